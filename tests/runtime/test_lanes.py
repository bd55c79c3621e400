"""Lanes on CUDA, with streams and events that are made up: what the watchdog's thread and results see of them."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
from types import SimpleNamespace

import pytest
import torch

from tawpipe.runtime import lanes
from tawpipe.runtime.lanes import CudaLane, Moment


class Stream:
    def wait_stream(self, other: Stream) -> None: ...

    def wait_event(self, event: Event) -> None: ...

    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...


class Event:
    def __init__(self, **_: bool) -> None:
        self.recorded = False

    def record(self, stream: Stream) -> None:
        self.recorded = True

    def query(self) -> bool:
        return self.recorded


@pytest.fixture
def cuda_lane(monkeypatch: pytest.MonkeyPatch) -> CudaLane:
    monkeypatch.setattr(torch.cuda, "Stream", lambda *_, **__: Stream())
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    return CudaLane(torch.device("cuda", 0))


def test_watchdog_reads_a_lane_while_actions_are_issued(cuda_lane, monkeypatch):
    """The watchdog's thread looks at what the main thread adds to, and every allocation may switch between them."""
    failures: list[BaseException] = []
    over = threading.Event()

    def look() -> None:
        try:
            while not over.is_set():
                cuda_lane.doing()
        except BaseException as error:
            failures.append(error)

    before = gc.get_threshold()
    switch = lambda *_: time.sleep(0) if threading.current_thread() is looker else None  # noqa: E731
    looker = threading.Thread(target=look)
    gc.callbacks.append(switch)
    gc.set_threshold(1, 1, 1)
    try:
        looker.start()
        for number in range(3000):
            cuda_lane.submit(lambda: None, (), f"action {number}")
            if number % 50 == 0:
                cuda_lane.busy_s()
    finally:
        over.set()
        gc.set_threshold(*before)
        gc.callbacks.remove(switch)
        looker.join()
    assert not failures
    cuda_lane.busy_s()
    assert cuda_lane.doing() is None


class TimedEvent:
    """An event in a stream that comes to it at ``device_ms``."""

    device_ms = 0.0

    def __init__(self, **_: bool) -> None: ...

    def record(self) -> None:
        self.ms = self.device_ms

    def elapsed_time(self, other: TimedEvent) -> float:
        return other.ms - self.ms


def test_stream_moment_is_dated_by_device_time_if_the_host_looks_late(monkeypatch):
    """Where the host did not wait, the end is as long after the one before as the device says; but not before it was
    issued, and not still to come.
    """
    host = SimpleNamespace(now=100.0)
    monkeypatch.setattr(lanes, "time", SimpleNamespace(perf_counter=lambda: host.now))
    monkeypatch.setattr(torch.cuda, "Event", TimedEvent)
    moments: list[Moment] = []

    def issue(host_s: float, device_s: float) -> None:
        host.now, TimedEvent.device_ms = host_s, 1e3 * device_s
        moments.append(Moment(torch.device("cuda", 0), moments[-1] if moments else None))
        moments[-1].note()

    def look(host_s: float, place: int, *, waited: bool = False) -> float:
        host.now = host_s
        return moments[place].seconds(waited=waited)

    issue(100.0, 7.0)
    assert look(101.0, 0, waited=True) == 101.0
    for number in range(1, 5):  # as fast as they are issued, and read one later
        issue(101.0 + number, 7.75 + number)
        if number > 1:
            assert look(101.0 + number, number - 1) == 100.75 + number
    assert look(106.0, 4) == 105.75
    issue(106.0, 8.0)  # a clock that is slow
    assert look(107.0, 5) == 106.0
    issue(108.0, 20.0)  # and fast
    assert look(108.5, 6) == 108.5
    assert look(200.0, 1) == 102.75, "what has been read stays"
