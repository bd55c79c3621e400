"""Activation pipelines: every work once, in orders that can be and are proved, and as long as theory says."""

from __future__ import annotations

import os
import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forked_commands import run_tawpipe
from schedules import laid_out, llama, step_for
from tawpipe.errors import UserError
from tawpipe.schedule.actions import Op
from tawpipe.schedule.buffers import AWAY, Kind
from tawpipe.schedule.pipelines.cost_based import SolvedPipeline, ZeroBubble
from tawpipe.schedule.pipelines.layout import Layout
from tawpipe.schedule.pipelines.memory import peak
from tawpipe.schedule.pipelines.positions import AXES, Positions
from tawpipe.schedule.pipelines.program import PipelineShape, build_pipeline
from tawpipe.schedule.pipelines.times import spell_times
from tawpipe.schedule.pipelines.work import BlockTimes, Order, PipelineCosts, Work, makespan, needs
from tawpipe.schedule.pipelines.work import play as play_stages
from tawpipe.schedule.proof.symbolic import ScheduleError
from tawpipe.schedule.proof.verify import verify
from tawpipe.schedule.sizes.activations import peak_activations
from tawpipe.schedule.strategies.build import build
from tawpipe.schedule.transform import for_one_thread
from tawpipe.simulate import BlockCost, CostModel, LinkModel, Seconds, play
from tawpipe.topology import Topology

FAST = LinkModel(1e12)
FIXED = ("1f1b", "interleaved-1f1b", "zero-bubble")


COPIES = CostModel(
    (BlockCost(), *[BlockCost(Seconds(1.0), Seconds(3.0))] * 8, BlockCost()),
    FAST,
    FAST,
    boundary_bytes=1,
    kept_bytes=3.0,
    graph_bytes=20.0,
    host=LinkModel(1.0),
)


def pipeline(kind: str, nodes: int, local: int, count: int, *, layers: int = 8, stages: str = "world", **more):
    topology = Topology.grid(nodes, local)
    times = f"0/0/0,{layers}x1/2/1,0/0/0"
    step = step_for(llama(layers), topology, count, use=laid_out(kind, stages=stages, block_times=times))
    return build(step, **more)


def costs(layers: int, forward: float = 1.0, backward: float = 3.0, between: LinkModel = FAST) -> CostModel:
    layer = BlockCost(Seconds(forward), Seconds(backward))
    return CostModel((BlockCost(), *[layer] * layers, BlockCost()), between, FAST, boundary_bytes=1)


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("kind", FIXED)
def test_every_block_computes_every_micro_batch_once(kind, axis):
    schedule = pipeline(kind, 2, 2, 8, stages=axis)
    forward, backward = Counter(), Counter()
    for program in schedule.programs:
        for action in program:
            if action.op is Op.FORWARD:
                forward[action.block, action.micro_batch] += 1
            if action.op in (Op.BACKWARD, Op.BACKWARD_INPUT):
                backward[action.block, action.micro_batch] += 1
    assert forward == {(b, m): 1 for b in range(9) for m in range(8)}
    assert backward == {(b, m): 1 for b in range(10) for m in range(8)}
    timeline = play(schedule, costs(8))
    assert timeline.step_seconds > 0
    held = {schedule.homes[unit].ranks for unit in range(len(schedule.homes))}
    assert all(len(ranks) == (1 if axis == "world" else 2) for ranks in held)


@pytest.mark.parametrize("kind", FIXED)
@pytest.mark.parametrize(("nodes", "local", "axis"), [(2, 2, "nodes"), (3, 2, "locals"), (3, 1, "world")])
def test_pipelines_verify_for_every_number_of_micro_batches(kind, nodes, local, axis):
    """Tied embeddings, pipelines side by side with uneven shares or none, training and evaluation."""
    topology, model = Topology.grid(nodes, local), llama(8, tied=True)
    for count in (1, 2, 3, 5, 6, 12):
        step = step_for(model, topology, count, use=laid_out(kind, stages=axis))
        verify(for_one_thread(build(step, training=False)), steps=1, one_thread=True)
        try:
            schedule = build(step)
        except UserError as error:
            assert kind == "interleaved-1f1b" and "groups of one size" in str(error)
            continue
        verify(for_one_thread(schedule), steps=2, one_thread=True)


