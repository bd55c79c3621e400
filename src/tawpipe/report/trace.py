"""Timelines of a step in all formats: text for a terminal, a trace for trace viewers, an SVG picture, an HTML page.

Viewers of the trace are chrome://tracing and ui.perfetto.dev.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tawpipe.report.bars import Bar, label
from tawpipe.report.page import timeline_page, write_text
from tawpipe.report.picture import draw_timeline
from tawpipe.report.rounds import waiting
from tawpipe.report.summary import differences, summary
from tawpipe.schedule.actions import Lane

Timelines = list[tuple[str, list[Bar]]]
"""Name and bars of each timeline. The name is ``predicted``, ``executed``, or ``predicted`` with a list of what was
left out."""


def write_trace(
    timelines: Timelines, out: Path, *, ranks: Sequence[int], title: str, page: Path | None = None
) -> Iterator[str]:
    """Write trace.json and timeline.svg into ``out``, and an HTML page if ``page`` is set; yield lines of text.

    The files are written while the lines are read.

    Args:
        timelines: name and bars of each timeline.
        out: folder for the files; it is created if needed.
        ranks: ranks to describe and draw.
        title: title of the picture and the page.
        page: file of the HTML page, or None.

    Yields:
        Lines that summarise the timelines, compare them if both are complete, and name the files.
    """
    out.mkdir(parents=True, exist_ok=True)
    words, compared = in_words(timelines, ranks)
    yield from (*words, *compared)
    write_chrome_trace(timelines, out / "trace.json")
    draw_timeline(timelines, out / "timeline.svg", ranks=ranks, title=title)
    files = [out / "trace.json", out / "timeline.svg"]
    if page is not None:
        write_text(page, trace_page(timelines, ranks=ranks, title=title))
        files.append(page)
    yield f"wrote {', '.join(map(str, files))}; ui.perfetto.dev opens the first"


def trace_page(timelines: Timelines, *, ranks: Sequence[int], title: str) -> str:
    """Return the HTML of a page with the timelines and the text about them."""
    words, compared = in_words(timelines, ranks)
    return timeline_page(timelines, ranks, "\n".join(words), "\n".join(compared), title)


def in_words(timelines: Timelines, ranks: Sequence[int]) -> tuple[list[str], list[str]]:
    """Return two lists of lines: a summary of every timeline, and a comparison of the first two.

    The second list is empty if there is one timeline, or if actions of the first one were left out."""
    words = []
    for name, bars in timelines:
        known = {bar.rank for bar in bars}
        words += [f"{name}:", *summary(bars, [rank for rank in ranks if rank in known]), *waiting(bars)]
    whole = timelines[0][0] in ("predicted", "executed")
    compared = list(differences(timelines[0][1], timelines[1][1])) if len(timelines) > 1 and whole else []
    return words, compared


def write_chrome_trace(timelines: Sequence[tuple[str, Sequence[Bar]]], path: Path) -> None:
    """Write timelines to ``path`` as JSON in the format of chrome://tracing.

    Ranks are processes, lanes are threads, and actions are slices. Waiting before an action is a slice of its own.

    Args:
        timelines: name and bars of each timeline. If there are several, the name precedes the names of the ranks.
        path: file to write.
    """
    events: list[dict[str, Any]] = []
    offset = 0
    for name, bars in timelines:
        events += chrome_events(bars, title=name if len(timelines) > 1 else "", offset=offset)
        offset += 1 + max((bar.rank for bar in bars), default=0)
    path.write_text(json.dumps({"traceEvents": events}), encoding="utf-8")


def chrome_events(bars: Iterable[Bar], *, title: str = "", offset: int = 0) -> Iterable[dict[str, Any]]:
    """Yield trace events in the format of chrome://tracing: names of ranks and lanes, waiting times, and actions.

    Args:
        bars: bars of a step.
        title: prefix of the names of ranks.
        offset: number added to the ranks, so that several timelines fit in one file.
    """
    lanes = list(Lane)
    seen: set[int] = set()
    for bar in bars:
        process, thread = bar.rank + offset, lanes.index(bar.action.lane)
        if process not in seen:
            seen.add(process)
            name = f"{title} rank {bar.rank} (node {bar.node})".strip()
            yield {"ph": "M", "name": "process_name", "pid": process, "args": {"name": name}}
            yield {"ph": "M", "name": "process_sort_index", "pid": process, "args": {"sort_index": process}}
            for number, lane in enumerate(lanes):
                arguments = {"name": lane.value}
                yield {"ph": "M", "name": "thread_name", "pid": process, "tid": number, "args": arguments}
        common = {"ph": "X", "pid": process, "tid": thread}
        if bar.begin > bar.start:
            yield common | {"name": "wait", "ts": bar.start * 1e6, "dur": (bar.begin - bar.start) * 1e6}
        yield common | {
            "name": label(bar),
            "cat": bar.action.op.value,
            "ts": bar.begin * 1e6,
            "dur": (bar.end - bar.begin) * 1e6,
            "args": {"action": str(bar.action)},
        }
