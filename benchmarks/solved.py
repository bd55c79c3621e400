"""How much shorter are solved pipelines than fixed ones under a limit of memory, and up to which size is that proved?

    python benchmarks/solved.py --out benchmarks/results/DATE-solved

By the clock of schedule/pipelines/work.py alone: no device, no root. A cell is a number of stages and micro-batches, a
limit of memory as a share of what 1F1B holds at most, a host link (boundaries that it moves while a stage computes one
forward pass), and layers that are alike or not. A stage has two layers; forward, input gradient and weight gradient of
a layer take the same time, and what is kept for W is half of what is kept for the backward pass. Uneven layers take 1,
2, 1/2 and 3/2 times as long in turn, and a hop takes a tenth. Every cell is given ``--seconds`` of one worker, from the
fastest fixed way that fits. Idle time is what a step takes above the bound: the solver's or that of arithmetic,
whichever is higher. Jitter multiplies the time of every work by 0.9 to 1.1, drawn anew for each of ``--draws`` plays;
its cost is the median of them over the step without it. Where the folder has cells already, it goes on with the next.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import math
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from tawpipe.errors import UserError
from tawpipe.orders.solver.constraints import Model
from tawpipe.orders.solver.solve import JITTER, heuristics, peak, shaken, solve
from tawpipe.schedule.pipelines.layout import Layout
from tawpipe.schedule.pipelines.work import BlockTimes, Order, PipelineCosts, makespan, play

LAYERS = 2
"""Of a stage."""
SIZES = ((4, 8), (4, 16), (6, 12), (8, 16))
SHARES = (1.0, 0.7, 0.5, 0.35)
LINKS = (2.0, 1.0, 0.5)
UNEVEN = (1.0, 2.0, 0.5, 1.5)


@dataclass(frozen=True)
class Cell:
    """One problem."""

    stages: int
    micro_batches: int
    share: float
    link: float
    uneven: bool

    @property
    def name(self) -> str:
        kind = "uneven" if self.uneven else "equal"
        return f"{self.stages} x {self.micro_batches}, {kind}, memory {self.share:g}, link {self.link:g}"

    def problem(self) -> tuple[Layout, PipelineCosts]:
        """The layout, and its costs with the limit."""
        times = [UNEVEN[layer % 4] if self.uneven else 1.0 for layer in range(LAYERS * self.stages)]
        end = BlockTimes(0.0, 0.0, 0.0, 0.0)
        blocks = (end, *(BlockTimes(one, one, one, 1.0, 0.5) for one in times), end)
        forward = sum(times) / self.stages
        costs = PipelineCosts(blocks, 0.1 if self.uneven else 0.0, host=forward / LAYERS / self.link)
        layout = Layout.even(len(blocks), self.stages)
        return layout, replace(costs, memory=self.share * self.stages * LAYERS)


def jitter(layout: Layout, order: Order, costs: PipelineCosts, draws: int) -> float:
    """How much longer a step takes, in the median."""
    # Others than those by which the solver chooses.
    drawn = (play(layout, order, costs, shaken(1000 + seed)) for seed in range(draws))
    played = statistics.median(map(makespan, drawn))
    return played / makespan(play(layout, order, costs)) - 1


def measure(cell: Cell, seconds: float, draws: int) -> dict[str, Any]:
    """The best fixed way, and what is found from it."""
    layout, costs = cell.problem()
    begin = time.perf_counter()
    try:
        fixed = heuristics(layout, costs, cell.micro_batches)
    except UserError as error:
        return {"cell": asdict(cell), "name": cell.name, "reason": str(error)}
    fixed_s = time.perf_counter() - begin
    lengths = {name: makespan(play(layout, order, costs)) for name, order in fixed.items()}
    best = min(lengths, key=lambda name: lengths[name])
    model = Model(layout, costs, cell.micro_batches, True, fixed[best]).model.proto
    found = solve(layout, costs, cell.micro_batches, fixed[best], seconds=seconds)
    idle, left = lengths[best] - found.bound, found.makespan - found.bound
    return {
        "cell": asdict(cell),
        "name": cell.name,
        "limit": costs.memory,
        "peak": max(peak(layout, found.order, costs)),
        "fixed": lengths,
        "fixed_s": fixed_s,
        "best": best,
        "makespan": found.makespan,
        "bound": found.bound,
        "gap": found.gap,
        "idle_fixed": idle,
        "idle": left,
        "less": 1 - left / idle if idle > 1e-9 * found.bound else None,
        "variables": len(model.variables),
        "constraints": len(model.constraints),
        "first_s": found.history[1][0] if len(found.history) > 1 else None,
        "best_s": max(at for at, _ in found.history),
        "seconds": found.seconds,
        "jitter_fixed": jitter(layout, fixed[best], costs, draws),
        "jitter": jitter(layout, found.order, costs, draws),
    }


def page(environment: dict[str, Any], rows: Sequence[dict[str, Any]]) -> str:
    """Markdown."""
    good = [row for row in rows if "reason" not in row]
    could = [row["less"] for row in good if row["less"] is not None]
    lines = [
        "# Solved pipelines under a limit of memory",
        "",
        f"{environment['date']}, `{environment['command']}`, OR-tools {environment['ortools']}, Python "
        f"{environment['python']}, {environment['machine']}.",
        "",
        f"{len(good)} cells; in {len(good) - len(could)} the best fixed way is proved to be the shortest. In the "
        f"others idle time is {statistics.median(could):.0%} less in the median (from {min(could):.0%} to "
        f"{max(could):.0%}), "
        f"and at least 30 % less in {sum(one >= 0.3 for one in could)} of {len(could)}. "
        f"Jitter of {JITTER:.0%} costs the fixed ways {statistics.median(row['jitter_fixed'] for row in good):.1%} and "
        f"the found ones {statistics.median(row['jitter'] for row in good):.1%} in the median.",
        "",
        f"In the median of all cells a step is {statistics.median(map(_shorter, good)):.1%} shorter (from "
        f"{min(map(_shorter, good)):.0%} to {max(map(_shorter, good)):.0%}), and devices wait "
        f"{statistics.median(map(_less_waiting, good)):.0%} less: most of their waiting is below the bound.",
        "",
        "| stages x micro-batches | cells | variables | constraints | s to first | s to best | proved optimal | gap "
        "| idle, fixed | idle, solved | less | jitter, fixed | jitter, solved |",
        "| --- " + "| ---: " * 12 + "|",
    ]
    for size in dict.fromkeys((row["cell"]["stages"], row["cell"]["micro_batches"]) for row in good):
        own = [row for row in good if (row["cell"]["stages"], row["cell"]["micro_batches"]) == size]
        middle = partial(_middle, own)
        proved = sum(row["gap"] < 1e-6 for row in own)
        idle, left = (statistics.median(row[name] / row["bound"] for row in own) for name in ("idle_fixed", "idle"))
        lines.append(
            f"| {size[0]} x {size[1]} | {len(own)} | {middle('variables'):.0f} | {middle('constraints'):.0f} "
            f"| {middle('first_s'):.1f} | {middle('best_s'):.1f} | {proved} | {middle('gap'):.1%} | {idle:.1%} "
            f"| {left:.1%} | {middle('less'):.0%} | {middle('jitter_fixed'):.1%} | {middle('jitter'):.1%} |"
        )
    lines += [
        "",
        "Medians; idle time as a share of the bound; s after the start of the solver, without the fixed ways.",
        "",
        "| cell | best fixed way | step | solved | bound | idle less by | s to best | jitter, fixed | jitter, solved |",
        "| --- | --- " + "| ---: " * 7 + "|",
    ]
    for row in rows:
        if "reason" in row:
            lines.append(f"| {row['name']} | {row['reason']} " + "| " * 7 + "|")
            continue
        less = "-" if row["less"] is None else f"{row['less']:.0%}"
        lines.append(
            f"| {row['name']} | {row['best']} | {row['fixed'][row['best']]:.2f} | {row['makespan']:.2f} "
            f"| {row['bound']:.2f} | {less} | {row['best_s']:.1f} | {row['jitter_fixed']:.1%} | {row['jitter']:.1%} |"
        )
    return "\n".join(lines) + "\n"


def _shorter(row: dict[str, Any]) -> float:
    """Of the step, as a share of that of the best fixed way."""
    return 1 - row["makespan"] / row["fixed"][row["best"]]


def _less_waiting(row: dict[str, Any]) -> float:
    """Of the time in which devices compute nothing, as a share of that under the best fixed way."""
    cell = Cell(**row["cell"])
    _, costs = cell.problem()
    busy = cell.micro_batches * sum(one.forward + one.backward_input + one.backward_weight for one in costs.blocks)
    fixed, found = (cell.stages * length - busy for length in (row["fixed"][row["best"]], row["makespan"]))
    return 1 - found / fixed


def _middle(rows: Sequence[dict[str, Any]], name: str) -> float:
    return statistics.median([row[name] for row in rows if row[name] is not None] or [math.nan])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=30.0, help="of the solver, for every cell")
    parser.add_argument("--sizes", nargs="+", default=[f"{a}x{b}" for a, b in SIZES], metavar="STAGESxMICRO-BATCHES")
    parser.add_argument("--draws", type=int, default=21)
    parser.add_argument("--jobs", type=int, default=1, help="cells side by side")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    sizes = [(int(a), int(b)) for a, _, b in (size.partition("x") for size in args.sizes)]
    cells = [
        Cell(stages, micro_batches, share, link, uneven)
        for share in SHARES
        for link in LINKS
        for uneven in (False, True)
        for stages, micro_batches in sizes
    ]
    environment = {"command": shlex.join(["python", *sys.argv]), "date": time.strftime("%Y-%m-%d")}
    environment |= {"ortools": importlib.metadata.version("ortools"), "python": platform.python_version()}
    environment |= {"machine": platform.machine(), "seconds": args.seconds, "draws": args.draws}
    file = args.out / "solved.json"
    rows = json.loads(file.read_text(encoding="utf-8"))["cells"] if file.is_file() else []
    done = {row["name"] for row in rows}
    left = [cell for cell in reversed(cells) if cell.name not in done]  # the least memory first
    with ProcessPoolExecutor(args.jobs) as pool:
        jobs = [pool.submit(measure, cell, args.seconds, args.draws) for cell in left]
        for job in as_completed(jobs):
            rows.append(job.result())
            numbers = {cell.name: number for number, cell in enumerate(cells)}
            rows.sort(
                key=lambda row: (row["cell"]["stages"], row["cell"]["micro_batches"], numbers.get(row["name"], 0))
            )
            content = json.dumps({"environment": environment, "cells": rows}, indent=1)
            file.write_text(content + "\n", encoding="utf-8")
            (args.out / "table.md").write_text(page(environment, rows), encoding="utf-8")
            print(job.result()["name"], flush=True)


if __name__ == "__main__":
    main()
