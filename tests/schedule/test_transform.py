"""Transforms of schedules: without overlap a rank does one thing at a time, and everything else stays."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedule_numbers import check_numbers
from schedules import llama, make, schedules
from tawpipe.schedule.actions import Lane
from tawpipe.schedule.proof.verify import ScheduleError, verify
from tawpipe.schedule.sizes.traffic import link_elements
from tawpipe.schedule.transform import for_one_thread, without_overlap
from tawpipe.simulate import CostModel, LinkModel, play


@settings(max_examples=10, deadline=None)
@given(schedule=schedules(), seed=st.integers(0, 1000))
def test_schedule_without_overlap_verifies_and_sums_right_on_one_lane(schedule, seed):
    serial = without_overlap(schedule)
    verify(serial)
    check_numbers(serial, seed=seed)
    assert link_elements(serial) == link_elements(schedule)
    for before, after in zip(schedule.programs, serial.programs, strict=True):
        assert {action.lane for action in after} <= {Lane.COMPUTE}
        assert Counter(replace(action, lane=Lane.COMPUTE) for action in before) == Counter(after)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(schedule=schedules())
def test_many_schedules_without_overlap_verify(schedule):
    verify(without_overlap(schedule))


@pytest.mark.parametrize("strategy", ["tawpipe-spread", "flat", "hsdp"])
def test_synchronous_programs_keep_their_order_without_overlap(strategy):
    schedule = make(llama(6), 2, 2, 8, strategy=strategy, look_ahead=0)
    for before, after in zip(schedule.programs, without_overlap(schedule).programs, strict=True):
        assert tuple(replace(action, lane=Lane.COMPUTE) for action in before) == after


@pytest.mark.parametrize("strategy", ["tawpipe-striped", "tawpipe-whole"])
def test_staggered_programs_deadlock_on_one_lane_unless_reordered(strategy):
    schedule = make(llama(6), 3, 2, 12, strategy=strategy, look_ahead=0)
    simply = tuple(tuple(replace(action, lane=Lane.COMPUTE) for action in own) for own in schedule.programs)
    with pytest.raises(ScheduleError, match="deadlock"):
        verify(replace(schedule, programs=simply))
    verify(without_overlap(schedule))


# one issuing thread that may block


@settings(max_examples=8, deadline=None)
@given(schedule=schedules(), seed=st.integers(0, 1000))
def test_every_schedule_verifies_for_one_blocking_thread(schedule, seed):
    sorted_ = for_one_thread(schedule)
    verify(sorted_, one_thread=True)
    check_numbers(sorted_, seed=seed)
    for before, after in zip(schedule.programs, sorted_.programs, strict=True):
        for lane in Lane:
            assert [one for one in before if one.lane is lane] == [one for one in after if one.lane is lane]


@pytest.mark.parametrize("strategy", ["tawpipe-striped", "tawpipe-whole"])
def test_staggered_programs_reordered_for_one_thread_take_equal_time(strategy):
    schedule = make(llama(6), 3, 2, 24, strategy=strategy)
    verify(schedule)
    with pytest.raises(ScheduleError, match="deadlock"):
        verify(schedule, one_thread=True)
    between, inside = LinkModel(3e5, 1e-3), LinkModel(1e7, 1e-4)
    costs = CostModel.timed(layers=6, forward_s=0.002, backward_s=0.006, between=between, inside=inside)
    before, after = (play(one, costs).step_times for one in (schedule, for_one_thread(schedule)))
    assert before == pytest.approx(after)
