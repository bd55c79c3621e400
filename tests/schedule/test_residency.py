"""What stays in buffers: never too much, always what is computed with, and as rarely brought anew as can be."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedules import llama, make
from tawpipe.schedule.proof.verify import verify
from tawpipe.schedule.routes.residency import Stay, plan_stays

USES = st.lists(st.lists(st.integers(0, 5), max_size=2, unique=True), max_size=14)


def zigzag(units: int, rounds: int) -> list[list[int]]:
    """The order of a training step: forward, backward, forward, ..."""
    return [[u] for _ in range(rounds) for u in (*range(units), *reversed(range(units)))]


def coming(stays: Sequence[dict[int, Stay]]) -> int:
    """How many units have to come."""
    return sum(not stay.held for visit in stays for stay in visit.values())


def fewest(uses: Sequence[Sequence[int]], capacity: int, busy: int) -> int:
    """How many must come at least: all ways to keep something tried."""

    @cache
    def search(number: int, inside: frozenset[int]) -> int:
        if number == len(uses):
            return 0
        needed = frozenset(unit for visit in uses[max(0, number - busy) : number + 1] for unit in visit)
        missing = len(set(uses[number]) - inside)
        optional = (inside | set(uses[number])) - needed
        room = min(capacity - len(needed), len(optional))
        return missing + min(search(number + 1, needed | set(kept)) for kept in combinations(sorted(optional), room))

    return search(0, frozenset())


@settings(max_examples=300, deadline=None)
@given(uses=USES, busy=st.integers(0, 2), spare=st.integers(0, 2), reuse=st.booleans())
def test_unit_keeps_its_buffer_while_it_may_be_in_use(uses, busy, spare, reuse):
    most = max(map(len, uses), default=0)
    capacity = (busy + 1) * most + spare
    holds: dict[int, int] = {}
    used: list[dict[int, int]] = []
    for visit, units in zip(plan_stays(uses, capacity=capacity, busy=busy, reuse=reuse), uses, strict=True):
        assert set(visit) == set(units)
        for unit, stay in visit.items():
            assert 0 <= stay.place < capacity
            assert not stay.held or (reuse and holds[stay.place] == unit)
            holds[stay.place] = unit
        used.append({stay.place: unit for unit, stay in visit.items()})
        for earlier in used[-busy - 1 :]:
            assert all(holds[slot] == unit for slot, unit in earlier.items())


@settings(max_examples=200, deadline=None)
@given(uses=USES, busy=st.integers(0, 2), spare=st.integers(0, 2))
def test_planned_buffer_stays_need_the_fewest_transfers(uses, busy, spare):
    capacity = (busy + 1) * max(map(len, uses), default=0) + spare
    found = plan_stays(uses, capacity=capacity, busy=busy)
    assert coming(found) == fewest(uses, capacity, busy)


def test_turning_points_reuse_all_buffers():
    for units, rounds, capacity in ((12, 1, 4), (12, 4, 4), (5, 3, 2)):
        came = coming(plan_stays(zigzag(units, rounds), capacity=capacity, busy=capacity - 1))
        assert came == 2 * rounds * units - (2 * rounds - 1) * capacity


def test_every_unit_is_transferred_once_if_each_has_a_buffer():
    assert coming(plan_stays(zigzag(7, 3), capacity=7, busy=2)) == 7


def test_buffers_rotate_without_reuse():
    stays = plan_stays(zigzag(4, 1), capacity=3, busy=2, reuse=False)
    assert [next(iter(visit.values())).place for visit in stays] == [0, 1, 2, 0, 1, 2, 0, 1]
    assert not any(stay.held for visit in stays for stay in visit.values())


@pytest.mark.parametrize("training", [True, False])
def test_carrier_rank_keeps_arriving_weights_as_long_as_others(training: bool) -> None:
    """Embedding and head of one size, which share buffers, in several rounds."""
    schedule = make(llama(3), 2, 2, 7, training=training, strategy="tawpipe-whole", step_cache="all", look_ahead=1)
    verify(schedule)
