"""Lanes: each runs its actions in order, beside the other lanes. A worker thread on the CPU, a stream on CUDA.

Every submitted action has an event. An action starts when all events it was given have ended and its lane is free. If
an action fails, every action that waits for it fails with the same error, up to the caller that waits for the step's
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
    """End of one submitted action."""

    def wait(self) -> None:
        """Block the calling thread until the action has ended; raise the error of the action if it failed."""
        ...

    @property
    def done(self) -> bool:
        """True if ``wait`` would return, or raise, at once."""
        ...


@dataclass(frozen=True)
class Doing:
    """Action that a lane is at.

    Args:
        label: Label of the action, usually the action itself.
        seconds: Seconds since the action started, or since it started to wait.
        waits: True if the action still waits for other actions of this rank.
    """

    label: object
    seconds: float
    waits: bool


class Moment:
    """End of work that is being issued now, as a time of ``time.perf_counter``.

    On the CPU, ``note`` stores the time. On CUDA, ``note`` records an event in the stream, and ``seconds`` computes the
    time later: the host's clock if the caller has just waited for the event, else the time of ``before`` plus the time
    between both events.

    Args:
        device: Device that does the work.
        before: Previous moment on the same device.
    """

    def __init__(self, device: torch.device, before: Moment | None = None) -> None:
        on_cuda = device.type == "cuda"
        self.issued_s, self._seconds = time.perf_counter(), nan
        self._event = torch.cuda.Event(enable_timing=True) if on_cuda else None
        self._before = before if on_cuda else None

    def note(self) -> None:
        """Set this moment to now, or record its event in the current stream. Call it inside a lane."""
        if self._event is None:
            self._seconds = time.perf_counter()
        else:
            self._event.record()

    def seconds(self, *, waited: bool) -> float:
        """Return the time of this moment, as ``time.perf_counter`` would have shown it.

        Call it once the moment is past. The first call on CUDA fixes the value. Later calls return that value.

        Args:
            waited: True if the caller has waited for the moment until now.
        """
        if isnan(self._seconds):
            now, before, self._before = time.perf_counter(), self._before, None
            if waited or before is None or isnan(before._seconds):
                self._seconds = now
            else:
                assert self._event is not None and before._event is not None
                event_seconds = before._seconds + before._event.elapsed_time(self._event) / 1e3
                # limited to known bounds, as the clocks of host and device drift apart
                self._seconds = min(max(event_seconds, self.issued_s), now)
        return self._seconds


class LaneProtocol(Protocol):
    """Interface of a lane for the executor."""

    def begin_step(self) -> None:
        """Make every action submitted from now on wait for the work in the caller's own stream so far."""
        ...

    def submit(self, run: Callable[[], None], after: Iterable, label: object) -> Event: ...

    def doing(self) -> Doing | None:
        """Return the action under way, or None if nothing is left to do. Callable from any thread."""
        ...

    def busy_s(self) -> float:
        """Return the seconds that ended actions were under way since the lane was made.

        On CUDA it is 0 unless the lane measures times.
        """
        ...

    def close(self, limit_s: float | None = None) -> bool:
        """Wait for all submitted actions and end the lane; return True if it has ended.

        Args:
            limit_s: Largest waiting time in seconds; None for no limit.
        """
        ...


LOOK_FOR_FAILURES_S = 0.2
CLOSING_LOOK_S = 0.005


class Failure:
    """First error of any lane.

    Every thread that waits checks it from time to time: the lane it waits for may itself wait for a peer that will
    never answer because of this error.
    """

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self.told = False
        """True once a call of the pipeline has raised an error because of this failure."""

    def note(self, error: BaseException) -> None:
        """Keep ``error`` if it is the first."""
        if self.error is None:
            self.error = error

    def wait_for(self, event: Event) -> None:
        """Wait for an event on behalf of the pipeline's caller. If that raises, set ``told``."""
        try:
            event.wait()
        except Exception:
            self.told = self.error is not None
            raise


class CpuEvent:
    """End of one action of a worker thread.

    It is one bare lock, held until the action ends: a ``threading.Condition`` costs ten times as much to make.
    """

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
                self._held.release()  # other threads may wait for this event
            elif self._failure.error is not None:
                raise self._failure.error
        if self.error is not None:
            raise self.error

    def end(self, error: BaseException | None = None) -> None:
        """Mark the action as ended, with its error if it failed, and wake the threads that wait."""
        self.error = error
        self.done = True
        self._held.release()