def test_split_backward_passes_are_refused_for_other_strategies():
    class Whole(ZeroBubble):
        splits = False

    schedule = pipeline("zero-bubble", 2, 1, 4)
    other = Whole(schedule.step.settings.stages, schedule.step.settings.block_times)
    with pytest.raises(ScheduleError, match="take backward passes apart"):
        verify(replace(schedule, step=replace(schedule.step, strategy=other)), steps=1)


@pytest.mark.slow
def test_published_pipelines_run_without_importing_the_order_search(tmp_path):
    """Nor does a run that only may plan import it."""
    script = tmp_path / "script.py"
    script.write_text("""
import sys
import tawpipe.train.run
from tawpipe.schedule.strategies.build import build
from schedules import llama, step_for
from tawpipe.topology import Topology
for name in ("1f1b", "interleaved-1f1b"):
    build(step_for(llama(4), Topology.grid(2, 1), 4, strategy=name))
searches = [name for name in sys.modules if name.startswith("tawpipe.orders.")]
print([name for name in searches if not name.startswith("tawpipe.orders.improv")])
""")
    done = run_tawpipe([], os.environ, 120, program=str(script))
    assert done.stdout.strip() == "[]", done.stderr


def some_order(layout: Layout, count: int, split: float, seed: int) -> Order:
    """Works in any order in which all comes after what it needs."""
    draw = random.Random(seed)
    works = {Work("F", stage, m) for stage in range(layout.stages) for m in range(count)}
    for work in sorted(works):
        parts = "IW" if draw.random() < split else "B"
        works |= {Work(kind, work.stage, work.micro_batch) for kind in parts}
    left, lists = set(works), [[] for _ in range(layout.size)]
    while left:
        ready = [
            work
            for work in sorted(left)
            if not any(one in left for choice in needs(work, layout.stages) for one in choice)
        ]
        work = draw.choice(ready)
        left.remove(work)
        lists[layout.places[work.stage]].append(work)
    return Order(tuple(map(tuple, lists)))


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_any_order_on_any_layout_verifies(data):
    """Uneven stages anywhere, several on a position, backward passes in parts or whole, frozen layers, tied ends."""
    size = data.draw(st.sampled_from([2, 3, 4]))
    layers, tied = data.draw(st.integers(size, 9)), data.draw(st.booleans())
    stages = data.draw(st.integers(size, layers + 2))
    cuts = sorted(data.draw(st.permutations(range(1, layers + 2)))[: stages - 1])
    places = list(data.draw(st.permutations([*range(size), *[s % size for s in range(stages - size)]])))
    model = llama(layers, tied=tied, frozen=data.draw(st.integers(0, layers)), lora=data.draw(st.booleans()))
    layout = Layout(layers + 2, (0, *cuts), tuple(places))
    axis = data.draw(st.sampled_from(["nodes", "world"]))
    topology = Topology.grid(size, 2 if axis == "nodes" else 1)
    costs_ = PipelineCosts((BlockTimes(1, 2, 1),) * (layers + 2))
    seed, split = data.draw(st.integers(0, 999)), data.draw(st.sampled_from([0.0, 0.5, 1.0]))
    shape = PipelineShape(
        model, layout, Positions(topology, axis), costs_, lambda count: some_order(layout, count, split, seed)
    )

    class Any(ZeroBubble):
        def shape(self, model, topology):
            return shape

    count = data.draw(st.integers(1, 5))
    step = step_for(model, topology, count, use=Any(axis))
    verify(for_one_thread(build_pipeline(shape, step, training=True)), steps=2, one_thread=True)


