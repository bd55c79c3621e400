"""One HTML page with figures and tables, which opens without a network. Imports errors and report; plotly when
it is written.

A page is a list of sections; each has words, perhaps a table, and figures. It follows the reader's light or dark theme
and the width of the window.
"""

from __future__ import annotations

import html
import importlib.util
import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tawpipe.errors import UserError
from tawpipe.report.bars import Bar, first_of_nodes
from tawpipe.report.chrome import label
from tawpipe.report.picture import KINDS, kind_of
from tawpipe.schedule.actions import Lane

PALETTE = ("#2a6fdb", "#e4572e", "#2e933c", "#7a5195", "#c9a227", "#4c9f9f", "#8d99ae", "#b5543c", "#5b8c5a", "#a05195")
MOST_BARS = 20_000
"""A timeline with more is cut to its first ranks: a browser should stay quick."""
LONG = 40
"""Characters of a cell, beyond which it is wrapped."""
LABEL = 28
"""Characters of a line in the label of a bar."""

STYLE = """
:root { color-scheme: light dark; --text: #1c2330; --quiet: #5c6675; --line: #d8dde5; --back: #ffffff;
  --soft: #f4f6f9; }
@media (prefers-color-scheme: dark) {
  :root { --text: #e4e8ee; --quiet: #9aa5b4; --line: #343c49; --back: #14181f; --soft: #1c222c; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem 1rem 4rem; max-width: 1180px; background: var(--back); color: var(--text);
  font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.6rem; margin: 0 0 .3rem; } h2 { font-size: 1.15rem; margin: 2.2rem 0 .4rem; }
p { margin: .3rem 0 .8rem; max-width: 75ch; } .quiet { color: var(--quiet); }
pre { overflow-x: auto; background: var(--soft); padding: .7rem .9rem; font-size: .82rem; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .9rem; }
th, td { padding: .3rem .7rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th:first-child, td:first-child, td:last-child { text-align: left; } th { color: var(--quiet); font-weight: 600; }
td:first-child { white-space: normal; min-width: 9rem; } td.long { white-space: normal; min-width: 18rem; }
tr.chosen td { background: var(--soft); font-weight: 600; }
.figure { margin: .6rem 0 1rem; min-height: 10rem; }
.legend { display: flex; flex-wrap: wrap; gap: .2rem 1.1rem; font-size: .85rem; margin: .6rem 0 -.4rem; }
.legend button { all: unset; cursor: pointer; display: flex; align-items: center; gap: .4rem; }
.legend button::before { content: ""; width: .8rem; height: .8rem; background: var(--color); border-radius: 2px; }
.legend button:focus-visible { outline: 2px solid var(--color); outline-offset: 2px; }
.legend button[aria-pressed=false] { opacity: .4; }
"""
SCRIPT = """
function paint() {
  const dark = matchMedia('(prefers-color-scheme: dark)').matches;
  const text = dark ? '#e4e8ee' : '#1c2330', line = dark ? '#343c49' : '#d8dde5';
  for (const one of document.querySelectorAll('.js-plotly-plot')) {
    const change = {'font.color': text, 'paper_bgcolor': 'rgba(0,0,0,0)', 'plot_bgcolor': 'rgba(0,0,0,0)'};
    for (const axis of Object.keys(one.layout)) {
      if (/^[xy]axis/.test(axis)) { change[axis + '.gridcolor'] = line; change[axis + '.zerolinecolor'] = line; }
    }
    Plotly.relayout(one, change);
  }
}
function toggle(button) {
  const shown = button.getAttribute('aria-pressed') === 'false';
  button.setAttribute('aria-pressed', shown);
  const plot = button.closest('.figure').querySelector('.js-plotly-plot');
  Plotly.restyle(plot, {visible: shown}, [Number(button.dataset.trace)]);
}
for (const one of document.querySelectorAll('.legend button')) {
  one.addEventListener('click', () => toggle(one));
}
window.addEventListener('load', paint);
matchMedia('(prefers-color-scheme: dark)').addEventListener('change', paint);
"""


@dataclass(frozen=True)
class Table:
    """Rows of text; the first column is on the left.

    Args:
        marked: numbers of rows that stand out.
    """

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    marked: Sequence[int] = ()


