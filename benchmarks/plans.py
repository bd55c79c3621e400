"""How long does a plan take, and does it name what fits? Thirty cases up to the largest, and a grid drawn at random.

    python benchmarks/plans.py --out benchmarks/results/DATE-plans
    python benchmarks/plans.py --grid 100 --seed 1

Seconds are those of the processor that the search takes (``time.process_time``), of which other programs on the machine
take nothing. The goal is ``GOAL_S`` for up to 100,000 rows, 1,024 devices and 128 layers. Writes ``table.md`` and
``plans.json``. With ``--grid`` models, machines, lengths, batches and memories are drawn instead, and a case is wrong
if its plan takes longer, ends in an error that is none of the user's, or names nothing though a single setting that was
drawn at random fits; each has a line that repeats it. The exit code is 1 if one is wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from tawpipe.errors import UserError
from tawpipe.plan.machine import Device
from tawpipe.plan.measure import machine_of, request_of
from tawpipe.plan.plan import Plan
from tawpipe.plan.predict import memory_quickly
from tawpipe.plan.request import PlanRequest
from tawpipe.plan.search import LEAN, fits, search, unplayed
from tawpipe.schedule.strategies import strategies

HERE = Path(__file__).resolve().parent.parent
GOAL_S = 20.0
MODELS: dict[str, dict[str, Any]] = {
    "8B, 32 layers": {"layers": 32, "hidden": 4096},
    "13B, 48 layers": {"layers": 48, "hidden": 4096},
    "70B, 80 layers": {"layers": 80, "hidden": 8192},
    "1.5B, 28 layers": {"layers": 28, "hidden": 1536},
    "26B, 128 layers": {"layers": 128, "hidden": 4096},
    "30B-A3B, 48 layers": {"layers": 48, "hidden": 2048, "experts": 128},
}
TOPOLOGIES = ("1x2", "1x8", "2x4@10gbit", "3x8@1gbit", "3x8@10gbit", "4x4@100gbit", "8x8@25gbit", "16x8@100gbit")
LARGE = ("32x8@100gbit", "64x8@100gbit", "128x8@400gbit", "128x8@10gbit")
CASES = (  # model, machines, tokens of a row, rows of a step
    ("13B, 48 layers", "3x8@10gbit", 16384, 192),
    ("13B, 48 layers", "3x8@10gbit", 16384, 1536),
    ("13B, 48 layers", "3x8@10gbit", 16384, 1537),
    ("13B, 48 layers", "3x8@1gbit", 4096, 192),
    ("13B, 48 layers", "3x8@1gbit", 4096, 1536),
    ("13B, 48 layers", "3x8@1gbit", 4096, 100_000),
    ("8B, 32 layers", "1x8", 4096, 64),
    ("8B, 32 layers", "1x8", 8192, 512),
    ("8B, 32 layers", "2x4@1gbit", 4096, 128),
    ("8B, 32 layers", "2x4@1gbit", 4096, 100_000),
    ("8B, 32 layers", "3x8@10gbit", 32768, 96),
    ("8B, 32 layers", "16x8@100gbit", 8192, 1024),
    ("8B, 32 layers", "128x8@400gbit", 8192, 4096),
    ("8B, 32 layers", "128x8@10gbit", 8192, 100_000),
    ("70B, 80 layers", "4x8@100gbit", 8192, 256),
    ("70B, 80 layers", "8x8@10gbit", 8192, 512),
    ("70B, 80 layers", "8x8@1gbit", 4096, 10_000),
    ("70B, 80 layers", "32x8@100gbit", 16384, 2048),
    ("70B, 80 layers", "128x8@400gbit", 8192, 100_000),
    ("26B, 128 layers", "4x8@10gbit", 4096, 256),
    ("26B, 128 layers", "4x8@1gbit", 4096, 4096),
    ("26B, 128 layers", "16x8@10gbit", 4096, 10_000),
    ("26B, 128 layers", "128x8@100gbit", 4096, 100_000),
    ("26B, 128 layers", "128x8@1gbit", 4096, 100_000),
    ("1.5B, 28 layers", "1x2", 4096, 100_000),
    ("1.5B, 28 layers", "24x1@1gbit", 2048, 1000),
    ("1.5B, 28 layers", "2x8@0.1gbit", 131072, 16),
    ("30B-A3B, 48 layers", "2x4@10gbit", 8192, 64),
    ("30B-A3B, 48 layers", "3x8@10gbit", 16384, 1536),
    ("30B-A3B, 48 layers", "128x8@400gbit", 8192, 100_000),
)


@dataclass(frozen=True)
class Planned:
    """A plan, and what it took."""

    model: str
    topology: str
    sequence_length: int
    global_batch: int
    memory_gib: float
    cpu_s: float
    chosen: str | None
    step_seconds: float | None
    error: str = ""
    fits: str = ""

    @property
    def wrong(self) -> str:
        """Why it is, or nothing."""
        if self.error:
            return self.error
        if self.cpu_s > GOAL_S:
            return f"takes {self.cpu_s:.1f} s"
        return f"names nothing, {self.fits} fits" if self.fits and not self.chosen else ""


@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory()


@cache
def model_folder(layers: int, hidden: int, experts: int = 0) -> str:
    """A folder with the config of such a model, and nothing else."""
    folder = Path(_folder().name, f"{layers}-{hidden}-{experts}")
    sizes = {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": 7 * hidden // 2,
        "num_attention_heads": hidden // 128,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "vocab_size": 128256,
        "max_position_embeddings": 1 << 20,
        "tie_word_embeddings": False,
    }
    mixture = {"num_experts": experts, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
    config = (
        AutoConfig.for_model("qwen3_moe", **sizes, **mixture) if experts else AutoConfig.for_model("llama", **sizes)
    )
    config.save_pretrained(folder)
    return str(folder)


def ask(model: str, topology: str, tokens: int, rows: int, memory_gib: float) -> PlanRequest:
    """The request for a case's plan."""
    return request_of(
        model_folder(**MODELS[model]),
        machine_of(topology, device=Device("H100")),
        sequence_length=tokens,
        global_batch=rows,
        memory_bytes=int(memory_gib * 2**30),
    )


