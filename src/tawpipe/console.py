"""The output of rank 0: with rich where the output is a terminal, plain lines where it is not.

Other ranks make a :class:`Console` too and are silent, so that callers need no ``if rank == 0``.

On a terminal the newest numbers stand in its last line, which is drawn anew again and again. It is one line, however
narrow the terminal is, and the cursor stays in it: so whoever else writes to the terminal (the launcher, other ranks
under torchrun) need only erase the line they are in first, as :class:`AboveBar` does.
"""

from __future__ import annotations

import logging
import math
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TextIO, cast

from rich.console import Console as RichConsole
from rich.console import ConsoleOptions, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from tawpipe.streams import lossy

ERASE_LINE = "\r\x1b[2K"
"""What terminals take for: go to the beginning of the line, and erase it."""
REDRAWN_PER_S = 2
"""Times in a second that the bar is drawn: drawing takes about a millisecond of Python."""
WIDTHS = (10, 30)
"""Characters that the bar itself has at least and at most; where there are fewer it is left out."""
LONGEST_PROBLEM = 300
"""Characters of an error's text that are passed on."""
QUIET_S = 10.0
"""Seconds between two lines of ``progress`` where the output is no terminal."""
progress = logging.getLogger("tawpipe.progress")
"""Logger for lines about measuring and planning, which take a while. Only ``progress_to`` and ``passing`` print them.

An info says what is being done and may be replaced by the next line. A warning is a fact and stays.
"""


