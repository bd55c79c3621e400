"""The output of rank 0: with rich where the output is a terminal, plain lines where it is not.

Other ranks make a :class:`Console` too and are silent, so that callers need no ``if rank == 0``.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TextIO

from rich.console import Console as RichConsole
from rich.table import Table
from rich.text import Text


class Console:
    """Prints a run.

    Args:
        rank: of this process; only rank 0 prints.
        stream: standard output by default.
        clock: seconds; for the time that is left.
    """

    def __init__(
        self, rank: int = 0, *, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._stream = stream or sys.stdout
        self._rich = RichConsole(file=self._stream, highlight=False, soft_wrap=True)
        self._silent = rank != 0
        self._clock = clock
        self._began: tuple[int, float] | None = None

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
        extra: str = "",
    ) -> None:
        """The line of one logging step. The time left follows from the steps since the first call.

        Args:
            extra: further words, for example the validation loss.
        """
        now = self._clock()
        if self._began is None:
            self._began = (step, now)
        first, began = self._began
        left = ""
        if step > first:
            left = f" | {duration((num_steps - step) * (now - began) / (step - first))} left"
        width = len(str(num_steps))
        head = f"step {step:>{width}}/{num_steps}"
        body = f"loss {loss:.4f} | grad norm {grad_norm:.3g} | {tokens_per_second:,.0f} tokens/s{left}"
        self.line(f"{head} | {body}" + (f" | {extra}" if extra else ""))

    def notice(self, text: str) -> None:
        """Print something that the user should know and need not act on."""
        self.line(text, style="yellow")

    def summary(self, rows: Sequence[tuple[str, str]]) -> None:
        """The results of the run: a table like that of the plan."""
        self.plan(rows, title="done")

    def line(self, text: str, style: str | None = None) -> None:
        """Print a line, where the output is a terminal in a style of rich."""
        if self._silent:
            return
        if self._rich.is_terminal:
            self._rich.print(text, style=style, markup=False)
        else:
            print(text, file=self._stream, flush=True)


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
