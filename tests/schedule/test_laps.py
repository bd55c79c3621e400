"""Laps: right for any number of stages and groups, and nothing can be left out of one, or change places."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from schedules import llama
from tawpipe.errors import UserError
from tawpipe.schedule.actions import Action, Op
from tawpipe.schedule.buffers import Kind, ids, layer_cache
from tawpipe.schedule.decode_steps import build_decode_steps
from tawpipe.schedule.hazards import Hazards
from tawpipe.schedule.pipelines.layout import Layout
from tawpipe.schedule.proof.verify import ScheduleError, verify
from tawpipe.schedule.step import Schedule
from tawpipe.schedule.transform import for_one_thread
from tawpipe.topology import Topology


def _laps(ranks: int, groups: int, layers: int | None = None, *, tied: bool = False) -> Schedule:
    return build_decode_steps(llama(layers or ranks, tied=tied), Topology.grid(ranks, 1), groups)


def _with(schedule: Schedule, rank: int, program: list[Action]) -> Schedule:
    programs = [
        tuple(program) if other == rank else schedule.programs[other] for other in range(len(schedule.programs))
    ]
    return replace(schedule, programs=tuple(programs))


@pytest.mark.parametrize("ranks", range(1, 7))
def test_decode_steps_verify_with_lanes_and_with_one_thread(ranks):
    for groups in range(1, 17):
        schedule = _laps(ranks, groups)
        verify(schedule)
        verify(schedule, one_thread=True)
        assert for_one_thread(schedule) is schedule
    assert {action.op for action in schedule.programs[0]} <= {Op.EXCHANGE, Op.PREPARE, Op.FORWARD}


def test_decode_step_verifies_on_nodes_with_tied_embeddings():
    for layout in (None, Layout(7, (0, 1, 4, 6), (0, 1, 2, 3))):  # the embedding and the head each alone on a rank
        schedule = build_decode_steps(llama(5, tied=True), Topology.grid(2, 2), 5, layout)
        verify(schedule)
        verify(schedule, one_thread=True)
        assert schedule.homes[0].copies == ((0,), (3,))  # whole where it embeds, and whole where it is the head's


def test_every_action_of_a_decode_step_reads_back_from_its_text():
    for program in _laps(3, 2).programs:
        assert [Action.parse(str(action)) for action in program] == list(program)


def test_decode_step_receives_and_sends_on_two_lanes():
    for ranks in range(2, 7):
        for program in _laps(ranks, 3).programs:
            ways = {(transfer.send, action.lane) for action in program for transfer in action.transfers}
            assert len(ways) == len({lane for _, lane in ways}) == 2


def test_every_layer_has_one_cache_on_the_rank_of_its_stage():
    schedule = _laps(3, 2, layers=5)
    kept = [{b for a in program for b in a.writes if b.kind is Kind.CACHE} for program in schedule.programs]
    assert sorted(b for of_rank in kept for b in of_rank) == [layer_cache(block) for block in range(1, 6)]


@pytest.mark.parametrize(
    ("ranks", "groups", "layers"), [(1, 1, 1), (1, 3, 2), (2, 1, 2), (2, 3, 3), (3, 4, 3), (4, 2, 4)]
)
def test_decode_step_with_any_action_removed_is_refused(ranks, groups, layers):
    schedule = _laps(ranks, groups, layers)
    for rank, program in enumerate(schedule.programs):
        for index in range(len(program)):
            with pytest.raises(ScheduleError):
                verify(_with(schedule, rank, [*program[:index], *program[index + 1 :]]))


def _dependent(program: tuple[Action, ...]) -> Iterator[tuple[int, int]]:
    """Pairs of actions of which the second waits for the first."""
    hazards = Hazards[int]()
    for index, action in enumerate(program):
        for other in hazards.add(index, reads=action.reads, writes=action.writes, frees=action.frees):
            yield other, index


@pytest.mark.parametrize(("ranks", "groups", "layers"), [(1, 1, 1), (1, 3, 2), (2, 1, 2), (2, 3, 3), (3, 4, 3)])
def test_decode_step_with_swapped_dependent_actions_is_refused(ranks, groups, layers):
    schedule = _laps(ranks, groups, layers)
    for rank, program in enumerate(schedule.programs):
        for first, second in _dependent(program):
            changed = list(program)
            changed[first], changed[second] = changed[second], changed[first]
            with pytest.raises(ScheduleError):
                verify(_with(schedule, rank, changed))


def test_decode_step_with_groups_in_another_order_is_refused():
    schedule = _laps(1, 2)
    half = len(schedule.programs[0]) // 2
    with pytest.raises(ScheduleError, match=r"pass 1 finds 0 passes in cache\.1"):
        verify(_with(schedule, 0, [*schedule.programs[0][half:], *schedule.programs[0][:half]]))


def test_drawn_tokens_must_return_by_the_end_of_a_decode_step():
    schedule = _laps(2, 1)
    back = [action for action in schedule.programs[0] if ids(0) in action.writes]
    away = [action for action in schedule.programs[1] if ids(0) in action.reads]
    kept = [[a for a in program if a not in (*back, *away)] for program in schedule.programs]
    with pytest.raises(ScheduleError, match=r"ids\.0"):
        verify(replace(schedule, programs=tuple(map(tuple, kept))))


def test_only_decode_steps_begin_with_ids_and_keep_caches():
    schedule = _laps(1, 1)
    with pytest.raises(ScheduleError, match=r"ids\.0 is for laps"):
        verify(replace(schedule, looped=False))


def test_impossible_decode_steps_are_refused():
    with pytest.raises(UserError, match="groups of a lap"):
        _laps(2, 0)
    with pytest.raises(UserError, match="layers of the model"):
        _laps(3, 1, layers=2)
    with pytest.raises(UserError, match="stages of a lap"):
        build_decode_steps(llama(4), Topology.grid(2, 1), 1, Layout.even(6, 2, 2))
