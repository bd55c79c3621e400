"""The search for the longest row: memory that is a line, a line with a bend, time that grows with the square."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from longest import GRAIN, WITHIN, longest
from longest_probe import MEMORY, SECONDS, Reading, anonymous_bytes, clear_record, most_anonymous_bytes


def looked_for(peak, seconds, *, most_bytes=1e9, most_seconds=600.0, first=2048):
    """The search on made-up readings, which end as measured ones do."""

    def probe(tokens):
        ended = MEMORY if peak(tokens) > most_bytes else SECONDS if seconds(tokens) > most_seconds else ""
        return Reading(tokens, int(min(peak(tokens), most_bytes)), 0, min(seconds(tokens), most_seconds), ended)

    return longest(probe, most_bytes=most_bytes, most_seconds=most_seconds, first=first)


@pytest.mark.parametrize("slope", [1e3, 3e4, 3e5, 2e6])
@pytest.mark.parametrize("fixed", [1e6, 5e8])
def test_the_longest_row_fits_and_a_tenth_more_does_not(slope, fixed):
    best, readings = looked_for(lambda tokens: fixed + slope * tokens, lambda tokens: 1e-4 * tokens)
    limit = (1e9 - fixed) / slope
    assert best is not None
    assert best.tokens <= limit <= best.tokens * (1 + WITHIN) + GRAIN
    over = [one for one in readings if one.ended]
    assert min(one.tokens for one in over) <= best.tokens * (1 + WITHIN) + GRAIN
    assert len(readings) <= 10


def test_search_measures_few_rows_if_memory_is_linear():
    best, readings = looked_for(lambda tokens: 1e8 + 3e4 * tokens, lambda tokens: 1e-4 * tokens)
    assert best is not None and len(readings) <= 5


def test_longest_row_is_found_if_memory_bends_after_short_rows():
    best, _ = looked_for(lambda tokens: max(4e8 + 1e3 * tokens, 5e4 * tokens), lambda tokens: 1e-4 * tokens)
    assert best is not None and best.tokens <= 20_000 <= best.tokens * (1 + WITHIN) + GRAIN


def test_longest_row_is_found_if_time_limits_before_memory():
    best, readings = looked_for(lambda tokens: 1e3 * tokens, lambda tokens: 1e-4 * tokens + 1e-7 * tokens**2)
    assert best is not None and best.tokens <= 76_960 <= best.tokens * (1 + WITHIN) + GRAIN
    assert {one.ended for one in readings} == {"", SECONDS}


def test_search_returns_none_if_no_row_fits():
    best, readings = looked_for(lambda tokens: 2e9, lambda tokens: 1.0)
    assert best is None and readings


@contextmanager
def pages(size: int) -> Iterator[None]:
    """Memory of the system's own, of which no allocator had some left, while it is there."""
    with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as held:
        for place in range(0, size, mmap.PAGESIZE):
            held[place] = 1
        yield


def test_anonymous_bytes_counts_memory_of_the_process():
    before = anonymous_bytes(os.getpid())
    with pages(2**25):
        assert 0.9 < (anonymous_bytes(os.getpid()) - before) / 2**25 < 3


def test_peak_anonymous_bytes_includes_freed_memory():
    clear_record(os.getpid())
    before = anonymous_bytes(os.getpid())
    with pages(2**26):
        pass
    assert 0.9 < (most_anonymous_bytes(os.getpid()) - before) / 2**26 < 3
