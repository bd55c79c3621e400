"""The pictures of pipelines' orders: fixed ones beside those that were found, stage by stage and micro-batch by
micro-batch, by the clock of schedule/pipelines/work.py.

What was found is read from results of ``benchmarks/found_schedules.py``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drawing import Drawing

from tawpipe.schedule.pipelines.layout import Layout
from tawpipe.schedule.pipelines.work import BlockTimes, Order, PipelineCosts, Work, makespan, play

FOUND = Path(__file__).parents[2] / "benchmarks" / "results" / "2026-11-23-found-schedules" / "schedules.json"
LEFT, WIDTH, ROW, HOST_ROW, STRIP = 84, 880, 19, 8, 13
COLORS = {"F": "weight", "B": "gradient", "I": "gradient", "W": "weight2", "O": "activation", "R": "near"}
WORDS = {
    "F": "forward",
    "B": "backward, or its part for inputs",
    "W": "gradients of weights",
    "O": "to the host's memory",
    "R": "and back",
}
LIGHTER = 0.72
"""Every other stage of a device."""
NUMBER = 8.5
"""Pixels that a digit needs."""


@dataclass(frozen=True)
class Panel:
    """One schedule in a picture.

    Args:
        note: said behind the name, before the time.
    """

    name: str
    note: str
    layout: Layout
    order: Order
    costs: PipelineCosts

    @property
    def is_uneven(self) -> bool:
        """True if layers differ, and so what a stage is."""
        return len(set(self.costs.blocks[1:-1])) > 1

    @property
    def height(self) -> float:
        rows = ROW + (HOST_ROW if self.order.host else 0)
        return 26 + (STRIP + 8) * self.is_uneven + self.layout.size * rows + 24


def generated() -> str:
    """Fixed schedules of unequal layers, and the generated one."""
    found = json.loads(FOUND.read_text(encoding="utf-8"))["generated"]
    title = (
        "A step of Nemotron Nano v2 9B on 4 devices, 8 micro-batches: what devices do under fixed schedules, and under "
        "the one that was made for its layers"
    )
    return _picture(title, [*map(_panel, found)], "time of the layers, in hundredths of a millisecond")


def solved() -> str:
    """Heuristics under a limit of memory, and what the solver made of it."""
    found = json.loads(FOUND.read_text(encoding="utf-8"))["solved"]
    title = "A step under half the memory that 1F1B wants: the fastest fixed ways that fit, and the solver's"
    return _picture(title, [*map(_panel, found)], "time, a layer's forward pass is 1")


def _panel(saved: Mapping[str, Any]) -> Panel:
    """The inverse of what benchmarks/found_schedules.py writes."""
    given = saved["costs"]
    costs = PipelineCosts(**{**given, "blocks": tuple(BlockTimes(*one) for one in given["blocks"])})
    layout = Layout.parse(saved["layout"], len(costs.blocks))
    return Panel(saved["name"], saved["note"], layout, Order.parse(saved["order"]), costs)


def _picture(title: str, panels: Sequence[Panel], axis: str) -> str:
    times = [play(one.layout, one.order, one.costs) for one in panels]
    longest = max(map(makespan, times))
    drawing = Drawing(LEFT + WIDTH + 96, 56 + sum(one.height for one in panels) + 30, title)
    kinds = {"B" if work.kind == "I" else work.kind for some in times for work in some}
    x = float(LEFT)
    for kind, words in WORDS.items():
        if kind in kinds:
            drawing.rect(x, 20, 14, 14, COLORS[kind], radius=2)
            drawing.text(x + 20, 31, words, "soft", size=12)
            x += 40 + 6.3 * len(words)
    top = 56.0
    for panel, spans in zip(panels, times, strict=True):
        _draw(drawing, panel, spans, top, WIDTH / longest)
        top += panel.height
    paler = (
        "; every other stage of a device is paler" if any(one.layout.stages > one.layout.size for one in panels) else ""
    )
    drawing.text(LEFT, top + 6, axis + paler, "soft", size=12)
    return drawing.svg()


def _draw(drawing: Drawing, panel: Panel, spans: Mapping[Work, tuple[float, float]], top: float, scale: float) -> None:
    end, layout = makespan(spans), panel.layout
    busy = [0.0] * layout.size
    for work, (begin, stop) in spans.items():
        busy[layout.places[work.stage]] += (stop - begin) * (work.kind not in "OR")
    idle = 1 - sum(busy) / (end * layout.size)
    drawing.text(LEFT, top + 12, panel.name, bold=True)
    words = f"{panel.note}: {end:,.0f}, devices wait {idle:.0%} of it"
    drawing.text(LEFT + 14 + 7.4 * len(panel.name), top + 12, words, "soft", size=12)
    if panel.is_uneven:
        _partition(drawing, panel, top + 22)
    y, pitch = top + 26 + (STRIP + 8) * panel.is_uneven, ROW + (HOST_ROW if panel.order.host else 0)
    drawing.line([(LEFT + end * scale + 1, y - 3), (LEFT + end * scale + 1, y + layout.size * pitch)], "ink", width=1)
    drawing.text(LEFT + end * scale + 6, y + 12, f"{end:,.0f}", size=12, bold=True)
    for place in range(layout.size):
        at = y + place * pitch
        drawing.text(LEFT - 10, at + 13, f"device {place}", "soft", size=12, anchor="end")
        drawing.rect(LEFT, at, end * scale, ROW - 3, "panel")
    turns = {stage: turn % 2 for place in range(layout.size) for turn, stage in enumerate(layout.stages_of(place))}
    paths: dict[tuple[str, int], list[str]] = {}
    for work, (begin, stop) in spans.items():
        at = y + layout.places[work.stage] * pitch
        left, wide = LEFT + begin * scale, max(0.6, (stop - begin) * scale - 0.7)
        at, tall = (at + ROW - 2, HOST_ROW - 3) if work.kind in "OR" else (at, ROW - 3)
        pieces = paths.setdefault((COLORS[work.kind], turns[work.stage]), [])
        pieces.append(f"M{left:.1f} {at:.1f}h{wide:.1f}v{tall}h-{wide:.1f}z")
    for (color, turn), pieces in sorted(paths.items()):
        more = {"fill-opacity": LIGHTER} if turn else {}
        drawing.add("path", {"class": f"f-{color}", "d": "".join(pieces), **more})
    for work, (begin, stop) in sorted(spans.items()):
        wide, number = (stop - begin) * scale, str(work.micro_batch)
        if work.kind not in "OR" and wide > NUMBER * len(number) + 1:
            at = y + layout.places[work.stage] * pitch
            drawing.text(LEFT + (begin + stop) / 2 * scale, at + 12, number, "paper", size=10, anchor="middle")


def _partition(drawing: Drawing, panel: Panel, top: float) -> None:
    """The stages in the order of the model, each as wide as its share of the time, with its device's number."""
    layout, blocks = panel.layout, panel.costs.blocks
    seconds = [
        sum(blocks[b].forward + blocks[b].backward_input + blocks[b].backward_weight for b in layout.blocks_of(stage))
        for stage in range(layout.stages)
    ]
    x, scale = float(LEFT), WIDTH / 2 / math.fsum(seconds)
    drawing.text(LEFT - 10, top + 10, "stages", "soft", size=12, anchor="end")
    for stage, one in enumerate(seconds):
        drawing.rect(x, top, one * scale - 1, STRIP, "panel", border="line")
        if one * scale > NUMBER + 2:
            place = str(layout.places[stage])
            drawing.text(x + one * scale / 2, top + 10, place, "ink", size=10, anchor="middle")
        x += one * scale
    layers = ", ".join(str(len(layout.blocks_of(stage))) for stage in range(layout.stages))
    drawing.text(x + 8, top + 10, f"of {layers} blocks", "soft", size=11)
