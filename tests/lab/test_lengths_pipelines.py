"""Documents of uneven lengths that pass the stages of pipelines in the lab: bins and slices as a run deals them."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from selected import quick_ones
from tawpipe.errors import UserError
from tawpipe.runtime.compute.step_input import StepInput
from tawpipe.runtime.frame import Frame
from tawpipe.runtime.world import World
from tawpipe.schedule.actions import Op
from tawpipe.schedule.pipelines.strategy import ActivationPipeline
from tawpipe.schedule.proof.verify import verify
from tawpipe.schedule.strategies.table import strategies
from tawpipe.simulate import LinkModel, play
from tawpipe.topology import Topology
from tawpipe_lab import ours
from tawpipe_lab.bounds import Bounds, workload_costs
from tawpipe_lab.compare import bounds_of, link_of
from tawpipe_lab.lengths import DealtWorkload, dealt, mean_pack
from tawpipe_lab.ours_run import _SleepingCompute
from tawpipe_lab.sleeper import BusyTime, Sleeper
from tawpipe_lab.suite import Cell, Entry, load_suite
from tawpipe_lab.worker import make
from tawpipe_lab.workload import PASSES, LengthsWorkload, merge_knobs, spell_out
from timed import DOCUMENTS

TINY = LengthsWorkload(**{**DOCUMENTS, "layers": 4})
NAMES = ("1f1b-ours", "interleaved-1f1b-ours", "zero-bubble", "generated")
TOPOLOGY = Topology.grid(2, 2)


def through(name: str, stages: str, **knobs: Any) -> dict[str, Any]:
    """Knobs, and what a search gave."""
    knobs = {"stages": stages, "packing": "balanced", **knobs}
    return merge_knobs(knobs, ours.search_knobs(name, TINY, TOPOLOGY, knobs, LinkModel(1e7)))


@pytest.mark.parametrize("stages", quick_ones(("world", "nodes", "locals"), ["nodes"]))
@pytest.mark.parametrize("name", NAMES)
def test_every_token_passes_all_pipeline_stages_once(name: str, stages: str) -> None:
    if name in ("interleaved-1f1b-ours", "zero-bubble") and stages == "world":
        pytest.skip("four layers are no eight stages")
    knobs = through(name, stages)
    work, schedule = ours.computed(name, TINY, TOPOLOGY, knobs), ours.schedule_of(name, TINY, TOPOLOGY, knobs)
    verify(schedule)
    assert isinstance(work, DealtWorkload) and any(map(len, work.packs.slices))
    assert schedule.step.slices and schedule.step.micro_batches == work.shares
    tokens = Counter[int]()
    for row in work.packs.single:
        for bin in row:
            tokens.update({n: work.packs.tokens(bin) if bin.part else work.packs.lengths[n] for n in bin.documents})
    assert tokens == Counter(dict(enumerate(TINY.lengths)))
    whole = PASSES * sum(map(TINY.work.of, TINY.lengths))
    assert work.compute_s == pytest.approx(whole)
    cell = Cell("c", 2, 2, "100mbit", TINY)
    bounds = bounds_of(cell, Entry(name, knobs), link_of(cell))
    assert isinstance(bounds, Bounds)
    assert bounds.compute_s == pytest.approx(whole / 4) and bounds.dependency_s >= bounds.physical_s
    if stages == "nodes":
        strategy = schedule.step.strategy
        assert isinstance(strategy, ActivationPipeline)
        places = strategy.layout_of(schedule.model, strategy.positions(TOPOLOGY)).places
        borders = sum(one != other for one, other in pairwise(places))
        moved = borders * TINY.token_bytes * TINY.tokens
        assert sum(bounds.sent_bytes) == pytest.approx(2 * moved, rel=0.01)  # there, and gradients back


def test_balanced_packs_shorten_a_pipeline_step_against_packs_in_turn() -> None:
    seconds: dict[str, float] = {}
    for packing in ("in turn", "balanced"):
        knobs = through("1f1b-ours", "nodes", packing=packing)
        work = ours.computed("1f1b-ours", TINY, TOPOLOGY, knobs)
        assert isinstance(work, DealtWorkload)
        assert (work.packs.positions, work.packs.world_size) == (2, 2)
        costs = workload_costs(work, between=LinkModel(1e9), inside=LinkModel(1e9))
        schedule = ours.schedule_of("1f1b-ours", TINY, TOPOLOGY, knobs)
        seconds[packing] = play(schedule, costs, steps=1).makespan
    assert PASSES * sum(map(TINY.work.of, TINY.lengths)) / 4 < 1.25 * seconds["balanced"]
    assert seconds["in turn"] > 1.2 * seconds["balanced"]


@pytest.mark.parametrize("name", NAMES)
def test_device_sleeps_for_its_stages_and_holds_keys_of_open_slices(name: str) -> None:
    """A rank's program without its transfers: what arrives is there."""
    knobs = through(name, "nodes")
    work, schedule = ours.computed(name, TINY, TOPOLOGY, knobs), ours.schedule_of(name, TINY, TOPOLOGY, knobs)
    assert isinstance(work, DealtWorkload)
    asked = 0.0
    transport: Any = None
    frame = Frame({}, transport, StepInput({}, scale=1.0, seed=None, step=0))
    for rank in range(4):
        sleeper = Sleeper(BusyTime())
        compute = _SleepingCompute(work, schedule, rank, sleeper)
        most = 0
        for action in schedule.programs[rank]:
            if action.op is Op.EXCHANGE and action.transfers[0].buffer.is_activation:
                compute._held |= compute.receive_buffers(action, frame)
                compute._drop(action)
            elif action.op is Op.FORWARD:
                compute.forward(action, frame)
            elif action.op in (Op.BACKWARD, Op.BACKWARD_INPUT):
                compute.backward(action, frame)
            elif action.op is Op.BACKWARD_WEIGHT:
                compute.backward_weight(action, frame)
            kept = [buffer for buffer in compute._held if buffer.kind.value == "kv"]
            most = max(most, sum(compute._held[buffer].nbytes for buffer in kept))
        assert not compute._held
        layers = {block for block in range(1, 5) if any(a.block == block for a in schedule.programs[rank])}
        cut = [group for group in schedule.step.slices if group[0] in schedule.step.micro_batches[rank]]
        longest = max((sum(work.tokens(m) for m in group) for group in cut), default=0.0)
        assert most >= 0.98 * len(layers) * longest * work.keys_bytes
        asked += sleeper.asked_s
    assert asked == pytest.approx(work.compute_s)