def test_host_memory_orders_verify_and_reordered_ones_are_refused():
    """What is offloaded comes back before it is needed, in turns that orders set between the lanes of a position."""
    layout, model, topology = Layout.even(4, 2), llama(2), Topology.grid(2, 1)
    first = [Work(kind, 0, m) for kind, m in [("F", 0), ("F", 1), ("F", 2), ("B", 0), ("B", 1), ("B", 2)]]
    last = [Work(kind, 1, m) for m in range(3) for kind in "FB"]
    moved = (Work("O", 0, 1), Work("O", 0, 2), Work("R", 0, 1), Work("R", 0, 2))
    after = {Work("F", 0, 2): Work("O", 0, 1), Work("R", 0, 1): Work("B", 0, 0), Work("R", 0, 2): Work("B", 0, 1)}
    order = Order((tuple(first), tuple(last)), (moved, ()), after)
    costs_ = PipelineCosts((BlockTimes(0, 0, 0), BlockTimes(1, 2, 1), BlockTimes(1, 2, 1), BlockTimes(0, 1, 0)), host=1)
    shape = PipelineShape(model, layout, Positions(topology, "world"), costs_, lambda _: order)
    step = step_for(model, topology, 3, use=laid_out("1f1b"))
    schedule = for_one_thread(build_pipeline(shape, step, training=True))
    verify(schedule, steps=2, one_thread=True)
    assert peak_activations(schedule, 0, {Kind.INPUT: 1}) == 3  # of two micro-batches, and what is sent
    swapped = order.host[0][::-1]
    bad = Order(order.compute, (swapped, ()), {})
    with pytest.raises((ScheduleError, KeyError, ValueError)):
        verify(build_pipeline(replace(shape, order_of=lambda _: bad), step, training=True))


@pytest.mark.parametrize(
    ("recompute", "kinds"),
    [
        ("none", {"graph"}),
        ("selective", {"kept"}),
        ("none:6,selective:1,full", {"graph", "kept", "x"}),
    ],
)
def test_kept_graphs_and_inputs_are_offloaded_in_a_solved_order(recompute, kinds):
    """Whatever they keep, but for layers that say that it stays."""
    blocks = [BlockTimes(0, 0, 0, 0), *[BlockTimes(100, 200, 97)] * 8, BlockTimes(0, 300, 0)]
    blocks[3] = replace(blocks[3], stays=1)
    compute = "F0.0 F0.1 F0.2 B0.0 B0.1 B0.2|F1.0 B1.0 F1.1 B1.1 F1.2 B1.2"
    orders = (f"{compute};O0.1 O0.2 R0.1 R0.2|;F0.2>O0.1 R0.1>B0.0 R0.2>B0.1", f"{compute};;")
    model, topology, times = llama(8), Topology.grid(2, 1), spell_times(PipelineCosts(tuple(blocks), host=7.0))
    uses = [SolvedPipeline("world", times, given) for given in orders]
    moved, plain = (build(step_for(model, topology, 3, use=use, recompute=recompute)) for use in uses)
    verify(for_one_thread(moved), steps=2, one_thread=True)
    away = [action for action in moved.programs[0] if action.op is Op.OFFLOAD]
    assert {action.reads[0].kind.value for action in away} == kinds
    assert {action.block for action in away} == {1, 2, 4}
    sizes = {Kind.GRAPH: 20, Kind.ATTENTION: 3, Kind.INPUT: 1}
    each = sum(sizes[moved.step.saves(block) or Kind.INPUT] for block in (1, 2, 4))
    saved = [peak_activations(one, 0, sizes) for one in (plain, moved)]
    assert each // 2 < saved[0] - saved[1] <= each  # two micro-batches wait, of which one comes back
    assert peak_activations(moved, 0, {AWAY[kind]: size for kind, size in sizes.items()}) == 2 * each


def test_offload_time_follows_the_bytes_of_what_layers_keep():
    seconds: dict[str, float] = {}
    for recompute in ("none", "selective", "full"):
        use = SolvedPipeline("world", "0/0/0,2x1/2/1,0/1/0;host=1", "F0.0 B0.0|F1.0 B1.0;O0.0 R0.0|;")
        schedule = build(step_for(llama(2), Topology.grid(2, 1), 1, use=use, recompute=recompute))
        timeline = play(schedule, COPIES, steps=1)
        seconds[recompute] = timeline.makespan
    assert seconds["none"] - seconds["full"] > 30