def plan(model: str, topology: str, tokens: int, rows: int, memory_gib: float, single: random.Random | None) -> Planned:
    """Plan a case.

    Args:
        single: draws the settings of which it is seen whether they fit; None for none.
    """
    chosen, error, found, begin = None, "", "", time.process_time()
    try:
        request = ask(model, topology, tokens, rows, memory_gib)
        begin = time.process_time()
        chosen = Plan.of(request, search(request)).chosen
    except UserError:
        pass
    except Exception as problem:
        error = f"{type(problem).__name__}: {problem}"
    took = time.process_time() - begin
    if single is not None and not error and chosen is None:
        found = next(_fitting(ask(model, topology, tokens, rows, memory_gib), single), "")
    seconds = chosen.seconds if chosen else None
    return Planned(model, topology, tokens, rows, memory_gib, took, chosen and chosen.strategy, seconds, error, found)


def _fitting(request: PlanRequest, draw: random.Random) -> Iterator[str]:
    """Settings that fit, of every strategy one that is drawn at random."""
    for strategy in strategies().values():
        if not strategy.candidate:
            continue
        for way in strategy.layouts(request.topology):
            settings = replace(request.settings, strategy=strategy.name)
            settings = replace(settings, **(LEAN if draw.random() < 0.5 else {"micro_batches_per_visit": 1}))
            try:
                step = request.step(settings, way)
                if not unplayed(request, step) and fits(request, memory_quickly(request, step)):
                    yield f"{strategy.name} {way.layout}"
            except UserError:
                continue


def drawn(seed: int, number: int) -> tuple[str, str, int, int, float]:
    """A case of the grid."""
    draw = random.Random(f"{seed} {number}")
    topology = draw.choice(TOPOLOGIES if draw.random() < 0.8 else LARGE)
    rows = round(10 ** draw.uniform(0, 5))
    return draw.choice(list(MODELS)), topology, 1 << draw.randint(10, 17), rows, draw.choice((22, 38, 75, 76, 135))


def grid(seed: int, first: int, number: int) -> int:
    """Plan so many cases, and say what is wrong; how many are."""
    wrong = 0
    for case in range(first, first + number):
        made = plan(*drawn(seed, case), single=random.Random(case))
        print(f"{case:4d} {made.cpu_s:5.1f} s  {made.chosen}  {drawn(seed, case)}", flush=True)
        if made.wrong:
            wrong += 1
            again = f"python benchmarks/plans.py --seed {seed} --first {case} --grid 1"
            print(f"     WRONG: {made.wrong}; again: {again}", flush=True)
    print(f"{wrong} of {number} wrong; seed {seed}")
    return wrong


def table(rows: list[Planned]) -> str:
    """The cases as a page."""
    lines = [
        "| model | machines | tokens of a row | rows of a step | chosen | s/step | processor s |",
        "| --- | --- | --: | --: | --- | --: | --: |",
    ]
    for row in rows:
        step = "" if row.step_seconds is None else f"{row.step_seconds:.1f}"
        what = row.chosen or row.error or "nothing fits"
        sizes = f"{row.sequence_length:,} | {row.global_batch:,}"
        lines.append(f"| {row.model} | {row.topology} | {sizes} | {what} | {step} | {row.cpu_s:.1f} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--grid", type=int, metavar="CASES")
    parser.add_argument("--first", type=int, default=0, metavar="CASE")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--memory", type=float, default=76, metavar="GIB")
    args = parser.parse_args()
    if args.grid:
        return int(grid(args.seed, args.first, args.grid) > 0)
    if args.out is None:
        parser.error("--out or --grid")
    rows = list[Planned]()
    for case in CASES[args.first :]:
        rows.append(plan(*case, args.memory, None))
        print(table(rows[-1:]).splitlines()[-1], flush=True)
    args.out.mkdir(parents=True, exist_ok=True)
    commit = subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], cwd=HERE, text=True).strip()
    command = shlex.join(["python", "benchmarks/plans.py", *sys.argv[1:]])
    machine = f"{os.cpu_count()} cores, {platform.processor() or platform.machine()}, load {os.getloadavg()[0]:.1f}"
    most = max(row.cpu_s for row in rows)
    head = (
        f"# How long plans take\n\nH100 with {args.memory:g} GiB, by estimate; on {machine} at the end, at {commit}. "
    )
    head += f"`{command}`. The longest takes {most:.1f} s of the processor, the goal is {GOAL_S:g}.\n\n"
    (args.out / "table.md").write_text(head + table(rows) + "\n", encoding="utf-8")
    (args.out / "plans.json").write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n", encoding="utf-8")
    return int(any(row.wrong for row in rows))


if __name__ == "__main__":
    sys.exit(main())
