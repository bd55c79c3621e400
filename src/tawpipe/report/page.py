"""HTML pages with figures and tables that open without a network.

The plotly script, which draws the figures, is a file of several megabytes. It is written once next to all pages of a
folder.

A page is a list of sections. Each has text, and may have a table and figures. Charts stand side by side if the window
is wide enough. A page follows the reader's light or dark theme. The script page.js draws the figures when all of the
page is laid out: earlier, a figure would get the width that it has before its neighbours exist.
"""

from __future__ import annotations

import html
import importlib.util
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib import resources
from itertools import groupby
from pathlib import Path
from typing import Any

from tawpipe.errors import UserError
from tawpipe.extras import VERSION, install_hint
from tawpipe.report.bars import Bar, first_of_nodes
from tawpipe.report.figures import describe, is_timeline, stacked_bars, timeline_figure
from tawpipe.report.rounds import RoundPart, rounds, waiting

MOST_BARS = 20_000
"""Maximum number of bars of a timeline. Ranks beyond it are left out, so that browsers stay fast."""
MOST_RANKS = 48
"""Maximum number of ranks in a figure."""
LONG = 40
"""Number of characters above which a table cell is wrapped."""
PLOTLY = "plotly.min.js"
"""Name of the script file next to the pages that draws their figures."""
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline' 'self' file:; img-src data: blob:"
"""Content-Security-Policy: the browser refuses all requests of a page to a network."""
OWN_SERVER = "; connect-src 'self'"
"""Addition to ``POLICY``: a page that renews itself may ask the server that it is from."""
SCRIPT = f'<script src="{PLOTLY}"></script>'
"""Tag of a page with figures; it loads the plotly script."""
INDEX = "<!-- index -->"
"""Placeholder for the link to the list of pages, see ``with_index``."""
RENEW = "<!-- renew -->"
"""Placeholder for the seconds after which a served page renews itself, see ``renewing``."""
ZOOM = {"in": "Closer", "out": "Farther", "earlier": "Earlier", "later": "Later", "all": "Whole step"}
"""Buttons of a timeline: value of ``data-zoom`` -> text."""


@dataclass(frozen=True)
class Table:
    """Table of texts. The first column is aligned to the left.

    Args:
        head: titles of the columns.
        rows: cells of each row.
        marked: indices of rows to emphasise.
    """

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    marked: Sequence[int] = ()


@dataclass
class Section:
    """Part of a page.

    Args:
        title: heading.
        text: paragraph below the heading.
        table: table, or None.
        figures: figures of plotly.
        lines: preformatted text, shown unchanged.
        markup: HTML before the figures.
        beside: the section may stand beside neighbouring sections that also have this flag.
    """

    title: str
    text: str = ""
    table: Table | None = None
    figures: list[Any] = field(default_factory=list)
    lines: str = ""
    markup: str = ""
    beside: bool = False


def write_page(path: Path, kind: str, title: str, sections: Iterable[Section], *, subtitle: str = "") -> None:
    """Write a page to ``path``, and the plotly script next to it if the page has figures; see ``page_text``."""
    write_text(path, page_text(kind, title, sections, subtitle=subtitle))


