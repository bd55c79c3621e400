"""The clock: exact times of small schedules, sharing of links, and what it has in common with the proof."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from itertools import chain
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from schedules import MOST_LAYERS, shapes, step_for
from tawpipe.errors import UserError
from tawpipe.schedule.actions import Action, Lane, Op, Transfer, exchange
from tawpipe.schedule.buffers import Buffer, Kind, Pool, block_input, pool_kind
from tawpipe.schedule.hazards import Hazards
from tawpipe.schedule.proof.verify import ScheduleError, verify
from tawpipe.schedule.settings import spell_homes
from tawpipe.schedule.sizes.traffic import link_elements
from tawpipe.schedule.spec import BlockSpec, ModelSpec, UnitSpec
from tawpipe.schedule.step import Schedule, StepSpec
from tawpipe.schedule.strategies.build import build, step_of
from tawpipe.simulate import BlockCost, CostModel, LinkModel, MicroBatchSize, Seconds, play
from tawpipe.simulate.clock import dependencies
from tawpipe.simulate.network import Flow, share
from tawpipe.topology import Topology
from tawpipe_lab.critical import unlimited_buffers

FREE = LinkModel(math.inf)


def layers_only(layers: int, elements: int = 4800) -> ModelSpec:
    """Equal layers between an embedding and a head without weights."""
    own = [BlockSpec((i,), "layer") for i in range(layers)]
    blocks = (BlockSpec((), "embedding", False, False), *own, BlockSpec((), "head"))
    return ModelSpec(blocks, tuple(UnitSpec(elements, True, (i + 1,)) for i in range(layers)))


def made(
    nodes: int, local: int, *, layers: int = 4, count: int | None = None, elements: int = 4800, **settings: Any
) -> Schedule:
    topology = Topology.grid(nodes, local)
    return build(step_for(layers_only(layers, elements), topology, count or nodes * local, **settings))


def costs(layers: int = 4, *, rate: float = 1e5, inside: LinkModel = FREE, **settings) -> CostModel:
    between = settings.pop("between", LinkModel(rate))
    return CostModel.timed(layers=layers, forward_s=0.1, backward_s=0.3, between=between, inside=inside, **settings)


POOLS = ("S", "W", "G")


def by_hand(topology: Topology, programs, *, units: int = 1, stripe: int = 25, pools=()) -> Schedule:
    """A schedule out of actions: every unit and every buffer of ``POOLS`` is one stripe of 25 elements, 100 bytes. All
    units live on rank 0.
    """
    blocks = (BlockSpec((), "embedding", False, False), BlockSpec((0,), "layer"), BlockSpec((), "head"))
    model = ModelSpec(blocks, (UnitSpec(stripe, True, (1,)),) * units)
    shared = (*pools, *(Pool(name, pool_kind(name), 9, stripe) for name in POOLS))
    everyone = tuple(tuple(p) for p in programs)
    step = step_for(model, topology, 0, strategy="tawpipe-whole", homes=spell_homes((0,) * units))
    return Schedule("by hand", step, everyone, (shared,) * topology.world_size)


def send(peer: int, unit: int = 0, lane: Lane = Lane.INTER_W, buffer: str = "W.0") -> Action:
    return exchange(lane, (Transfer(True, peer, unit, Buffer.parse(buffer)),))


def receive(peer: int, unit: int = 0, lane: Lane = Lane.INTER_W, buffer: str = "W.1") -> Action:
    return exchange(lane, (Transfer(False, peer, unit, Buffer.parse(buffer)),))


OUTPUT = block_input(0, 2)
"""What a forward pass of the layer writes."""


def compute(*reads: str) -> Action:
    """A forward pass of the layer: 0.1 s under ``costs``."""
    return Action(Op.FORWARD, Lane.COMPUTE, tuple(map(Buffer.parse, reads)), (OUTPUT,), block=1, micro_batch=0)


def ends(schedule: Schedule, model: CostModel, rank: int) -> list[float]:
    return [span.end for span in play(schedule, model, steps=1).spans(rank)]


# exact times

TWO = Topology.grid(2, 1)


def test_simulated_transfer_takes_latency_plus_bytes_over_rate():
    schedule = by_hand(TWO, [[send(1)], [receive(0)]])
    model = costs(between=LinkModel(50, latency_s=0.5))
    assert ends(schedule, model, 1) == [pytest.approx(0.5 + 100 / 50)]
    assert ends(schedule, model, 0) == [pytest.approx(100 / 50)]  # a latency before, to which it is not held


def test_simulated_messages_follow_at_the_link_rate_despite_latency():
    """Weights that are sent, or gathered by a ring: a lane is held for bytes, and who reads them waits for the rest."""
    sent = [send(1)] * 5, [receive(0, buffer=f"W.{number}") for number in range(5)]
    gather = [_collective("all_gather", "rail", Lane.INTER_W, "S.0", f"W.{number}") for number in range(5)]
    model = costs(between=LinkModel(100, latency_s=2.5))
    for programs in (sent, (gather, gather)):
        assert ends(by_hand(TWO, programs), model, 1) == pytest.approx([2.5 + number for number in range(1, 6)])


def test_action_that_needs_its_lane_waits_for_the_latency():
    programs = [[send(1), receive(1, buffer="W.1")], [receive(0), send(0, buffer="W.2")]]
    model = costs(between=LinkModel(100, latency_s=2.5))
    assert ends(by_hand(TWO, programs), model, 0) == pytest.approx([1.0, 3.5 + 1 + 2.5])


@pytest.mark.parametrize("rate", [math.inf, 1e3])
@pytest.mark.parametrize(("stages", "rounds", "latency"), [(2, 3, 0.025), (4, 2, 0.2), (4, 3, 1.0), (6, 2, 0.5)])
def test_1f1b_with_latency_takes_the_time_of_its_formula(stages, rounds, latency, rate):
    """P stages, k P micro-batches, f and b for the passes of one, a hop h of bytes and latency. In a round the first
    stage's P micro-batches go to the last one and back: P (f + b) + 2 (P - 1) h.
    """
    schedule = made(stages, 1, layers=stages, count=stages * rounds, strategy="1f1b")
    model = costs(stages, between=LinkModel(rate, latency), boundary_bytes=10)
    spans = [span for rank in range(stages) for span in play(schedule, model, steps=1).spans(rank, lane=Lane.COMPUTE)]
    work, hop = 0.1 + 0.3, latency + 10 / rate
    formula = rounds * (stages * work + 2 * (stages - 1) * hop) + (stages - 1) * work + 2 * (stages - 2) * hop
    passes = [span.end for span in spans if span.action.op in (Op.FORWARD, Op.BACKWARD)]
    assert max(passes) == pytest.approx(formula)


def test_simulated_send_waits_for_its_receive_and_holds_its_lane():
    waits = [compute(), replace(receive(0), reads=(OUTPUT,))]
    schedule = by_hand(TWO, [[send(1)], waits])
    timeline = play(schedule, costs(rate=100), steps=1)
    sent = timeline.span(0, 0, 0)
    assert (sent.start, sent.begin, sent.end) == (0, pytest.approx(0.1), pytest.approx(1.1))


@pytest.mark.parametrize(("duplex", "expected"), [(True, 1.0), (False, 2.0)])
def test_two_directions_share_only_a_half_duplex_link(duplex, expected):
    rank0 = [send(1), receive(1, lane=Lane.INTER_G, buffer="G.0")]
    rank1 = [receive(0), send(0, lane=Lane.INTER_G, buffer="G.1")]
    model = costs(between=LinkModel(100, full_duplex=duplex))
    assert ends(by_hand(TWO, [rank0, rank1]), model, 0) == [pytest.approx(expected)] * 2


def test_concurrent_transfers_share_a_link_until_one_ends():
    """100 and 200 bytes over 100 bytes/s: side by side until 2 s, the rest of the larger one alone until 3 s."""
    large = [send(1, lane=Lane.INTER_G, buffer="H.0"), receive(0, lane=Lane.INTER_G, buffer="H.1")]
    schedule = by_hand(TWO, [[send(1), large[0]], [receive(0), large[1]]], pools=(Pool("H", Kind.GRADIENT, 2, 50),))
    assert ends(schedule, costs(rate=100), 0) == [pytest.approx(2.0), pytest.approx(3.0)]


@pytest.mark.parametrize(("shared", "expected"), [(True, 2.0), (False, 1.0)])
def test_the_ranks_of_a_node_share_its_link_unless_each_has_its_own(shared, expected):
    programs = [[send(2)], [send(3)], [receive(0)], [receive(1)]]
    model = costs(between=LinkModel(100, shared=shared))
    assert ends(by_hand(Topology.grid(2, 2), programs), model, 3) == [pytest.approx(expected)]


def test_slow_node_slows_transfers_over_its_link():
    schedule = by_hand(Topology.grid(3, 1), [[send(1), send(2, lane=Lane.INTER_G)], [receive(0)], [
        receive(0, lane=Lane.INTER_G)]])  # fmt: skip
    model = costs(between=LinkModel(100), between_of={2: LinkModel(25)})
    # Rank 2's link takes 25 bytes/s; what it leaves of the sender's 100 goes to rank 1.
    assert ends(schedule, model, 0) == [pytest.approx(100 / 75), pytest.approx(4.0)]


def _collective(name: str, group: str, lane: Lane, read: str, write: str) -> Action:
    buffers = ((Buffer.parse(read),), (Buffer.parse(write),))
    return Action(Op.COLLECTIVE, lane, *buffers, unit=0, collective=name, group=group)


@pytest.mark.parametrize(("name", "read"), [("all_gather", "S.0"), ("reduce_scatter", "A.0")])
def test_a_rail_collective_moves_all_but_one_part_of_the_result(name, read):
    """D = 3 pieces of 100 bytes: two of them in and out of every node, two latencies one after the other."""
    action = _collective(name, "rail", Lane.INTER_W, read, "W.0")
    schedule = by_hand(Topology.grid(3, 1), [[action]] * 3, pools=(Pool("A", Kind.GRADIENT, 1, 75),))
    model = costs(between=LinkModel(100, latency_s=0.25))
    assert ends(schedule, model, 1) == [pytest.approx(2 * 100 / 100 + 2 * 0.25)]


@pytest.mark.parametrize(("shared", "expected"), [(True, 6.0), (False, 2.0)])
def test_a_node_collective_uses_the_fast_link(shared, expected):
    """A ring of three passes 2 x 100 bytes from each rank to the next: 600 bytes over one device, 200 over each rank's
    link.
    """
    action = _collective("all_gather", "node", Lane.GATHER, "S.0", "W.0")
    schedule = by_hand(Topology.grid(2, 3), [[action]] * 6)
    assert ends(schedule, costs(inside=LinkModel(100, shared=shared)), 4) == [pytest.approx(expected)]


def test_simulated_collective_begins_with_its_last_member():
    early = _collective("all_gather", "rail", Lane.INTER_W, "S.0", "W.0")
    late = replace(early, reads=(*early.reads, OUTPUT))
    timeline = play(by_hand(TWO, [[early], [compute(), late]]), costs(rate=100), steps=1)
    assert (timeline.span(0, 0, 0).start, timeline.span(0, 0, 0).begin) == (0, pytest.approx(0.1))
    assert timeline.makespan == pytest.approx(1.1)


@pytest.mark.parametrize(("algorithm", "pieces"), [("ring", 3), ("pairwise", 4)])
def test_world_reduction_costs_what_its_algorithm_sends(algorithm, pieces):
    """2 x 2 ranks: the ring passes 3 pieces over each node's link, each of 2 ranks sends 2 pieces away pairwise."""
    action = _collective("reduce_scatter", "world", Lane.INTER_G, "A.0", "G.0")
    schedule = by_hand(Topology.grid(2, 2), [[action]] * 4, pools=(Pool("A", Kind.GRADIENT, 1, 100),))
    assert ends(schedule, costs(rate=100, reduce_scatter=algorithm), 0) == [pytest.approx(pieces)]