@pytest.mark.parametrize(("memory", "count"), [(8, 8), pytest.param(10, 80, marks=pytest.mark.slow), (13, 8), (20, 8)])
def test_memory_limit_includes_activations_in_transfer(memory, count):
    """Inputs that wait, those that have come early, those that are yet to go, and gradients."""
    use = SolvedPipeline("world", f"0/0/0/0,8x10/20/10,0/9/0/0;memory={memory};host=3;hop=2")
    schedule = build(step_for(llama(8), Topology.grid(4, 1), count, use=use))
    held = [peak_activations(schedule, rank) for rank in range(4)]
    assert memory - 2 < max(held) <= memory
    verify(for_one_thread(schedule), steps=1, one_thread=True)


@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_memory_limit_counts_kept_graphs_as_the_costs_do(recompute):
    times = "0/0/0/0,8x10/20/10/6/7,0/9/0/0;memory=60;host=1"
    step = step_for(llama(8), Topology.grid(4, 1), 8, use=SolvedPipeline("world", times), recompute=recompute)
    sizes = {Kind.INPUT: 1, Kind.INPUT_GRADIENT: 1, Kind.GRAPH: 6, Kind.ATTENTION: 6, Kind.LINEAR: 7}
    held = [peak_activations(build(step), rank, sizes) for rank in range(4)]
    assert 48 < max(held) <= 60


def test_memory_limit_too_small_for_transfers_is_refused():
    use = SolvedPipeline("world", "0/0/0/0,8x10/20/10,0/9/0/0;memory=3;host=3")
    with pytest.raises(UserError, match=r"memory of a position: got 3.*with what is on its way between positions"):
        build(step_for(llama(8), Topology.grid(4, 1), 8, use=use))


def test_given_pipeline_order_is_used():
    order = "F0.0 F0.1 B0.0 B0.1|F1.0 F1.1 B1.1 B1.0;;"
    knobs: dict[str, Any] = {"strategy": "solved", "stages": "world", "pipeline_order": order}
    step = step_for(llama(4), Topology.grid(2, 1), 2, **knobs)
    last = [action.micro_batch for action in build(step).programs[1] if action.op is Op.BACKWARD and action.block == 5]
    assert last == [1, 0]
    other = build(step_for(llama(4), Topology.grid(2, 1), 3, **knobs))  # for as many as it has no order
    verify(for_one_thread(other), steps=1, one_thread=True)


@pytest.mark.parametrize(
    "order",
    [
        "F0.0 F0.1 B0.0 B0.1",
        "F0.x|;;",
        "F0.0 B0.0 F0.1|F1.0 F1.1 B1.1 B1.0;;",
        "F0.0 F0.1 B0.0 B0.1 B0.1|F1.0 F1.1 B1.1 B1.0;;",
        "F1.0 F1.1 B1.1 B1.0|F0.0 F0.1 B0.0 B0.1;;",
        "B0.0 F0.0 F0.1 B0.1|F1.0 F1.1 B1.1 B1.0;;",
        "F0.0 F0.1 I0.0 B0.1|F1.0 F1.1 B1.1 B1.0;;",
        "F0.0 F0.1 B0.0 B0.1|F1.0 F1.1 B1.1 B1.0;O0.1|;",
        "F0.0 F0.1 B0.0 B0.1|F1.0 F1.1 B1.1 B1.0|F2.0 F2.1 B2.0 B2.1;;",
    ],
)
def test_pipeline_order_of_another_shape_is_refused(order):
    with pytest.raises(UserError, match=r"schedule.pipeline_order: got .*; .*or nothing"):
        build(step_for(llama(4), Topology.grid(2, 1), 2, strategy="solved", stages="world", pipeline_order=order))


