"""Schedules that were found for a pipeline, beside fixed ones: what docs/design.md shows.

    python benchmarks/found_schedules.py --out benchmarks/results/DATE-found-schedules

``generated``: partition, placement and order of Nemotron Nano v2 9B on 4 devices with 8 micro-batches, by the times
that the authors of AdaPtis published (lab/mixes.py), without communication. ``solved``: twelve equal layers on 4
devices with 8 micro-batches and half the memory that 1F1B wants, over a link to the host's memory that passes a
boundary activation while a stage computes a forward pass. Writes ``schedules.json`` and ``table.md``; the times are
those of schedule/pipelines/work.py.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import sys
import time
from collections.abc import Iterator
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

from tawpipe.orders.arrange import arrange
from tawpipe.orders.generate import generate
from tawpipe.orders.solver.solve import heuristics, solve
from tawpipe.orders.zero_bubble import zero_bubble
from tawpipe.schedule.pipelines.layout import Layout
from tawpipe.schedule.pipelines.memory import peak
from tawpipe.schedule.pipelines.orders import interleaved, one_f_one_b
from tawpipe.schedule.pipelines.work import BlockTimes, Order, PipelineCosts, makespan, play
from tawpipe_lab.mixes import MIXES
from tawpipe_lab.rivals.stages import balanced_cuts

DEVICES, MICRO_BATCHES = 4, 8
LAYERS, SHARE, SECONDS = 12, 0.5, 60.0
"""Of the example for the solver: layers, the share of the memory that 1F1B wants, and the solver's time."""
WAYS = {
    "zero-bubble": "fewer micro-batches in flight",
    "1f1b": "fewer micro-batches in flight",
    "1f1b-offload": "some wait in the host's memory, in a fixed pattern",
}


def spelled(name: str, note: str, layout: Layout, order: Order, costs: PipelineCosts) -> dict[str, Any]:
    """A schedule as plain data."""
    found = play(layout, order, costs)
    given = {name: value for name in ("hop", "memory", "host") if (value := getattr(costs, name)) < math.inf}
    return {
        "name": name,
        "note": note,
        "layout": str(layout),
        "makespan": makespan(found),
        "kept": max(peak(layout, order, costs)),
        "costs": {"blocks": [astuple(block) for block in costs.blocks], **given},
        "order": str(order),
    }


def of_layers() -> Iterator[dict[str, Any]]:
    """Fixed schedules of unequal layers, and the generated one."""
    costs = PipelineCosts(MIXES["nemotron"]())
    blocks = costs.blocks
    even = Layout.even(len(blocks), DEVICES)
    yield spelled("1F1B", "equal stages", even, one_f_one_b(even, MICRO_BATCHES), costs)
    seconds = [one.forward + one.backward_input + one.backward_weight for one in blocks]
    balanced = Layout(len(blocks), tuple(balanced_cuts(seconds, DEVICES)), even.places)
    yield spelled("1F1B", "stages balanced by time", balanced, one_f_one_b(balanced, MICRO_BATCHES), costs)
    twice = Layout.even(len(blocks), DEVICES, 2)
    yield spelled("interleaved 1F1B", "equal stages", twice, interleaved(twice, MICRO_BATCHES), costs)
    folded = Layout.even(len(blocks), DEVICES, 2, folded=True)
    yield spelled("zero bubble", "equal stages in a V", folded, zero_bubble(folded, MICRO_BATCHES, costs), costs)
    most = max(peak(twice, interleaved(twice, MICRO_BATCHES), costs))
    for note, limit in (("with no more memory than interleaved 1F1B", most), ("with memory for all", math.inf)):
        limited = replace(costs, memory=limit)
        layout = generate(limited, DEVICES, MICRO_BATCHES)
        yield spelled("generated", note, layout, arrange(layout, limited, MICRO_BATCHES), limited)


def under_a_limit() -> Iterator[dict[str, Any]]:
    """The fastest fixed ways that fit, and the solver's."""
    layer, end = BlockTimes(1, 1, 1, kept=1.0, kept_for_weights=0.5), BlockTimes(0, 0, 0, kept=0.0)
    free = PipelineCosts((end, *[layer] * LAYERS, end))
    layout = Layout.even(LAYERS + 2, DEVICES)
    wanted = max(peak(layout, one_f_one_b(layout, MICRO_BATCHES), free))
    costs = replace(free, memory=SHARE * wanted, host=float(LAYERS // DEVICES))
    ways = heuristics(layout, costs, MICRO_BATCHES)
    for name, note in WAYS.items():
        yield spelled(name, note, layout, ways[name], costs)
    found = solve(layout, costs, MICRO_BATCHES, seconds=SECONDS)
    yield spelled("solved", f"at least {found.bound:,.0f} is proved", layout, found.order, costs)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--out", type=Path, default=Path("found-schedules"))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    environment = {"command": shlex.join(["python", *sys.argv]), "date": time.strftime("%Y-%m-%d")}
    content = {"environment": environment, "generated": [*of_layers()], "solved": [*under_a_limit()]}
    (args.out / "schedules.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    lines = [f"{environment['date']}, `{environment['command']}`", ""]
    for what in ("generated", "solved"):
        lines += ["| | | makespan | kept at most |", "| --- | --- | ---: | ---: |"]
        for one in content[what]:
            lines.append(f"| {one['name']} | {one['note']} | {one['makespan']:,.0f} | {one['kept']:.4g} |")
        lines.append("")
    (args.out / "table.md").write_text("\n".join(lines), encoding="utf-8")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
