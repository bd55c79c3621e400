"""What is there to gain where layers take unequal times? Fixed schedules and the generated one, by the stages' clock.

    python benchmarks/mixed_layers.py --out benchmarks/results/DATE-mixed-layers-clock

The cells of the suite ``mixed-layers``: the models of lab/mixes.py on 4 and 6 positions with 8 and 32 micro-batches,
without communication. Every number is a step over what it would take if all positions were always busy. ``layers``: as
many layers in every stage as can be; ``cost``: stages as equal in time as whole layers can be. Beside the generated
schedule stand the seconds of its search and the boundary activations that a position keeps at most, next to those of
1F1B with stages of equally many layers. Writes ``results.json`` and ``table.md``; minutes on one processor.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tawpipe.errors import UserError
from tawpipe.schedule.pipelines.layout import Layout
from tawpipe.schedule.pipelines.memory import peak
from tawpipe.schedule.pipelines.orders import interleaved, one_f_one_b
from tawpipe.schedule.pipelines.search.arrange import arrange
from tawpipe.schedule.pipelines.search.generate import generate
from tawpipe.schedule.pipelines.search.zero_bubble import zero_bubble
from tawpipe.schedule.pipelines.work import Order, PipelineCosts, makespan, play
from tawpipe_lab.mixes import MIXES
from tawpipe_lab.rivals.stages import balanced_cuts

POSITIONS, MICRO_BATCHES = (4, 6), (8, 32)


def fixed(costs: PipelineCosts, positions: int, count: int) -> Iterator[tuple[str, Layout, Order | None]]:
    """(name, layout, order) of fixed schedules; None for an order that cannot use so many micro-batches."""
    blocks = costs.blocks
    seconds = [one.forward + one.backward_input + one.backward_weight for one in blocks]
    for name, each in (("1f1b", 1), ("interleaved", 2), ("zero-bubble", 2)):
        even = Layout.even(len(blocks), positions, each, folded=name == "zero-bubble")
        balanced = Layout(len(blocks), tuple(balanced_cuts(seconds, even.stages)), even.places)
        for balance, layout in (("layers", even), ("cost", balanced)):
            try:
                if name == "zero-bubble":
                    order = zero_bubble(layout, count, costs)
                else:
                    order = (one_f_one_b if name == "1f1b" else interleaved)(layout, count)
            except UserError:
                order = None
            yield f"{name}, {balance}", layout, order


def cell(mix: str, positions: int, count: int) -> dict[str, Any]:
    """One row of the table."""
    costs = PipelineCosts(MIXES[mix]())
    work = sum(one.forward + one.backward_input + one.backward_weight for one in costs.blocks)
    least = count * work / positions
    times: dict[str, float | None] = {}
    kept = {}
    for name, layout, order in fixed(costs, positions, count):
        times[name] = makespan(play(layout, order, costs)) / least if order else None
        kept[name] = max(peak(layout, order, costs)) if order else None
    begin = time.perf_counter()
    layout = generate(costs, positions, count)
    order = arrange(layout, costs, count)
    seconds = time.perf_counter() - begin
    times["generated"] = makespan(play(layout, order, costs)) / least
    kept["generated"] = max(peak(layout, order, costs))
    place = {"mix": mix, "positions": positions, "micro_batches": count}
    return {**place, "times": times, "kept": kept, "search_s": seconds, "layout": str(layout)}


def table(environment: dict[str, str], rows: list[dict[str, Any]]) -> list[str]:
    names = list(rows[0]["times"])
    lines = [
        f"{environment['date']}, `{environment['command']}`",
        "",
        f"| | {' | '.join(names)} | search, s | kept (1F1B) |",
        f"| --- |{' ---: |' * (len(names) + 2)}",
    ]
    for row in rows:
        times = " | ".join("-" if one is None else f"{one:.3f}" for one in row["times"].values())
        kept = f"{row['kept']['generated']:.0f} ({row['kept'][names[0]]:.0f})"
        what = f"{row['mix']}, {row['positions']} x {row['micro_batches']}"
        lines.append(f"| {what} | {times} | {row['search_s']:.0f} | {kept} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--out", type=Path, default=Path("mixed-layers-clock"))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    environment = {"command": shlex.join(["python", *sys.argv]), "date": time.strftime("%Y-%m-%d")}
    rows = [cell(mix, places, count) for mix in MIXES for places in POSITIONS for count in MICRO_BATCHES]
    (args.out / "results.json").write_text(json.dumps({"environment": environment, "rows": rows}, indent=1) + "\n")
    lines = table(environment, rows)
    (args.out / "table.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