def test_buffer_is_rewritten_after_its_last_reader():
    rank1 = [receive(0, buffer="W.1"), compute("W.1"), receive(0, buffer="W.1")]
    schedule = by_hand(TWO, [[send(1), send(1)], rank1])
    assert ends(schedule, costs(rate=100), 1) == [pytest.approx(1.0), pytest.approx(1.1), pytest.approx(2.1)]
    assert ends(unlimited_buffers(schedule), costs(rate=100), 1)[2] == pytest.approx(2.0)


def test_link_capacity_unused_by_one_flow_goes_to_others():
    def flow(**ports):
        return Flow(tuple(((name, 0, "out"), amount) for name, amount in ports.items()), None)

    a, b, c = flow(p=10.0), flow(p=10.0, q=10.0), flow(q=10.0)
    rates = dict(share([a, b, c], {("p", 0, "out"): 10.0, ("q", 0, "out"): 100.0}))
    assert [rates[f] * 10 for f in (a, b, c)] == pytest.approx([5.0, 5.0, 95.0])


def test_micro_batches_cost_time_by_their_size():
    block = BlockCost(Seconds(1.0, 0.5, 0.25), Seconds())
    model = CostModel((BlockCost(), block, BlockCost()), FREE, FREE, sizes={0: MicroBatchSize(4, 8)})
    schedule = by_hand(Topology.grid(1, 1), [[compute()]])
    assert play(schedule, model, steps=1).makespan == pytest.approx(1.0 + 2.0 + 2.0)
    assert play(schedule, replace(model, compute_factor={0: 2.0}), steps=1).makespan == pytest.approx(10.0)


