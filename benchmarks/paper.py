"""The sixteen cells of TawPipe's paper (AAAI 2026, its table of 24 GPUs), by the planner's clock.

    python benchmarks/paper.py --out benchmarks/results/DATE-paper

Three nodes of eight GPUs, 10 GbE; 48 layers of 12 H^2 weights and a vocabulary of 32,000, 1,536 sequences in a step,
fp16, recomputation. The paper does not say how fast its devices compute nor how many sequences a micro-batch has. So:

* the speed of a device is fitted on the four cells of TawPipe, which computing limits: operations per second in matrix
  products at H 1024 and at H 4096, and in attention; three numbers for four cells;
* the sequences of a micro-batch are fitted on the four cells of FSDP, one number for each;
* the eight cells of WeiPipe and 1F1B are predicted with these, and nothing is fitted on them.

TawPipe is played as its paper has it (units whole on one device, staggered, every visit pulled anew), FSDP as a ring
over all devices that fetches one layer ahead.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from tawpipe.plan.machine import uniform
from tawpipe.plan.predict import predict
from tawpipe.plan.profile import Profile, size_of
from tawpipe.plan.request import PlanRequest
from tawpipe.schedule.footprint import BlockMemory, Widths
from tawpipe.schedule.settings import ScheduleSettings
from tawpipe.schedule.spec import BlockSpec, ModelSpec, UnitSpec
from tawpipe.simulate import BlockCost, LinkModel, Seconds

LAYERS, VOCABULARY, BATCH, DEVICES = 48, 32_000, 1536, 24
SYSTEMS = ("1F1B", "FSDP", "WeiPipe", "TawPipe")
CELLS: dict[tuple[int, int], tuple[float, ...]] = {
    (1024, 4096): (7212, 10559, 12055, 13629),
    (1024, 8192): (6636, 8826, 10663, 11738),
    (1024, 16384): (5594, 6751, 8412, 8914),
    (4096, 16384): (1114.2, 956.1, 1232.4, 1377.6),
}
"""(H, S) -> tokens per GPU and second of ``SYSTEMS``."""
SIZES = (1, 2, 3, 4, 6, 8, 12, 16)
"""Sequences of a micro-batch that are tried."""
LINK = LinkModel(1.17e9, 3e-5)
"""10 GbE with TCP."""
INSIDE = LinkModel(200e9, 1e-5, shared=False)
PASSES = 4
"""Of the forward pass's work: forward, forward again, and twice as much backward."""

Rates = tuple[float, float, float]
"""Seconds of an operation in matrix products at H 1024, at H 4096, and in attention."""


def work(hidden: int, length: int) -> list[float]:
    """Operations of a token: in matrix products if H is 1024, if it is 4096, and in attention; all passes."""
    products = PASSES * LAYERS * 24 * hidden**2 + 6 * hidden * VOCABULARY
    return [products * (hidden == 1024), products * (hidden == 4096), PASSES * LAYERS * 2 * length * hidden]


def fit_rates() -> Rates:
    """By the four cells of TawPipe, least relative squares."""
    terms = np.array([np.array(work(*cell)) * found[3] for cell, found in CELLS.items()])
    found, *_ = np.linalg.lstsq(terms, np.ones(len(terms)), rcond=None)
    return tuple(map(float, found))  # pyright: ignore[reportReturnType]


def request_of(hidden: int, length: int, micro_batch: int, rates: Rates) -> PlanRequest:
    """The plan that is asked for in one cell."""
    numel, table = 12 * hidden * hidden, hidden * VOCABULARY
    product = rates[0] if hidden == 1024 else rates[1]
    forward = Seconds(0.0, 2 * numel * product, 2 * hidden * rates[2])
    layer = BlockCost(forward, Seconds(0.0, 3 * forward.per_token, 3 * forward.per_pair))
    head = BlockCost(Seconds(0.0, 2 * table * product), Seconds(0.0, 6 * table * product))
    blocks = (
        BlockSpec((0,), "embedding", backward_reads_weights=False),
        *(BlockSpec((i + 1,), "layer") for i in range(LAYERS)),
        BlockSpec((LAYERS + 1,), "head"),
    )
    units = [UnitSpec(table, True, (0,)), *(UnitSpec(numel, True, (i + 1,)) for i in range(LAYERS))]
    model = ModelSpec(blocks, (*units, UnitSpec(table, True, (LAYERS + 1,))))
    profile = Profile((BlockCost(), *[layer] * LAYERS, head), 3e-11, BlockMemory(2 * hidden, {}), "formula")
    return PlanRequest(
        model,
        profile,
        uniform(3, 8, between=LINK, inside=INSIDE),
        BATCH,
        micro_batch,
        length,
        size_of([length] * micro_batch),
        Widths(2, 2, 4, 2),
    )


