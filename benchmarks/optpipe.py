"""Llama 8B in less memory than 1F1B wants: what layers keep, offload or compute again, beside the best uniform way.

    python benchmarks/optpipe.py --out benchmarks/results/DATE-optpipe
    python benchmarks/optpipe.py --out benchmarks/results/DATE-optpipe --suite src/tawpipe_lab/suites/optpipe.yaml

Twelve cells, written down here before anything was solved: costs as ``tawpipe plan`` has them for Llama 8B on H100s,
four nodes of eight devices with 400 Gbit/s between nodes, a pipeline of four stages over the nodes (eight side by side)
with 16 micro-batches of one row; memory of a position 0.7, 0.5 and 0.35 of what 1F1B keeps without recomputation; a
link to the host of 25 or 12.5 GB/s each way, shared by the eight devices of a node; rows of 4,096 and 16,384 tokens.

The baseline is the shortest of 1f1b, interleaved-1f1b, zero-bubble and generated, with no, selective or full
recomputation of all layers, that fits. Beside it: a choice layer by layer without the host's memory (search/keep.py),
one with it, and the solver from the shorter of these on. Times are those of schedule/pipelines/work.py, and so is
memory, the worst of all timings, with room for what is on its way. Weights and optimizer state are left out of both.
Nothing computes here. Writes ``optpipe.json`` and ``table.md``; where the folder has cells already, it goes on with the
next. With ``--suite`` it writes four of the cells as a suite of the lab, with the orders found and those of the best
uniform ways.
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
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from tawpipe.errors import UserError
from tawpipe.model.chain import Chain
from tawpipe.model.files.build import build_model
from tawpipe.orders.arrange import arrange
from tawpipe.orders.generate import generate
from tawpipe.orders.keeping import Kept, choose
from tawpipe.orders.solver.solve import solve
from tawpipe.plan.cost.measure import INSIDE, LATENCY_S, Asked, request_of
from tawpipe.plan.cost.request import PlanRequest
from tawpipe.plan.machine.machine import Device, Machine
from tawpipe.plan.search.pipelines import pipeline_costs
from tawpipe.schedule.pipelines.cost_based import SolvedPipeline, held_at_once
from tawpipe.schedule.pipelines.layout import Layout
from tawpipe.schedule.pipelines.memory import fits, peak
from tawpipe.schedule.pipelines.orders import interleaved, one_f_one_b
from tawpipe.schedule.pipelines.positions import Positions
from tawpipe.schedule.pipelines.times import spell_times
from tawpipe.schedule.pipelines.work import Order, PipelineCosts, makespan, play
from tawpipe.schedule.settings import RECOMPUTE, recompute_of_blocks
from tawpipe.simulate import LinkModel

STAGES, LOCAL, MICRO_BATCHES, BETWEEN = 4, 8, 16, 50e9
LENGTHS, SHARES, LINKS = (4096, 16384), (0.7, 0.5, 0.35), (25e9, 12.5e9)
TRIES = 20_000
"""Of annealing, without the host's memory, and as many with it."""
SLOWER, LAB_RATE = {4096: 4, 16384: 1}, 10e6 / 8 * 0.99
"""Of the lab: times as long as on the GPU, by tokens; bytes a second of its links."""
UNDER_WAY = 13
"""Boundary activations, of the limit, for what has come before its work starts and what has yet to go."""


@dataclass(frozen=True)
class Cell:
    """One problem."""

    tokens: int
    share: float
    link: float

    @property
    def name(self) -> str:
        return f"{self.tokens:,} tokens, memory {self.share:g}, host {self.link / 1e9:g} GB/s"


CELLS = [Cell(tokens, share, link) for tokens in LENGTHS for share in SHARES for link in LINKS]


@cache
def request_for(tokens: int, link: float) -> PlanRequest:
    """What a plan is asked."""
    host = LinkModel(link / LOCAL, 1e-5, shared=False)
    machine = Machine((LOCAL,) * STAGES, LinkModel(BETWEEN, LATENCY_S), INSIDE["GPU"], host=host, device=Device("H100"))
    asked = Asked(tokens, MICRO_BATCHES * LOCAL, 1)
    built = build_model("llama-8b", max_positions=asked.row, longest=asked.longest)
    return request_of(Chain(built.model), machine, asked)


@cache
def costs_of(tokens: int, link: float) -> dict[str, PipelineCosts]:
    """The costs of a plan by what layers compute again, with any memory."""
    request = request_for(tokens, link)
    positions = Positions(request.topology, "nodes")
    return {how: pipeline_costs(request, positions, how) for how in RECOMPUTE}


def problem(cell: Cell, under_way: int = UNDER_WAY) -> dict[str, PipelineCosts]:
    """The costs of a cell, with its limit but for what is on its way."""
    free = costs_of(cell.tokens, cell.link)
    even = Layout.even(len(free["none"].blocks), STAGES)
    wanted = max(peak(even, one_f_one_b(even, MICRO_BATCHES), free["none"]))
    return {how: replace(costs, memory=cell.share * wanted - under_way) for how, costs in free.items()}


