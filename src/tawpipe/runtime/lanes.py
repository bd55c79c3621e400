"""Lanes: what runs actions in order while other lanes run theirs. A worker thread on the CPU, a stream on CUDA.

Every submitted action gets an event; an action starts when the events that it was given have passed
and the lane is free. A failed action fails everything that waits for it, and so reaches whoever waits for the step's
result.
"""

from __future__ import annotations

import queue
import threading
import time
from _thread import allocate_lock
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import isnan, nan
from typing import Protocol

import torch


class Event(Protocol):
    """The end of one submitted action."""

    def wait(self) -> None:
        """Block the calling thread until the action has ended; raises what the action raised."""
        ...

    @property
    def done(self) -> bool:
        """True if ``wait`` would return, or raise, at once."""
        ...


@dataclass(frozen=True)
class Doing:
    """The action that a lane is at.

    Args:
        label: of the action, mostly the action itself.
        seconds: since it was begun, or since it is waited with.
        waits: for other actions of this rank, before it begins.
    """

    label: object
    seconds: float
    waits: bool


class Moment:
    """The end of something that is issued now, as a time of ``time.perf_counter``, whenever it is asked for.

    A stream comes to it while the host is elsewhere. Where the host has waited for it, its own clock says when it was;
    else the device's clock, how long after the one before.

    Args:
        before: the last one on the same device, which is past whenever this one is.
    """

    def __init__(self, device: torch.device, before: Moment | None = None) -> None:
        on_cuda = device.type == "cuda"
        self.issued_s, self._seconds = time.perf_counter(), nan
        self._event = torch.cuda.Event(enable_timing=True) if on_cuda else None
        self._before = before if on_cuda else None

    def note(self) -> None:
        """It is now; to be called by what the lane runs."""
        if self._event is None:
            self._seconds = time.perf_counter()
        else:
            self._event.record()

    def seconds(self, *, waited: bool) -> float:
        """When it was, once it is past.

        Args:
            waited: the caller has waited for it until now.
        """
        if isnan(self._seconds):
            now, before, self._before = time.perf_counter(), self._before, None
            if waited or before is None or isnan(before._seconds):
                self._seconds = now
            else:
                assert self._event is not None and before._event is not None
                said = before._seconds + before._event.elapsed_time(self._event) / 1e3
                self._seconds = min(max(said, self.issued_s), now)  # the two clocks drift apart
        return self._seconds


class LaneProtocol(Protocol):
    """A lane, as far as the executor knows it."""

    def begin_step(self) -> None:
        """Let everything that is submitted from now on wait for what the caller has put into its own stream so far."""
        ...

    def submit(self, run: Callable[[], None], after: Iterable, label: object) -> Event: ...

    def doing(self) -> Doing | None:
        """The action under way; None if nothing is left to do. From any thread."""
        ...

    def busy_s(self) -> float:
        """Seconds in which actions that have ended were under way, since the lane was made. On CUDA only where it was
        asked for.
        """
        ...

    def close(self, limit_s: float | None = None) -> bool:
        """Wait until what has been submitted is over, for so long at most; True if it is. Then the lane has ended."""
        ...


LOOK_FOR_FAILURES_S = 0.2
CLOSING_LOOK_S = 0.005


class Failure:
    """The first error of any lane. Whoever waits looks here now and then: the lane that it waits for may itself be
    waiting for a peer which will never answer, because of that error.
    """

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self.told = False
        """True once the caller of the pipeline has been given an error because of it."""

    def note(self, error: BaseException) -> None:
        if self.error is None:
            self.error = error

    def wait_for(self, event: Event) -> None:
        """Wait for an event on behalf of the pipeline's caller, who is told of an error by that."""
        try:
            event.wait()
        except Exception:
            self.told = self.error is not None
            raise


class CpuEvent:
    """Set by a worker thread. One bare lock, held until the end: a condition costs ten times as much to make."""

    __slots__ = ("_failure", "_held", "done", "error")

    def __init__(self, failure: Failure) -> None:
        self._held = allocate_lock()
        self._held.acquire()
        self._failure = failure
        self.done = False
        self.error: BaseException | None = None

    def wait(self) -> None:
        while not self.done:
            if self._held.acquire(timeout=LOOK_FOR_FAILURES_S):
                self._held.release()  # for whoever waits besides
            elif self._failure.error is not None:
                raise self._failure.error
        if self.error is not None:
            raise self.error

    def end(self, error: BaseException | None = None) -> None:
        self.error = error
        self.done = True
        self._held.release()


