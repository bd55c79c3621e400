"""Prefetching: the same items, ahead of time, and nothing left behind."""

import threading
import time

import pytest
import torch

from tawpipe.data.prefetch import Prefetcher


def test_prefetcher_yields_all_items_in_order():
    with Prefetcher(iter(range(100)), depth=3) as items:
        assert list(items) == list(range(100))
        with pytest.raises(StopIteration):
            next(items)


def test_exception_reaches_the_consumer_after_the_items_before_it():
    def broken():
        yield 1
        raise ValueError("at two")

    with Prefetcher(broken()) as items:
        assert next(items) == 1
        with pytest.raises(ValueError, match="at two"):
            next(items)


def test_prefetch_thread_is_bounded_and_ends_with_the_consumer():
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


def test_closing_a_full_prefetcher_twice_does_not_hang():
    items = Prefetcher(iter(range(1000)), depth=1)
    items.close()
    items.close()
    with pytest.raises(StopIteration):
        next(items)


def test_prefetching_leaves_the_random_state_of_torch_alone():
    before = torch.get_rng_state()
    with Prefetcher(iter(range(10))) as items:
        list(items)
    assert torch.equal(torch.get_rng_state(), before)
