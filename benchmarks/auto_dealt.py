"""Does a plan for documents that are dealt choose what is fastest? Settings drawn at random, candidates by the clock.

    python benchmarks/auto_dealt.py --out benchmarks/results/DATE-auto-dealt

A setting is a model, a cluster of H100s, links and the lengths of a corpus. The search is given what a run gives it: a
typical step of the corpus. Then other steps are drawn, dealt for the settings of every candidate as
the run would deal them, and played bin by bin. A few steps of few, long documents may have a sixth more to do than the
mean one: what they take is told for as much work as steps of the corpus have. Right is a choice within 3 % of the
fastest. Writes ``table.md`` and ``results.json``.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import shlex
import statistics
import sys
import time
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from plans import MODELS, model_folder
from tawpipe.model.build import build_model
from tawpipe.model.chain import Chain
from tawpipe.model.flops import work_of
from tawpipe.plan.dealt import BALANCED, played
from tawpipe.plan.devices import Device
from tawpipe.plan.lengths import Lengths, lengths_of
from tawpipe.plan.measure import Asked, machine_of, request_of
from tawpipe.plan.plan import Plan
from tawpipe.plan.request import PlanRequest
from tawpipe.plan.search import search
from tawpipe.plan.typical import LOOKED_AT, typical_documents
from tawpipe.schedule.pipelines.dealing import LONG
from tawpipe.schedule.settings import DEFAULT
from tawpipe.schedule.step import StepSpec
from tawpipe.train.config import TrainConfig
from tawpipe.train.decided import BatchShape

GOOD = 0.03
MOST_S = 6.0
"""For which a plan is looked for."""
FAR = 1.25
"""Multiple of the choice's seconds beyond which a candidate is not played: predictions are not that wrong."""
FIRST_PLAYED = 100
"""The first step that is played; ``LOOKED_AT`` steps from it on say how much a step has to do in the mean."""


@dataclass(frozen=True)
class Setting:
    """What is planned for."""

    model: str
    nodes: int
    local: int
    gbit: float
    corpus: str
    max_document: int
    documents: int
    """Of the greatest length, whose tokens a device has in a step."""

    @classmethod
    def drawn(cls, source: random.Random) -> Setting:
        nodes, local = source.choice(((2, 4), (3, 2), (2, 2), (4, 2), (2, 8)))
        return cls(
            source.choice(("1.5B, 28 layers", "8B, 32 layers")),
            nodes,
            local,
            source.choice((0.1, 1, 5, 10, 25, 100)),
            source.choice(("lognormal:6.35,2.33", "lognormal:4.46,2.26")),
            source.choice((16384, 49152, 98304)),
            source.choice((1, 2, 4)),
        )

    @property
    def tokens(self) -> int:
        """Of a step."""
        return self.nodes * self.local * self.documents * self.max_document

    def __str__(self) -> str:
        corpus = f"{self.corpus}, up to {self.max_document:,}; {self.tokens / 2**20:.2g} Mi tokens"
        return f"{self.model}; {self.nodes}x{self.local}, {self.gbit:g} Gbit/s; {corpus}"


@cache
def chain_of(model: str) -> Chain:
    return Chain(build_model(model_folder(**MODELS[model]), max_positions=1 << 17).model)


def asked(setting: Setting, lengths: Lengths) -> PlanRequest:
    """What a run asks for."""
    machine = machine_of(
        f"{setting.nodes}x{setting.local}@{setting.gbit:g}gbit", device=Device("H100", memory_bytes=80 << 30)
    )
    config = TrainConfig(tokens_per_step=setting.tokens, max_document=setting.max_document)
    batch = BatchShape.of(config, "balanced", machine.world_size)
    steps = [lengths.step(setting.tokens, number) for number in range(LOOKED_AT)]
    typical = typical_documents(steps, lengths.longest, work_of(chain_of(setting.model)))
    row = [min(typical[0], batch.row_tokens)]
    while (left := batch.row_tokens - sum(row)) > 0:
        row.append(min(left, typical[len(row) % len(typical)]))
    given = Asked(
        batch.row_tokens,
        batch.rows,
        lengths=row,
        profile="estimate",
        dealt=typical,
        settings=replace(DEFAULT, sequence_ranks=1),
    )
    return request_of(chain_of(setting.model), machine, given)


def seconds_of(request: PlanRequest, step: StepSpec, steps: list[list[int]]) -> float | None:
    """The mean of some steps, dealt and played; None where the strategy cannot run one of them."""
    cuts = LONG if request.cuts else None
    by = step.strategy.dealing(step, cap=request.sequence_length, work=request.deals_by, cuts=cuts)
    tried = [played(request, step, BALANCED, by(lengths)) for lengths in steps]
    return None if None in tried else statistics.fmean(one.seconds for one in tried if one)