class CpuLane:
    """A worker thread with a queue.

    Args:
        name: of the lane; the thread is called so.
        failure: shared by all lanes of a process.
        delay: returns seconds to sleep before an action; for tests that look for missing waits.
    """

    def __init__(self, name: str, failure: Failure, *, delay: Callable[[], float] | None = None) -> None:
        self.name, self._failure, self._delay = name, failure, delay
        self._queue: queue.SimpleQueue = queue.SimpleQueue()
        self._at: tuple[object, float, bool] | None = None
        self._busy_s = 0.0
        # A daemon: a lane that waits for a peer which is gone must not keep the process from ending.
        self._thread = threading.Thread(target=self._work, name=f"lane {name}", daemon=True)
        self._thread.start()

    def begin_step(self) -> None:
        """Nothing to do: the caller's work is done when its call returns."""

    def submit(self, run: Callable[[], None], after: Iterable[CpuEvent], label: object) -> CpuEvent:
        event = CpuEvent(self._failure)
        self._queue.put((run, tuple(after), event, label))
        return event

    def busy_s(self) -> float:
        return self._busy_s

    def doing(self) -> Doing | None:
        at = self._at
        return None if at is None else Doing(at[0], time.monotonic() - at[1], at[2])

    def close(self, limit_s: float | None = None) -> bool:
        self._queue.put(None)
        self._thread.join(limit_s)
        return not self._thread.is_alive()

    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            event = item[2]
            error = self._attempt(item[0], item[1], item[3])
            del item  # whoever waits for the end may count on it that the lane holds nothing of the action any more
            self._at = None
            event.end(error)
            del event, error

    def _attempt(self, run: Callable[[], None], after: tuple[CpuEvent, ...], label: object) -> BaseException | None:
        """Run one action when what it waits for has ended; what it raised, if anything."""
        try:
            self._at = (label, time.monotonic(), True)
            for other in after:
                other.wait()
            self._at = (label, time.monotonic(), False)
            if self._failure.error is not None:
                # An action that is left out would put a group's operations out of order: nothing runs any more.
                raise self._failure.error
            if self._delay is not None:
                time.sleep(self._delay())
            begin = time.perf_counter()
            run()
            self._busy_s += time.perf_counter() - begin
        except BaseException as error:
            if self._failure.error is None:
                error.add_note(f"in action: {label}")
            self._failure.note(error)
            return error
        return None


class CudaEvent:
    """Recorded in a stream."""

    __slots__ = ("begin", "event", "issued")

    def __init__(self, *, timed: bool = False) -> None:
        self.event = torch.cuda.Event(enable_timing=timed)
        self.begin = torch.cuda.Event(enable_timing=timed)
        self.issued = False  # an event that was never recorded says that it has ended

    def wait(self) -> None:
        self.event.synchronize()

    @property
    def done(self) -> bool:
        return self.issued and self.event.query()


class CudaLane:
    """A stream: ``submit`` runs the function at once on the calling thread, which puts its kernels into the stream.

    Args:
        delay: returns seconds for which the stream idles before an action.
        high_priority: for lanes of transfers, whose few blocks should not queue behind a large matrix product.
        timed: take down how long actions take.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        delay: Callable[[], float] | None = None,
        high_priority: bool = False,
        timed: bool = False,
    ) -> None:
        self._timed, self._busy_s = timed, 0.0
        self.stream = torch.cuda.Stream(device, priority=-1 if high_priority else 0)
        self._delay = delay
        self._submitted: deque[tuple[object, float, CudaEvent]] = deque()
        self._lock = threading.Lock()
        """Of ``_submitted``, at which the watchdog looks while the issuing thread adds to it."""

    def begin_step(self) -> None:
        self.busy_s()
        self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))

    def submit(self, run: Callable[[], None], after: Iterable[CudaEvent], label: object) -> CudaEvent:
        event = CudaEvent(timed=self._timed)
        with torch.cuda.stream(self.stream), torch.profiler.record_function(str(label)):
            for other in after:
                self.stream.wait_event(other.event)
            if self._delay is not None:
                torch.cuda._sleep(int(self._delay() * 1e9))  # cycles; about a nanosecond each
            event.begin.record(self.stream)
            with self._lock:
                self._submitted.append((label, time.monotonic(), event))  # before ``run``, in which a thread may hang
            run()
            event.event.record(self.stream)
            event.issued = True
        return event

    def busy_s(self) -> float:
        while self._submitted and self._submitted[0][2].done:
            with self._lock:
                event = self._submitted.popleft()[2]
            if self._timed:
                self._busy_s += event.begin.elapsed_time(event.event) / 1e3
        return self._busy_s

    def doing(self) -> Doing | None:
        with self._lock:
            submitted = tuple(self._submitted)
        for label, begin, event in submitted:
            if not event.done:
                return Doing(label, time.monotonic() - begin, not event.begin.query())
        return None

    def close(self, limit_s: float | None = None) -> bool:
        end = None if limit_s is None else time.monotonic() + limit_s
        while not self.stream.query():  # a stream that is synchronised cannot be given up
            if end is not None and time.monotonic() > end:
                return False
            time.sleep(CLOSING_LOOK_S)
        return True


def make_lane(
    name: str, device: torch.device, failure: Failure, *, delay: Callable[[], float] | None = None
) -> LaneProtocol:
    """The kind of lane that the device needs."""
    if device.type == "cuda":
        computes = name == "COMPUTE"
        return CudaLane(device, delay=delay, high_priority=not computes, timed=computes)
    return CpuLane(name, failure, delay=delay)
