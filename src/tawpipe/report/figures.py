"""Figures for HTML pages: bars, curves, and lanes over time. plotly is imported when the first figure is made.

Figures have no legend; the page adds one next to them, see page.py. ``describe`` puts the content of a figure into
words, for readers who cannot see it.
"""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, cycle
from typing import Any

from tawpipe.report.bars import KINDS, Bar, kind_of, label, lanes_of
from tawpipe.schedule.buffers import OUTSIDE, Kind
from tawpipe.simulate import Timeline

PALETTE = (
    *("#2a6fdb", "#e4572e", "#2e933c", "#7a5195", "#a8820a", "#3d8b8b", "#75829a"),
    *("#b5543c", "#5b8c5a", "#a05195", "#d81b8c", "#1b9bd8", "#6b4423", "#3b3f8f"),
)
LIMIT = "#c0392b"
LABEL = 28
"""Maximum number of characters of a line in the label of a bar."""
MOST_NAMES = 16
"""Maximum number of bars or curves whose values are listed in a description."""


def _figure(height: int, **layout: Any) -> Any:
    """Return an empty plotly figure with the layout that all figures have.

    Args:
        height: height in pixels.
        **layout: further layout settings of plotly.
    """
    from plotly import graph_objects

    figure = graph_objects.Figure()
    figure.update_layout(
        height=height,
        margin={"l": 10, "r": 10, "t": 10, "b": 40},
        showlegend=False,
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        font={"family": "system-ui, sans-serif"},
        **layout,
    )
    figure.update_xaxes(automargin=True, gridcolor="#d8dde5")
    figure.update_yaxes(automargin=True, gridcolor="#d8dde5")
    return figure


def stacked_bars(
    names: Sequence[str],
    parts: Mapping[str, Sequence[float]],
    *,
    unit: str,
    limit: float | None = None,
    marks: Sequence[float] = (),
    marks_name: str = "",
    side_by_side: bool = False,
    chosen: str | None = None,
) -> Any:
    """Return a plotly figure with a horizontal bar for every name, divided into parts.

    Args:
        names: names of the bars.
        parts: name of a part -> its size in every bar.
        unit: unit of the sizes.
        limit: draw a line across all bars at this value; None or 0 for no line.
        marks: value to mark on every bar; empty for no marks.
        marks_name: name of the marks.
        side_by_side: draw the parts as separate bars.
        chosen: name of the bar to emphasise.
    """
    labels = [textwrap.wrap(name, LABEL, break_long_words=False) for name in names]
    height = sum(max(30, 14 + 14 * len(label)) for label in labels)
    figure = _figure(80 + height, barmode="group" if side_by_side else "stack", xaxis_title=unit)
    for color, (part, values) in zip(cycle(PALETTE), parts.items(), strict=False):
        figure.add_bar(
            y=list(names),
            x=list(values),
            name=part,
            orientation="h",
            marker_color=color,
            hovertemplate=f"%{{y}}<br>{part}: %{{x:.4g}} {unit}<extra></extra>",
        )
    if limit:
        figure.add_vline(x=limit, line_dash="dash", line_color=LIMIT, annotation_text="limit")
    if marks:
        figure.add_scatter(
            y=list(names),
            x=list(marks),
            name=marks_name,
            mode="markers",
            marker={"symbol": "line-ns", "size": 18, "line": {"width": 3, "color": "#333333"}},
            hovertemplate=f"%{{y}}<br>{marks_name}: %{{x:.4g}} {unit}<extra></extra>",
        )
    words = ["<br>".join(label) for label in labels]
    words = [f"<b>{word}</b>" if name == chosen else word for name, word in zip(names, words, strict=True)]
    ticks = {"tickvals": list(names), "ticktext": words}
    figure.update_yaxes(autorange="reversed", **ticks)
    return figure