class CpuLane:
    """Lane of a CPU: a worker thread with a queue.

    Args:
        name: Name of the lane and of its thread.
        failure: First error, shared by all lanes of a process.
        delay: Returns seconds to sleep before an action. For tests that look for missing waits.
    """

    def __init__(self, name: str, failure: Failure, *, delay: Callable[[], float] | None = None) -> None:
        self.name, self._failure, self._delay = name, failure, delay
        self._queue: queue.SimpleQueue = queue.SimpleQueue()
        self._at: tuple[object, float, bool] | None = None
        self._busy_s = 0.0
        # daemon, as a lane that waits for a lost peer must not keep the process from ending
        self._thread = threading.Thread(target=self._work, name=f"lane {name}", daemon=True)
        self._thread.start()

    def begin_step(self) -> None:
        """Do nothing: on the CPU, work of the caller is done when its call returns."""

    def submit(self, run: Callable[[], None], after: Iterable[CpuEvent], label: object) -> CpuEvent:
        """Queue ``run``, which the worker thread calls after the events ``after``; return the event of its end."""
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
        """Run the queued actions one after another until the queue yields None."""
        while (item := self._queue.get()) is not None:
            event = item[2]
            error = self._attempt(item[0], item[1], item[3])
            del item  # free the action and its tensors before its event ends: a waiting thread may rely on that
            self._at = None
            event.end(error)
            del event, error

    def _attempt(self, run: Callable[[], None], after: tuple[CpuEvent, ...], label: object) -> BaseException | None:
        """Wait for the events ``after``, run one action, and return the error it raised, or None."""
        try:
            self._at = (label, time.monotonic(), True)
            for other in after:
                other.wait()
            self._at = (label, time.monotonic(), False)
            if self._failure.error is not None:
                # After a failure no action runs: a skipped one would put the operations of a process group out of
                # order.
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
    """End of one action, recorded in a CUDA stream."""

    __slots__ = ("begin", "event", "issued")

    def __init__(self, *, timed: bool = False) -> None:
        self.event = torch.cuda.Event(enable_timing=timed)
        self.begin = torch.cuda.Event(enable_timing=timed)
        self.issued = False  # ``query`` of an event that was never recorded returns True

    def wait(self) -> None:
        self.event.synchronize()

    @property
    def done(self) -> bool:
        return self.issued and self.event.query()


class CudaLane:
    """Lane of a GPU: a CUDA stream. ``submit`` calls the function at once, on the calling thread, inside the stream.

    Args:
        device: GPU of the stream.
        delay: Returns seconds for which the stream idles before an action. For tests.
        high_priority: True for lanes of transfers, whose few blocks must not queue behind a large matrix product.
        timed: Measure how long actions take.
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
        """Protects ``_submitted``, which the watchdog reads while the issuing thread adds to it."""

    def begin_step(self) -> None:
        self.busy_s()
        self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))

    def submit(self, run: Callable[[], None], after: Iterable[CudaEvent], label: object) -> CudaEvent:
        """Make the stream wait for the events ``after``, call ``run`` now, and return the event of the kernels' end."""
        event = CudaEvent(timed=self._timed)
        with torch.cuda.stream(self.stream), torch.profiler.record_function(str(label)):
            for other in after:
                self.stream.wait_event(other.event)
            if self._delay is not None:
                torch.cuda._sleep(int(self._delay() * 1e9))  # in cycles of about one nanosecond
            event.begin.record(self.stream)
            with self._lock:
                # before ``run``, so that ``doing`` shows an action that hangs in ``run``
                self._submitted.append((label, time.monotonic(), event))
            run()
            event.event.record(self.stream)
            event.issued = True
        return event

    def busy_s(self) -> float:
        """Add up the times of actions that have ended, and return the sum in seconds; 0 unless ``timed``."""
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
        """Wait, at most ``limit_s`` seconds, until the stream is idle; return True if it is."""
        end = None if limit_s is None else time.monotonic() + limit_s
        while not self.stream.query():  # polled, because ``synchronize`` has no time limit
            if end is not None and time.monotonic() > end:
                return False
            time.sleep(CLOSING_LOOK_S)
        return True


def make_lane(
    name: str, device: torch.device, failure: Failure, *, delay: Callable[[], float] | None = None
) -> LaneProtocol:
    """Return a ``CudaLane`` for a GPU, a ``CpuLane`` for a CPU.

    Only the lane named ``COMPUTE`` measures its times on CUDA; all others are streams of high priority.
    """
    if device.type == "cuda":
        computes = name == "COMPUTE"
        return CudaLane(device, delay=delay, high_priority=not computes, timed=computes)
    return CpuLane(name, failure, delay=delay)
