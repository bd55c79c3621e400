"""Failures of workers, as the launcher sees them: their standard error, and which worker failed first.

A rank that dies breaks the connections of the others, which then fail as well. So the first worker to *exit* need not
be the cause. A traceback is printed before connections close: the times of tracebacks give the order.
"""

from __future__ import annotations

import re
import signal
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TextIO

from tawpipe.environment import ENDS, ERROR_PREFIX, STUCK, USER_ERROR

_FAILURE = re.compile(r"Traceback \(most recent call last\)|Fatal Python error|terminate called|" + ERROR_PREFIX)
_EXCEPTION = re.compile(r"^(?:\[rank\d+\]: ?)?([\w.]*(?:Error|Exception|Exit|Interrupt)\b.*|[\w.]+Error$)")
_CAUSES = {signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGTERM, signal.SIGINT}
"""Signals that end a worker by a fault of its own or by a person's kill. SIGABRT often follows a lost peer."""


@dataclass
class StderrKeeper:
    """Last lines of one worker's standard error, which are also shown as they arrive if ``shown_on`` is a stream.

    From a line on that looks like the beginning of a failure, lines are held back, because the report shows them once
    for all ranks. :meth:`release` shows them if the worker did not fail.
    """

    shown_on: TextIO | None = None
    lines: deque[str] = field(default_factory=lambda: deque(maxlen=400))
    failing_since: float | None = None
    stuck_since: float | None = None
    """Time at which the worker reported that it ends because a step took too long."""
    _partial: str = ""
    _held: list[str] = field(default_factory=list)

    def feed(self, chunk: bytes) -> None:
        """Take a part of the worker's standard error: keep its complete lines, and show them or hold them back."""
        # Progress bars end their lines with a carriage return.
        pieces = re.split(r"(?<=[\n\r])", self._partial + chunk.decode("utf-8", errors="replace"))
        self._partial = pieces.pop()
        for piece in pieces:
            self.lines.append(piece.rstrip("\r\n"))
            if self.stuck_since is None and piece.startswith(STUCK) and ENDS in piece:
                self.stuck_since = time.monotonic()
            if self.failing_since is None and _FAILURE.search(piece):
                self.failing_since = time.monotonic()
            if self.failing_since is not None:
                self._held.append(piece)
            elif self.shown_on is not None:
                self._show([piece])

    def release(self, *, older_than_s: float = 0.0) -> None:
        """Show lines that were held back for at least ``older_than_s`` seconds.

        With 0, all held lines and an incomplete last line are shown.
        """
        if self.failing_since is not None and time.monotonic() - self.failing_since >= older_than_s:
            self._show(self._held)
            self._held, self.failing_since = [], None
        if not older_than_s and self._partial:
            self._show([self._partial + "\n"])
            self._partial = ""

    def _show(self, pieces: Sequence[str]) -> None:
        if self.shown_on is not None:
            self.shown_on.write("".join(pieces))
            self.shown_on.flush()

    def _all_lines(self) -> list[str]:
        return [*self.lines, *([self._partial] if self._partial else [])]

    def message(self) -> str:
        """Return the last expected error that the worker printed, without earlier output; else its last 20 lines."""
        lines = self._all_lines()
        starts = [index for index, line in enumerate(lines) if line.startswith(ERROR_PREFIX)]
        return "\n".join(lines[starts[-1] :] if starts else lines[-20:])

    def tail(self, count: int) -> list[str]:
        """Return the last ``count`` lines that are not blank, from the first traceback on if there is one."""
        lines = [line for line in self._all_lines() if line.strip()]
        starts = [index for index, line in enumerate(lines) if "Traceback (most recent call last)" in line]
        return lines[starts[0] if starts else 0 :][-count:]

    def exception(self) -> str:
        """Return the last line that names an error, else the last line that is not blank; ``""`` if there is none."""
        lines = self._all_lines()
        for line in reversed(lines):
            if line.startswith(ERROR_PREFIX):
                return line.removeprefix(ERROR_PREFIX)
            if match := _EXCEPTION.match(line):
                return match[1]
        return next((line.strip() for line in reversed(lines) if line.strip()), "")


@dataclass(frozen=True)
class WorkerFailure:
    """Worker that ended with an exit code other than 0.

    Args:
        returncode: exit code as in ``subprocess``: -n for signal n.
        at_s: time at which the launcher noticed the end, by ``time.monotonic``.
        keeper: standard error of the worker.
    """

    rank: int
    returncode: int
    at_s: float
    keeper: StderrKeeper

    @property
    def began_s(self) -> float:
        """Time at which the worker began to fail: its first traceback or last report, else its end."""
        begun = [at for at in (self.keeper.failing_since, self.keeper.stuck_since) if at is not None]
        return min(begun, default=self.at_s)

    @property
    def ended_stuck(self) -> bool:
        """True if the worker ended only because of its watchdog."""
        return self.returncode > 0 and self.keeper.stuck_since == self.began_s

    def reason(self) -> str:
        """Return text for the user about how the worker ended, and its error."""
        detail = f": {text}" if (text := self.keeper.exception()) else ""
        if self.returncode >= 0:
            return f"ended with exit code {self.returncode}{detail}"
        try:
            name = signal.Signals(-self.returncode).name
        except ValueError:
            name = f"signal {-self.returncode}"
        hint = " (by hand, or by the kernel for lack of memory)" if -self.returncode == signal.SIGKILL else ""
        return f"was killed by {name}{hint}{detail}"


def first_cause(failures: Sequence[WorkerFailure]) -> WorkerFailure:
    """Return the failure that probably caused the others. ``failures`` must not be empty.

    A worker killed by a signal of ``_CAUSES`` comes first, then a wrong setting, then the worker that began to fail
    first."""

    def order(failure: WorkerFailure) -> tuple[int, float, int]:
        if -failure.returncode in _CAUSES:
            return 0, failure.at_s, failure.rank
        return (1 if failure.returncode == USER_ERROR else 2), failure.began_s, failure.rank

    return min(failures, key=order)


def print_expected_error(error: Exception) -> None:
    """Print an error and its notes to standard error without a traceback, in the form that a launcher recognises."""
    lines = [f"{ERROR_PREFIX}{error}", *getattr(error, "__notes__", ())]
    print("\n".join(lines), file=sys.stderr, flush=True)
