"""Schedules as data: every builder's result is proved right, gives the right numbers, and a broken one is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedule_numbers import check_numbers
from schedules import NAMES, SCOPED, llama, make, schedules
from tawpipe.errors import UserError
from tawpipe.schedule.actions import Action, Lane, Op
from tawpipe.schedule.buffers import BALANCE, COUNT, NORM, Buffer, Kind
from tawpipe.schedule.hazards import Hazards
from tawpipe.schedule.proof.symbolic import Content, Contents, Running
from tawpipe.schedule.proof.verify import ScheduleError, verify
from tawpipe.schedule.spec import BlockSpec, ModelSpec, UnitSpec, share_micro_batches
from tawpipe.schedule.step import Schedule
from tawpipe.schedule.strategies.table import find
from tawpipe.topology import Topology


@settings(max_examples=25, deadline=None)
@given(schedule=schedules())
def test_every_built_schedule_verifies_and_reads_back(schedule):
    verify(schedule)
    for program in schedule.programs:
        for action in program:
            assert Action.parse(str(action)) == action


@pytest.mark.slow
@settings(max_examples=75, deadline=None)
@given(schedule=schedules())
def test_many_more_built_schedules_verify(schedule):
    verify(schedule)


@settings(max_examples=8, deadline=None)
@given(schedule=schedules(), seed=st.integers(0, 1000))
def test_every_execution_order_gives_the_sums_of_one_process(schedule, seed):
    check_numbers(schedule, seed=seed)


@settings(max_examples=40, deadline=None)
@given(schedule=schedules())
def test_every_buffer_is_weight_gradient_or_activation(schedule):
    for program in schedule.programs:
        for one in {one for action in program for one in (*action.reads, *action.writes)} - {NORM, COUNT, BALANCE}:
            assert one.is_weight + one.is_gradient + one.is_activation == 1, one
            assert Buffer.parse(str(one)) == one


@pytest.mark.parametrize("strategy", NAMES)
@pytest.mark.parametrize(("nodes", "local"), [(1, 1), (1, 3), (3, 1), (3, 2)])
def test_every_copy_of_a_unit_is_whole_and_ranks_hold_one_copy(strategy, nodes, local):
    model, topology = llama(6), Topology.grid(nodes, local)
    for unit, home in zip(model.units, find(strategy).place(model, topology), strict=True):
        assert home.padded >= unit.numel
        assert len(home.copies) == (nodes if strategy == "hsdp" else 1)
        ranks = [rank for copy in home.copies for rank in copy]
        assert len(set(ranks)) == len(ranks)
        for copy in home.copies:
            assert [home.index(rank) for rank in copy] == list(range(len(copy)))
        assert all(home.index(rank) is None for rank in set(topology.group("world", 0)) - set(ranks))


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


@pytest.mark.parametrize("strategy", SCOPED)
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
def test_a_broken_schedule_is_refused(strategy, change):
    schedule = make(llama(5), 3, 2, 12, strategy=strategy)
    verify(schedule)
    with pytest.raises(ScheduleError):
        verify(_edit(schedule, 0, change))


def test_buffer_reused_too_early_is_detected():
    schedule = make(llama(5), 2, 2, 4, strategy="tawpipe-spread")

    def change(program):
        return [
            replace(action, writes=(Buffer.parse("W1.0"),))
            if action.lane is Lane.GATHER and action.writes == (Buffer.parse("W1.1"),)
            else action
            for action in program
        ]

    with pytest.raises(ScheduleError):
        verify(_edit(schedule, 1, change))


@pytest.mark.parametrize("strategy", ["tawpipe-spread", "tawpipe-striped", "weipipe", "zero-bubble"])
def test_action_that_begins_while_its_buffer_is_read_is_refused(monkeypatch, strategy):
    """A receive that is posted while its buffer is read, as if its lane's order were enough."""
    schedule = make(llama(8), 2, 2, 8, strategy=strategy)
    verify(schedule)

    class Forgetful(Hazards):
        def before(self, *, frees=None, **names):
            return [] if frees is None else super().before(frees=frees, **names)

    monkeypatch.setattr("tawpipe.schedule.proof.verify.Hazards", Forgetful)
    with pytest.raises(ScheduleError, match="belongs to what has begun"):
        verify(schedule)


def test_gradient_counted_twice_is_detected():
    schedule = make(llama(3), 2, 2, 4, strategy="tawpipe-spread")

    def change(program):
        i = next(i for i, action in enumerate(program) if action.op is Op.ADD)
        return [
            *program[: i + 1],
            replace(program[i], reads=(*program[i].writes, *program[i].reads)),
            *program[i + 1 :],
        ]

    with pytest.raises(ScheduleError, match="twice"):
        verify(_edit(schedule, 0, change))