def ways(costs: PipelineCosts) -> Iterator[tuple[str, Layout, Order]]:
    """Published orders, and the generated one."""
    blocks = len(costs.blocks)
    even, twice = Layout.even(blocks, STAGES), Layout.even(blocks, STAGES, 2)
    folded = Layout.even(blocks, STAGES, 2, folded=True)
    yield "1f1b", even, one_f_one_b(even, MICRO_BATCHES)
    yield "interleaved-1f1b", twice, interleaved(twice, MICRO_BATCHES)
    yield "zero-bubble", folded, arrange(folded, costs, MICRO_BATCHES)
    made = generate(costs, STAGES, MICRO_BATCHES)
    yield "generated", made, arrange(made, costs, MICRO_BATCHES)


@cache
def uniform(tokens: int, share: float) -> tuple[dict[str, float], dict[str, Layout]]:
    """Times and layouts of all ways that fit. No link to the host takes part."""
    found, layouts = dict[str, float](), dict[str, Layout]()
    for how, costs in problem(Cell(tokens, share, LINKS[0])).items():
        try:
            for name, layout, order in ways(costs):
                if all(fits(costs, most) for most in peak(layout, order, costs)):
                    layouts[f"{name}, {how}"] = layout
                    found[f"{name}, {how}"] = makespan(play(layout, order, costs))
        except UserError:  # memory for no order
            continue
    return found, layouts


@cache
def chosen(tokens: int, share: float, link: float = 0.0, under_way: int = UNDER_WAY) -> Kept:
    """The choice from a V and the stages of the best uniform way on; with the host's memory if there is a link."""
    options, (fixed, layouts) = problem(Cell(tokens, share, link or LINKS[0]), under_way), uniform(tokens, share)
    if not link:
        options = {how: replace(costs, host=math.inf) for how, costs in options.items()}
    folded = Layout.even(len(options["none"].blocks), STAGES, 2, folded=True)
    begin = [folded, layouts[min(fixed, key=lambda name: fixed[name])]]
    return choose(options, begin, MICRO_BATCHES, tries=TRIES)


def held(cell: Cell, kept: Kept, order: Order) -> float:
    """The most that a position holds at any time, with what is on its way, in boundary activations."""
    request, choice = request_for(cell.tokens, cell.link), kept.choice
    made = {"recompute": choice.recompute, "stages": f"nodes:{choice.layout}", "block_times": spell_times(kept.costs)}
    step = request.step(replace(request.settings, strategy="solved", pipeline_order=str(order), **made))
    assert isinstance(step.strategy, SolvedPipeline)
    return held_at_once(step, step.strategy.shape_of(step), order)


def measure(cell: Cell, seconds: float, under_way: int = UNDER_WAY) -> dict[str, Any]:
    """A cell's baseline, and what is found; with more room for what is on its way where an order held too much."""
    begin = time.perf_counter()
    fixed, _ = uniform(cell.tokens, cell.share)
    alone = chosen(cell.tokens, cell.share, under_way=under_way)
    hosted = chosen(cell.tokens, cell.share, cell.link, under_way)
    kept = min(alone, hosted, key=lambda kept: kept.makespan)
    found = solve(kept.choice.layout, kept.costs, MICRO_BATCHES, kept.order, seconds=seconds)
    best = min(fixed, key=lambda name: fixed[name])
    choice, limit = kept.choice, kept.costs.memory + under_way
    holds = held(cell, kept, found.order)
    if holds > limit:
        return measure(cell, seconds, under_way + 1)
    return {
        "name": cell.name,
        "limit": limit,
        "held": holds,
        "under_way": under_way,
        "fixed_s": {name: value / 1e6 for name, value in fixed.items()},
        "best": best,
        "chosen_s": alone.makespan / 1e6,
        "with_host_s": hosted.makespan / 1e6,
        "solved_s": found.makespan / 1e6,
        "bound_s": found.bound / 1e6,
        "shorter": 1 - found.makespan / fixed[best],
        "layout": str(choice.layout),
        "recompute": choice.recompute,
        "moving": sorted(choice.moving),
        "offloads": sum(map(len, found.order.host)) // 2,
        "costs": spell_times(kept.costs),
        "order": str(found.order),
        "took_s": time.perf_counter() - begin,
    }