@dataclass
class Section:
    """A part of a page.

    Args:
        lines: text that is shown as it is.
        figures: of plotly.
    """

    title: str
    text: str = ""
    table: Table | None = None
    figures: list[Any] = field(default_factory=list)
    lines: str = ""


def write_page(path: Path, title: str, sections: Iterable[Section], *, subtitle: str = "") -> None:
    """Write the page."""
    parts = [f"<h1>{html.escape(title)}</h1>", f'<p class="quiet">{html.escape(subtitle)}</p>' if subtitle else ""]
    library = True
    for section in sections:
        parts.append(f"<h2>{html.escape(section.title)}</h2>")
        if section.text:
            parts.append(f"<p>{html.escape(section.text)}</p>")
        if section.lines:
            parts.append(f"<pre>{html.escape(section.lines)}</pre>")
        if section.table is not None:
            parts.append(_table(section.table))
        for figure in section.figures:
            made = figure.to_html(
                full_html=False, include_plotlyjs=library, config={"displayModeBar": False, "responsive": True}
            )
            parts.append(f'<div class="figure">{_legend(figure)}{made}</div>')
            library = False
    head = (
        f'<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{STYLE}</style>"
    )
    body = "\n".join(filter(None, parts))
    page = f'<!doctype html><html lang="en"><head>{head}</head><body>{body}<script>{SCRIPT}</script></body></html>'
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page, encoding="utf-8")


def check_page(path: str | None, *, makes_folder: bool = False) -> None:
    """Whether a page can be written there.

    Args:
        makes_folder: whether its folder is made before it is written.

    Raises:
        UserError: it cannot.
    """
    if not path:
        return
    if importlib.util.find_spec("plotly") is None:
        raise UserError("--report", path, "plotly installed: pip install 'tawpipe[plan]'")
    if Path(path).is_dir() or not (makes_folder or Path(path).absolute().parent.is_dir()):
        raise UserError("--report", path, "a file in a folder that exists")


def timeline_page(
    path: Path, timelines: Sequence[tuple[str, Sequence[Bar]]], ranks: Sequence[int], words: str, compared: str, of: str
) -> None:
    """A page with timelines of one step, each to zoom into.

    Args:
        ranks: whose lanes are drawn.
        words: what is said about them, in lines.
        compared: how they differ, in lines; may be empty.
        of: what they are of.
    """
    sections = [
        timeline_section(f"The step, {name}", bars, ranks=own)
        for name, bars in timelines
        if (own := [rank for rank in ranks if any(bar.rank == rank for bar in bars)])
    ]
    if compared:
        sections.append(Section("Predicted and executed", lines=compared))
    sections.append(Section("In words", lines=words))
    write_page(path, "Timeline", sections, subtitle=of)


def _table(table: Table) -> str:
    def row(cells: Sequence[str], tag: str, name: str = "") -> str:
        long = [" class=long" if len(cell) > LONG else "" for cell in cells]
        inside = "".join(f"<{tag}{how}>{html.escape(cell)}</{tag}>" for cell, how in zip(cells, long, strict=True))
        return f"<tr{f' class={name!r}' if name else ''}>{inside}</tr>"

    rows = [row(cells, "td", "chosen" if i in table.marked else "") for i, cells in enumerate(table.rows)]
    return (
        f'<div class="wide"><table><thead>{row(table.head, "th")}</thead><tbody>{"".join(rows)}</tbody></table></div>'
    )


def _legend(figure: Any) -> str:
    """Names and colours of a figure's traces, each a switch. Plotly's own takes its room from the figure, which leaves
    nothing of it on a narrow screen.
    """
    if len(figure.data) < 2:
        return ""
    buttons = []
    for number, trace in enumerate(figure.data):
        line = trace.type == "scatter"
        color = (
            trace.marker.line.color
            if line and trace.mode == "markers"
            else (trace.line if line else trace.marker).color
        )
        name = html.escape(trace.name or "")
        buttons.append(f'<button data-trace="{number}" aria-pressed="true" style="--color:{color}">{name}</button>')
    return f'<div class="legend">{"".join(buttons)}</div>'


# figures


