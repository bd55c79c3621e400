"""Homes in the host's memory as schedules have them: proved, on a lane of their own, and nothing else is changed."""

from __future__ import annotations

import itertools
import zlib
from dataclasses import replace

import pytest

from host_homes import levels_of
from schedules import EVERY, llama, make
from selected import quick_ones
from tawpipe.errors import UserError
from tawpipe.schedule.actions import Lane, Op
from tawpipe.schedule.buffers import Kind
from tawpipe.schedule.landing import Landing, Raising
from tawpipe.schedule.proof.verify import ScheduleError, verify
from tawpipe.schedule.step import Schedule
from tawpipe.schedule.strategies.table import strategies
from tawpipe.schedule.transform import for_one_thread, without_overlap

SHAPES = ((1, 1), (2, 1), (2, 2))


def texts(**settings) -> str:
    """Programs and pools of every strategy."""
    found = []
    for name in EVERY:
        for nodes, local in SHAPES if name != "tawpipe-groups" else ():  # it came later
            for early in (False, True):
                try:
                    schedule = make(llama(6), nodes, local, 5, strategy=name, early_updates=early, **settings)
                except UserError as error:
                    found.append(f"{name} {nodes} {local}: {type(error).__name__}")
                    continue
                for rank in range(nodes * local):
                    found += [schedule.text(rank), str(schedule.pools[rank])]
    return "\n".join(found)


def test_schedules_with_homes_on_devices_are_unchanged() -> None:
    """Byte for byte: the sum is of the text before there was another place for homes."""
    assert f"{zlib.crc32(texts().encode()):08x}" == "2a5deace"
    assert texts(host_homes="none") == texts()


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("shape", quick_ones(SHAPES, [(2, 2)]), ids=str)
def test_every_strategy_verifies_with_homes_in_the_host(name: str, shape: tuple[int, int]) -> None:
    nodes, local = shape
    if strategies()[name].axis and nodes * local == 1:
        return
    for early, level in itertools.product((False, True), levels_of(name)):
        schedule = make(llama(8, tied=early), nodes, local, 6, strategy=name, host_homes=level, early_updates=early)
        verify(for_one_thread(schedule), one_thread=True)
        for program in schedule.programs:
            lanes = {action.lane for action in program if action.op is Op.UPDATE}
            assert lanes == {Lane.HOME}
            touches = {
                action.op
                for action in program
                if any(one.kind is Kind.HOME_GRADIENT for one in (*action.reads, *action.writes))
            }
            assert touches - {Op.NORM} == {Op.ADD, Op.UPDATE}
            read = {action.op for action in program if any(one.kind is Kind.HOME_WEIGHT for one in action.reads)}
            assert level == "state" or read == {Op.RAISE, Op.UPDATE}


def test_schedules_without_overlap_verify_with_homes_in_the_host() -> None:
    schedule = make(llama(4), 2, 1, 4, strategy="tawpipe-spread", host_homes="state", look_ahead=0)
    verify(without_overlap(schedule))
    verify(without_overlap(make(llama(4), 2, 1, 4, strategy="tawpipe-whole", host_homes="all", look_ahead=0)))


@pytest.mark.parametrize("name", [name for name in EVERY if strategies()[name].axis])
def test_pipelines_refuse_host_homes_all(name: str) -> None:
    with pytest.raises(UserError, match=r"schedule.host_homes.*state or none.*stay there"):
        make(llama(8), 2, 1, 4, strategy=name, host_homes="all")


def test_host_weights_are_raised_once_per_visit_while_others_compute() -> None:
    schedule = make(llama(6), 1, 1, 2, host_homes="all", micro_batches_per_visit=2)
    program = schedule.programs[0]
    raised = [action for action in program if action.op is Op.RAISE]
    layers = [action.unit for action in raised if schedule.homes[action.unit].shard_size == 336]
    assert layers == [1, 2, 3, 4, 5, 6, 4, 3, 2, 1]  # the last two are still there when the backward pass begins
    (places,) = {pool.count for pool in schedule.pools[0] if pool.kind is Kind.WEIGHT and pool.elements == 336}
    assert places == 2
    for before, after in itertools.pairwise(raised):  # the place of what computes now is not the one that is filled
        if {before.unit, after.unit} <= set(layers):
            assert before.writes != after.writes