@pytest.mark.parametrize(
    "change", [lambda g: g[::-1], lambda g: g[:1], lambda g: (*g, g[0])], ids=["swapped", "less", "more"]
)
def test_gradients_of_a_block_must_match_its_units(change):
    """An adapter makes two trainable units of a block; equal sizes, so that nothing but the order tells them apart."""
    model = llama(3)
    model = replace(model, blocks=(*model.blocks[:1], replace(model.blocks[1], units=(1, 2)), *model.blocks[2:]))
    model = replace(model, units=(*model.units[:2], replace(model.units[2], blocks=(1, 2)), *model.units[3:]))
    schedule = make(model, 2, 2, 4, strategy="tawpipe-spread")
    verify(schedule)

    def edit(program):
        i = next(i for i, action in enumerate(program) if action.op is Op.BACKWARD and action.block == 1)
        writes = tuple(one for one in program[i].writes if not one.is_gradient)
        program[i] = replace(program[i], writes=(*writes, *change(program[i].gradients)))
        return program

    with pytest.raises(ScheduleError):
        verify(_edit(schedule, 0, edit))


def test_schedule_of_one_device_has_only_compute_actions():
    schedule = make(llama(3), 1, 1, 4, strategy="tawpipe-spread", micro_batches_per_visit=2)
    assert {action.lane for action in schedule.programs[0]} == {Lane.COMPUTE}
    assert schedule.pools == ((),)


# scopes of copies


@pytest.mark.parametrize("strategy", SCOPED)
def test_kept_weights_enter_a_node_once_per_step(strategy):
    schedule = make(llama(4, tied=True), 2, 2, 12, strategy=strategy, step_cache="all")
    for rank in range(4):
        pulls = [action for action in schedule.programs[rank] if action.lane is Lane.INTER_W]
        pulled = [action.unit for action in pulls if action.op is Op.COLLECTIVE]
        pulled += [transfer.unit for action in pulls for transfer in action.transfers if not transfer.send]
        assert len(set(pulled)) == len(pulled)
        assert strategy != "tawpipe-spread" or sorted(pulled) == list(range(len(schedule.model.units)))


