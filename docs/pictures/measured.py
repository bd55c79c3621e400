"""What was measured: seconds per step of every strategy in two suites of the lab, with the limits beside them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from drawing import Drawing

RESULTS = Path(__file__).parent.parent.parent / "benchmarks" / "results"


class Bar(NamedTuple):
    """A row of the chart: the fastest of some strategies of the lab, restricted to some settings."""

    label: str
    strategies: tuple[str, ...]
    settings: tuple[tuple[str, object], ...] = ()


GROUPS: dict[tuple[str, str], list[Bar]] = {
    ("weight", "tawpipe"): [
        Bar("tawpipe-spread", ("tawpipe-spread",)),
        Bar("tawpipe-step, weights kept", ("tawpipe-step",)),
        Bar("tawpipe-striped", ("tawpipe-striped",)),
        Bar("tawpipe-whole, as in the paper", ("tawpipe-whole",)),
    ],
    ("near", "others in the same runtime"): [
        Bar("flat, one ring over all devices", ("flat",)),
        Bar("HSDP", ("hsdp-ours",)),
        Bar("WeiPipe", ("weipipe",)),
        Bar("zero bubble, made for the links", ("zero-bubble",)),
    ],
    ("rival", "as torch ships them"): [
        Bar("FSDP2, tuned", ("fsdp2", "fsdp2-node")),
        Bar("FSDP2 left to itself", ("fsdp2",), (("prefetch", 0), ("reduction", "gloo"))),
        Bar("FSDP2 with our gather", ("fsdp2-hierarchical",)),
        Bar("HSDP", ("hsdp",)),
        Bar("1F1B, plain or interleaved", ("1f1b", "interleaved-1f1b")),
        Bar("zero-bubble (ZBV)", ("zbv",)),
    ],
}
SUITES = (("2026-11-25-base-6", "computing is the limit"), ("2026-11-25-link-bound", "the slow link is the limit"))
TOP, PITCH, LEFT, BAR_WIDTH = 108, 24, (244, 576), 252


def fastest(rows: list[dict[str, Any]], bar: Bar) -> dict[str, Any]:
    """The row of ``rows`` that ``bar`` stands for. Void rows count: without them a rival would look slower."""
    mine = [row for row in rows if row["label"].partition(" ")[0] in bar.strategies]
    fitting = [row for row in mine if set(bar.settings) <= row["knobs"].items()]
    return min((r for r in fitting if r["status"] in ("ok", "void")), key=lambda r: r["seconds_per_step"]["median"])


def computing_s(cell: dict[str, Any]) -> float:
    """Seconds that every device of a cell computes in a step; nothing can be faster."""
    work = cell["workload"]
    layer_s = work["forward_s"] + work["backward_input_s"] + work["backward_weight_s"]
    return work["layers"] * layer_s * work["micro_batches"] / (cell["nodes"] * cell["local"])


def measured() -> str:
    """The picture as SVG."""
    bottom = TOP + PITCH * (len(GROUPS) + sum(map(len, GROUPS.values()))) + 6
    picture = Drawing(880, bottom + 76, "Seconds per step of tawpipe and its rivals, with the physical limits")
    picture.text(16, 30, "Seconds per step", size=15, bold=True)
    picture.text(16, 50, "shorter is better;", "soft")
    picture.text(16, 68, "every strategy at its best", "soft")
    y = TOP
    for (_, group), bars in GROUPS.items():
        picture.text(16, y + 16, group, bold=True)
        for bar in bars:
            y += PITCH
            picture.text(LEFT[0] - 8, y + 15, bar.label, anchor="end")
        y += PITCH
    for left, (folder, name) in zip(LEFT, SUITES, strict=True):
        results = json.loads((RESULTS / folder / "results.json").read_text(encoding="utf-8"))
        _panel(picture, left, bottom, name, results["rows"])
    picture.line([(22, bottom + 31), (22, bottom + 47)], "ink", width=2.5)
    picture.text(
        34, bottom + 44, "limit of a strategy whose bytes need more time on the slow link than computing", "soft"
    )
    picture.text(
        16, bottom + 66, "* the machine was too busy (void in the table): undisturbed it may be faster", "soft"
    )
    return picture.svg()


def _panel(picture: Drawing, left: float, bottom: float, name: str, rows: list[dict[str, Any]]) -> None:
    """The bars of one suite, from zero, on a scale of its own."""
    cell = rows[0]["cell"]
    limit = computing_s(cell)
    shown = [fastest(rows, bar) for bars in GROUPS.values() for bar in bars]
    scale = BAR_WIDTH / max(row["seconds_per_step"]["median"] for row in shown)
    picture.text(left, 30, name, size=15, bold=True)
    rate = cell["rate"].removesuffix("mbit")
    picture.text(left, 50, f"{cell['nodes']} nodes x {cell['local']}, {rate} Mbit/s between nodes", "soft")
    for tick in range(0, int(BAR_WIDTH / scale) + 1, 10):
        picture.line([(left + tick * scale, TOP - 6), (left + tick * scale, bottom)], "line", width=1)
        picture.text(left + tick * scale, bottom + 16, f"{tick} s", "soft", size=11, anchor="middle")
    y = TOP
    for (color, _), bars in GROUPS.items():
        for bar in bars:
            y += PITCH
            row = fastest(rows, bar)
            seconds, bound, void = row["seconds_per_step"]["median"], row["physical_bound_s"], row["status"] == "void"
            picture.rect(left, y + 3, seconds * scale, PITCH - 7, color)
            if void:
                area = {"x": left, "y": y + 3, "width": seconds * scale, "height": PITCH - 7}
                picture.add("rect", {"fill": "url(#hatch)", **area})
            if bound > limit * 1.01:
                picture.line([(left + bound * scale, y + 1), (left + bound * scale, y + PITCH - 2)], "ink", width=2.5)
            picture.text(left + seconds * scale + 6, y + 16, f"{seconds:.2f}" + "*" * void, size=12)
        y += PITCH
    picture.line([(left + limit * scale, TOP - 12), (left + limit * scale, bottom)], "gradient", width=2)
    picture.text(left, TOP - 18, f"limit: computing alone, {limit:.2f} s", "gradient", bold=True)
