"""One HTML page with figures and tables, which opens without a network.

A page is a list of sections; each has words, perhaps a table, and figures. It follows the reader's light or dark theme
and the width of the window.
"""

from __future__ import annotations

import html
import importlib.util
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tawpipe.errors import UserError
from tawpipe.report.bars import Bar, first_of_nodes
from tawpipe.report.figures import stacked_bars, timeline_figure
from tawpipe.report.rounds import Share, rounds, waiting

MOST_BARS = 20_000
"""A timeline with more is cut to its first ranks: a browser should stay quick."""
MOST_RANKS = 48
"""Ranks in a figure."""
LONG = 40
"""Characters of a cell, beyond which it is wrapped."""
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
    """Refuse a file that no page can be written to.

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
    sections += [one for name, bars in timelines for one in _waiting(name, bars)]
    if compared:
        sections.append(Section("Predicted and executed", lines=compared))
    sections.append(Section("In words", lines=words))
    write_page(path, "Timeline", sections, subtitle=of)


def _waiting(name: str, bars: Sequence[Bar]) -> Iterator[Section]:
    """What every rank computed and waited, round by round; nothing for one rank alone."""
    found = rounds(bars)
    ranks = sorted({rank for one in found for rank in one.shares})
    if len(ranks) < 2:
        return
    own = {rank: [one.shares.get(rank, Share()) for one in found] for rank in ranks[:MOST_RANKS]}
    parts = {f"round {number}, computed": [own[rank][number].computed for rank in own] for number in range(len(found))}
    parts["waited"] = [sum(share.waited for share in own[rank]) for rank in own]
    figure = stacked_bars([f"rank {rank}" for rank in own], parts, unit="s")
    yield Section(f"Who waits for whom, {name}", next(iter(waiting(bars))), figures=[figure])


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
        said.append("The first rank of every node.")
    return Section(title, " ".join(filter(None, said)), figures=[timeline_figure(bars, chosen)])


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