def test_missing_or_too_early_raises_are_refused() -> None:
    for name in ("tawpipe-spread", "tawpipe-whole", "flat"):
        schedule = make(llama(3), 2, 1, 2, strategy=name, host_homes="all")
        verify(schedule)
        program = schedule.programs[0]
        for i, action in enumerate(program):
            if action.op is Op.RAISE:
                with pytest.raises(ScheduleError):
                    verify(replace(schedule, programs=((*program[:i], *program[i + 1 :]), schedule.programs[1])))
    early = make(llama(3), 1, 1, 2, host_homes="all", early_updates=True)
    program = list(early.programs[0])
    i = max(i for i, one in enumerate(program) if one.op is Op.RAISE)
    j = next(j for j, one in enumerate(program) if one.op is Op.UPDATE and one.unit == program[i].unit)
    program.insert(i, program.pop(j))
    with pytest.raises(ScheduleError):
        verify(replace(early, programs=(tuple(program),)))


def test_gradient_of_one_process_moves_to_the_host_only_to_accumulate() -> None:
    """Under early updates; an update from a place on the device, where it may not be, is refused."""
    settings = {"host_homes": "state", "early_updates": True, "micro_batches_per_visit": 2}
    once, twice = (make(llama(3), 1, 1, rows, **settings) for rows in (2, 4))
    assert not any(action.op is Op.ADD for action in once.programs[0])
    adds = {action.unit for action in twice.programs[0] if action.op is Op.ADD}
    passing = {
        action.unit
        for action in twice.programs[0]
        if action.op is Op.UPDATE and any(one.kind is Kind.LANDING for one in action.reads)
    }
    assert adds and not adds & passing
    late = make(llama(3), 1, 1, 2, host_homes="state", micro_batches_per_visit=2)
    with pytest.raises(ScheduleError):
        verify(replace(once, step=late.step))


def test_raising_adds_weight_buffers_and_actions() -> None:
    plain = make(llama(3), 1, 1, 2)
    raising = Raising(plain.step)
    found = list(raising.through(plain.programs[0]))
    assert {pool.kind for pool in raising.pools} == {Kind.WEIGHT}
    assert [one for one in found if one.op is not Op.RAISE] != list(plain.programs[0]) and len(found) > len(
        plain.programs[0]
    )


def test_early_update_in_the_host_runs_before_the_step_ends() -> None:
    schedule = make(llama(6), 2, 1, 4, strategy="tawpipe-spread", host_homes="state", early_updates=True)
    lane = [(action.op, action.unit) for action in schedule.programs[0] if action.lane is Lane.HOME]
    updates = [unit for op, unit in lane if op is Op.UPDATE]
    last = max(index for index, (op, _) in enumerate(lane) if op is Op.ADD)
    assert all(lane.index((Op.ADD, unit)) < lane.index((Op.UPDATE, unit)) for unit in updates)
    assert any(op is Op.UPDATE for op, _ in lane[:last])


@pytest.mark.parametrize("places", [1, 2, 3])
def test_gradient_landing_uses_gradient_buffers_many_places(places: int) -> None:
    schedule = make(
        llama(6),
        1,
        1,
        3,
        strategy="tawpipe-spread",
        host_homes="state",
        gradient_buffers=places,
        micro_batches_per_visit=3,
    )
    verify(schedule)
    assert {pool.count for pool in schedule.pools[0] if pool.elements == 336} == {places}
    copies = [action for action in schedule.programs[0] if action.op is Op.ADD]
    assert len(copies) == len(schedule.model.units)  # all micro-batches of a visit are there before the gradient goes