def test_zero_bubble_order_fits_its_links_within_published_memory():
    """Links as slow as half a forward pass; the other order is made as if they took no time."""
    size, count = 6, 24
    layout = Layout.even(2 * size + 2, size, 2, folded=True)
    end, layer = BlockTimes(0, 0, 0, kept=0), BlockTimes(10, 20, 10)
    costs_ = PipelineCosts((end, *[layer] * 2 * size, end), hop=5, nodes=(0, 0, 1, 1, 2, 2))
    strategy = ZeroBubble("world", spell_times(costs_))
    topology, model = Topology.grid(3, 2), llama(2 * size)
    shape = strategy.shape(model, topology)
    assert shape.layout == layout
    order = shape.order_of(count)
    assert max(peak(layout, order, costs_)) <= 2 * size + 1
    without = replace(strategy, block_times=spell_times(replace(costs_, hop=0.0)))
    other = without.shape(model, topology).order_of(count)
    assert makespan(play_stages(layout, order, costs_)) < 0.97 * makespan(play_stages(layout, other, costs_))
    for name, numbers in (("nodes", (0, 1)), ("pace", (1.0, 2.0))):
        wrong = replace(strategy, block_times=spell_times(replace(costs_, **{name: numbers})))
        with pytest.raises(UserError, match=f"schedule.block_times: got '{name}=.*6 numbers, one for every position"):
            wrong.shape(model, topology)


def test_1f1b_bubble_equals_the_formula():
    """(P - 1) / (M + P - 1) of a step that begins and ends with nothing under way."""
    ranks, count, layers = 4, 12, 8
    timeline = play(pipeline("1f1b", ranks, 1, count, layers=layers), costs(layers), steps=1)
    each = layers / ranks * 4.0
    assert timeline.makespan == pytest.approx((count + ranks - 1) * each, rel=1e-6)


def test_more_stages_shrink_the_bubble():
    seconds = [play(pipeline(kind, 4, 1, 8), costs(8), steps=1).makespan for kind in FIXED]
    assert seconds[0] > seconds[1] > 8 * 2 * 4.0
    assert seconds[2] < seconds[1]


def test_simulated_pipeline_sends_its_activations_over_the_links():
    schedule = pipeline("1f1b", 3, 1, 6, layers=6)
    moved = play(schedule, costs(6), steps=2).node_bytes[1]
    assert [(node.sent, node.received) for node in moved] == [(6, 6), (12, 12), (6, 6)]


def test_1f1b_holds_one_micro_batch_per_following_stage():
    schedule = pipeline("1f1b", 4, 1, 12, layers=4)
    held = [peak_activations(schedule, rank, {Kind.INPUT: 1}) for rank in range(4)]
    assert held == [5, 6, 5, 4]  # what waits, one that is sent, one for which there is room already


def test_every_direction_between_two_positions_has_its_own_lane():
    for kind in ("1f1b", "zero-bubble"):
        shape = laid_out(kind).shape(llama(12), Topology.grid(6, 1))
        for position in range(6):
            own = [lane for pair, lane in shape.lanes.items() if position in pair]
            assert len(own) == len(set(own))


@pytest.mark.parametrize(
    ("kind", "layers", "count", "stages", "expected"),
    [
        ("interleaved-1f1b", 4, 6, "world", "got 4; at least 6, one for each of the 2 stages of 3 positions"),
        ("interleaved-1f1b", 8, 7, "world", "micro-batches: got 7; 6 or 8"),
        ("1f1b", 8, 6, "rows", "got 'rows'; world, nodes, locals"),
        ("1f1b", 8, 6, "locals", "one of world, nodes; inside each node it would have one position"),
        ("1f1b", 8, 6, "world:0,2,9@0,1,1", "world:0,2,9@0,1,1|3 positions"),
        ("1f1b", 8, 6, "world:0,2,9@2,1,0", "stages at 0,1,2 under 1f1b"),
        ("zero-bubble", 8, 6, "world:0,4,2@0,1,2", "ascending from 0 below 10"),
    ],
)
def test_impossible_pipelines_are_refused(kind, layers, count, stages, expected):
    with pytest.raises(UserError, match=expected):
        pipeline(kind, 3, 1, count, layers=layers, stages=stages)
