"""Layouts made for models of unequal layers beside the fixed schedules, by the stages' clock.

    python benchmarks/generated.py --out benchmarks/results/DATE-generated
    python benchmarks/generated.py --mixes nemotron nemotron:28 --cells 4x8 --out DIR

Costs are those of ``tawpipe_lab.mixes``; transfers take no time unless ``--hop`` says otherwise. The first cell is the
example that the authors of AdaPtis published: Nemotron Nano v2 9B on 4 positions with 8 micro-batches, in hundredths of
a millisecond, 1F1B with 14 layers a stage 133,121, theirs 89,870.

Beside ours stand 1F1B with equally many layers and with the best cuts that a descent finds, interleaved 1F1B with two
stages a position (and the best of two to four) with equally many layers and with loads balanced by cost, and zero
bubble on a V, likewise. Ours comes twice: with any memory, and with no more on any position than interleaved 1F1B with
equally many layers takes on its fullest one. Interleaved 1F1B cannot use 32 micro-batches on 6 positions; it is given
30 there, and all others with it. The bound is the mean work of a position, or what the position of the longest block
cannot do without. Writes ``table.md`` and ``generated.json``.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import shlex
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

from tawpipe.orders.arrange import arrange
from tawpipe.orders.generate import generate
from tawpipe.orders.moves import Moves, StagePlan
from tawpipe.orders.ticks import Ticks
from tawpipe.orders.zero_bubble import zero_bubble
from tawpipe.schedule.pipelines.layout import Layout
from tawpipe.schedule.pipelines.limits import BUDGET
from tawpipe.schedule.pipelines.memory import peak
from tawpipe.schedule.pipelines.orders import interleaved, one_f_one_b
from tawpipe.schedule.pipelines.work import Order, PipelineCosts, makespan, play
from tawpipe_lab.mixes import MIXES

CELLS = ("4x8", "4x32", "6x8", "6x30")
TURNS = (2, 3, 4)
"""Stages of a position under interleaved 1F1B."""
COLUMNS = ("1f1b", "1f1b-best", "interleaved", "interleaved-balanced", "zero-bubble", "zero-bubble-balanced")
OURS = ("generated", "generated-limited")


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    mixes = ("nemotron", "nemotron:24", "gemma", "dense-and-experts")
    parser.add_argument("--mixes", nargs="*", default=mixes, help="and their layers, if not those of the model")
    parser.add_argument("--cells", nargs="*", default=CELLS, help="positions x micro-batches")
    parser.add_argument("--hop", type=float, default=0.0, help="time of a transfer between two positions")
    parser.add_argument("--budget", type=int, default=BUDGET, help="of the search, see generate")
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


@dataclass(frozen=True)
class Cell:
    """What is asked."""

    costs: PipelineCosts
    positions: int
    micro_batches: int

    @property
    def moves(self) -> Moves:
        return Moves(Ticks.of(self.costs), self.positions, self.micro_batches, 4 * self.positions)

    def span(self, layout: Layout, order: Order) -> float:
        """The step's time."""
        return makespan(play(layout, order, self.costs))

    def bound(self) -> float:
        """Less than any schedule takes: the mean work, or what is before the longest block and its work."""
        totals = [one.forward + one.backward_input + one.backward_weight for one in self.costs.blocks]
        before = accumulate((one.forward for one in self.costs.blocks), initial=0.0)
        alone = (start + self.micro_batches * total for start, total in zip(before, totals, strict=False))
        return max(sum(totals) * self.micro_batches / self.positions, *alone)

    def layouts(self, turns: int, *, folded: bool = False) -> tuple[Layout, Layout] | None:
        """Equally many layers, balanced loads; None where there are too few."""
        blocks = len(self.costs.blocks)
        if turns * self.positions > blocks - 2:
            return None
        even = Layout.even(blocks, self.positions, turns, folded=folded)
        return even, Layout(blocks, *self.moves.balanced(StagePlan(even.cuts, even.places)))

    def contiguous(self) -> Layout:
        """1F1B's best cuts: from balanced ones on, moved one or two at a time for as long as the step gets shorter."""
        moves, layouts = self.moves, self.layouts(1)
        assert layouts is not None
        best, layout = self.span(layouts[1], one_f_one_b(layouts[1], self.micro_batches)), layouts[1]
        while True:
            limit = round(best * moves.total[0][-1] / self.micro_batches / self._work(self.costs)) + 1
            options = [
                Layout(layout.blocks, *one) for _, one in moves.shifts(StagePlan(layout.cuts, layout.places), limit)
            ]
            spans = [(self.span(one, one_f_one_b(one, self.micro_batches)), str(one), one) for one in options]
            if not spans or min(spans)[0] >= best:
                return layout
            best, _, layout = min(spans)

    def _work(self, costs: PipelineCosts) -> float:
        return sum(one.forward + one.backward_input + one.backward_weight for one in costs.blocks)

    def fixed(self) -> Iterator[tuple[str, float, str]]:
        """(schedule, time, layout) of the published orders."""
        count = self.micro_batches
        even = self.layouts(1)
        assert even is not None
        for name, layout in (("1f1b", even[0]), ("1f1b-best", self.contiguous())):
            yield name, self.span(layout, one_f_one_b(layout, count)), str(layout)
        for turns in TURNS:
            for name, layout in zip(("interleaved", "interleaved-balanced"), self.layouts(turns) or (), strict=False):
                yield f"{name}-{turns}", self.span(layout, interleaved(layout, count)), str(layout)
        folded = self.layouts(2, folded=True) or ()
        for name, layout in zip(("zero-bubble", "zero-bubble-balanced"), folded, strict=False):
            yield name, self.span(layout, zero_bubble(layout, count, self.costs)), str(layout)


