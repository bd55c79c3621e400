"""Processes that meet in a store in which others have met before them."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch._C._distributed_c10d import HashStore, TCPStore

from tawpipe.errors import RunError
from tawpipe.runtime.meeting import PREFIX, agree_on_name

SOON = timedelta(seconds=60)


def start(store, world_size: int, late: dict[int, float] | None = None) -> list[str]:
    """One start of all ranks, each in a thread."""

    def one(rank: int) -> str:
        time.sleep((late or {}).get(rank, 0))
        return agree_on_name(store, rank, world_size, SOON)

    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(one, range(world_size)))


def tcp_store() -> TCPStore:
    return TCPStore("127.0.0.1", 0, None, True, SOON, wait_for_workers=False)


@pytest.mark.parametrize("make", [HashStore, tcp_store])
def test_every_start_agrees_on_a_new_name(make):
    store = make()
    names = [start(store, size) for size in (4, 4, 2, 1, 5)]
    assert all(len(set(found)) == 1 for found in names)
    assert len({found[0] for found in names}) == len(names)


@pytest.mark.parametrize("late", [{0: 0.3}, {1: 0.3}, {2: 0.3, 3: 0.1}])
def test_store_entries_of_an_earlier_start_are_ignored(late):
    """Ranks that come late find greetings, an offer, agreement and the word to go of the start before."""
    store = HashStore()
    first = start(store, 4)
    second = start(store, 4, late)
    assert len(set(second)) == 1 and second[0] != first[0]


def test_error_entries_of_an_earlier_start_are_deleted():
    store = HashStore()
    store.set("exception_dump", "rank 3")
    start(store, 3)
    assert not store.check(["exception_dump"])


def test_interrupted_start_leaves_no_valid_store_entries():
    """Two of three have come; then the processes are started again, and one of them is slow."""
    store = HashStore()
    for rank in range(2):
        with pytest.raises(RunError, match=f"rank {rank}: fewer than 3 processes connected within 0 s"):
            agree_on_name(store, rank, 3, timedelta(seconds=0.1))
    assert len(set(start(store, 3, {1: 0.2}))) == 1


def test_offer_of_another_world_size_is_not_accepted():
    store = HashStore()
    start(store, 2)
    said = []
    waiting = threading.Thread(target=lambda: said.append(agree_on_name(store, 3, 4, SOON)))
    waiting.start()
    time.sleep(0.1)
    assert not said and store.check([f"{PREFIX}/offer"])
    with ThreadPoolExecutor(3) as pool:
        others = list(pool.map(lambda rank: agree_on_name(store, rank, 4, SOON), range(3)))
    waiting.join()
    assert len({*others, *said}) == 1
