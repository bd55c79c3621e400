"""The watchdog: in a step that takes too long every rank says what it waits for; where asked for, its process ends.

A rank that hangs makes all others wait, each for its neighbour; which of them is the cause, only the place in the
schedule tells. So every rank prints its own, and what follows from those of all (stalls.py). Lines begin with
``environment.STUCK``, by which a launcher finds them. No process is ended from within a debugger or a notebook, nor
while a rank that answers is in one.

Torch's flight recorder says the same of NCCL's communicators: group, sequence number, sizes, and whether an operation
was begun or only issued. Torch would write its record when its own time limit is over, which the watchdog does not wait
for. ``torchfrtrace FOLDER --prefix rank_`` compares those of all ranks.

The watchdog is Python, which stands still while another thread keeps the interpreter's lock in a call that does not
return, and it asks CUDA, which may not answer. So where it may end the process, it keeps putting off a timer of C,
which does so if that stops (``faulthandler``, of which a process has one).

The store may not answer either: the process that has it may have stopped, and a call waits as long as it does. So no
thread asks it on which a report or an end depends.
"""

from __future__ import annotations

import faulthandler
import math
import os
import sys
import textwrap
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from types import FrameType
from typing import Protocol, TextIO

import torch

from tawpipe.environment import ENDS, EVERYONE, STUCK
from tawpipe.runtime.lanes import Doing, Event
from tawpipe.runtime.threads import use_device
from tawpipe.runtime.watch.stalls import BEGINNING, Others, Standing, conclusion
from tawpipe.schedule.actions import Lane

LOOK_S = 0.25
"""Seconds between two looks at the steps. Whether others ask is asked a fourth as often, so within ``SETTLE_S``."""
LAST_WORDS_S = 5.0
"""Seconds after the report, so that every rank has printed its own, and its verdict, before connections break."""
DEAF_S = 30.0
"""Seconds beyond a step's limit for which the watchdog may fail to run before the timer of C ends the process."""
MOST_LETTERS = 160
"""Most letters of an action in a report."""
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