def tokens(system: str, asked: PlanRequest) -> float:
    """Tokens per device and second."""
    settings: dict[str, Any] = {
        "1F1B": {"strategy": "1f1b"},
        "FSDP": {"strategy": "flat", "look_ahead": 1, "gradient_buffers": 1, "reuse": False},
        "WeiPipe": {"strategy": "weipipe"},
        "TawPipe": {"strategy": "tawpipe-whole", "reuse": False},
    }[system]
    seconds = predict(asked, asked.step(ScheduleSettings(micro_batches_per_visit=1, **settings))).step_seconds
    return BATCH * asked.sequence_length / seconds / DEVICES


def fit_micro_batch(hidden: int, length: int, rates: Rates) -> int:
    """The size with which FSDP comes closest to what the paper measured."""
    target = CELLS[hidden, length][1]
    usable = [size for size in SIZES if BATCH % (size * DEVICES) == 0]
    return min(usable, key=lambda size: abs(tokens("FSDP", request_of(hidden, length, size, rates)) / target - 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--out", type=Path, default=Path("paper"))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    rates = fit_rates()
    rows: list[dict[str, Any]] = []
    for (hidden, length), found in CELLS.items():
        size = fit_micro_batch(hidden, length, rates)
        asked = request_of(hidden, length, size, rates)
        for system, measured in zip(SYSTEMS, found, strict=True):
            predicted = tokens(system, asked)
            cell = {"hidden": hidden, "length": length, "micro_batch": size, "system": system}
            rows.append(cell | {"paper": measured, "predicted": predicted, "error": predicted / measured - 1})
            print(rows[-1], flush=True)
    environment = {"command": shlex.join(["python", *sys.argv]), "date": time.strftime("%Y-%m-%d")}
    content = {"environment": environment, "seconds_per_operation": rates, "rows": rows}
    (args.out / "paper.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    (args.out / "table.md").write_text("\n".join(table(environment, rates, rows)) + "\n", encoding="utf-8")


def table(environment: dict[str, Any], rates: Rates, rows: list[dict[str, Any]]) -> list[str]:
    """Markdown."""
    unseen = [row for row in rows if row["system"] in ("WeiPipe", "1F1B")]
    teraflops = [1 / one / 1e12 if one > 0 else float("inf") for one in rates]
    lines = [
        f"{environment['date']}, `{environment['command']}`",
        "",
        f"Fitted: {teraflops[0]:.0f} TFLOP/s in products at H 1024, {teraflops[1]:.0f} at H 4096, {teraflops[2]:.0f} "
        f"in attention (on TawPipe's cells); sequences of a micro-batch (on FSDP's). Median error of the eight cells "
        f"of WeiPipe and 1F1B: {statistics.median(abs(row['error']) for row in unseen):.1%}, largest "
        f"{max(abs(row['error']) for row in unseen):.1%}; order of the four systems kept in {orders(rows)} settings.",
        "",
        "| setting | sequences | system | paper, tokens/GPU/s | predicted | error |",
        "| --- | ---: | --- | ---: | ---: | ---: |",
    ]
    for row in rows:
        lines.append(
            f"| H{row['hidden']} S{row['length']} | {row['micro_batch']} | {row['system']} | {row['paper']:.0f} "
            f"| {row['predicted']:.0f} | {row['error']:+.1%} |"
        )
    return lines


def orders(rows: list[dict[str, Any]]) -> str:
    """In how many settings the prediction puts the systems in the paper's order."""
    kept = 0
    for hidden, length in CELLS:
        mine = [row for row in rows if (row["hidden"], row["length"]) == (hidden, length)]
        by_paper, by_clock = (sorted(mine, key=lambda row, by=by: row[by]) for by in ("paper", "predicted"))
        kept += by_paper == by_clock
    return f"{kept} of {len(CELLS)}"


if __name__ == "__main__":
    main()