def _swapped(schedule: Schedule, op: Op, before: Op, *, unit: int) -> Schedule:
    """An action on HOME and the first one after it that reads what it wrote, the other way round."""
    program = list(schedule.programs[0])
    i = next(i for i, one in enumerate(program) if one.op is op and one.unit == unit and one.lane is Lane.HOME)
    j = next(
        j for j, one in enumerate(program) if j > i and one.op is before and set(one.reads) & set(program[i].writes)
    )
    program.insert(j, program.pop(i))
    return replace(schedule, programs=(tuple(program), *schedule.programs[1:]))


@pytest.mark.parametrize(("op", "before"), [(Op.ADD, Op.UPDATE), (Op.ADD, Op.NORM)])
@pytest.mark.parametrize("name", ["tawpipe-spread", "tawpipe-whole", "1f1b"])
def test_host_update_before_its_gradient_is_refused(name: str, op: Op, before: Op) -> None:
    schedule = make(llama(5), 2, 1, 4, strategy=name, host_homes="state", early_updates=before is Op.UPDATE)
    verify(schedule)
    with pytest.raises(ScheduleError, match=r"lacks|holds nothing"):
        verify(_swapped(schedule, op, before, unit=1 if name == "1f1b" else 0))


def test_weight_copy_before_its_host_update_is_refused() -> None:
    """Of a program in which a unit is updated in the middle of a step: what travels then is of another version."""
    schedule = make(llama(3), 2, 1, 2, strategy="tawpipe-spread", host_homes="state")
    program = list(schedule.programs[0])
    update = program.pop(next(i for i, one in enumerate(program) if one.op is Op.UPDATE))
    with pytest.raises(ScheduleError):  # the next step would pull what has not been updated
        verify(replace(schedule, programs=(tuple(program), *schedule.programs[1:])))
    early = make(llama(3), 2, 1, 2, strategy="tawpipe-spread", host_homes="state", early_updates=True)
    program = list(early.programs[0])
    i = next(i for i, one in enumerate(program) if one.op is Op.UPDATE and one.unit == update.unit)
    j = max(j for j, one in enumerate(program) if one.op is Op.COLLECTIVE and one.reads == (update.reads[1],))
    program.insert(j, program.pop(i))
    with pytest.raises(ScheduleError):
        verify(replace(early, programs=(tuple(program), *early.programs[1:])))


def test_missing_gradient_fetch_before_accumulation_is_refused() -> None:
    schedule = make(llama(3), 1, 1, 3, strategy="tawpipe-spread", host_homes="state")
    fetches = [i for i, one in enumerate(schedule.programs[0]) if one.op is Op.ADD and one.writes[0].pool]
    assert fetches
    for i in fetches:
        program = schedule.programs[0]
        with pytest.raises(ScheduleError):
            verify(replace(schedule, programs=((*program[:i], *program[i + 1 :]),)))


def test_landing_adds_gradient_buffers_on_the_device() -> None:
    """One process fills its gradients itself: every unit has a place of its size, ``gradient_buffers`` at a time."""
    plain = make(llama(3), 1, 1, 2)
    landing = Landing(plain.step)
    program = list(landing.through(plain.programs[0]))
    assert [pool.kind for pool in landing.pools] == [Kind.LANDING] * len(landing.pools) and landing.pools
    home = [action for action in program if action.lane is Lane.HOME]
    assert home and all(action.op is Op.ADD for action in home)


@pytest.mark.parametrize("name", ["tawpipe-striped", "tawpipe-whole"])
@pytest.mark.parametrize("rows", [5, 12])
def test_early_host_updates_never_block_awaited_gradients(name: str, rows: int) -> None:
    """On the lane of homes: a rank's update may wait for weights that a peer sends once its gradients have gone."""
    settings = {"early_updates": True, "host_homes": "state", "reuse": False, "gradient_buffers": 1, "look_ahead": 0}
    for ranks in (1, 2):
        verify(make(llama(1), 3, 4, rows, strategy=name, sequence_ranks=ranks, **settings))