class Console:
    """Prints a run.

    Args:
        rank: of this process; only rank 0 prints.
        stream: standard output by default.
        clock: seconds; for the time that is left.
        bar: draw progress as a bar where the output is a terminal that can.
    """

    def __init__(
        self,
        rank: int = 0,
        *,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.perf_counter,
        bar: bool = False,
    ) -> None:
        self._stream: Any = lossy(stream or sys.stdout, name="" if rank else "standard output")
        self._rich = _RichConsole(file=self._stream, highlight=False, soft_wrap=True, emoji=False)
        # rich may be told to colour what goes to a file; lines that are drawn again do not belong there.
        self._has_bar = bar and rank == 0 and self._rich.is_interactive and self._stream.isatty()
        self._bar = _Bar(clock)
        self._live: Live | None = None
        self._silent = rank != 0
        self._clock = clock
        self._began: tuple[int, float] | None = None
        self._missed = Counter[str]()

    @contextmanager
    def showing(self, what: str) -> Iterator[None]:
        """Draw, print or send ``what`` on one rank, after all that the ranks do together.

        An error there is said the first time, counted for the summary, and not raised. Ctrl-C and SystemExit are.
        """
        try:
            yield
        except Exception as error:  # whatever a library that draws or sends raises
            problem = " ".join(str(error).split())[:LONGEST_PROBLEM]
            self.missed(what, f"{what}: not shown, training continues: {type(error).__name__}: {problem}")

    def missed(self, what: str, words: str) -> None:
        """Count that ``what`` could not be shown, and say so in ``words`` the first time."""
        self._missed[what] += 1
        if self._missed[what] == 1:
            self.notice(words)

    def topology(self, text: str) -> None:
        """Print the processes that were found, for example ``4 processes = 2 nodes x 2``."""
        self.line(text, style="bold")

    def plan(self, rows: Sequence[tuple[str, str]], *, title: str = "plan") -> None:
        """A table of labels and values, before anything is paid for."""
        if self._silent or not rows:
            return
        if self._rich.is_terminal:
            table = Table(title=title, title_justify="left", show_header=False)
            for label, value in rows:
                table.add_row(Text(label), Text(value))
            self._rich.print(table)
            return
        width = max(len(label) for label, _ in rows)
        self.line(f"{title}:")
        for label, value in rows:
            self.line(f"  {label:<{width}}  {value}")

    def progress(
        self,
        step: int,
        num_steps: int,
        *,
        loss: float,
        grad_norm: float,
        tokens_per_second: float,
        at: float | None = None,
        shares: Mapping[str, Any] | None = None,
        extra: str = "",
        line: bool = True,
    ) -> None:
        """The numbers of a step. The time left follows from the steps since the first call.

        Args:
            at: the end of the step, by the clock; now by default.
            shares: of what there is that the step has used, by name, for the bar; None for what is not known.
            extra: further words, for example the validation loss; they always get a line.
            line: whether the step gets a line where there is no bar.
        """
        if self._silent:
            return
        at = self._clock() if at is None else at
        if self._began is None:
            self._began = (step, at)
        first, began = self._began
        left_s = (num_steps - step) * (at - began) / (step - first) if step > first else None
        width = len(str(num_steps))
        head = f"step {step:>{width}}/{num_steps}"
        said = [f"loss {loss:.4f}", f"grad norm {grad_norm:.3g}", f"{tokens_per_second:,.0f} tokens/s"]
        if self._has_bar:
            used = [f"{name} {share:.0%}" for name, share in (shares or {}).items() if share is not None]
            self._bar.update(step, num_steps, [said[0], said[2], *used], None if left_s is None else at + left_s)
            if self._live is None:
                # Where standard error is no terminal, it is somebody's file, or the launcher reads it.
                redirect = sys.stderr.isatty()
                self._live = Live(
                    self._bar,
                    console=self._rich,
                    refresh_per_second=REDRAWN_PER_S,
                    transient=True,
                    redirect_stderr=redirect,
                )
                self._live.start(refresh=True)
        if extra or (line and not self._has_bar):
            left = [f"{duration(left_s)} left"] if left_s is not None else []
            self.line(" | ".join([head, *said, *left, *([extra] if extra else [])]))

    @contextmanager
    def passing(self) -> Iterator[None]:
        """Show the lines of ``progress`` on rank 0 within the context; see the function ``passing``."""
        with nullcontext() if self._silent else passing(self._stream):
            yield

    def end_progress(self) -> None:
        """Take the bar away, if there is one; lines that are printed afterwards stand where it was."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def notice(self, *texts: str) -> None:
        """Print lines that the user should know and need not act on; an empty text stands for none."""
        for text in filter(None, texts):
            self.line(text, style="yellow")

    def warning(self, text: str) -> None:
        """Print something that the user should act on, set off from what is around it."""
        self.line(f"\nwarning: {text}\n", style="bold yellow")

    def summary(self, rows: Sequence[tuple[str, str]]) -> None:
        """The results of the run: a table like that of the plan, with what could not be shown."""
        missed = ", ".join(f"{what} ({times} times)" if times > 1 else what for what, times in self._missed.items())
        self.plan([*rows, *([("not shown", missed)] if missed else [])], title="done")
        if self._stream.lost and not self._silent:
            words = f"{self._stream.lost} lines of standard output were lost: {self._stream.problem}"
            print(f"tawpipe: {words}", file=sys.stderr, flush=True)

    def line(self, text: str, style: str | None = None) -> None:
        """Print a line, where the output is a terminal in a style of rich."""
        if self._silent:
            return
        if self._rich.is_terminal:
            self._rich.print(text, style=style, markup=False)
        else:
            print(text, file=self._stream, flush=True)


@contextmanager
def progress_to(say: Callable[[str], None]) -> Iterator[None]:
    """Pass every line of ``progress`` to ``say`` within the context."""
    with _progress_handled(lambda record: say(record.getMessage())):
        yield


@contextmanager
def _progress_handled(emit: Callable[[logging.LogRecord], None]) -> Iterator[None]:
    handler, level = logging.Handler(), progress.level
    handler.emit = emit
    progress.addHandler(handler)
    progress.setLevel(logging.INFO)
    try:
        yield
    finally:
        progress.setLevel(level)
        progress.removeHandler(handler)


@contextmanager
def passing(stream: TextIO, *, indent: str = "", clock: Callable[[], float] = time.monotonic) -> Iterator[None]:
    """Show the lines of ``progress`` on ``stream`` within the context.

    On a terminal each line replaces the one before, and the last one is erased at the end. Elsewhere a line is printed
    only if ``QUIET_S`` seconds have passed since the one before. Warnings are always printed and stay.
    """
    erase, printed = ERASE_LINE if stream.isatty() else "", -math.inf

    def show(record: logging.LogRecord) -> None:
        nonlocal printed
        text = indent + record.getMessage()
        if record.levelno >= logging.WARNING:
            stream.write(f"{erase}{text}\n")
        elif erase:
            stream.write(erase + text[: shutil.get_terminal_size().columns - 1])
        elif clock() - printed >= QUIET_S:
            printed = clock()
            stream.write(f"{text}\n")
        stream.flush()

    try:
        with _progress_handled(show):
            yield
    finally:
        if erase:
            stream.write(erase)
            stream.flush()


class _RichConsole(RichConsole):
    """rich's, but the cursor is never hidden: a process that is killed could not show it again."""

    def show_cursor(self, show: bool = True) -> bool:
        return False