def write_text(path: Path, text: str) -> None:
    """Write the HTML of a page to ``path``, and the plotly script next to it if the page uses the script.

    The folder is created if needed. A script of this size is not written again."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    script, content = path.parent / PLOTLY, plotly_script().encode() if f'src="{PLOTLY}"' in text else b""
    if content and not (script.exists() and script.stat().st_size == len(content)):  # replaces one of another version
        script.write_bytes(content)


def plotly_script() -> str:
    """Return the source of the plotly script."""
    from plotly.offline import get_plotlyjs

    return get_plotlyjs()


def page_text(kind: str, title: str, sections: Iterable[Section], *, subtitle: str = "", changes: bool = False) -> str:
    """Return the HTML of a page.

    Args:
        kind: kind of page in one word: Run, Plan, Trace, Comparison.
        title: heading.
        sections: parts of the page.
        subtitle: line below the heading; empty for none.
        changes: the page may say more when it is made again. It renews itself if it is served, see ``renewing``.
    """
    section_list = list(sections)
    texts = [_section(f"part-{number}", section) for number, section in enumerate(section_list, 1)]
    parts = []
    for name, group in groupby(zip(section_list, texts, strict=True), key=lambda pair: _grid(pair[0])):
        joined = "".join(text for _, text in group)
        parts.append(f'<div class="{name}">{joined}</div>' if name else joined)
    links = "".join(
        f'<li><a href="#part-{n}">{html.escape(section.title)}</a></li>' for n, section in enumerate(section_list, 1)
    )
    contents = (
        f'<nav class="contents" aria-label="On this page"><ul>{links}</ul></nav>' if len(section_list) > 1 else ""
    )
    quiet = f'<p class="quiet">{html.escape(subtitle)}</p>' if subtitle else ""
    drawn = any(section.figures for section in section_list)
    drawer = f" {PLOTLY} beside it draws the figures." if drawn else ""
    code = f"{SCRIPT if drawn else ''}<script>\n{_asset('page.js')}</script>"
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}{OWN_SERVER if changes else ""}">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">{RENEW if changes else ""}'
        f'<title>{html.escape(f"{kind}: {title}")}</title><link rel="icon" href="data:,">'
        f"<style>\n{_asset('page.css')}</style></head><body>"
        f'<a class="skip" href="#main">To the content</a>'
        f'<header><p class="brand"><b>tawpipe</b> <span>{html.escape(kind)}</span>{INDEX}</p>'
        f"<h1>{html.escape(title)}</h1>{quiet}{contents}</header>\n"
        f'<main id="main">{"".join(parts)}</main>\n'
        f"<footer>Made by tawpipe {VERSION}. The page needs no network.{drawer}</footer>\n{code}</body></html>\n"
    )


def with_index(text: str, address: str) -> str:
    """Return the HTML of a page in which the placeholder ``INDEX`` is replaced by a link to ``address``."""
    return text.replace(INDEX, f'<a href="{html.escape(address)}">All pages</a>', 1)


def renewing(text: str, seconds: float) -> str:
    """Return the HTML of a page that renews itself every ``seconds`` if it may change; else ``text``."""
    return text.replace(RENEW, f'<meta name="renew" content="{seconds}">', 1)


def _asset(name: str) -> str:
    """Return the text of the file ``name`` in this package, for example ``page.css``."""
    return (resources.files("tawpipe.report") / name).read_text(encoding="utf-8")


def _grid(section: Section) -> str:
    """Return the CSS class of the grid in which a section stands beside its neighbours; ``""`` for none."""
    return ("charts" if section.figures else "facts") if section.beside else ""


def _section(name: str, section: Section) -> str:
    """Return the HTML of a section, which has the id ``name``."""
    parts = [f'<h2 id="{name}-title">{html.escape(section.title)}</h2>']
    if section.text:
        parts.append(f"<p>{html.escape(section.text)}</p>")
    if section.lines:
        parts.append(f'<pre tabindex="0">{html.escape(section.lines)}</pre>')
    if section.table is not None:
        parts.append(_table(section.table, section.title))
    parts.append(section.markup)
    parts += [_figure(figure, section.title) for figure in section.figures]
    return f'<section id="{name}" aria-labelledby="{name}-title">{"".join(parts)}</section>\n'


def _figure(figure: Any, title: str) -> str:
    """Return the HTML of a figure: legend, zoom buttons, and data to draw with a description in words.

    The place of the drawing has its height already, so that nothing moves when it is drawn.
    """
    place = f'<div class="drawing" style="height:{figure.layout.height}px"></div>'
    drawing = f'{place}<script type="application/json">{figure.to_json()}</script>'  # plotly escapes < and >
    words = html.escape(f"{title}. {describe(figure)}")
    return (
        f'<figure aria-label="{html.escape(title)}">{_legend(figure)}{_zoom(figure)}'
        f'<div role="img" aria-label="{words}">{drawing}</div></figure>'
    )


def check_page(path: str | None, *, makes_folder: bool = False) -> None:
    """Check that a page can be written to ``path``. Nothing is checked if ``path`` is empty.

    Args:
        path: file of the page.
        makes_folder: its folder will be created before the page is written.

    Raises:
        UserError: plotly is not installed, or the file or its folder cannot be used.
    """
    if not path:
        return
    if importlib.util.find_spec("plotly") is None:
        raise UserError("--report", path, f"plotly installed: {install_hint('plan')}")
    if Path(path).is_dir() or not (makes_folder or Path(path).absolute().parent.is_dir()):
        raise UserError("--report", path, "a file in a folder that exists")


def timeline_page(
    timelines: Sequence[tuple[str, Sequence[Bar]]], ranks: Sequence[int], words: str, compared: str, of: str
) -> str:
    """Return the HTML of a page with timelines of one step that readers can zoom into, waiting times, and text.

    Args:
        timelines: name and bars of each timeline.
        ranks: ranks whose lanes are drawn. A timeline without any of them is left out.
        words: lines that describe the timelines.
        compared: lines that compare the timelines; may be empty.
        of: title of the page.
    """
    sections = [
        timeline_section(f"The step, {name}", bars, ranks=shown)
        for name, bars in timelines
        if (shown := [rank for rank in ranks if any(bar.rank == rank for bar in bars)])
    ]
    sections += [section for name, bars in timelines for section in _waiting(name, bars)]
    if compared:
        sections.append(Section("Predicted and executed", lines=compared))
    sections.append(Section("In words", lines=words))
    return page_text("Trace", of, sections)


def _waiting(name: str, bars: Sequence[Bar]) -> Iterator[Section]:
    """Yield a section about the time that every rank computed and waited, by round; nothing for a single rank."""
    all_rounds = rounds(bars)
    ranks = sorted({rank for round_ in all_rounds for rank in round_.shares})
    if len(ranks) < 2:
        return
    shares = {rank: [round_.shares.get(rank, RoundPart()) for round_ in all_rounds] for rank in ranks[:MOST_RANKS]}
    parts = {
        f"round {number}, computed": [shares[rank][number].computed for rank in shares]
        for number in range(len(all_rounds))
    }
    parts["waited"] = [sum(share.waited for share in shares[rank]) for rank in shares]
    figure = stacked_bars([f"rank {rank}" for rank in shares], parts, unit="s")
    yield Section(f"Waiting by rank, {name}", next(iter(waiting(bars))), figures=[figure])


def timeline_section(
    title: str, bars: Sequence[Bar], words: str = "", *, ranks: Sequence[int] | None = None
) -> Section:
    """Return a section with a timeline, instructions for zooming, and a note about the ranks shown.

    Ranks are left out after ``MOST_BARS`` bars, but the first one is always shown.

    Args:
        title: heading.
        bars: bars of the step.
        words: further text.
        ranks: ranks to draw; by default the first of every node.
    """
    count = Counter(bar.rank for bar in bars)
    asked = first_of_nodes(bars) if ranks is None else list(ranks)
    chosen, total = [], 0
    for rank in asked:
        total += count[rank]
        if chosen and total > MOST_BARS:
            break
        chosen.append(rank)
    sentences = ["Drag to zoom and double-click to go back, or use the buttons.", words]
    if len(chosen) < len(asked):
        some, all_ = (", ".join(map(str, those)) for those in (chosen, asked))
        sentences.append(f"Only rank {some} of {all_}: more than {MOST_BARS} bars would make a browser slow.")
    elif len(chosen) < len(count) and ranks is None:
        sentences.append("The first rank of every node.")
    return Section(title, " ".join(filter(None, sentences)), figures=[timeline_figure(bars, chosen)])


def _table(table: Table, title: str) -> str:
    """Return the HTML of a table, with ``title`` for screen readers."""

    def row(cells: Sequence[str], tag: str, name: str = "") -> str:
        long = [" class=long" if len(cell) > LONG else "" for cell in cells]
        inside = "".join(f"<{tag}{how}>{html.escape(cell)}</{tag}>" for cell, how in zip(cells, long, strict=True))
        return f"<tr{f' class={name!r}' if name else ''}>{inside}</tr>"

    rows = [row(cells, "td", "chosen" if i in table.marked else "") for i, cells in enumerate(table.rows)]
    head = f"<thead>{row(table.head, 'th')}</thead>" if any(table.head) else ""
    return (
        f'<div class="wide" role="region" tabindex="0" aria-label="{html.escape(title)}, table">'
        f"<table>{head}<tbody>{''.join(rows)}</tbody></table></div>"
    )


def _zoom(figure: Any) -> str:
    """Return the HTML of the buttons that move and zoom a timeline; ``""`` for other figures.

    Buttons are needed because fingers scroll the page, and because not every reader has a mouse."""
    if not is_timeline(figure):
        return ""
    buttons = "".join(f'<button type="button" data-zoom="{way}">{words}</button>' for way, words in ZOOM.items())
    return f'<div class="zoom" role="group" aria-label="Zoom">{buttons}</div>'


def _legend(figure: Any) -> str:
    """Return the HTML of a legend, with a button for each trace that shows or hides it; ``""`` for one trace.

    Plotly's own legend is not used, because on a narrow screen it takes all the space of the figure."""
    if len(figure.data) < 2:
        return ""
    buttons = []
    for number, trace in sorted(enumerate(figure.data), key=lambda numbered: numbered[1].legendrank or 0):
        line = trace.type == "scatter"
        color = (
            trace.marker.line.color
            if line and trace.mode == "markers"
            else (trace.line if line else trace.marker).color
        )
        name = html.escape(trace.name or "")
        buttons.append(
            f'<button type="button" data-trace="{number}" aria-pressed="true" style="--color:{color}">{name}</button>'
        )
    return f'<div class="legend" role="group" aria-label="Shown in the figure">{"".join(buttons)}</div>'
