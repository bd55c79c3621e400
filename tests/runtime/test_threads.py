"""Threads that call CUDA: each sets its device first, or its first call would make a context on device 0.

The stand-in (``fake_cuda``) notes every thread that sets its device, and every call of one that has not.
"""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tawpipe
from fake_cuda import DEVICE, FakeEvent, fake_cuda
from ledger import Ledger
from pipelines import make_pipeline
from processes import wait_for
from streams import rows_of, tiny
from tawpipe.data.prefetch import Prefetcher
from tawpipe.runtime import leaving
from tawpipe.runtime.homes import host_memory
from tawpipe.runtime.threads import use_device
from tawpipe.runtime.watch import watchdog
from tawpipe.runtime.watch.watchdog import Watchdog
from tawpipe.runtime.world import World
from tawpipe.topology import Topology

WORLD = World(Topology.grid(1, 1), 0, DEVICE, None)
MADE = re.compile(r"\b(Thread|Timer|\w*PoolExecutor|start_new_thread|to_thread|run_in_executor|Prefetcher)\(")
NO_CUDA = {
    "runtime/lanes.py": "lanes of a CPU",
    "serving/service/engine.py": "HTTP, and signals",
    "serving/service/api.py": "tokenizers",
    "train/saying/tracking.py": "what other programs are told",
    "model/facts.py": "files",
    "checkpoint/save.py": "files, and messages between processes, of what has been copied to the host",
}
"""Files whose threads call nothing of CUDA, and what they do instead."""
SETS_DEVICE = {
    "runtime/watch/watchdog.py",
    "runtime/homes/storage.py",
    "runtime/compute/rows.py",
    "runtime/leaving.py",
    "data/prefetch.py",
    "train/loop.py",
}
"""Files whose threads do, each with a test below, or among the cases of ``test_streams``."""


@pytest.fixture
def ledger() -> Iterator[Ledger]:
    with fake_cuda() as ledger:
        yield ledger


def ask() -> None:
    FakeEvent().query()


def in_thread(run: Any) -> None:
    thread = threading.Thread(target=run, name="of a user")
    thread.start()
    thread.join()


def test_thread_that_sets_no_device_is_detected(ledger: Ledger) -> None:
    in_thread(ask)
    assert ledger.faults == ["an event is asked in thread of a user, which has not set its device"]


def test_every_module_that_makes_threads_is_listed() -> None:
    """A new one has to be named here, and tested if it may call CUDA."""
    root = Path(tawpipe.__file__).parent
    makers = {
        str(path.relative_to(root))
        for path in root.rglob("*.py")
        if any(MADE.search(line) and not line.startswith("class ") for line in path.read_text().splitlines())
    }
    assert makers | {"train/saying/tracking.py"} == SETS_DEVICE | NO_CUDA.keys()
    for name in SETS_DEVICE - {"data/prefetch.py"}:  # whose caller says how its thread begins
        assert "use_device" in (root / name).read_text(), name


def test_threads_of_a_pipeline_set_their_device_first(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "LOOK_S", 0.001)
    pipeline = make_pipeline(tiny(1), world=WORLD, dtype=torch.float32, check="never")
    pipeline._steps.judge = lambda result: result.wait()  # type: ignore[method-assign]
    pipeline.set_timeout(timedelta(hours=1))
    pipeline.step(rows_of(1, 4))
    dog = pipeline.executor.watchdog
    assert wait_for(lambda: not dog._steps), "it has asked for the end of the step"
    pipeline.close()
    assert {"reading weights_0", "watchdog"} <= set(ledger.on_device_first)
    assert not ledger.faults, ledger.faults


def test_last_words_of_a_hanging_rank_set_their_device_first(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL's record, of which the events are asked whether they are over."""
    monkeypatch.setattr(watchdog, "LOOK_S", 0.001)
    monkeypatch.setattr(watchdog, "LAST_WORDS_S", 10.0)
    said = threading.Event()
    dog = Watchdog(dict, "rank 3", limit_s=0.002, end=lambda: None, device=DEVICE)
    dog.last_words = lambda step: str(ask()) + str(said.set())
    never: Any = SimpleNamespace(done=False)
    dog.watch("step 7", never)
    assert said.wait(60)
    dog.close()
    assert not ledger.faults, ledger.faults


class _Executor:
    """An executor that is idle when it is asked for the third time."""

    failure = untold = None

    def __init__(self) -> None:
        self.asked, self.closed = 0, threading.Event()
        self.watchdog = SimpleNamespace(close=self.closed.set)

    @property
    def idle(self) -> bool:
        ask()
        self.asked += 1
        return self.asked > 2

    def end_lanes(self, limit_s: float) -> list[bool]:
        ask()
        return [True]


def test_pipeline_released_in_another_thread_sets_its_device_first(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In which it is forgotten, or in a thread of its own; a user's thread is on its own device again afterwards."""
    monkeypatch.setattr(leaving, "_running", {})
    monkeypatch.setattr(leaving, "LOOK_S", 0.001)
    executor, world = _Executor(), WORLD
    held: list[Any] = [threading.Event()]  # as much of a pipeline as can be let go of
    leaving.leave_at_exit(held[0], executor, SimpleNamespace(end=ask), (), world)  # type: ignore[arg-type]
    in_thread(held.clear)
    assert executor.closed.wait(60)
    assert not ledger.faults, ledger.faults
    in_thread(ask)
    assert len(ledger.faults) == 1


def test_process_end_in_another_thread_sets_its_device_first(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose pipeline was made in another thread than the one that ends it, and whose groups a third one leaves."""
    monkeypatch.setattr(leaving, "_running", {})
    monkeypatch.setattr(leaving, "joined_by_us", lambda: True)
    monkeypatch.delattr(sys, "last_type", raising=False)  # of a test that has failed
    codes, left = list[int](), threading.Event()
    monkeypatch.setattr(leaving.os, "_exit", codes.append)
    monkeypatch.setattr(torch.distributed, "destroy_process_group", lambda: (ask(), left.set()))
    pipeline, executor = threading.Event(), _Executor()
    leaving.leave_at_exit(pipeline, executor, SimpleNamespace(end=ask), (), WORLD)  # type: ignore[arg-type]
    in_thread(leaving._at_exit)
    assert left.is_set() and not codes and not ledger.faults, ledger.faults


def test_prefetch_thread_sets_its_device_first(ledger: Ledger) -> None:
    with Prefetcher((ask() for _ in range(3)), begin=partial(use_device, DEVICE)) as items:
        assert list(items) == [None] * 3
    assert not ledger.faults, ledger.faults


def test_pinned_memory_freed_in_another_thread_sets_its_device_first(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = SimpleNamespace(cudaHostRegister=lambda *_: 0, cudaHostUnregister=lambda _: ask())
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    held = [host_memory._Pages(-1, 4096)]
    held[0].register(1)
    in_thread(held.clear)
    assert not ledger.faults, ledger.faults