# agreement with the proof


def _edit(schedule: Schedule, rank: int, change) -> Schedule:
    programs = list(schedule.programs)
    programs[rank] = tuple(change(list(programs[rank])))
    return replace(schedule, programs=tuple(programs))


def _without(op: Op, lane: Lane):
    def change(program):
        del program[next(i for i, action in enumerate(program) if action.op is op and action.lane is lane)]
        return program

    return change


def test_ungrouped_schedule_sends_more_over_the_physical_links():
    """Without grouping, for six nodes of one rank each, more crosses the links of the three real nodes."""
    topology = Topology.grid(3, 2)
    grouped, alone = (made(*grid, strategy="tawpipe-spread", reuse=False) for grid in ((3, 2), (6, 1)))
    model = costs(reduce_scatter="ring")
    timeline = play(alone, model, physical=topology)
    for node, link in enumerate(link_elements(alone, physical=topology)):
        assert timeline.node_bytes[1][node].sent == pytest.approx(link.bytes_sent(4, 4))
    ratio = timeline.node_bytes[1][0].sent / play(grouped, model).node_bytes[1][0].sent
    assert ratio == pytest.approx((5 / 6) / (2 / 3))


def test_deadlock_names_the_waiting_actions():
    schedule = _edit(made(2, 2, layers=1, strategy="tawpipe-whole"), 1, _without(Op.COLLECTIVE, Lane.REDUCE))
    with pytest.raises(ScheduleError, match="deadlock"):
        verify(schedule, steps=1)
    with pytest.raises(ScheduleError, match=r"deadlock(.|\n)*waits for rank 1 to come to this collective"):
        play(schedule, costs(1), steps=1)