def lines(
    x: Sequence[float] | Sequence[str],
    series: Mapping[str, Sequence[float | None]],
    *,
    x_title: str,
    y_title: str,
    log: bool = True,
    ends: Mapping[str, tuple[float, str]] | None = None,
    limit: float = 0.0,
    chosen: str | None = None,
) -> Any:
    """Return a plotly figure with curves over a common axis.

    At the pointer, the values of all curves are shown, also of equal ones.

    Args:
        x: values of the axis.
        series: name of a curve -> its values; None where it has none.
        x_title: title of the horizontal axis.
        y_title: title of the vertical axis.
        log: use logarithmic axes.
        ends: name of a curve -> (last value to mark, reason for its end).
        limit: draw a line across all curves at this value; 0 for no line.
        chosen: name of the curve to draw on top. The other curves are wider and pale, so that one with equal values
            stays visible at the sides.
    """
    figure = _figure(380, xaxis_title=x_title, yaxis_title=y_title, hovermode="x unified")
    colored = list(zip(PALETTE * 2, series.items(), strict=False))
    for color, (name, values) in sorted(colored, key=lambda curve: curve[1][0] == chosen):  # the last one is on top
        below = chosen is not None and name != chosen
        figure.add_scatter(
            x=list(x),
            y=list(values),
            name=name,
            mode="lines+markers",
            line={"color": color, "width": 6 if below else 2.5},
            opacity=0.5 if below else 1,
            legendrank=1000 if below else 1,
            hovertemplate=f"{name}: %{{y:.4g}}<extra></extra>",
        )
    if limit:
        figure.add_scatter(
            x=[min(x), max(x)],
            y=[limit, limit],
            name="limit",
            mode="lines",
            line={"color": LIMIT, "dash": "dash"},
            hovertemplate="limit: %{y:.4g}<extra></extra>",
        )
    if ends:
        last = {name: max(at for at, value in zip(x, series[name], strict=True) if value is not None) for name in ends}
        figure.add_scatter(
            x=[last[name] for name in ends],
            y=[value for value, _ in ends.values()],
            name="where a row ends",
            mode="markers",
            marker={"symbol": "x-thin", "size": 12, "line": {"width": 3, "color": LIMIT}},
            customdata=[f"{name}: {why}" for name, (_, why) in ends.items()],
            hovertemplate="%{customdata}: %{y:.4g}<extra></extra>",
            legendrank=1001,
        )
    if log:
        figure.update_xaxes(type="log")
        figure.update_yaxes(type="log")
    return figure


def heat_map(
    x: Sequence[str],
    y: Sequence[str],
    shares: Sequence[Sequence[float]],
    words: Sequence[Sequence[str]],
    *,
    x_title: str,
    y_title: str,
) -> Any:
    """Return a plotly figure with coloured cells over two axes. The first row is at the top.

    Args:
        x: names of the columns.
        y: names of the rows.
        shares: for each row, a number from 0 (bad) to 1 (good) for every cell.
        words: for each row, the text of every cell.
        x_title: title of the horizontal axis.
        y_title: title of the vertical axis.
    """
    figure = _figure(110 + 56 * len(y), xaxis_title=x_title, yaxis_title=y_title)
    figure.add_heatmap(
        x=list(x),
        y=list(y),
        z=[list(row) for row in shares],
        text=[list(row) for row in words],
        texttemplate="%{text}",
        textfont={"color": "#1c2330"},
        hovertemplate=f"{x_title}: %{{x}}<br>{y_title}: %{{y}}<br>%{{text}}<extra></extra>",
        zmin=0,
        zmax=1,
        colorscale=[[0, "#f0a58f"], [0.5, "#f4e3a1"], [1, "#8ecb92"]],
        showscale=False,
        xgap=2,
        ygap=2,
    )
    figure.update_xaxes(type="category", showgrid=False)
    figure.update_yaxes(type="category", showgrid=False, autorange="reversed")
    return figure


def is_timeline(figure: Any) -> bool:
    """Return True if ``figure`` was made by ``timeline_figure``."""
    return figure.layout.barmode == "overlay"


def timeline_figure(bars: Sequence[Bar], chosen: Sequence[int]) -> Any:
    """Return a plotly figure with a row for every lane of some ranks, and a bar for every action, over seconds.

    Readers can zoom into it.

    Args:
        bars: bars of a step.
        chosen: ranks to draw.
    """
    rank_bars = [bar for bar in bars if bar.rank in chosen]
    rows = lanes_of(rank_bars, chosen)
    names = {row: f"rank {row[0]} {row[1]}" for row in rows}
    figure = _figure(70 + 24 * len(rows), barmode="overlay", xaxis_title="seconds", bargap=0.15)
    for kind, color in KINDS.items():
        some = [bar for bar in rank_bars if kind_of(bar) == kind]
        if some:
            figure.add_bar(
                y=[names[bar.rank, bar.action.lane] for bar in some],
                x=[bar.end - bar.begin for bar in some],
                base=[bar.begin for bar in some],
                orientation="h",
                name=kind,
                marker={"color": color, "line": {"width": 0}},
                customdata=[[label(bar), bar.begin, bar.end, bar.begin - bar.start] for bar in some],
                hovertemplate="%{customdata[0]}<br>%{customdata[1]:.4f} to %{customdata[2]:.4f} s, "
                "waited %{customdata[3]:.4f} s<extra></extra>",
            )
    figure.update_yaxes(categoryorder="array", categoryarray=[names[row] for row in rows][::-1], dtick=1)
    return figure


