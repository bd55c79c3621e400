"""HTML page of a comparison."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tawpipe.report.bars import executed_bars
from tawpipe.report.figures import lines, stacked_bars
from tawpipe.report.page import Section, Table, page_text, timeline_section
from tawpipe_lab.table import cells_of, describe, order_of, table_of, title


def compare_page(
    name: str, environment: dict[str, Any], rows: list[dict[str, Any]], recordings: Path | None = None
) -> str:
    """Return the HTML page of a comparison: per cell a table and figures of seconds, bytes and memory, then timelines.

    Args:
        name: name of the suite.
        environment: date, command and machine of the run, as in ``results.json``.
        rows: rows of ``results.json``.
        recordings: folder with one subfolder per recorded step, each drawn as a timeline; None for no timelines.
    """
    sections = [*_overview(rows)]
    for some in cells_of(rows).values():
        sections += _cell(sorted(some, key=order_of))
    if recordings is not None:
        for folder in sorted(entry for entry in recordings.iterdir() if entry.is_dir()):
            sections.append(timeline_section(f"A step: {folder.name}", executed_bars(folder)))
    subtitle = f"{environment['date']}, {environment['command']}, {environment['machine']}"
    return page_text("Comparison", name, sections, subtitle=subtitle)


def _overview(rows: Sequence[dict[str, Any]]) -> Iterator[Section]:
    """Yield one section over all cells if there are several: share of the physical bound per strategy.

    The share is the physical bound divided by the median seconds per step; 1 is the best possible.
    """
    cells = list(cells_of(rows))
    if len(cells) < 2:
        return
    labels = list(dict.fromkeys(row["label"] for row in rows))
    known = {(row["cell"]["name"], row["label"]): row for row in rows if "seconds_per_step" in row}

    def share(cell: str, label: str) -> float | None:
        row = known.get((cell, label))
        return None if row is None else row["physical_bound_s"] / row["seconds_per_step"]["median"]

    series = {label: [share(cell, label) for cell in cells] for label in labels}
    figure = lines(cells, series, x_title="", y_title="share of the physical bound", log=False)
    yield Section("All cells", "1 is what computing and links allow.", figures=[figure])


def _cell(rows: list[dict[str, Any]]) -> Iterator[Section]:
    """Yield the section of one cell: its table, and figures of seconds, bytes and peak memory.

    Without any row that has measurements, the section holds the table only.

    Args:
        rows: rows of the cell in the order of the table.
    """
    good = [row for row in rows if "seconds_per_step" in row]
    table = Table(*table_of(rows), marked=[0] if good and good[0] is rows[0] else [])
    heading = title(rows[0]["cell"])
    if not good:
        yield Section(heading, describe(rows[0]), table)
        return
    names = [row["label"] for row in good]
    medians = [row["seconds_per_step"]["median"] for row in good]
    waits = [min(row["exposed_communication_s"] or 0.0, median) for row, median in zip(good, medians, strict=True)]
    parts = {"computing": [median - wait for median, wait in zip(medians, waits, strict=True)], "not computing": waits}
    bounds = [row["physical_bound_s"] for row in good]
    figures = [stacked_bars(names, parts, unit="s per step", marks=bounds, marks_name="physical bound")]
    moved = {"sent by the busiest node": [max(row["link_bytes_sent"]) / 1e6 for row in good]}
    if any(moved["sent by the busiest node"]):
        figures.append(stacked_bars(names, moved, unit="MB per step"))
    held = [row for row in good if row["peak_gib"] is not None]
    if held:
        memory = {"peak": [row["peak_gib"] for row in held]}
        figures.append(stacked_bars([row["label"] for row in held], memory, unit="GiB per process"))
    yield Section(heading, describe(rows[0]), table, figures=figures)
