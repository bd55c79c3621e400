"""Which families requests can share, and whether they get what the model's own ``generate`` gives.

    python benchmarks/serving_families.py --out benchmarks/results/DATE-serving-families

Every causal LM that the installed transformers knows, tiny, random and in fp64: three requests of 5, 13 and 9 tokens
join in different passes, prompts come in chunks of 4, and every one of 10 greedy tokens must be that of
``generate(use_cache=True)`` of the request alone: on one process, and on three with a stage each and two groups.
RoBERTa and its kin are compared with greedy forward passes instead: their positions begin behind the padding token's
number, and ``generate`` gives them other ones. Moshi, too, whose ``generate`` is not what its forward passes give.
Writes ``table.md``.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path

import torch
import transformers

from family_configs import families
from pool import WorkerPool
from served_families import Served, served


def table(outcomes: dict[str, Served]) -> str:
    """All outcomes as a page."""
    counts = Counter(outcome.kind for outcome in outcomes.values())
    staged = sum(outcome.staged == "equal" for outcome in outcomes.values())
    lines = [
        "# Families that requests can share",
        "",
        "`python benchmarks/serving_families.py`, "
        f"transformers {transformers.__version__} and torch {torch.__version__}: "
        + ", ".join(f"{count} {kind}" for kind, count in counts.most_common())
        + f" of {len(outcomes)}; on three processes {staged} equal. Equal: every greedy token in fp64 is that of"
        " `generate`.",
        "",
        "| family | one process | three | |",
        "|---|---|---|---|",
    ]
    reasons = {name: outcome.reason.partition("; transformers serve")[0] for name, outcome in outcomes.items()}
    rows = (
        f"| {name} | {outcome.kind} | {outcome.staged} | {reasons[name]} |"
        for name, outcome in sorted(outcomes.items())
    )
    return "\n".join([*lines, *rows, ""])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", help="all by default")
    parser.add_argument("--out", type=Path, help="folder for table.md")
    given = parser.parse_args()
    outcomes, pool = {}, WorkerPool()
    for name in given.families or families():
        outcomes[name] = served(name, pool)
        print(f"{name}: {outcomes[name].kind} {outcomes[name].staged} {outcomes[name].reason}", flush=True)
    pool.close()
    if given.out:
        given.out.mkdir(parents=True, exist_ok=True)
        (given.out / "table.md").write_text(table(outcomes), encoding="utf-8")
    wrong = [name for name, outcome in outcomes.items() if {outcome.kind, outcome.staged} & {"wrong", "broken"}]
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
