"""Watchdog: in a step that takes too long, every rank reports what it waits for; if configured, its process ends.

A rank that hangs makes all others wait, each for its neighbour. Only the positions of all ranks in the schedule show
the cause. So every rank prints its own position, and a conclusion from all positions (stalls.py). The lines begin with
``environment.STUCK``, by which a launcher finds them. No process is ended inside a debugger or a notebook, nor while a
rank that answers is in one.

Torch's flight recorder holds the state of NCCL's communicators: group, sequence number, sizes, and whether an operation
was started or only issued. Torch writes this record after its own time limit, for which the watchdog does not wait.
``torchfrtrace FOLDER --prefix rank_`` compares the records of all ranks.

The watchdog is a Python thread. It stalls while another thread holds the interpreter's lock in a call that does not
return. It also calls CUDA, which may not answer. So if it may end the process, it repeatedly postpones a timer in C,
which ends the process if the watchdog stops (``faulthandler``, one timer per process).

The store may not answer either: if the process that owns it has stopped, a call to it blocks. So no thread that a
report or an end depends on calls the store.
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
"""Seconds between two checks of the steps. Questions of other ranks are checked every fourth time.

So they are noticed within ``SETTLE_S`` seconds.
"""
LAST_WORDS_S = 5.0
"""Seconds between the report and the end, so that every rank prints its conclusion before connections break."""
DEAF_S = 30.0
"""Seconds beyond a step's limit for which the watchdog may fail to run before the C timer ends the process."""
MOST_LETTERS = 160
"""Largest number of characters of an action in a report."""
STDERR = 2
"""File descriptor to which the C timer writes; ``sys.stderr`` has none in a notebook."""
EXIT_CODE = 1
RECORDED = 4000
"""Operations that a rank's flight record keeps: some steps of a few hundred each."""
RECORD_PREFIX = "rank_"


class StepView(Protocol):
    """Interface of an object that shows whether a step has ended."""

    @property
    def done(self) -> bool: ...


class LastEvents:
    """Last events of a step in all lanes, to see whether the step has ended.

    Args:
        last: Lane -> its last event; filled while the step is being issued.
    """

    def __init__(self, last: Mapping[Lane, Event]) -> None:
        self._last = last
        self.issued = False

    @property
    def done(self) -> bool:
        """True if the whole step has been issued and its last events have ended."""
        return self.issued and all(event.done for event in self._last.values())