def test_pools_count_the_buffers_of_kept_weights():
    model = llama(8)
    plain, cached = (make(model, 3, 2, 12, strategy="tawpipe-spread", step_cache=cache) for cache in (0, "all"))
    slices = [sum(p.count * p.elements for p in one.pools[0] if p.name.startswith("S")) for one in (plain, cached)]
    assert slices[0] < slices[1] <= sum(home.padded // 2 for home in cached.homes)
    weights = [one.pool_elements(0, Kind.WEIGHT) for one in (plain, cached)]
    assert weights[1] - weights[0] == slices[1] - slices[0]


@pytest.mark.parametrize("strategy", ["tawpipe-spread", "tawpipe-striped", "flat", "hsdp"])
def test_embedding_and_head_share_their_buffers(strategy):
    """Sizes of an embedding and of a head that has a norm besides; two rounds, so that both come twice."""
    units = (UnitSpec(5000, True, (0,)), *(UnitSpec(1000, True, (i,)) for i in range(1, 7)), UnitSpec(5040, True, (7,)))
    blocks = (
        BlockSpec((0,), "embedding", False),
        *(BlockSpec((i,), "layer") for i in range(1, 7)),
        BlockSpec((7,), "head"),
    )
    schedule = make(ModelSpec(blocks, units), 2, 2, 8, strategy=strategy, gradient_buffers=2)
    verify(schedule)
    assert schedule.homes[0].padded == schedule.homes[7].padded
    for pools in schedule.pools:
        large = {pool.name[0]: pool for pool in pools if pool.elements > 4000}
        assert len({pool.elements for pool in large.values()}) == 1
        assert large["G"].count == 1 and large["W"].count <= 2


def test_tawpipe_spread_caching_everything_equals_tawpipe_step():
    cached = make(llama(4), 3, 2, 12, strategy="tawpipe-spread", step_cache="all", gradients_scope="step")
    assert cached.programs == make(llama(4), 3, 2, 12, strategy="tawpipe-step").programs


def test_kept_weights_of_the_previous_step_are_refused():
    schedule = make(llama(2), 2, 1, 4, strategy="tawpipe-spread", step_cache="all")
    forward = next(action for action in schedule.programs[0] if action.op is Op.FORWARD)
    (name,), contents = forward.weights, Contents([schedule, schedule])
    contents.held[0][name] = Content("w", 0, (0, 1), version=0)
    with pytest.raises(ScheduleError, match=r"version=1.*finds.*version=0"):
        contents.local(Running(0, 1, 0, forward))


@pytest.mark.parametrize("strategy", [*SCOPED, "hsdp"])
def test_gradients_leave_a_node_once_per_step_when_complete(strategy):
    schedule = make(llama(4), 2, 2, 12, strategy=strategy, gradients_scope="step")
    for program in schedule.programs:
        left: dict[int, int] = {}
        for i, action in enumerate(program):
            if action.lane is Lane.INTER_G and action.op in (Op.EXCHANGE, Op.COLLECTIVE):
                for unit in [t.unit for t in action.transfers if t.send] if action.transfers else [action.unit]:
                    assert unit not in left
                    left[unit] = i
        last = max(i for i, action in enumerate(program) if action.op is Op.BACKWARD)
        assert min(left.values()) < last


def test_gradients_that_leave_once_need_no_extra_buffer():
    schedule = make(llama(4), 2, 2, 4, strategy="tawpipe-spread", gradients_scope="step")
    assert not any(pool.name.startswith("A") for pools in schedule.pools for pool in pools)


def test_the_norm_counts_every_gradient_once():
    schedule = make(llama(3), 3, 2, 6, strategy="hsdp")
    norms = [next(action for action in program if action.op is Op.NORM) for program in schedule.programs]
    assert [any(one.is_gradient for one in norm.reads) for norm in norms] == [True, True, False, False, False, False]
    for program in schedule.programs:
        assert sum(action.op is Op.UPDATE for action in program) == len(schedule.model.units)


# knobs


@pytest.mark.parametrize(
    ("setting", "knobs"),
    [
        ("look_ahead", {"look_ahead": -1}),
        ("strategy", {"strategy": "nowhere"}),
        ("step_cache", {"step_cache": "run"}),
        ("step_cache", {"step_cache": -1}),
        ("step_cache", {"step_cache": 2, "reuse": False}),
        ("step_cache", {"strategy": "tawpipe-whole", "step_cache": 2}),
        ("step_cache", {"strategy": "flat", "step_cache": "all"}),
        ("gradients_scope", {"strategy": "flat", "gradients_scope": "step"}),
        ("step_cache", {"strategy": "hsdp", "step_cache": "all"}),
        ("gradients_scope", {"strategy": "weipipe", "gradients_scope": "step"}),
        ("look_ahead", {"strategy": "weipipe", "look_ahead": 0}),
    ],
)
def test_invalid_schedule_settings_are_named(setting, knobs):
    with pytest.raises(UserError, match=rf"schedule\.{setting}: got"):
        make(llama(4), 2, 2, 4, **({"strategy": "tawpipe-spread"} | knobs))


def test_a_ring_needs_a_layer_for_every_process():
    with pytest.raises(UserError, match=r"layers of the model: got 3; at least 4, one for every process of the ring"):
        make(llama(3), 2, 2, 4, strategy="weipipe")


def test_hazards_order_reads_and_writes():
    hazards: Hazards[int] = Hazards()
    assert hazards.add(0, reads=[], writes=["a"]) == []
    assert hazards.add(1, reads=["a"], writes=["b"]) == [0]
    assert hazards.add(2, reads=["a"], writes=["c"]) == [0]
    assert hazards.add(3, reads=[], writes=["a"]) == [0, 1, 2]
    assert hazards.add(4, reads=["b"], writes=[], frees=["b"]) == [1]
    assert hazards.add(5, reads=[], writes=["b"]) == [4]


def test_hazards_order_frees_between_lanes():
    """What is freed on one lane may be made anew on another; on the same lane the order is enough."""
    hazards: Hazards[int] = Hazards()
    hazards.record(0, reads=[], writes=["x"], lane=Lane.COMPUTE)
    assert hazards.before(reads=["x"], writes=[], frees=["x"], lane=Lane.HOST) == [0]
    hazards.record(1, reads=["x"], writes=[], frees=["x"], lane=Lane.HOST)
    assert hazards.before(reads=[], writes=["x"], lane=Lane.HOST) == []
    assert hazards.before(reads=[], writes=["x"], lane=Lane.COMPUTE) == [1]


def test_readers_on_one_lane_do_not_accumulate():
    """A frozen weight at home is read in every step and never written."""
    hazards: Hazards[int] = Hazards()
    for event in range(1000):
        hazards.record(event, reads=["home.w.0"], writes=[], lane=Lane.INTER_W if event % 2 else Lane.COMPUTE)
    assert sorted(hazards.last_events()) == [998, 999]
    assert sorted(hazards.before(reads=[], writes=["home.w.0"])) == [998, 999]


@settings(max_examples=50, deadline=None)
@given(count=st.integers(0, 50), world=st.integers(1, 12))
def test_micro_batches_are_shared_once_and_evenly(count, world):
    shares = share_micro_batches(count, world)
    assert [m for own in shares for m in own] == list(range(count))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