def measured(mix: str, layers: int, cell: Cell, budget: int) -> dict[str, Any]:
    """A row: times by schedule, memory, layouts, and how long the search took."""
    fixed = list(cell.fixed())
    times, layouts = {name: span for name, span, _ in fixed}, {name: text for name, _, text in fixed}
    even = Layout.parse(layouts["interleaved-2"], len(cell.costs.blocks))
    peaks = {"interleaved": max(peak(even, interleaved(even, cell.micro_batches), cell.costs))}
    seconds = 0.0
    for name, memory in zip(OURS, (math.inf, peaks["interleaved"]), strict=True):
        costs, start = replace(cell.costs, memory=memory), time.process_time()
        layout = generate(costs, cell.positions, cell.micro_batches, budget=budget)
        order = arrange(layout, costs, cell.micro_batches)
        seconds = max(seconds, time.process_time() - start)
        times[name], layouts[name] = cell.span(layout, order), str(layout)
        peaks[name] = max(peak(layout, order, costs))
    for name in ("interleaved", "interleaved-balanced"):
        turns = [span for one, span in times.items() if one.rpartition("-")[0] == name]
        if turns:
            times[name], times[f"{name}-any"] = times[f"{name}-{TURNS[0]}"], min(turns)
    return {
        "mix": mix,
        "layers": layers,
        "positions": cell.positions,
        "micro_batches": cell.micro_batches,
        "bound": cell.bound(),
        "times": times,
        "peaks": peaks,
        "layouts": layouts,
        "search_seconds": round(seconds, 2),
    }


def table(rows: list[dict[str, Any]]) -> list[str]:
    """The rows for a page: times over the bound, and what the fixed schedules take over ours."""
    head = ["mix", "layers", "positions", "micro-batches", "bound", "1F1B", "best cuts", "interleaved", "balanced"]
    head += [
        "zero bubble",
        "balanced",
        "ours",
        "ours in its memory",
        "over ours: interleaved (best)",
        "balanced (best)",
    ]
    head += ["best fixed", "memory: interleaved", "ours"]
    lines = ["| " + " | ".join([*head, "search s"]) + " |", "| --- |" + " ---: |" * len(head)]
    for row in rows:
        times, ours = row["times"], row["times"]["generated"]
        cells = [row["mix"], row["layers"], row["positions"], row["micro_batches"], f"{row['bound']:,.0f}"]
        cells += [
            f"{times[name]:,.0f} ({times[name] / row['bound']:.3f})" if name in times else "-"
            for name in (*COLUMNS, *OURS)
        ]
        for name in ("interleaved", "interleaved-balanced"):
            known = name in times
            cells.append(f"{times[name] / ours:.2f} ({times[f'{name}-any'] / ours:.2f})" if known else "-")
        best = min(span for name, span in times.items() if name not in OURS)
        cells += [f"{best / ours:.2f}", *(f"{row['peaks'][name]:.0f}" for name in ("interleaved", "generated"))]
        cells.append(f"{row['search_seconds']:.1f}")
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return lines


def layout_line(row: dict[str, Any]) -> str:
    """What was found."""
    cell = f"{row['mix']}, {row['layers']} layers, {row['positions']} x {row['micro_batches']}"
    return f"* {cell}: `{row['layouts']['generated']}`"


def main() -> None:
    """Everything, printed as it comes and written at the end."""
    asked = arguments()
    rows = []
    for mix in asked.mixes:
        name, _, layers = mix.partition(":")
        blocks = MIXES[name](*([int(layers)] if layers else []))
        for text in asked.cells:
            positions, _, count = text.partition("x")
            cell = Cell(PipelineCosts(blocks, asked.hop), int(positions), int(count))
            rows.append(measured(name, len(blocks) - 2, cell, asked.budget))
            print("\n".join(table(rows[-1:])[2:]), flush=True)
    command = shlex.join(["python", "benchmarks/generated.py", *sys.argv[1:]])
    lines = [
        f"{time.strftime('%Y-%m-%d')}, `{command}`, {platform.machine()}, Python {platform.python_version()}",
        "",
        "The step's time by the stages' clock, in the costs' unit; in parentheses over the bound. Interleaved 1F1B has "
        "two stages a position, in parentheses as many of two to four as are best. Memory is the fullest position's, "
        "in inputs of layers. Seconds of search are the processor's, of the longer of both.",
        "",
        *table(rows),
        "",
        *map(layout_line, rows),
    ]
    asked.out.mkdir(parents=True, exist_ok=True)
    (asked.out / "table.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (asked.out / "generated.json").write_text(json.dumps({"command": command, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