def looked_at(setting: Setting, count: int) -> dict[str, Any]:
    """The choice, and every candidate by its prediction and by the clock."""
    lengths = lengths_of(setting.corpus).cut(setting.max_document)
    begin, request = time.thread_time(), asked(setting, lengths)
    plan = Plan.of(request, search(request, most_s=lambda _: MOST_S))
    planned_s = time.thread_time() - begin
    assert plan.chosen is not None, plan.reason
    later = [lengths.step(setting.tokens, FIRST_PLAYED + number) for number in range(LOOKED_AT)]
    steps, of = later[:count], work_of(chain_of(setting.model)).of
    works = [sum(map(of, documents)) for documents in later]
    played_work = statistics.fmean(works[:count]) / statistics.fmean(works)
    candidates = []
    for candidate in plan.candidates:
        if candidate.fits and candidate.step is not None and candidate.seconds < FAR * plan.chosen.seconds:
            took = seconds_of(request, candidate.step, steps)
            settings = {name: value for name, value in candidate.chosen_settings().items() if name != "block_times"}
            candidates.append(
                {
                    "strategy": candidate.strategy,
                    "predicted_s": candidate.seconds,
                    "clock_s": took and took / played_work,
                    "settings": settings,
                }
            )
    known = [candidate for candidate in candidates if candidate["clock_s"]]
    best, (chosen,) = (
        min(known, key=lambda candidate: candidate["clock_s"]),
        [candidate for candidate in known if candidate["strategy"] == plan.chosen.strategy],
    )
    return {
        "setting": vars(setting),
        "name": str(setting),
        "chosen": chosen["strategy"],
        "predicted_s": chosen["predicted_s"],
        "clock_s": chosen["clock_s"],
        "error": chosen["predicted_s"] / chosen["clock_s"] - 1,
        "fastest": best["strategy"],
        "behind": chosen["clock_s"] / best["clock_s"] - 1,
        "errors": [candidate["predicted_s"] / candidate["clock_s"] - 1 for candidate in known],
        "planned_s": planned_s,
        "played_work": played_work,
        "candidates": candidates,
    }


def page(rows: list[dict[str, Any]], seed: int) -> str:
    """All of it."""
    right = sum(row["behind"] <= GOOD for row in rows)
    errors = [abs(error) for row in rows for error in row["errors"]]
    within = sum(error <= 0.07 for error in errors)
    said = f"Right within {GOOD:.0%} in {right} of {len(rows)} settings, drawn with seed {seed}. Of {len(errors)} "
    said += (
        f"predictions {within} are within 7 % of the clock over dealt steps; median {statistics.median(errors):.1%}, "
    )
    said += f"largest {max(errors):.1%}. By the clock, nothing was run: torch {torch.__version__}, "
    said += f"Python {platform.python_version()}."
    shares = [row["played_work"] for row in rows]
    said += f" Steps that were played had {min(shares):.2f} to {max(shares):.2f} of the work of a mean one."
    lines = [
        f"`python benchmarks/auto_dealt.py {shlex.join(sys.argv[1:])}`",
        "",
        said,
        "",
        "| setting | chosen | predicted s | by the clock s | error | fastest by the clock | behind it |",
        "| --- | --- | ---: | ---: | ---: | --- | ---: |",
    ]
    lines += [
        f"| {row['name']} | {row['chosen']} | {row['predicted_s']:.2f} | {row['clock_s']:.2f} | {row['error']:+.1%} | "
        f"{row['fastest']} | {row['behind']:.1%} |"
        for row in rows
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--settings", type=int, default=10)
    parser.add_argument("--steps", type=int, default=3, help="that every candidate is played for")
    parser.add_argument("--seed", type=int, default=38)
    parser.add_argument("--only", nargs="+", type=int, help="numbers of settings; DIR keeps the others that it has")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    source, rows = random.Random(args.seed), dict[int, dict[str, Any]]()
    if args.only and args.out and (path := args.out / "results.json").exists():
        rows = {row["number"]: row for row in json.loads(path.read_text(encoding="utf-8"))}
    for number, setting in enumerate([Setting.drawn(source) for _ in range(args.settings)]):
        if args.only and number not in args.only:
            continue
        row = rows[number] = {"number": number, **looked_at(setting, args.steps)}
        print(f"{number} {row['name']}: {row['chosen']}, {row['behind']:.1%} behind {row['fastest']}", flush=True)
        for candidate in row["candidates"]:
            print("   ", candidate["strategy"], candidate["predicted_s"], candidate["clock_s"], flush=True)
    found = [row for _, row in sorted(rows.items())]
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "table.md").write_text(page(found, args.seed), encoding="utf-8")
        (args.out / "results.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
