"""Timelines of a step in all their forms: words for a terminal, a trace for chrome://tracing and ui.perfetto.dev,
pictures, a page.
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
"""Each with its name: ``predicted``, ``executed``, or ``predicted`` with what was left out of it."""


def write_trace(
    timelines: Timelines, out: Path, *, ranks: Sequence[int], title: str, page: Path | None = None
) -> Iterator[str]:
    """Write trace.json and timeline.svg into ``out``, and a page if asked for.

    Yields:
        Lines that sum the timelines up, compare them if both are whole, and say what was written.
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
    """The HTML of timelines with what is said about them."""
    words, compared = in_words(timelines, ranks)
    return timeline_page(timelines, ranks, "\n".join(words), "\n".join(compared), title)


def in_words(timelines: Timelines, ranks: Sequence[int]) -> tuple[list[str], list[str]]:
    """Lines that sum the timelines up, and lines that compare them, if both are whole."""
    words = []
    for name, bars in timelines:
        known = {bar.rank for bar in bars}
        words += [f"{name}:", *summary(bars, [rank for rank in ranks if rank in known]), *waiting(bars)]
    whole = timelines[0][0] in ("predicted", "executed")
    compared = list(differences(timelines[0][1], timelines[1][1])) if len(timelines) > 1 and whole else []
    return words, compared


def write_chrome_trace(timelines: Sequence[tuple[str, Sequence[Bar]]], path: Path) -> None:
    """One process per rank, one thread per lane, one slice per action; waiting is a slice of its own before it.

    Args:
        timelines: each with its name, which stands before those of its ranks if there are several.
    """
    events: list[dict[str, Any]] = []
    offset = 0
    for name, bars in timelines:
        events += chrome_events(bars, title=name if len(timelines) > 1 else "", offset=offset)
        offset += 1 + max((bar.rank for bar in bars), default=0)
    path.write_text(json.dumps({"traceEvents": events}), encoding="utf-8")


def chrome_events(bars: Iterable[Bar], *, title: str = "", offset: int = 0) -> Iterable[dict[str, Any]]:
    """The events; ``offset`` is added to the ranks, so that two timelines fit in one file."""
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
