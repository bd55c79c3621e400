"""HTML page of the check ``rivals``: a table and bars per model, without a script."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

from tawpipe.report.page import Section, Table, page_text
from tawpipe_lab.versus.forecast import STEPS

WIDTH, LABELS, ROW = 900, 150, 30
"""Pixels: width of the bars' picture, of its labels, and height of a row."""
COLORS = {"ours": "#3b76c4", "fsdp2": "#b5793a", "file": "#6b8f4e"}
HEAD = (
    "row,s per step,spread,predicted s,of the limit,MB per step,predicted MB,GiB,predicted GiB,recompute,rows at once"
)


def rivals_page(setting: dict[str, Any], check: dict[str, Any]) -> str:
    """Return the HTML page from the setting and the row of this check in the JSON file."""
    numbers = check["numbers"]
    links = {f"link {name}": f"{link['gbit_s']:.3g} Gbit/s" for name, link in numbers.get("links", {}).items()}
    facts = Table(("what", "value"), [*(links | setting["versions"] | setting["nccl"]).items()])
    sections = [Section("Result", f"{check['status']}: {check['note']}.", facts)]
    for name, model in numbers.get("models", {}).items():
        of_model = [row for row in numbers["rows"] if row["model"] == name]
        sections.append(_model(name, model, sorted(of_model, key=lambda row: row.get("median", float("inf")))))
    if left_out := numbers.get("left_out"):
        sections.append(Section("Left out", "", Table(("row", "reason"), list(left_out.items()))))
    subtitle = f"{setting['date']}, {setting['device']}"
    return page_text("Rivals", f"Rivals on {setting['processes']}", sections, subtitle=subtitle)


def _model(name: str, facts: dict[str, Any], of_model: Sequence[dict[str, Any]]) -> Section:
    """Return the section of one model."""
    warm, timed, passes = STEPS[name]
    words = (
        f"Llama of {facts['parameters'] / 1e6:,.1f} M parameters, {facts['layers']} layers of width {facts['hidden']}, "
        f"{facts['tokens']:,} tokens a step in rows of {facts['length']:,}. Median of {passes * timed} timed steps; "
        f"{passes * warm} steps before them. "
        + ("Rows alternate. " if passes == 1 else "Each row is built, timed and freed, then again in reverse order. ")
        + f"The limit (red) is {facts['limit_s']:.3g} s: the longer of a device's computing ({facts['compute_s']:.3g} "
        "s) and the least bytes of all rows at the measured rate. Circles are single steps, dashes are predictions."
    )
    table = Table(HEAD.split(","), [_cells(row, facts["limit_s"]) for row in of_model])
    return Section(f"The {name} model", words, table, markup=_bars(of_model, facts["limit_s"]))


def _cells(row: dict[str, Any], limit_s: float) -> list[str]:
    """Return the table's cells of a row; a cell without a value is a dash."""
    predicted, median, moved = row["predicted"] or {}, row.get("median"), row.get("bytes")
    megabytes = [moved / 1e6 if isinstance(moved, int) else moved, predicted and predicted["bytes"] / 1e6]
    share = limit_s / median if median else None
    values = [median, row.get("spread"), predicted.get("seconds"), share, *megabytes, row.get("gib")]
    values += [predicted.get("gib"), row["recompute"], row["micro_batch"]]
    texts = [f"{value:.3g}" if isinstance(value, int | float) else str(value or "-") for value in values]
    return [row["name"] + (f" (failed: {row['failed']})" if "failed" in row else ""), *texts]


def _bars(of_model: Sequence[dict[str, Any]], limit_s: float) -> str:
    """Return an SVG picture: a bar for every median, circles for single steps, marks for predictions and the limit."""
    measured, parts = [row for row in of_model if "median" in row], list[str]()
    longest = max((max(row["seconds"]) for row in measured), default=0.0)
    at = lambda seconds: LABELS + seconds / max(longest, limit_s) * (WIDTH - LABELS - 20)  # noqa: E731
    for number, row in enumerate(measured):
        y, predicted = ROW * number + 6, (row["predicted"] or {}).get("seconds", 0.0)
        parts.append(f'<text x="0" y="{y + 15}" fill="currentColor">{html.escape(row["name"])}</text>')
        bar = f'x="{LABELS}" y="{y}" width="{at(row["median"]) - LABELS:.1f}"'
        parts.append(f'<rect {bar} height="20" fill="{COLORS[row["side"]]}"/>')
        circle = f'cy="{y + 10}" r="3" fill="none" stroke="currentColor"'
        parts += [f'<circle cx="{at(seconds):.1f}" {circle}/>' for seconds in row["seconds"]]
        if 0 < predicted <= max(longest, limit_s):
            parts.append(f'<path d="M{at(predicted):.1f} {y - 2}v24" stroke="currentColor" stroke-dasharray="3 2"/>')
    height = ROW * len(measured) + 10
    label = html.escape("Median seconds: " + ", ".join(f"{row['name']} {row['median']:.3g}" for row in measured))
    line = f'<path d="M{at(limit_s):.1f} 0V{height}" stroke="#c0392b"/>'
    box = f'viewBox="0 0 {WIDTH} {height}" width="100%" font-size="13" role="img" aria-label="{label}"'
    drawn = f'<div class="wide"><svg {box} style="min-width: 40rem">{"".join(parts)}{line}</svg></div>'
    return drawn if measured else ""