def test_unmatched_exchange_is_named():
    schedule = by_hand(TWO, [[send(1), receive(1, lane=Lane.INTER_G)], [receive(0)]])
    with pytest.raises(ScheduleError, match="waits for rank 1 to send u0"):
        play(schedule, costs(), steps=1)


def test_lanes_in_a_circular_wait_are_named():
    """Each side receives before it sends."""
    rank0 = [receive(1, buffer="W.1"), compute("W.1"), send(1, buffer="W.1")]
    rank1 = [receive(0, buffer="W.1"), send(0, buffer="W.1")]
    with pytest.raises(ScheduleError) as error:
        play(by_hand(TWO, [rank0, rank1]), costs(), steps=1)
    assert "rank 0 step 0 #1: COMPUTE FORWARD" in str(error.value)
    assert "waits for rank 0 step 0 #0: INTER_W EXCHANGE" in str(error.value)


@pytest.mark.parametrize("lane", [Lane.INTER_W, Lane.GATHER, Lane.REDUCE])
def test_mismatched_operations_are_refused(lane):
    def swap(program):
        a, b = [i for i, action in enumerate(program) if action.lane is lane][:2]
        program[a], program[b] = program[b], program[a]
        return program

    schedule = _edit(made(2, 2, strategy="tawpipe-spread", layers=3), 0, swap)
    for judge in (verify, lambda s: play(s, costs(3))):
        with pytest.raises(ScheduleError, match="different operations"):
            judge(schedule)


def shaped(shape: StepSpec, *, training: bool = True, **changes: Any) -> Schedule:
    """A step's schedule for layers alone."""
    model, chosen = layers_only(shape.model.num_layers, 1001), replace(shape.settings, **changes)
    return build(step_of(model, shape.topology, chosen, shape.micro_batches), training=training)


@settings(max_examples=30, deadline=None)
@given(shape=shapes(), training=st.booleans())
def test_verified_schedule_simulates_and_moves_the_counted_bytes(shape, training):
    schedule = shaped(shape, training=training)
    model = costs(MOST_LAYERS, weight_bytes=2, gradient_bytes=4, reduce_scatter="ring")
    timeline = play(schedule, model, steps=2)
    for node, link in enumerate(link_elements(schedule)):
        for step in range(2):
            moved = timeline.node_bytes[step][node]
            assert moved.sent == pytest.approx(link.bytes_sent(2, 4))
            assert moved.received == pytest.approx(link.bytes_received(2, 4))
    for rank in range(schedule.topology.world_size):
        for span in timeline.spans(rank):
            assert 0 <= span.start <= span.begin <= span.end