class Watchdog:
    """Watches the steps of one rank in a thread.

    Args:
        doing: gives the action that every lane is at.
        where: this rank, in words.
        limit_s: of a step, from the end of the one before it; 0 for none.
        ends: whether the process ends after the report. If not, there is another report at twice the time, and so on.
        messages: names of an action's messages, each with the ranks at its other ends.
        failure: gives the first error of any action.
        end: is called instead of ending the process.
        device: of this rank; the watchdog's threads ask CUDA about its events.
    """

    def __init__(
        self,
        doing: Callable[[], Mapping[Lane, Doing | None]],
        where: str,
        *,
        limit_s: float = 0.0,
        ends: bool = True,
        messages: Callable[[object], dict[str, list[int]]] = lambda label: {},
        failure: Callable[[], BaseException | None] = lambda: None,
        stream: TextIO | None = None,
        end: Callable[[], None] | None = None,
        device: torch.device | None = None,
    ) -> None:
        self._device = device
        self._doing, self._where, self._stream = doing, where, stream
        self._messages, self._failure, self._own_end = messages, failure, end
        self.limit_s, self.ends = limit_s, ends
        self._others: Others | None = None
        """The other ranks, which are asked for their standings, as long as the store is there."""
        self.last_words: Callable[[str], str] = lambda step: ""
        """Called with the step after the report, for at most ``LAST_WORDS_S``; what it returns is said, too."""
        self.leave_words: Callable[[str], object] = lambda verdict: None
        """Called with the verdict on all ranks before the process ends."""
        self._steps: list[tuple[str, StepView]] = []
        self._since, self._reports = time.monotonic(), 0
        """Time at which the step before the present one ended, and reports since then."""
        self._armed = self._asked = False
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._begin = cache(threading.Thread(target=self._run, name="watchdog", daemon=True).start)
        self._listener = threading.Thread(target=self._listen, name="questions", daemon=True)

    def watch(self, step: str, ended: StepView) -> None:
        """A step, or ``BEGINNING``, begins, which is over when ``ended`` is."""
        if not self.limit_s:
            return
        with self._lock:
            if not self._steps:
                self._since, self._reports = time.monotonic(), 0
            self._steps.append((step, ended))
        self._begin()

    def hear(self, others: Others) -> None:
        """Answer from now on when one of ``others`` asks, and ask them when a step is late."""
        self._others = others
        self._listener.start()
        self._begin()

    def close(self) -> None:
        self._closed.set()
        if self._listener.is_alive():  # an interpreter must not go down under a thread that is inside the store
            self._listener.join(4 * LOOK_S)

    def _listen(self) -> None:
        with suppress(Exception):  # the store has gone with its process
            while self._others is not None and not self._closed.wait(4 * LOOK_S):
                self._asked = self._others.ask
        self._others = None

    def _run(self) -> None:
        use_device(self._device)
        put_off = -math.inf
        while not self._closed.wait(LOOK_S):
            now = time.monotonic()
            if now - put_off > min(self.limit_s, DEAF_S) / 4:
                put_off = now
                self._arm(self.limit_s + DEAF_S)
            with self._lock:
                while self._steps and self._steps[0][1].done:
                    self._steps.pop(0)
                    self._since, self._reports = now, 0
                step = self._steps[0][0] if self._steps else ""
            seconds, limit = now - self._since, self.limit_s * 2**self._reports
            asked, self._asked = self._asked, False
            late = bool(step) and seconds + LAST_WORDS_S * asked > limit  # so that ranks report, and end, together
            if late or asked:
                self._reports += late
                self._tell(step, seconds, late=late)
        self._arm(0.0)

    def _arm(self, seconds: float) -> None:
        """Let the timer of C end the process after so many seconds; never for 0, and where nothing is to end it."""
        if self._armed:
            faulthandler.cancel_dump_traceback_later()
        self._armed = bool(seconds) and self.ends and self._own_end is None and not held_by()
        if self._armed:
            faulthandler.dump_traceback_later(seconds, exit=True, file=STDERR)

    def _tell(self, step: str, seconds: float, *, late: bool) -> None:
        """Report, and end the process where it is to end."""
        standing, held = (look := partial(self.standing, step, late=late, before=self._at()))(), threading.Event()
        ends = late and self.ends and not standing.held
        options = "--timeouts.step-s, for the first step --timeouts.first-step-s" if self.ends else "timeout"
        limit = f", the limit is {self.limit_s:.0f} s ({options}, or ten times a step)" if late else ""
        self._say(f"{self._where}: {step or 'no step'}, {seconds:.0f} s{limit}{ENDS * ends}; {standing.text}")
        if ends:  # by a thread of C, should the last words hang and keep Python's lock
            self._arm(LAST_WORDS_S + 2)
        threading.Thread(target=self._conclude, args=(step, look, held, late), name="last report", daemon=True).start()
        if not self._closed.wait(LAST_WORDS_S) and ends and not held.is_set():
            (self._own_end or partial(os._exit, EXIT_CODE))()
            self.close()
        self._arm(self.limit_s + DEAF_S)

    def _conclude(self, step: str, look: Callable[[], Standing], held: threading.Event, late: bool) -> None:
        """Say what follows from the standings of all ranks, then the last words; note whether a debugger holds one."""
        use_device(self._device)
        try:
            standings = others.gather(look, ask=late) if (others := self._others) is not None else {}
        except Exception as error:
            self._say(f"{self._where}: the other ranks could not be asked ({error})")
        else:
            if any(it is not None and it.held for it in standings.values()):
                held.set()
            if standings:
                self._say(EVERYONE + (verdict := conclusion(standings)))
                if late and self.ends:
                    self.leave_words(verdict)
        if step and (words := self.last_words(step)):
            self._say(f"{self._where}: {words}")

    def _say(self, line: str) -> None:
        print(STUCK + line, file=self._stream or sys.stderr, flush=True)

    def _at(self) -> object:
        """What is under way, to see whether it is still the same later."""
        return self._steps[:1], [work and (lane, work.label, work.waits) for lane, work in self._doing().items()]

    def standing(self, step: str, *, late: bool, before: object = None) -> Standing:
        """Describe what this rank does, for itself and for others.

        Args:
            step: under way, or "".
            before: what ``_at`` gave at the first look.
        """
        doing = {lane: work for lane, work in self._doing().items() if work is not None}
        messages = {str(lane): self._messages(work.label) for lane, work in doing.items() if not work.waits}
        if step == BEGINNING and (others := self._others) is not None:
            messages[step] = {step: others.ranks}
        waits = bool(step and messages) and all(messages.values())
        failure = textwrap.shorten(str(self._failure() or ""), MOST_LETTERS, placeholder=" ...")
        words = (
            f"not all ranks have reached {step}" if step else (f"it runs no step; its script is {place_of_script()}")
        )
        places = [words] if step in ("", BEGINNING) else []
        for lane, work in doing.items():
            if not work.waits or lane is Lane.COMPUTE:
                label = textwrap.shorten(str(work.label).removeprefix(f"{lane} "), MOST_LETTERS, placeholder=" ...")
                peers = sorted({peer for ranks in messages.get(lane, {}).values() for peer in ranks})
                among = f" with rank {', '.join(map(str, peers))}" if peers else ""
                state = "waits to begin" if work.waits else "is in"
                places.append(f"{lane} {state} {label}{among}, {work.seconds:.0f} s")
        text = ("waits: " if waits else "waits for no other rank: ") + ("; ".join(places) or "nothing is running here")
        return Standing(
            f"has failed: {failure}" if failure else text,
            late=f"{step} took longer than {self.limit_s:.0f} s" if late else "",
            waits=waits and not failure,
            messages={name: ranks for named in messages.values() for name, ranks in named.items()},
            failure=failure,
            held=held_by(),
            moves=before is not None and self._at() != before,
        )


def held_by() -> str:
    """The debugger or interactive session that this process is in, in words, or ""."""
    if hasattr(sys, "ps1") or sys.flags.interactive:  # IPython sets it, too, and so do notebooks
        return "an interactive session"
    debugpy, monitoring = sys.modules.get("debugpy"), getattr(sys, "monitoring", None)
    debugs = debugpy.is_client_connected() if debugpy is not None else "pydevd" in sys.modules
    debugs |= monitoring is not None and monitoring.get_tool(monitoring.DEBUGGER_ID) is not None
    traced = any(frame.f_trace is not None for frame, _ in traceback.walk_stack(_main_frame()))
    return "a debugger" if debugs or traced else ""


def _main_frame() -> FrameType | None:
    return sys._current_frames().get(threading.main_thread().ident or 0)


def place_of_script() -> str:
    """Where the main thread is: the innermost place outside of installed packages."""
    stack = traceback.extract_stack(_main_frame()) if _main_frame() else []
    ours = [at for at in stack if not at.filename.startswith((sys.base_prefix, "<")) and "-packages" not in at.filename]
    return next((f"at {at.filename}:{at.lineno} in {at.name}" for at in reversed(ours)), "at an unknown place")


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
