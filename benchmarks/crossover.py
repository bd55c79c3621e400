"""Which strategy wins where: hidden sizes, sequence lengths and links, by the planner's clock.

    python benchmarks/crossover.py --out docs/crossover

All of them run here. Llama-like models of 16 layers (12 H^2 weights each), one sequence per micro-batch and eight
micro-batches per device, on four nodes of two devices that reach half of 989 TFLOP/s, 400 GB/s inside a node. Weights
travel in bf16, gradients in fp32. Memory is not limited here: the question is time. Beside each other stand what the
clock finds and the rule of docs/design.md, which compares volumes only: B S > 18 H (L / P) (1 - 1/D) / (k v), k of
the best setting, v = 2.
Writes ``crossover.json``, ``table.md`` and ``crossover.png``; five minutes on two processors.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import shlex
import sys
import time
from pathlib import Path
from typing import Any

from tawpipe.errors import UserError
from tawpipe.plan.cost.predict import predict
from tawpipe.plan.cost.profile import EFFICIENCY, Profile, size_of
from tawpipe.plan.cost.request import PlanRequest
from tawpipe.plan.machine.machine import Machine, uniform
from tawpipe.schedule.settings import DEFAULT, ScheduleSettings
from tawpipe.schedule.sizes.footprint import BlockMemory, Widths
from tawpipe.schedule.spec import BlockSpec, ModelSpec, UnitSpec
from tawpipe.schedule.strategies.table import strategies
from tawpipe.simulate import BlockCost, LinkModel, Seconds

HIDDEN = (1024, 2048, 4096, 8192)
LENGTHS = tuple(4096 << i for i in range(9))
GIGABITS = (10, 25, 100, 400)
LAYERS, NODES, LOCAL, PER_DEVICE = 16, 4, 2, 8
FLOPS = 989e12 * EFFICIENCY
FAMILY_OF = {
    "tawpipe-spread": "weights travel",
    "tawpipe-step": "weights travel",
    "hsdp": "a copy per node (HSDP)",
}
LEFT_OUT = ("generated", "solved")
"""Pipelines that are made for unequal layers, and for a limit of memory: here is neither."""
FAMILIES = {"weights travel": "#2a6fdb", "a pipeline": "#e4572e", "a copy per node (HSDP)": "#2e933c"}


def request_of(hidden: int, length: int, machine: Machine) -> PlanRequest:
    """The plan that is asked for in one cell."""
    numel = 12 * hidden * hidden
    blocks = (
        BlockSpec((), "embedding", backward_reads_weights=False, needs_backward=False),
        *(BlockSpec((i,), "layer") for i in range(LAYERS)),
        BlockSpec((), "head"),
    )
    model = ModelSpec(blocks, tuple(UnitSpec(numel, True, (i + 1,)) for i in range(LAYERS)))
    forward = Seconds(0.0, 2 * numel / FLOPS, 2 * hidden / FLOPS)
    backward = Seconds(0.0, 3 * forward.per_token, 3 * forward.per_pair)
    costs = (BlockCost(), *[BlockCost(forward, backward)] * LAYERS, BlockCost())
    profile = Profile(costs, 3e-11, BlockMemory(2 * hidden, {"graph": 34 * hidden, "kept": 6 * hidden}), "formula")
    count = PER_DEVICE * NODES * LOCAL
    return PlanRequest(model, profile, machine, count, 1, length, size_of([length]), Widths(2, 4, 4, 2))


def cell(place: tuple[int, int, float]) -> dict[str, Any]:
    """Seconds of the best setting of every family, and which settings these are, at (hidden size, tokens, Gbit/s)."""
    hidden, length, gigabits = place
    machine = uniform(
        NODES, LOCAL, between=LinkModel(gigabits * 1e9 / 8, 1e-5), inside=LinkModel(400e9, 5e-6, shared=False)
    )
    asked = request_of(hidden, length, machine)
    best: dict[str, tuple[float, str, int]] = {}

    def offer(family: str, seconds: float, name: str, per_visit: int = 1) -> None:
        if family not in best or seconds < best[family][0]:
            best[family] = (seconds, name, per_visit)

    for per_visit in (1, 2, 4, 8):
        for strategy, family in FAMILY_OF.items():
            if strategy == "tawpipe-step" and per_visit == PER_DEVICE:
                continue
            step = asked.step(ScheduleSettings(strategy=strategy, micro_batches_per_visit=per_visit))
            offer(family, predict(asked, step).step_seconds, f"{strategy}, {per_visit} per visit", per_visit)
    for pipeline in strategies().values():
        if not pipeline.axis or pipeline.name in LEFT_OUT:
            continue
        for layout in pipeline.layouts(asked.topology):
            try:
                seconds = predict(asked, asked.step(DEFAULT, layout)).step_seconds
            except UserError:  # fewer layers than stages
                continue
            offer("a pipeline", seconds, f"{layout.name} {layout.layout}")
    order = sorted(best, key=lambda family: best[family][0])
    return {
        "hidden": hidden,
        "tokens": length,
        "gigabits": gigabits,
        "winner": order[0],
        "setting": best[order[0]][1],
        "per_visit": best["weights travel"][2],
        "seconds": {family: found[0] for family, found in best.items()},
        "settings": {family: found[1] for family, found in best.items()},
    }


def rule(hidden: int, per_visit: int, stages: int = 2) -> float:
    """Tokens in a micro-batch from which on weights are fewer bytes than activations."""
    return 18 * hidden * LAYERS / (NODES * LOCAL) * (1 - 1 / NODES) / (per_visit * stages)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--out", type=Path, default=Path("crossover"))
    parser.add_argument("--jobs", type=int, help="processes, else one per processor")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    rows = []
    places = [(hidden, length, gigabits) for gigabits in GIGABITS for hidden in HIDDEN for length in LENGTHS]
    with multiprocessing.Pool(args.jobs) as pool:
        for row in pool.imap(cell, places):
            rows.append(row)
            print(f"{row['gigabits']} Gbit/s, H {row['hidden']}, {row['tokens']}: {row['setting']}", flush=True)
    environment = {"command": shlex.join(["python", *sys.argv]), "date": time.strftime("%Y-%m-%d")}
    (args.out / "crossover.json").write_text(json.dumps({"environment": environment, "rows": rows}, indent=1) + "\n")
    (args.out / "table.md").write_text("\n".join(table(environment, rows)) + "\n", encoding="utf-8")
    draw(rows, args.out / "crossover.png")


def table(environment: dict[str, Any], rows: list[dict[str, Any]]) -> list[str]:
    """From which sequence length on weights travel, found and by the rule."""
    lines = [
        f"{environment['date']}, `{environment['command']}`",
        "",
        "| links | H | weights win from | by volume alone | a copy per node wins at |",
        "| --- | ---: | ---: | ---: | --- |",
    ]
    for gigabits in GIGABITS:
        for hidden in HIDDEN:
            mine = [row for row in rows if (row["gigabits"], row["hidden"]) == (gigabits, hidden)]
            ahead = [row for row in mine if row["seconds"]["weights travel"] <= row["seconds"]["a pipeline"]]
            since = f"{ahead[0]['tokens'] // 1024} k" if ahead else "-"
            volume = rule(hidden, ahead[0]["per_visit"] if ahead else 1)
            copies = [f"{row['tokens'] // 1024} k" for row in mine if row["winner"].startswith("a copy")]
            lines.append(
                f"| {gigabits} Gbit/s | {hidden} | {since} | {volume / 1024:.1f} k | {', '.join(copies) or '-'} |"
            )
    return lines


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """A panel for every link: sequence length over hidden size, the winner's colour, and by how much it wins."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch, Rectangle

    figure, axes = pyplot.subplots(len(GIGABITS), 1, figsize=(11, 2.1 * len(GIGABITS)), squeeze=False)
    for axis, gigabits in zip(axes[:, 0], GIGABITS, strict=True):
        for row in rows:
            if row["gigabits"] != gigabits:
                continue
            x, y = LENGTHS.index(row["tokens"]), HIDDEN.index(row["hidden"])
            others = sorted(seconds for family, seconds in row["seconds"].items() if family != row["winner"])
            gain = others[0] / row["seconds"][row["winner"]] - 1
            axis.add_patch(Rectangle((x, y), 1, 1, color=FAMILIES[row["winner"]], alpha=min(1.0, 0.35 + 2 * gain)))
            axis.text(x + 0.5, y + 0.5, f"+{gain:.0%}", ha="center", va="center", fontsize=8)
        axis.set_xlim(0, len(LENGTHS))
        axis.set_ylim(0, len(HIDDEN))
        axis.set_xticks([i + 0.5 for i in range(len(LENGTHS))], [f"{length // 1024} k" for length in LENGTHS])
        axis.set_yticks([i + 0.5 for i in range(len(HIDDEN))], [f"H {hidden}" for hidden in HIDDEN])
        axis.set_title(f"links of {gigabits} Gbit/s", loc="left", fontsize=10)
        axis.tick_params(length=0, labelsize=8)
    axes[-1, 0].set_xlabel("tokens in a micro-batch")
    figure.legend(
        handles=[Patch(color=color, label=name) for name, color in FAMILIES.items()],
        loc="upper right",
        ncols=3,
        frameon=False,
    )
    figure.tight_layout(rect=(0, 0, 1, 0.97))
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    main()
