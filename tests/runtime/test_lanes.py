"""Lanes on CUDA, with streams and events that are made up: what the watchdog's thread sees of them."""

from __future__ import annotations

import contextlib
import gc
import threading
import time

import pytest
import torch

from tawpipe.runtime.lanes import CudaLane


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


def test_a_lane_is_looked_at_while_actions_are_issued(cuda_lane, monkeypatch):
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