def test_activation_bytes_follow_the_tokens_of_a_pack() -> None:
    knobs = through("1f1b-ours", "nodes")
    work, schedule = (
        ours.computed("1f1b-ours", TINY, TOPOLOGY, knobs),
        ours.schedule_of("1f1b-ours", TINY, TOPOLOGY, knobs),
    )
    assert isinstance(work, DealtWorkload)
    compute = _SleepingCompute(work, schedule, 0, Sleeper(BusyTime()))
    sent = [a.transfers[0].buffer for a in schedule.programs[0] if a.transfers and a.transfers[0].send]
    tokens = {buffer.at[0]: compute._new(buffer).nbytes / TINY.token_bytes for buffer in sent}
    for number, row in zip(work.shares[0], work.packs.of(0), strict=True):
        assert tokens[number] == pytest.approx(work.packs.tokens(row), abs=4)


def compute(world: World, *, workload: dict[str, Any], found: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Seconds that this rank computes in a step of every row."""
    seconds = {}
    for name, knobs in found.items():
        contender: Any = make(name, LengthsWorkload(**workload), world.topology, world.rank, **knobs)
        contender.step()
        before = contender.sleeper.asked_s
        contender.step()
        seconds[name] = contender.sleeper.asked_s - before
        assert not contender.compute._held
        contender.close()
    return seconds


@pytest.mark.slow
def test_pipelines_sleep_for_the_whole_workload(pool: Any) -> None:
    settings = {name: value for name, value in spell_out(TINY).items() if name != "kind"}
    found = {name: through(name, "nodes") for name in NAMES}
    ranks = pool.run(f"{__name__}:compute", 2, 2, workload=settings, found=found)
    whole = PASSES * sum(map(TINY.work.of, TINY.lengths))
    for name in NAMES:
        assert sum(rank[name] for rank in ranks) == pytest.approx(whole), name


def test_stages_are_searched_on_the_given_axis_with_link_costs() -> None:
    slow = ours.search_knobs("generated", TINY, TOPOLOGY, {"stages": "nodes", "packing": "balanced"}, LinkModel(1e5))
    assert slow["stages"] == "nodes:0,3@0,1"  # every other border would cross the link once more
    assert merge_knobs({"stages": "nodes"}, slow) == slow
    assert merge_knobs({"stages": "nodes:0,2@0,1"}, slow)["stages"] == "nodes:0,2@0,1"


def test_impossible_pipeline_settings_are_named() -> None:
    for name, knobs, setting in (
        ("1f1b-ours", {"packing": "tokens"}, "packing"),
        ("1f1b-ours", {"packing": "node"}, "packing"),
        ("generated", {"packing": "balanced", "keep_mib": 3}, "keep_mib"),
        ("1f1b-ours", {"packing": "balanced", "balance": "cost"}, "balance"),
        ("1f1b-ours", {"packing": "balanced", "sequence_ranks": 2}, "schedule.sequence_ranks"),
        ("solved", {"packing": "balanced"}, "schedule.strategy"),
        ("1f1b", {}, "workload"),
    ):
        with pytest.raises(UserError) as caught:
            make(name, TINY, TOPOLOGY, 0, **knobs)
        assert caught.value.setting == setting, name


def test_lengths_suite_has_pipelines_only_for_few_tokens() -> None:
    suite, axes = load_suite("lengths"), {name for name, strategy in strategies().items() if strategy.axis}
    for cell in suite.cells:
        named = {ours.rows().get(entry.strategy) for entry in cell.strategies}
        assert cell.name.startswith("few") == bool(named & axes)
    tenth = next(cell.workload for cell in suite.cells if cell.name == "few-48k-2x4-fast")
    usual = next(cell.workload for cell in suite.cells if cell.name == "few-48k-2x4")
    assert isinstance(tenth, LengthsWorkload) and isinstance(usual, LengthsWorkload)
    sizes = ("layer_bytes", "token_bytes", "keys_bytes", "graph_bytes")
    same = {name: getattr(usual, name) for name in sizes}
    assert replace(tenth, **same) == usual and all(10 * getattr(tenth, name) == same[name] for name in sizes)
    few = suite.only(["few-48k-3x2", "1f1b-ours", "step-balanced"])
    assert [cell.name for cell in few.cells] == ["few-48k-3x2"]
    assert [entry.strategy for entry in few.cells[0].strategies] == ["step-balanced", "1f1b-ours", "1f1b-ours"]
    assert all(cell.name.startswith("few") for cell in suite.only(["generated"]).cells)
    with pytest.raises(UserError, match="--only: got 'prod-1m-2x4,generated'; a cell and a strategy that it has"):
        suite.only(["prod-1m-2x4", "generated"])


def test_stages_are_searched_for_the_dealt_number_of_packs() -> None:
    """Rows end where documents of that length do, and bins where they are full."""
    wide = replace(TINY, bin_tokens=2 * TINY.max_document)
    for packing in ("in turn", "rows"):
        there = dealt(wide, packing, Topology.grid(2, 1)).micro_batches
        assert mean_pack(wide, packing, 2, 2).micro_batches == there
