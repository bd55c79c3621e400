"""Schedules as data: every builder's result is proved right, and a broken one is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tawpipe.errors import UserError
from tawpipe.schedule.actions import Action, Lane, Op
from tawpipe.schedule.build import build_evaluation, build_training
from tawpipe.schedule.hazards import Hazards
from tawpipe.schedule.placement import PLACEMENTS, place
from tawpipe.schedule.spec import BlockSpec, Knobs, ModelSpec, Schedule, UnitSpec, share_micro_batches
from tawpipe.schedule.verify import ScheduleError, verify
from tawpipe.topology import Topology


def llama(layers: int, *, tied: bool = False, lora: bool = False, frozen: int = 0) -> ModelSpec:
    """An embedding, some layers, a head with a norm; sizes that nothing divides."""
    last = layers + 1
    units = [UnitSpec(1001, not lora and frozen == 0, (0, last) if tied else (0,))]
    blocks = [BlockSpec((0,), "embedding", False, units[0].trainable)]
    for layer in range(1, layers + 1):
        own = [len(units)]
        units.append(UnitSpec(333, not lora and layer >= frozen, (layer,)))
        if lora:
            own.append(len(units))
            units.append(UnitSpec(17, True, (layer,)))
        blocks.append(BlockSpec(tuple(own), "layer", True, lora or layer >= frozen))
    own = [0] if tied else []
    own.append(len(units))
    units.append(UnitSpec(7, not lora, (last,)))
    if not tied:
        own.append(len(units))
        units.append(UnitSpec(1001, not lora, (last,)))
    blocks.append(BlockSpec(tuple(own), "head"))
    return ModelSpec(tuple(blocks), tuple(units))


def make(model: ModelSpec, nodes: int, local: int, count: int, build=build_training, **knobs) -> Schedule:
    topology = Topology.grid(nodes, local)
    return build(model, topology, Knobs(micro_batches=share_micro_batches(count, nodes * local), **knobs))


@settings(max_examples=120, deadline=None)
@given(
    nodes=st.integers(1, 4),
    local=st.integers(1, 4),
    layers=st.integers(1, 7),
    count=st.integers(1, 20),
    per_visit=st.integers(1, 3),
    look_ahead=st.integers(0, 4),
    gradient_buffers=st.integers(1, 3),
    placement=st.sampled_from(PLACEMENTS),
    shape=st.sampled_from([{}, {"tied": True}, {"lora": True}, {"frozen": 2}]),
    training=st.booleans(),
)
def test_every_built_schedule_is_proved(
    nodes, local, layers, count, per_visit, look_ahead, gradient_buffers, placement, shape, training
):
    schedule = make(
        llama(layers, **shape),
        nodes,
        local,
        count,
        build_training if training else build_evaluation,
        placement=placement,
        micro_batches_per_visit=per_visit,
        look_ahead=look_ahead,
        gradient_buffers=gradient_buffers,
    )
    if training:
        verify(schedule)
    else:
        verify(schedule, steps=1)
    for program in schedule.programs:
        for action in program:
            assert Action.parse(str(action)) == action


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_stripes_cover_the_unit_once(placement):
    topology = Topology.grid(3, 2)
    home = place(placement, topology, 1001, block=4)
    assert home.padded >= 1001
    assert len(set(home.ranks)) == len(home.ranks)


def _edit(schedule: Schedule, rank: int, change) -> Schedule:
    programs = list(schedule.programs)
    programs[rank] = tuple(change(list(programs[rank])))
    return replace(schedule, programs=tuple(programs))


def _drop(op: Op, lane: Lane, which: int = 0):
    def change(program):
        found = [i for i, action in enumerate(program) if action.op is op and action.lane is lane]
        del program[found[which]]
        return program

    return change


def _swap(lane: Lane):
    def change(program):
        a, b = [i for i, action in enumerate(program) if action.lane is lane][:2]
        program[a], program[b] = program[b], program[a]
        return program

    return change


@pytest.mark.parametrize("placement", ["spread", "striped", "whole"])
@pytest.mark.parametrize(
    "change",
    [
        _drop(Op.ADD, Lane.INTER_G),
        _drop(Op.BACKWARD, Lane.COMPUTE, 3),
        _drop(Op.UPDATE, Lane.COMPUTE),
        _swap(Lane.INTER_W),
        _swap(Lane.GATHER),
        _swap(Lane.REDUCE),
    ],
    ids=["lost add", "lost backward", "lost update", "pulls swapped", "gathers swapped", "reductions swapped"],
)
def test_a_broken_schedule_is_refused(placement, change):
    schedule = make(llama(5), 3, 2, 12, placement=placement)
    verify(schedule)
    with pytest.raises(ScheduleError):
        verify(_edit(schedule, 0, change))


def test_a_buffer_that_is_reused_too_early_is_found():
    schedule = make(llama(5), 2, 2, 4, placement="spread")

    def change(program):
        return [
            replace(action, writes=("W1.0",)) if action.lane is Lane.GATHER and action.writes == ("W1.1",) else action
            for action in program
        ]

    with pytest.raises(ScheduleError):
        verify(_edit(schedule, 1, change))


def test_a_gradient_counted_twice_is_found():
    schedule = make(llama(3), 2, 2, 4, placement="spread")

    def change(program):
        i = next(i for i, action in enumerate(program) if action.op is Op.ADD)
        return [
            *program[: i + 1],
            replace(program[i], reads=(*program[i].writes, *program[i].reads)),
            *program[i + 1 :],
        ]

    with pytest.raises(ScheduleError, match="twice"):
        verify(_edit(schedule, 0, change))


def test_one_device_moves_nothing():
    schedule = make(llama(3), 1, 1, 4, placement="spread", micro_batches_per_visit=2)
    assert {action.lane for action in schedule.programs[0]} == {Lane.COMPUTE}
    assert schedule.pools == ((),)


def test_weights_cross_the_slow_link_a_third_less_than_in_a_ring():
    """(1-1/D) of every visited unit enters a node; flat sharding passes (P-1)/P of it: at 3 x 2 a ratio of 1.25."""
    from tawpipe.schedule.traffic import link_elements

    spread, flat = (link_elements(make(llama(6), 3, 2, 6, placement=p))[0] for p in ("spread", "flat"))
    assert flat.weights_received / spread.weights_received == pytest.approx(1.25, rel=0.05)


def test_bad_knobs_are_named():
    with pytest.raises(UserError, match="schedule.look_ahead"):
        make(llama(2), 1, 1, 1, placement="spread", look_ahead=-1)
    with pytest.raises(UserError, match="schedule.placement"):
        make(llama(2), 1, 1, 1, placement="nowhere")


def test_hazards_order_reads_and_writes():
    hazards: Hazards[int] = Hazards()
    assert hazards.add(0, reads=[], writes=["a"]) == []
    assert hazards.add(1, reads=["a"], writes=["b"]) == [0]
    assert hazards.add(2, reads=["a"], writes=["c"]) == [0]
    assert hazards.add(3, reads=[], writes=["a"]) == [0, 1, 2]
    assert hazards.add(4, reads=["b"], writes=[], frees=["b"]) == [1]
    assert hazards.add(5, reads=["b"], writes=[]) == []


@settings(max_examples=50, deadline=None)
@given(count=st.integers(0, 50), world=st.integers(1, 12))
def test_micro_batches_are_shared_once(count, world):
    shares = share_micro_batches(count, world)
    assert [m for own in shares for m in own] == list(range(count))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
