"""What follows from the times of actions: where a step ends, and what held a device up."""

from __future__ import annotations

import pytest

from schedules import llama, make
from tawpipe.schedule.actions import Lane
from tawpipe.schedule.step import Schedule
from tawpipe.simulate import BlockCost, CostModel, LinkModel, play
from tawpipe.simulate.timeline import TRANSFERS, Idle, Record, Timeline


def timeline_of(record: Record) -> Timeline:
    return Timeline(record.schedule, record.schedule.topology, record, ((),) * record.steps)


@pytest.fixture(scope="module")
def schedule() -> Schedule:
    return make(llama(3), 2, 2, 8)


@pytest.fixture(scope="module")
def played(schedule: Schedule) -> Timeline:
    blocks = tuple(BlockCost.timed(0.1, 0.2) for _ in schedule.model.blocks)
    link = LinkModel(2e4, 1e-3)
    return play(schedule, CostModel(blocks, between=link, inside=LinkModel(1e5)), steps=4)


def test_every_action_of_every_step_has_a_unique_number(schedule: Schedule) -> None:
    record = Record(schedule, 3)
    numbers = [
        record.number(rank, step, index)
        for rank, program in enumerate(schedule.programs)
        for step in range(3)
        for index in range(len(program))
    ]
    assert numbers == list(range(record.total))
    for number in numbers:
        rank, step, index = record.where(number)
        assert record.number(rank, step, index) == number
        assert (record.rank(number), record.step(number)) == (rank, step)
        assert record.action(number) is schedule.programs[rank][index]


def test_step_times_add_up_to_the_makespan(played: Timeline) -> None:
    assert sum(played.step_times) == pytest.approx(played.makespan)
    assert list(played.step_ends) == sorted(played.step_ends)
    assert played.steady_step == 2 and played.step_seconds == played.step_times[2]


def test_computing_and_idle_time_cover_every_device(played: Timeline) -> None:
    for rank in range(4):
        spans = list(played.spans(rank, lane=Lane.COMPUTE))
        busy = sum(span.end - span.start for span in spans)
        idle = sum(played.idle(rank, step).total_s for step in range(4))
        assert busy + idle == pytest.approx(max(span.end for span in spans))
    mean = sum(played.idle(rank).total_s for rank in range(4)) / 4
    assert played.idle_s == pytest.approx(mean) and 0 < played.exposed_communication_s <= played.idle_s


def test_idle_gap_is_traced_to_the_rank_that_caused_it(schedule: Schedule) -> None:
    """COMPUTE of rank 0 waits for a transfer whose other member comes late, since it was computing until then."""
    record = Record(schedule, 1)
    record.start, record.begin, record.end = ([0.0] * record.total for _ in range(3))
    programs = schedule.programs

    def first(rank: int, wanted) -> int:
        return record.number(rank, 0, next(i for i, action in enumerate(programs[rank]) if wanted(action)))

    transfer, late = (first(rank, lambda action: action.op in TRANSFERS) for rank in (0, 1))
    waiting, other = (first(rank, lambda action: action.lane is Lane.COMPUTE) for rank in (0, 1))
    record.start[waiting] = record.end[waiting] = 7.0  # 0 to 1: latency of a lane, to 4: the other one, to 7: transfer
    record.cause[waiting], record.latest[transfer] = transfer, late
    record.begin[transfer], record.end[transfer] = 4.0, 7.0
    record.cause[late], record.begin[other], record.end[other] = other, 1.0, 4.0
    record.start[late], record.start[other] = 4.0, 1.0
    timeline = timeline_of(record)
    assert timeline.idle(0, 0) == Idle(transfer_s=3.0, compute_s=3.0, other_s=1.0)
    assert timeline.idle(0, 0).total_s == 7.0