def memory_figure(name: str, timeline: Timeline, rank: int, activation_bytes: Mapping[Kind, int], fixed: int) -> Any:
    """Return a plotly figure with a curve of the memory in GiB that a rank holds during a simulated step.

    An activation is held from the beginning of the action that makes it to the end of the action that frees it.

    Args:
        name: name of the curve.
        timeline: simulation of the step.
        rank: the rank.
        activation_bytes: bytes of one activation of every kind, see ``peak_activations``. Activations in CPU memory do
            not count.
        fixed: bytes that are held all the time: homes, buffers, and memory with which a block computes.
    """
    spans = list(timeline.spans(rank, step=timeline.steady_step))
    zero = min((span.begin for span in spans), default=0.0)
    changes: Counter[float] = Counter()
    for span in spans:
        new = [buffer for buffer in span.action.writes if buffer not in span.action.reads]
        for buffers, when, sign in ((new, span.begin, 1), (span.action.frees, span.end, -1)):
            size = sum(activation_bytes.get(buffer.kind, 0) for buffer in buffers if buffer.kind not in OUTSIDE)
            if size:
                changes[when - zero] += sign * size
    seconds = sorted({0.0, *changes})
    held = [size / 2**30 for size in accumulate((changes[when] for when in seconds[1:]), initial=fixed + changes[0.0])]
    figure = _figure(320, xaxis_title="seconds", yaxis_title="GiB")
    figure.add_scatter(x=seconds, y=held, name=name, mode="lines", line={"color": PALETTE[0], "shape": "hv"})
    figure.update_yaxes(rangemode="tozero")
    return figure


def describe(figure: Any) -> str:
    """Return text with the values that a figure of this module shows, for readers who cannot see it."""
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
    """Return text with the value of every part of every bar."""
    unit = figure.layout.xaxis.title.text or ""
    bars: dict[str, list[str]] = {}
    for trace in figure.data:
        for name, value in zip(trace.y, trace.x, strict=True):
            if value is not None:
                bars.setdefault(name, []).append(f"{trace.name} {value:.3g}")
    return f"Bars, in {unit or 'parts of one'}: " + _listed([f"{name}: {', '.join(bar)}" for name, bar in bars.items()])


def _lanes(figure: Any) -> str:
    """Return text with the length, the kinds of actions and the lanes of a timeline."""
    lanes = list(dict.fromkeys(name for trace in figure.data for name in trace.y))
    ends = (begin + width for trace in figure.data for begin, width in zip(trace.base, trace.x, strict=True))
    kinds = ", ".join(trace.name for trace in figure.data)
    return f"Timeline of {max(ends, default=0.0):.3g} seconds with bars for {kinds}, in the lanes {_listed(lanes)}"


def _curves(figure: Any) -> str:
    """Return text with the first and the last value of every curve."""
    x, y = (axis.title.text or "" for axis in (figure.layout.xaxis, figure.layout.yaxis))
    return f"Curves of {y} over {x or 'the columns'}: " + _listed([*_ends(figure)])


def _ends(figure: Any) -> Iterator[str]:
    """Yield a text with the first and last value of every curve."""
    for trace in figure.data:
        known = [(at, value) for at, value in zip(trace.x, trace.y, strict=True) if value is not None]
        if known:
            (first, begin), (last, end) = known[0], known[-1]
            yield f"{trace.name} from {begin:.3g} at {_short(first)} to {end:.3g} at {_short(last)}"


def _cells(trace: Any) -> str:
    """Return text with the words in every cell of a heat map."""
    rows = zip(trace.y, trace.text, strict=True)
    return "Cells: " + _listed([f"{x}, {y}: {word}" for y, row in rows for x, word in zip(trace.x, row, strict=True)])


def _short(value: object) -> str:
    """Format a number with four digits; convert other values to text."""
    return f"{value:.4g}" if isinstance(value, int | float) else str(value)


def _listed(words: list[str]) -> str:
    """Join texts with semicolons. After ``MOST_NAMES`` texts, only the number of further ones is added."""
    more = len(words) - MOST_NAMES
    return "; ".join(words[:MOST_NAMES]) + (f"; and {more} more" if more > 0 else "")