@dataclass
class _Bar:
    """The last line of the terminal: what matters most of the newest step, as much of it as there is room for.

    Args:
        clock: seconds; the time left runs down between steps.
    """

    clock: Callable[[], float]
    step: int = 0
    num_steps: int = 1
    said: Sequence[str] = field(default_factory=list)
    ends_at: float | None = None

    def update(self, step: int, num_steps: int, said: Sequence[str], ends_at: float | None) -> None:
        self.step, self.num_steps, self.said, self.ends_at = step, num_steps, said, ends_at

    def __rich_console__(self, console: RichConsole, options: ConsoleOptions) -> RenderResult:
        room = max(1, options.max_width - 1)  # a full line would make some terminals begin another one
        said = [f"step {self.step:>{len(str(self.num_steps))}}/{self.num_steps}", *self.said]
        if self.ends_at is not None:
            said.insert(2, f"{duration(max(0.0, self.ends_at - self.clock()))} left")
        while len(said) > 1 and len(" | ".join(said)) > room:
            said.pop()
        head, *rest = said
        width = min(WIDTHS[1], room - len(" | ".join(said)) - 3)
        yield Text(head[:room], end="")
        if width >= WIDTHS[0]:
            bar = ProgressBar(total=self.num_steps, completed=self.step, width=width)
            yield Segment(" ")
            yield from Segment.adjust_line_length(list(console.render(bar, options)), width)
            yield Segment(" " if rest else "")
            yield Text(" | ".join(rest), end="")
        else:
            yield Text("".join(f" | {words}" for words in rest), end="")


class AboveBar:
    """A stream to a terminal on which another process may draw a bar: every line first erases the one it begins in.

    Args:
        stream: that has a terminal at its other end.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._begins = stream, True

    def write(self, text: str) -> int:
        if text:
            self._stream.write((ERASE_LINE if self._begins else "") + text)
            self._begins = text.endswith("\n")
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def above_bar(stream: TextIO) -> TextIO:
    """``stream``, made safe for a terminal that another process may draw a bar on; as it is where there is none."""
    return cast(TextIO, AboveBar(stream)) if stream.isatty() and sys.stdout.isatty() else stream


def columns(rows: Sequence[Sequence[str]], *, words: int = 1) -> Iterator[str]:
    """Lines of a table: the first column and the last ones hold words, those between them numbers.

    >>> list(columns([("name", "size", "note"), ("a", "10", "small")]))
    ['name  size  note', 'a       10  small']

    Args:
        words: how many of the last columns hold words.
    """
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    for row in rows:
        cells = [
            cell.rjust(width) if 0 < i < len(row) - words else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(cells).rstrip()


def duration(seconds: float) -> str:
    """Seconds as people say them.

    >>> duration(7.4), duration(75), duration(3725)
    ('7 s', '1 min 15 s', '1 h 02 min')
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def span(seconds: float) -> str:
    """The length of a step, or of what is in it, to compare it with others.

    >>> span(0.0712), span(23.54), span(5525), span(0)
    ('71.2 ms', '23.540 s', '1.53 h', '0 s')
    """
    if seconds >= 3600:
        return f"{seconds / 3600:.2f} h"
    if seconds >= 100:
        return f"{seconds:.1f} s"
    if seconds >= 0.1 or not seconds:
        return f"{seconds:.3f} s" if seconds else "0 s"
    return f"{seconds * 1e3:.1f} ms" if seconds >= 1e-3 else f"{seconds * 1e3:.3f} ms"
