"""Timelines for chrome://tracing and ui.perfetto.dev."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tawpipe.report.bars import Bar
from tawpipe.schedule.actions import Lane


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


def label(bar: Bar) -> str:
    """A few words for an action: ``FORWARD b3 m1``, ``all_gather u4``.

    >>> from tawpipe.schedule.actions import Action
    >>> label(Bar(0, 0, Action.parse("COMPUTE FORWARD b3 m1 | W0.0 x.1.3 -> x.1.4"), 0, 0, 1))
    'FORWARD b3 m1'
    """
    action = bar.action
    words = [action.collective or action.op.value]
    if action.transfers:
        words.append(" ".join(f"{'>' if t.send else '<'}{t.peer}:u{t.unit}" for t in action.transfers))
    for letter, number in (("b", action.block), ("m", action.micro_batch), ("u", action.unit)):
        if number >= 0:
            words.append(f"{letter}{number}")
    return " ".join(words)
