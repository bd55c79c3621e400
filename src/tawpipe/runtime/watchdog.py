"""The watchdog: when a step takes too long, every rank says what it waits for, and its process ends.

A rank that hangs makes all others wait, each for its neighbour; which of them is the cause, only the place in the
schedule tells. So every rank prints its own: a rank whose lane COMPUTE alone is busy waits for nobody and is the one to
look at, and so is one that prints nothing, because it is in no step. Lines begin with ``environment.STUCK``, by which a
launcher finds them.

Torch's flight recorder says the same of NCCL's communicators: group, sequence number, sizes, and whether an operation
was begun or only issued. Torch would write its record when its own time limit is over, which the watchdog does not wait
for. ``torchfrtrace FOLDER --prefix rank_`` compares those of all ranks.

The watchdog is Python, which stands still while another thread keeps the interpreter's lock in a call that does not
return, and it asks CUDA, which may not answer. So it keeps putting off a timer of C, which ends the process if that
stops (``faulthandler``, of which a process has one).
"""

from __future__ import annotations

import faulthandler
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TextIO

import torch

from tawpipe.environment import STUCK
from tawpipe.runtime.lanes import Doing, Event
from tawpipe.runtime.threads import use_device
from tawpipe.schedule.actions import Lane

LOOK_S = 0.25
LAST_WORDS_S = 3.0
"""Seconds after the report, so that every rank has printed its own before connections break."""
DEAF_S = 30.0
"""Seconds beyond a step's limit for which the watchdog may fail to run before the timer of C ends the process."""
STDERR = 2
"""Where the timer of C writes: the descriptor, as ``sys.stderr`` has none in a notebook."""
EXIT_CODE = 1
RECORDED = 4000
"""Operations that a rank remembers: some steps of a few hundred each."""
RECORD_PREFIX = "rank_"


class StepView(Protocol):
    """A view of a step that tells when it is over."""

    @property
    def done(self) -> bool: ...


class LastEvents:
    """The last events of a step in all lanes.

    Args:
        last: the last event of every lane, while the step is being issued.
    """

    def __init__(self, last: Mapping[Lane, Event]) -> None:
        self._last = last
        self.issued = False

    @property
    def done(self) -> bool:
        return self.issued and all(event.done for event in self._last.values())


@dataclass
class _Watched:
    step: str
    begin: float
    ended: StepView


class Watchdog:
    """Watches the steps of one rank in a thread.

    Args:
        doing: gives the action that every lane is at.
        where: this rank, in words.
        limit_s: of a step, from the end of the one before it; 0 for none.
        end: is called after the report; ends the process by default.
        device: of this rank; the watchdog's threads ask CUDA about its events.
    """

    def __init__(
        self,
        doing: Callable[[], Mapping[Lane, Doing | None]],
        where: str,
        *,
        limit_s: float = 0.0,
        stream: TextIO | None = None,
        end: Callable[[], None] | None = None,
        device: torch.device | None = None,
    ) -> None:
        self._device = device
        self._doing, self._where, self._stream = doing, where, stream
        self._own_end = end
        self.limit_s = limit_s
        self.last_words: Callable[[str], str] = lambda step: ""
        """Called with the step after the report, for at most ``LAST_WORDS_S``; what it returns is said, too."""
        self._watched: list[_Watched] = []
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def watch(self, step: str, ended: StepView) -> None:
        """A step begins, which is over when ``ended`` is."""
        if not self.limit_s:
            return
        with self._lock:
            self._watched.append(_Watched(step, time.monotonic(), ended))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
            self._thread.start()

    def close(self) -> None:
        self._closed.set()

    def _run(self) -> None:
        use_device(self._device)
        put_off = -math.inf
        while not self._closed.wait(LOOK_S):
            now = time.monotonic()
            if self._own_end is None and now - put_off > min(self.limit_s, DEAF_S) / 4:
                put_off = now
                faulthandler.dump_traceback_later(self.limit_s + DEAF_S, exit=True, file=STDERR)
            with self._lock:
                while self._watched and self._watched[0].ended.done:
                    self._watched.pop(0)
                    if self._watched:  # it could not begin before
                        self._watched[0].begin = now
                late = self._watched[0] if self._watched else None
            if late is not None and self.limit_s and now - late.begin > self.limit_s:
                for line in self.report(late.step, now - late.begin):
                    self._say(line)
                if self._own_end is None:  # by a thread of C, should the last words hang and keep Python's lock
                    faulthandler.dump_traceback_later(LAST_WORDS_S + 2, exit=True, file=STDERR)
                threading.Thread(target=self._say_last, args=(late.step,), name="last words", daemon=True).start()
                if not self._closed.wait(LAST_WORDS_S):
                    self._end()
                break
        if self._own_end is None:
            faulthandler.cancel_dump_traceback_later()

    def _end(self) -> None:
        if self._own_end is not None:
            self._own_end()
        else:
            os._exit(EXIT_CODE)

    def _say_last(self, step: str) -> None:
        use_device(self._device)
        if words := self.last_words(step):
            self._say(f"{self._where}: {words}")

    def _say(self, line: str) -> None:
        print(STUCK + line, file=self._stream or sys.stderr, flush=True)

    def report(self, step: str, seconds: float) -> Iterator[str]:
        """Lines that say where this rank is."""
        limits = "--timeouts.step-s, for the first step --timeouts.first-step-s, or a multiple of what steps take"
        yield f"{self._where}: {step} has taken {seconds:.0f} s, the limit is {self.limit_s:.0f} s ({limits})"
        doing = {lane: work for lane, work in self._doing().items() if work is not None}
        for lane, work in doing.items():
            state = "waits to begin" if work.waits else "is in"
            yield f"{self._where}: {lane} {state} {work.label}, {work.seconds:.0f} s"
        compute = doing.get(Lane.COMPUTE)
        if not doing:
            yield f"{self._where}: nothing is under way here; this rank waits for nobody"
        elif (
            compute is not None
            and not compute.waits
            and not any(not work.waits for lane, work in doing.items() if lane is not Lane.COMPUTE)
        ):
            yield f"{self._where}: waits for nobody: it computes"


def keep_record() -> None:
    """Let NCCL's operations be remembered from now on. Before the first group is made; what a user has set stays."""
    if os.environ.get("TORCH_NCCL_TRACE_BUFFER_SIZE") is None:  # the name before torch 2.9, which still counts
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", str(RECORDED))


def write_record(folder: Path, rank: int) -> str:
    """Write this rank's flight record; how to read it, or why there is none, or nothing where no NCCL is.

    Stacks of Python are left out, as the watchdog cannot know whether they could be walked.
    """
    dump = getattr(sys.modules.get("torch._C._distributed_c10d"), "_dump_nccl_trace", None)
    if dump is None:
        return ""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        content = dump(includeCollectives=True, includeStackTraces=False, onlyActive=False)
        (folder / f"{RECORD_PREFIX}{rank}").write_bytes(content)
    except (OSError, RuntimeError) as error:
        return f"the flight record could not be written: {error}"
    return f"the flight record is in {folder}; with those of all ranks: torchfrtrace {folder} --prefix {RECORD_PREFIX}"