def lab_cell(cell: Cell, row: dict[str, Any]) -> dict[str, Any]:
    """A cell of the lab: layers that keep less are other kinds, and nothing is computed again beyond what these do."""
    options, scale = problem(cell), SLOWER[cell.tokens] / 1e6
    way, uniformly = row["best"].split(", ")
    boundary = round(scale * options["none"].hop * LAB_RATE)

    def kind(how: str) -> dict[str, float]:
        block = options[how].blocks[1]
        again = block.forward + block.backward_input  # ``none`` takes a forward pass off
        return {"backward_input_s": round(scale * again, 6), "graph_bytes": round(block.kept * boundary)}

    layer, head = options[uniformly].blocks[1], options[uniformly].blocks[-1]
    keeps = recompute_of_blocks(row["recompute"], request_for(cell.tokens, cell.link).model)[1:-1]
    layout, order = next((layout, order) for name, layout, order in ways(options[uniformly]) if name == way)
    workload = {
        "layers": len(keeps),
        "layer_bytes": 4000,
        "forward_s": round(scale * layer.forward, 6),
        **kind(uniformly),
    }
    workload |= {"backward_weight_s": round(scale * layer.backward_weight, 6), "micro_batches": MICRO_BATCHES}
    workload |= {"activation_bytes": boundary, "linear_bytes": round(layer.kept_for_weights * boundary)}
    kinds = {how[0]: kind(how) for how in options if how in keeps and how != uniformly}
    workload |= {"kinds": {**kinds, "head": {"backward_input_s": round(scale * head.backward_input, 6)}}}
    workload |= {"pattern": "".join(how[0] for how in keeps), "optimizer": False}
    workload |= {"room": row["limit"], "host_s": round(scale * options["none"].host, 6)}
    solved = {"stages": f"world:{row['layout']}", "order": row["order"]}
    fixed = {"stages": f"world:{layout}", "order": str(order), "pattern": uniformly[0] * len(keeps)}
    rows = {"solved": solved, way if way in ("zero-bubble", "generated") else f"{way}-ours": fixed}
    entries = [{"strategy": name, "knobs": {"recompute": "none"}, "searched": found} for name, found in rows.items()]
    name = f"{cell.tokens} tokens memory {cell.share:g}"
    return {"name": name, "nodes": STAGES, "local": 1, "rate": "10mbit", "workload": workload, "strategies": entries}


def lab_suite(rows: dict[str, dict[str, Any]]) -> str:
    """Four cells, two lengths and two shares of the memory, as YAML."""
    chosen = [Cell(tokens, share, LINKS[0]) for tokens in LENGTHS for share in SHARES[:2]]
    values = {"name": "optpipe", "samples": 2, "cells": [lab_cell(cell, rows[cell.name]) for cell in chosen]}
    text = yaml.safe_dump({**values, "strategies": []}, sort_keys=False, width=10**9)
    return f"# Llama 8B in less memory than 1F1B wants: four cells of benchmarks/optpipe.py, which wrote them.\n{text}"


def page(environment: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """Markdown."""
    lines = [
        "# Llama 8B in less memory than 1F1B wants",
        "",
        f"{environment['date']}, `{environment['command']}`, OR-tools {environment['ortools']}, Python "
        f"{environment['python']}, {environment['machine']}. By the clock; nothing computed.",
        "",
    ]
    for link in LINKS:
        own = [row["shorter"] for row in rows if row["name"].endswith(f"host {link / 1e9:g} GB/s")]
        if own:
            median, least = statistics.median(own), min(own)
            lines.append(f"At {link / 1e9:g} GB/s a step is {median:.1%} shorter in the median of {len(own)} cells, ")
            lines[-1] += f"from {least:.1%} to {max(own):.1%}."
    lines += [
        "",
        "| cell | best uniform way | s | layer by layer | with the host | solved | shorter by | held of the limit "
        "| offloads | recompute |",
        "| --- | --- " + "| ---: " * 7 + "| --- |",
    ]
    for row in rows:
        lines.append(
            f"| {row['name']} | {row['best']} | {row['fixed_s'][row['best']]:.3f} | {row['chosen_s']:.3f} "
            f"| {row['with_host_s']:.3f} | {row['solved_s']:.3f} | {row['shorter']:.1%} "
            f"| {row['held'] / row['limit']:.1%} | {row['offloads']} | {row['recompute']} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=20.0, help="of the solver, for every cell")
    parser.add_argument("--suite", type=Path, help="a file to write for the lab, when all cells are there")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    environment = {"command": shlex.join(["python", *sys.argv]), "date": time.strftime("%Y-%m-%d")}
    environment |= {"ortools": importlib.metadata.version("ortools"), "python": platform.python_version()}
    environment |= {"machine": platform.machine(), "seconds": args.seconds}
    file = args.out / "optpipe.json"
    rows = json.loads(file.read_text(encoding="utf-8"))["cells"] if file.is_file() else []
    for cell in CELLS:
        if cell.name in {row["name"] for row in rows}:
            continue
        rows.append(measure(cell, args.seconds))
        content = json.dumps({"environment": environment, "cells": rows}, indent=1)
        file.write_text(content + "\n", encoding="utf-8")
        (args.out / "table.md").write_text(page(environment, rows), encoding="utf-8")
        print(f"{cell.name}: {rows[-1]['shorter']:.1%} shorter, {rows[-1]['took_s']:.0f} s", flush=True)
    if args.suite:
        args.suite.write_text(lab_suite({row["name"]: row for row in rows}), encoding="utf-8")


if __name__ == "__main__":
    main()