def _figure(height: int, **layout: Any) -> Any:
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
) -> Any:
    """Horizontal bars, one for every name, cut in parts.

    Args:
        parts: name of a part -> its size for every bar.
        limit: a line across all bars.
        marks: one on every bar, and what they are called.
    """
    labels = [textwrap.wrap(name, LABEL, break_long_words=False) for name in names]
    height = sum(max(30, 14 + 14 * len(label)) for label in labels)
    figure = _figure(80 + height, barmode="stack", xaxis_title=unit)
    for color, (part, values) in zip(PALETTE, parts.items(), strict=False):
        figure.add_bar(
            y=list(names),
            x=list(values),
            name=part,
            orientation="h",
            marker_color=color,
            hovertemplate=f"%{{y}}<br>{part}: %{{x:.4g}} {unit}<extra></extra>",
        )
    if limit:
        figure.add_vline(x=limit, line_dash="dash", line_color="#c0392b", annotation_text="limit")
    if marks:
        figure.add_scatter(
            y=list(names),
            x=list(marks),
            name=marks_name,
            mode="markers",
            marker={"symbol": "line-ns", "size": 18, "line": {"width": 2, "color": "#888"}},
            hovertemplate=f"%{{y}}<br>{marks_name}: %{{x:.4g}} {unit}<extra></extra>",
        )
    ticks = {"tickvals": list(names), "ticktext": ["<br>".join(label) for label in labels]}
    figure.update_yaxes(autorange="reversed", **ticks)
    return figure


def lines(
    x: Sequence[float] | Sequence[str],
    series: Mapping[str, Sequence[float | None]],
    *,
    x_title: str,
    y_title: str,
    log: bool = True,
) -> Any:
    """Curves over a common axis."""
    figure = _figure(380, xaxis_title=x_title, yaxis_title=y_title)
    for color, (name, values) in zip(PALETTE * 2, series.items(), strict=False):
        figure.add_scatter(
            x=list(x),
            y=list(values),
            name=name,
            mode="lines+markers",
            line={"color": color},
            hovertemplate=f"{name}<br>%{{x}}: %{{y:.4g}}<extra></extra>",
        )
    if log:
        figure.update_xaxes(type="log")
        figure.update_yaxes(type="log")
    return figure


def timeline_section(
    title: str, bars: Sequence[Bar], words: str = "", *, ranks: Sequence[int] | None = None
) -> Section:
    """A timeline with words for its reader: how to move in it, and whose lanes it shows.

    Args:
        words: further ones.
        ranks: that are asked for; by default the first of every node.
    """
    count = Counter(bar.rank for bar in bars)
    asked = first_of_nodes(bars) if ranks is None else list(ranks)
    chosen, total = [], 0
    for rank in asked:
        total += count[rank]
        if chosen and total > MOST_BARS:
            break
        chosen.append(rank)
    said = ["Drag to zoom, double click to go back.", words]
    if len(chosen) < len(asked):
        some, all_ = (", ".join(map(str, those)) for those in (chosen, asked))
        said.append(f"Only rank {some} of {all_}: more than {MOST_BARS} bars would make a browser slow.")
    elif len(chosen) < len(count) and ranks is None:
        said.append("The first rank of every node: the others of a node do alike.")
    return Section(title, " ".join(filter(None, said)), figures=[timeline_figure(bars, chosen)])


def timeline_figure(bars: Sequence[Bar], chosen: Sequence[int]) -> Any:
    """Lanes of some ranks over seconds, to zoom into; the same colours as in pictures."""
    mine = [bar for bar in bars if bar.rank in chosen]
    rows = [
        (rank, lane) for rank in chosen for lane in Lane if any(b.rank == rank and b.action.lane is lane for b in mine)
    ]
    names = {row: f"rank {row[0]} {row[1]}" for row in rows}
    figure = _figure(70 + 24 * len(rows), barmode="overlay", xaxis_title="seconds", bargap=0.15)
    for kind, color in KINDS.items():
        some = [bar for bar in mine if kind_of(bar) == kind]
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


def memory_figure(steps: Mapping[str, tuple[Sequence[float], Sequence[float]]]) -> Any:
    """Memory over the time of a step: name -> (seconds, GiB), as stairs."""
    figure = _figure(320, xaxis_title="seconds", yaxis_title="GiB")
    for color, (name, (x, y)) in zip(PALETTE, steps.items(), strict=False):
        figure.add_scatter(x=list(x), y=list(y), name=name, mode="lines", line={"color": color, "shape": "hv"})
    figure.update_yaxes(rangemode="tozero")
    return figure
