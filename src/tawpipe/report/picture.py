"""Timelines as an SVG picture for documents."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from tawpipe.errors import UserError
from tawpipe.report.bars import KINDS, Bar, first_of_nodes, kind_of, label, lanes_of

WAITING = "#e8e8e8"
WIDTH, LABELS, TOP, ROW = 1400, 220, 30, 22
"""Pixels: width of the picture (``WIDTH``), of lane names (``LABELS``), and height of the title (``TOP``) and a lane
(``ROW``)."""
TICKS, KINDS_A_LINE = 10, 6


def draw_timeline(
    timelines: Sequence[tuple[str, Sequence[Bar]]], path: Path, *, ranks: Sequence[int] | None = None, title: str = ""
) -> None:
    """Write timelines as an SVG picture, below each other, with a row for every lane of a rank, over seconds.

    Args:
        timelines: name and bars of each timeline, for example ``predicted`` and ``executed``. A timeline may lack some
            of the ranks.
        path: file to write; its name ends with .svg.
        ranks: ranks to draw; by default the first of every node.
        title: title of the picture.

    Raises:
        UserError: the name has another suffix, or one of the ranks is in no timeline.
    """
    if path.suffix != ".svg":
        raise UserError("picture", str(path), "a name that ends with .svg")
    every = [bar for _, bars in timelines for bar in bars]
    known = {bar.rank for bar in every}
    if missing := [rank for rank in ranks or () if rank not in known]:
        raise UserError("--ranks", missing[0], f"some of {', '.join(map(str, sorted(known)))}")
    rows = [
        (name, bars, rank, lane)
        for name, bars in timelines
        for rank, lane in lanes_of(bars, first_of_nodes(bars) if ranks is None else ranks)
    ]
    begin, end = min((bar.begin for bar in every), default=0.0), max((bar.end for bar in every), default=0.0)
    scale, bottom = (WIDTH - LABELS - 30) / ((end - begin) or 1.0), TOP + ROW * len(rows)
    parts = [_text(10, 20, title, size=15)]
    for number, (name, bars, rank, lane) in enumerate(rows):
        y, several = TOP + ROW * number, f"{name}, " if len(timelines) > 1 else ""
        parts.append(_text(LABELS - 8, y + 15, f"{several}rank {rank} {lane}", anchor="end"))
        if number and (name, rank) != (rows[number - 1][0], rows[number - 1][2]):
            parts.append(f'<path d="M10 {y}H{WIDTH - 30}" stroke="#444" stroke-width="0.6"/>')
        for bar in (bar for bar in bars if bar.rank == rank and bar.action.lane is lane):
            start, left, right = (LABELS + scale * (at - begin) for at in (max(bar.start, begin), bar.begin, bar.end))
            if left > start:
                parts.append(_rectangle(start, y + 4, left - start, 14, WAITING, f"waits for {label(bar)}"))
            parts.append(_rectangle(left, y + 2, right - left, 18, KINDS[kind_of(bar)], label(bar)))
    for tick in range(TICKS + 1):
        at = (end - begin) * tick / TICKS
        parts.append(_text(LABELS + scale * at, bottom + 16, f"{at:.3g}{' s' * (tick == TICKS)}", anchor="middle"))
    drawn = {kind_of(bar) for bar in every}
    legend = [(kind, color) for kind, color in KINDS.items() if kind in drawn] + [("waiting", WAITING)]
    for number, (kind, color) in enumerate(legend):
        x, y = 10 + number % KINDS_A_LINE * (WIDTH - 20) / KINDS_A_LINE, bottom + 28 + number // KINDS_A_LINE * 18
        parts += [_rectangle(x, y, 12, 12, color, kind), _text(x + 18, y + 11, kind)]
    height = bottom + 40 + (len(legend) - 1) // KINDS_A_LINE * 18 + 12
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif">'
    path.write_text("\n".join([head, '<rect width="100%" height="100%" fill="#fff"/>', *parts, "</svg>\n"]), "utf-8")


def _text(x: float, y: float, words: str, *, anchor: str = "start", size: int = 12) -> str:
    """Return an SVG text element."""
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}">{escape(words)}</text>'


def _rectangle(x: float, y: float, width: float, height: float, color: str, words: str) -> str:
    """Return an SVG rectangle that shows ``words`` when the pointer is on it."""
    place = f'x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height}"'
    return f'<rect {place} fill="{color}"><title>{escape(words)}</title></rect>'
