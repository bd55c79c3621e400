"""Prefetching: the same items, ahead of time, and nothing left behind."""

import threading
import time

import pytest
import torch

from tawpipe.data.prefetch import Prefetcher


def test_items_arrive_in_order_and_then_end():
    with Prefetcher(iter(range(100)), depth=3) as items:
        assert list(items) == list(range(100))
        with pytest.raises(StopIteration):
            next(items)


def test_an_exception_reaches_the_consumer_after_the_items_before_it():
    def broken():
        yield 1
        raise ValueError("at two")

    with Prefetcher(broken()) as items:
        assert next(items) == 1
        with pytest.raises(ValueError, match="at two"):
            next(items)


def test_the_thread_is_bounded_and_ends_when_the_consumer_leaves():
    made: list[int] = []

    def endless():
        while True:
            made.append(len(made))
            yield made[-1]

    before = threading.active_count()
    with Prefetcher(endless(), depth=2) as items:
        assert next(items) == 0
        time.sleep(0.05)
        assert len(made) <= 1 + 2 + 1  # taken, queued, and one that waits for room
    assert threading.active_count() == before


def test_close_while_full_does_not_hang_and_may_be_repeated():
    items = Prefetcher(iter(range(1000)), depth=1)
    items.close()
    items.close()
    with pytest.raises(StopIteration):
        next(items)


def test_torchs_random_state_is_left_alone():
    before = torch.get_rng_state()
    with Prefetcher(iter(range(10))) as items:
        list(items)
    assert torch.equal(torch.get_rng_state(), before)