class Watchdog:
    """Thread that watches the steps of one rank.

    Args:
        doing: Returns the action that every lane is at.
        where: Description of this rank.
        limit_s: Time limit of a step in seconds, from the end of the step before; 0 for none.
        ends: End the process after the report. Otherwise it reports again at twice the time, and so on.
        messages: Returns the names of an action's messages, each with the ranks at its other ends.
        failure: Returns the first error of any action, or None.
        stream: Receives the report; standard error if None.
        end: Called instead of ending the process.
        device: Device of this rank, for the threads that ask CUDA about its events.
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
        """The other ranks, which are asked for their states while the store answers."""
        self.last_words: Callable[[str], str] = lambda step: ""
        """Called with the step after the report, for at most ``LAST_WORDS_S``; its result is printed, too."""
        self.leave_words: Callable[[str], object] = lambda verdict: None
        """Called with the conclusion about all ranks before the process ends."""
        self._steps: list[tuple[str, StepView]] = []
        self._since, self._reports = time.monotonic(), 0
        """Time at which the step before the present one ended, and number of reports since then."""
        self._armed = self._asked = False
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._begin = cache(threading.Thread(target=self._run, name="watchdog", daemon=True).start)
        self._listener = threading.Thread(target=self._listen, name="questions", daemon=True)

    def watch(self, step: str, ended: StepView) -> None:
        """Start to watch a step, or ``BEGINNING``, until ``ended.done`` is True. Does nothing without a time limit."""
        if not self.limit_s:
            return
        with self._lock:
            if not self._steps:
                self._since, self._reports = time.monotonic(), 0
            self._steps.append((step, ended))
        self._begin()

    def hear(self, others: Others) -> None:
        """Start to answer the questions of ``others``, in a thread, and let late steps ask them for their states."""
        self._others = others
        self._listener.start()
        self._begin()

    def close(self) -> None:
        """Make the threads stop. Waits up to one second for the thread that reads the store."""
        self._closed.set()
        if self._listener.is_alive():  # the interpreter must not exit while a thread is inside the store
            self._listener.join(4 * LOOK_S)

    def _listen(self) -> None:
        """Read from the store every second whether another rank asks, and keep the answer in ``_asked``.

        Runs in a thread until the watchdog is closed or the store fails."""
        with suppress(Exception):  # the process of the store has ended
            while self._others is not None and not self._closed.wait(4 * LOOK_S):
                self._asked = self._others.ask
        self._others = None

    def _run(self) -> None:
        """Check the steps every ``LOOK_S`` seconds until the watchdog is closed. Runs in a thread.

        Removes ended steps, reports a late step, answers questions of other ranks, and postpones the C timer."""
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
            # earlier after a question, so that ranks report and end together
            late = bool(step) and seconds + LAST_WORDS_S * asked > limit
            if late or asked:
                self._reports += late
                self._tell(step, seconds, late=late)
        self._arm(0.0)

    def _arm(self, seconds: float) -> None:
        """Set the C timer to end the process after ``seconds``, replacing an earlier setting.

        Only cancels it for 0 seconds, and if the process must not be ended (by setting, test, debugger or notebook).
        """
        if self._armed:
            faulthandler.cancel_dump_traceback_later()
        self._armed = bool(seconds) and self.ends and self._own_end is None and not held_by()
        if self._armed:
            faulthandler.dump_traceback_later(seconds, exit=True, file=STDERR)

    def _tell(self, step: str, seconds: float, *, late: bool) -> None:
        """Print this rank's report, and let a thread ask the other ranks and print the conclusion.

        That thread has ``LAST_WORDS_S`` seconds. Then the process is ended if the step is ``late``, the watchdog is set
        to end processes and was not closed meanwhile, and no rank is in a debugger or an interactive session."""
        standing, held = (look := partial(self.standing, step, late=late, before=self._at()))(), threading.Event()
        ends = late and self.ends and not standing.held
        options = "--timeouts.step-s, for the first step --timeouts.first-step-s" if self.ends else "timeout"
        limit = f", the limit is {self.limit_s:.0f} s ({options}, or ten times a step)" if late else ""
        self._say(f"{self._where}: {step or 'no step'}, {seconds:.0f} s{limit}{ENDS * ends}; {standing.text}")
        if ends:  # the C timer ends the process if the last words hang and hold Python's lock
            self._arm(LAST_WORDS_S + 2)
        threading.Thread(target=self._conclude, args=(step, look, held, late), name="last report", daemon=True).start()
        if not self._closed.wait(LAST_WORDS_S) and ends and not held.is_set():
            (self._own_end or partial(os._exit, EXIT_CODE))()
            self.close()
        self._arm(self.limit_s + DEAF_S)

    def _conclude(self, step: str, look: Callable[[], Standing], held: threading.Event, late: bool) -> None:
        """Collect the states of all ranks, print the conclusion from them, then the result of ``last_words``.

        Sets ``held`` if a debugger or an interactive session holds any rank. If the process is to be ended, passes the
        conclusion to ``leave_words`` first."""
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
        """Print a line that begins with ``STUCK``."""
        print(STUCK + line, file=self._stream or sys.stderr, flush=True)

    def _at(self) -> object:
        """Return the step and the actions under way, to see later whether they have changed."""
        return self._steps[:1], [work and (lane, work.label, work.waits) for lane, work in self._doing().items()]

    def standing(self, step: str, *, late: bool, before: object = None) -> Standing:
        """Return the state of this rank: what every lane does, for how long, and with which ranks.

        Args:
            step: Step under way, or ``""``.
            late: True if the step is late, which the state then says.
            before: Result of ``_at`` from an earlier look, or None at the first look. If the present result differs,
                the state's ``moves`` is True.
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
    """Return the debugger or interactive session that this process is in, as text, or ``""``."""
    if hasattr(sys, "ps1") or sys.flags.interactive:  # also set by IPython and in notebooks
        return "an interactive session"
    debugpy, monitoring = sys.modules.get("debugpy"), getattr(sys, "monitoring", None)
    debugs = debugpy.is_client_connected() if debugpy is not None else "pydevd" in sys.modules
    debugs |= monitoring is not None and monitoring.get_tool(monitoring.DEBUGGER_ID) is not None
    traced = any(frame.f_trace is not None for frame, _ in traceback.walk_stack(_main_frame()))
    return "a debugger" if debugs or traced else ""


def _main_frame() -> FrameType | None:
    """Return the present stack frame of the main thread, or None."""
    return sys._current_frames().get(threading.main_thread().ident or 0)


def place_of_script() -> str:
    """Return where the main thread is, as text: the innermost frame outside installed packages."""
    stack = traceback.extract_stack(_main_frame()) if _main_frame() else []
    ours = [at for at in stack if not at.filename.startswith((sys.base_prefix, "<")) and "-packages" not in at.filename]
    return next((f"at {at.filename}:{at.lineno} in {at.name}" for at in reversed(ours)), "at an unknown place")


def keep_record() -> None:
    """Enable NCCL's flight recorder, unless the user has set its size. Call it before the first group is made."""
    if os.environ.get("TORCH_NCCL_TRACE_BUFFER_SIZE") is None:  # name before torch 2.9, which is still read
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", str(RECORDED))


def write_record(folder: Path, rank: int) -> str:
    """Write this rank's flight record into ``folder``; return text that says how to read it, or why it failed.

    Returns ``""`` if torch has no NCCL. Python stacks are left out, as the watchdog cannot know whether walking them is
    safe.
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