@settings(max_examples=20, deadline=None)
@given(shape=shapes())
def test_schedule_with_unlimited_buffers_verifies(shape):
    verify(unlimited_buffers(shaped(shape)))


@settings(max_examples=30, deadline=None)
@given(shape=shapes())
def test_dependencies_repeat_in_every_step(shape):
    """The clock derives them from two steps and shifts them; here from four, directly."""
    for program in shaped(shape).programs:
        same, before = dependencies(program)
        hazards: Hazards[tuple[int, int]] = Hazards()
        for step in range(4):
            for index, action in enumerate(program):
                found = hazards.add((step, index), reads=action.reads, writes=action.writes, frees=action.frees)
                others = {(s, i) for s, i in found if program[i].lane is not action.lane}
                expected = {(step, i) for i in same[index]} | {(step - 1, i) for i in before[index] if step}
                assert others == expected


@settings(max_examples=30, deadline=None, derandomize=True)
@given(shape=shapes(), slower=st.floats(1.05, 4.0), rate=st.sampled_from([1e4, 5e4, 3e5]))
def test_slower_link_never_shortens_a_step(shape, slower, rate):
    """Fair sharing has anomalies in theory, like every list schedule: hence a tolerance, and examples that stay."""
    schedule = shaped(shape)
    fast = play(schedule, costs(MOST_LAYERS, rate=rate), steps=1).makespan
    assert play(schedule, costs(MOST_LAYERS, rate=rate / slower), steps=1).makespan >= fast * 0.99


@settings(max_examples=30, deadline=None, derandomize=True)
@given(shape=shapes(), latency=st.floats(0, 0.6))
def test_more_prefetch_never_slows_a_step_without_shared_links(shape, latency):
    """With transfers of fixed length every wait that is taken away can only help. Where links are shared that does not
    hold: what is needed later takes bandwidth from what is needed now. Nor where copies that are kept make room: others
    are brought then."""
    model = costs(MOST_LAYERS, between=LinkModel(math.inf, latency))
    less, more = shaped(shape), shaped(shape, look_ahead=shape.settings.look_ahead + 1)
    assume(Counter(map(str, chain(*less.programs))) == Counter(map(str, chain(*more.programs))))
    assert play(more, model, steps=1).makespan <= play(less, model, steps=1).makespan + 1e-9


def test_prefetching_hides_transfer_time():
    steps = [
        play(made(2, 2, count=8, strategy="tawpipe-spread", look_ahead=n, reuse=False), costs()).step_seconds
        for n in (0, 1, 2)
    ]
    assert steps[0] > steps[1] * 1.02
    assert steps[1] >= steps[2]


# what is read from a timeline


def test_simulated_steps_become_periodic():
    times = play(made(3, 2, strategy="tawpipe-striped", layers=5), costs(5, rate=3e4), steps=5).step_times
    assert times[2:] == pytest.approx([times[2]] * 3)


def test_busy_and_idle_time_add_up_to_the_step():
    timeline = play(made(3, 2, count=12, strategy="tawpipe-spread"), costs(rate=2e4))
    for rank in range(6):
        spans = timeline.spans(rank, lane=Lane.COMPUTE, step=timeline.steady_step)
        busy = sum(span.end - span.begin for span in spans)
        assert busy == pytest.approx(4 * 2 * 0.4)
        assert busy + timeline.idle(rank).total_s == pytest.approx(timeline.step_seconds, rel=0.02)
    assert timeline.exposed_communication_s == pytest.approx(timeline.idle_s, rel=1e-6)


def test_waiting_for_a_slow_device_is_not_counted_as_communication():
    timeline = play(made(1, 2, strategy="tawpipe-spread"), costs(inside=FREE, compute_factor={1: 2.0}))
    idle = timeline.idle(0)
    assert idle.transfer_s == pytest.approx(0.0, abs=1e-9)
    assert idle.compute_s == pytest.approx(4 * 0.4, rel=1e-6)
    assert timeline.idle(1).total_s == pytest.approx(0.0, abs=1e-9)


# cost models


def test_missing_block_costs_are_named():
    with pytest.raises(UserError, match="costs of block"):
        play(made(1, 1, layers=5, strategy="tawpipe-spread"), costs(2))
