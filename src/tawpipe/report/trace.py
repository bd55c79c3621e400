"""Timelines of a step in all their forms: words for a terminal, a trace to zoom into, pictures, a page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from tawpipe.report.bars import Bar
from tawpipe.report.chrome import write_chrome_trace
from tawpipe.report.differences import differences
from tawpipe.report.page import timeline_page
from tawpipe.report.picture import draw_timeline
from tawpipe.report.summary import summary

Timelines = list[tuple[str, list[Bar]]]
"""Each with its name: ``predicted``, ``executed``, or ``predicted`` with what was left out of it."""


def write_trace(
    timelines: Timelines, out: Path, *, ranks: Sequence[int], title: str, page: Path | None = None
) -> Iterator[str]:
    """Write trace.json into ``out``, timeline.svg and .png where matplotlib is installed, and a page if asked for.

    Yields:
        Lines that sum the timelines up, compare them if both are whole, and say what was written.
    """
    out.mkdir(parents=True, exist_ok=True)
    words = []
    for name, bars in timelines:
        known = {bar.rank for bar in bars}
        words += [f"{name}:", *summary(bars, [rank for rank in ranks if rank in known])]
    whole = timelines[0][0] in ("predicted", "executed")
    compared = list(differences(timelines[0][1], timelines[1][1])) if len(timelines) > 1 and whole else []
    yield from (*words, *compared)
    write_chrome_trace(timelines, out / "trace.json")
    files = [out / "trace.json", out / "timeline.svg", out / "timeline.png"]
    try:
        for picture in files[1:]:
            draw_timeline(timelines, picture, ranks=ranks, title=title)
    except ImportError:
        files = files[:1]
        yield "no picture: matplotlib is not installed (pip install 'tawpipe[lab]')"
    if page is not None:
        timeline_page(page, timelines, ranks, "\n".join(words), "\n".join(compared), title)
        files.append(page)
    yield f"wrote {', '.join(map(str, files))}; ui.perfetto.dev opens the first"
