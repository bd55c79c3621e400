"""Console output of rank 0: formatted by rich on a terminal, plain lines elsewhere.

The other ranks create a :class:`Console` too, which prints nothing. Callers need no ``if rank == 0``.

On a terminal, the last line shows the newest numbers and is redrawn repeatedly. It is always a single line, however
narrow the terminal is, and the cursor stays in it. Any other process that writes to the terminal (the launcher, or
other ranks under torchrun) must therefore erase the current line first, as :class:`AboveBar` does.
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
"""Terminal codes that move the cursor to the start of the line and erase the line."""
REDRAWN_PER_S = 2
"""Times per second that the progress bar is redrawn. Drawing it takes about one millisecond of Python."""
WIDTHS = (10, 30)
"""Minimum and maximum width of the bar itself, in characters. It is left out where fewer are free."""
LONGEST_PROBLEM = 300
"""Maximum number of characters of an error's text that are printed."""
QUIET_S = 10.0
"""Seconds between two lines of ``progress`` where the output is no terminal."""
progress = logging.getLogger("tawpipe.progress")
"""Logger for progress lines of measuring and planning, which take a while. Only ``progress_to`` outputs them."""


class Console:
    """Prints the messages of a run.

    Args:
        rank: rank of this process. Only rank 0 prints.
        stream: receives the output; standard output by default.
        clock: returns the time in seconds; used to estimate the time left.
        bar: draw a progress bar if the output is an interactive terminal.
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
        # Settings of rich can force terminal mode for a file. A file must not contain redrawn lines, so check isatty
        # too.
        self._has_bar = bar and rank == 0 and self._rich.is_interactive and self._stream.isatty()
        self._bar = _Bar(clock)
        self._live: Live | None = None
        self._silent = rank != 0
        self._clock = clock
        self._began: tuple[int, float] | None = None
        self._missed = Counter[str]()

    @contextmanager
    def showing(self, what: str) -> Iterator[None]:
        """Run a block that displays ``what`` on one rank; report its exceptions instead of raising them.

        Use it only after everything that the ranks do together. The first exception for ``what`` is printed. Each one
        is counted, and ``summary`` prints the count. KeyboardInterrupt and SystemExit are raised.

        Args:
            what: name of the thing that is drawn, printed or sent.
        """
        try:
            yield
        except Exception as error:  # libraries that draw or send may raise any exception
            problem = " ".join(str(error).split())[:LONGEST_PROBLEM]
            self.missed(what, f"{what}: not shown, training continues: {type(error).__name__}: {problem}")

    def missed(self, what: str, words: str) -> None:
        """Count that ``what`` could not be shown, and print ``words`` the first time."""
        self._missed[what] += 1
        if self._missed[what] == 1:
            self.notice(words)

    def topology(self, text: str) -> None:
        """Print a line that describes the processes found, for example ``4 processes = 2 nodes x 2``."""
        self.line(text, style="bold")

    def plan(self, rows: Sequence[tuple[str, str]], *, title: str = "plan") -> None:
        """Print a table of labels and values, for example the plan of a run before it starts.

        Args:
            rows: (label, value) pairs. Nothing is printed if there are none.
            title: heading of the table.
        """
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
        """Show the numbers of a finished step in the progress bar or on a line.

        The remaining time is estimated from the mean duration of the steps since the first call.

        Args:
            step: number of the finished step.
            num_steps: number of steps of the run.
            loss: loss of the step.
            grad_norm: gradient norm of the step.
            tokens_per_second: throughput.
            at: time at which the step ended, by the console's clock; now by default.
            shares: used share (0 to 1) of each limited resource by its name, shown in the bar only. None if unknown.
            extra: further text, for example the validation loss. A step with such text always gets a line.
            line: print a line for the step if there is no bar.
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
        texts = [f"loss {loss:.4f}", f"grad norm {grad_norm:.3g}", f"{tokens_per_second:,.0f} tokens/s"]
        if self._has_bar:
            used = [f"{name} {share:.0%}" for name, share in (shares or {}).items() if share is not None]
            self._bar.update(step, num_steps, [texts[0], texts[2], *used], None if left_s is None else at + left_s)
            if self._live is None:
                # Do not redirect standard error if it is a file or a pipe to the launcher.
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
            self.line(" | ".join([head, *texts, *left, *([extra] if extra else [])]))

    @contextmanager
    def passing(self) -> Iterator[None]:
        """Show the lines of ``progress`` on rank 0 within the context; see the function ``passing``."""
        with nullcontext() if self._silent else passing(self._stream):
            yield

    def end_progress(self) -> None:
        """Remove the progress bar, if there is one. Later lines are printed in its place."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def notice(self, *texts: str) -> None:
        """Print lines that inform the user and need no action. Empty texts are left out."""
        for text in filter(None, texts):
            self.line(text, style="yellow")

    def warning(self, text: str) -> None:
        """Print a warning that the user should act on, with a blank line before and after it."""
        self.line(f"\nwarning: {text}\n", style="bold yellow")

    def summary(self, rows: Sequence[tuple[str, str]]) -> None:
        """Print the results of the run as a table titled "done".

        The table also lists things that could not be shown (see ``showing``). If lines of standard output were lost,
        print their number to standard error.

        Args:
            rows: (label, value) pairs.
        """
        missed = ", ".join(f"{what} ({times} times)" if times > 1 else what for what, times in self._missed.items())
        self.plan([*rows, *([("not shown", missed)] if missed else [])], title="done")
        if self._stream.lost and not self._silent:
            words = f"{self._stream.lost} lines of standard output were lost: {self._stream.problem}"
            print(f"tawpipe: {words}", file=sys.stderr, flush=True)

    def line(self, text: str, style: str | None = None) -> None:
        """Print a line.

        Args:
            style: style of rich, used only if the output is a terminal.
        """
        if self._silent:
            return
        if self._rich.is_terminal:
            self._rich.print(text, style=style, markup=False)
        else:
            print(text, file=self._stream, flush=True)


@contextmanager
def progress_to(say: Callable[[str], None]) -> Iterator[None]:
    """Pass every line logged to ``progress`` to the function ``say`` within the context."""
    with _progress_handled(lambda record: say(record.getMessage())):
        yield


@contextmanager
def _progress_handled(emit: Callable[[logging.LogRecord], None]) -> Iterator[None]:
    handler, level = logging.Handler(), progress.level
    handler.emit = lambda record: emit(record)
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
    """A rich console that never hides the cursor: a killed process could not show it again."""

    def show_cursor(self, show: bool = True) -> bool:
        return False


@dataclass
class _Bar:
    """Progress bar in the last line of the terminal; the least important texts are left out if the line is too narrow.

    Args:
        clock: returns the time in seconds; the displayed time left decreases between steps.
        step: newest step.
        num_steps: number of steps of the run.
        texts: texts after the step number, the most important first.
        ends_at: expected end of the run by ``clock``, or None if unknown.
    """

    clock: Callable[[], float]
    step: int = 0
    num_steps: int = 1
    texts: Sequence[str] = field(default_factory=list)
    ends_at: float | None = None

    def update(self, step: int, num_steps: int, texts: Sequence[str], ends_at: float | None) -> None:
        """Store the values that the next drawing of the bar shows."""
        self.step, self.num_steps, self.texts, self.ends_at = step, num_steps, texts, ends_at

    def __rich_console__(self, console: RichConsole, options: ConsoleOptions) -> RenderResult:
        line_width = max(1, options.max_width - 1)  # some terminals start a new line after a completely filled one
        texts = [f"step {self.step:>{len(str(self.num_steps))}}/{self.num_steps}", *self.texts]
        if self.ends_at is not None:
            texts.insert(2, f"{duration(max(0.0, self.ends_at - self.clock()))} left")
        while len(texts) > 1 and len(" | ".join(texts)) > line_width:
            texts.pop()
        head, *rest = texts
        width = min(WIDTHS[1], line_width - len(" | ".join(texts)) - 3)
        yield Text(head[:line_width], end="")
        if width >= WIDTHS[0]:
            bar = ProgressBar(total=self.num_steps, completed=self.step, width=width)
            yield Segment(" ")
            yield from Segment.adjust_line_length(list(console.render(bar, options)), width)
            yield Segment(" " if rest else "")
            yield Text(" | ".join(rest), end="")
        else:
            yield Text("".join(f" | {words}" for words in rest), end="")


class AboveBar:
    """Stream to a terminal on which another process may draw a progress bar; erases the bar before every line.

    Args:
        stream: stream to a terminal.
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
    """Wrap ``stream`` in :class:`AboveBar` if both it and standard output are terminals, else return it unchanged."""
    return cast(TextIO, AboveBar(stream)) if stream.isatty() and sys.stdout.isatty() else stream


def columns(rows: Sequence[Sequence[str]], *, words: int = 1) -> Iterator[str]:
    """Yield the lines of a table with aligned columns.

    The first column and the last ``words`` columns are aligned to the left, as they hold words. The columns between
    them are aligned to the right, as they hold numbers.

    >>> list(columns([("name", "size", "note"), ("a", "10", "small")]))
    ['name  size  note', 'a       10  small']

    Args:
        rows: cells of each line; all lines have equally many.
        words: number of last columns that hold words.
    """
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    for row in rows:
        cells = [
            cell.rjust(width) if 0 < i < len(row) - words else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(cells).rstrip()


def duration(seconds: float) -> str:
    """Format a duration in seconds, minutes or hours, rounded to whole seconds (from one hour on, to whole minutes).

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
    """Format the duration of a step, or of a part of a step, with three or more digits, for comparison with others.

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
