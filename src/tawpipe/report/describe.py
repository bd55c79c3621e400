"""What a figure shows, in words: for readers who do not see it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

MOST_NAMES = 16
"""Bars or curves whose values are said one by one."""


def describe(figure: Any) -> str:
    """A sentence or two with the values of a figure of plotly that ``figures`` makes."""
    kinds = {trace.type for trace in figure.data}
    if "heatmap" in kinds:
        words = _cells(figure.data[0])
    elif "bar" in kinds and figure.layout.barmode == "overlay":
        words = _lanes(figure)
    elif "bar" in kinds:
        words = _bars(figure)
    else:
        words = _curves(figure)
    return re.sub(r"<[^>]+>", " ", words)


def _bars(figure: Any) -> str:
    """The parts of every bar."""
    unit = figure.layout.xaxis.title.text or ""
    bars: dict[str, list[str]] = {}
    for trace in figure.data:
        for name, value in zip(trace.y, trace.x, strict=True):
            if value is not None:
                bars.setdefault(name, []).append(f"{trace.name} {value:.3g}")
    return f"Bars, in {unit or 'parts of one'}: " + _listed([f"{name}: {', '.join(bar)}" for name, bar in bars.items()])


def _lanes(figure: Any) -> str:
    """Which lanes a timeline has, and how long it is."""
    lanes = list(dict.fromkeys(name for trace in figure.data for name in trace.y))
    ends = (begin + width for trace in figure.data for begin, width in zip(trace.base, trace.x, strict=True))
    kinds = ", ".join(trace.name for trace in figure.data)
    return f"Timeline of {max(ends, default=0.0):.3g} seconds with bars for {kinds}, in the lanes {_listed(lanes)}"


def _curves(figure: Any) -> str:
    """Where every curve begins and ends."""
    x, y = (axis.title.text or "" for axis in (figure.layout.xaxis, figure.layout.yaxis))
    return f"Curves of {y} over {x or 'the columns'}: " + _listed([*_ends(figure)])


def _ends(figure: Any) -> Iterator[str]:
    for trace in figure.data:
        known = [(at, value) for at, value in zip(trace.x, trace.y, strict=True) if value is not None]
        if known:
            (first, begin), (last, end) = known[0], known[-1]
            yield f"{trace.name} from {begin:.3g} at {_short(first)} to {end:.3g} at {_short(last)}"


def _cells(trace: Any) -> str:
    rows = zip(trace.y, trace.text, strict=True)
    return "Cells: " + _listed([f"{x}, {y}: {word}" for y, row in rows for x, word in zip(trace.x, row, strict=True)])


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, int | float) else str(value)


def _listed(words: list[str]) -> str:
    more = len(words) - MOST_NAMES
    return "; ".join(words[:MOST_NAMES]) + (f"; and {more} more" if more > 0 else "")
