"""Homes in the host's memory beside homes on devices, bit by bit, in every combination of settings.

    PYTHONPATH=tests/support:benchmarks python benchmarks/homes.py --out benchmarks/results/DATE-homes --share 1/4

Strategies, nodes, ends of a step (clipped, unclipped, early updates), rounds, scopes of gradients and types, all of
them; what else there is to choose (tied weights, optimizer, buffers) is drawn. Every case trains five steps with homes
on devices, then with each level that the strategy has, and compares losses, norms, masters, moments and what travels
with ``torch.equal``. It takes about an hour. Parts of it (``--share``, or as many as fit in ``--minutes``, in an order
that ``--seed`` says) add to ``cases.jsonl``, and what is there is not run again; ``table.md`` says what there is.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import date
from pathlib import Path
from typing import Any

from host_homes import CHOICES, every_case, levels_of
from pool import WorkerPool

GRID = ("strategy", "topology", "end", "rounds", "scope", "dtype")
"""Choices of which every combination is run."""
TYPES = ("float64", "float32")
AT_ONCE = 5
"""Cases that the processes are given at one time."""


def grid() -> list[dict[str, Any]]:
    """Every combination, with a draw of the other choices."""
    dice, known = random.Random(34), dict[tuple[Any, ...], dict[str, Any]]()
    for case in every_case():
        if case["dtype"] in TYPES:
            known.setdefault(tuple(case[name] for name in GRID), {name: case[name] for name in GRID})
    others = [name for name in CHOICES if name not in (*GRID, "host_homes")]
    return [case | {name: dice.choice(CHOICES[name]) for name in others} for case in known.values()]


def key_of(case: dict[str, Any]) -> str:
    """A case in a line."""
    return json.dumps(case, sort_keys=True)


def batches(cases: Sequence[dict[str, Any]], seed: int | None) -> list[list[dict[str, Any]]]:
    """A few cases of one topology at a time; in an order that a seed says, if there is one."""
    dice = random.Random(seed)
    shuffled = dice.sample(cases, len(cases)) if seed is not None else cases
    by = lambda case: case["topology"]  # noqa: E731
    groups = [list(group) for _, group in itertools.groupby(sorted(shuffled, key=by), key=by)]
    few = [group[at : at + AT_ONCE] for group in groups for at in range(0, len(group), AT_ONCE)]
    return dice.sample(few, len(few)) if seed is not None else few


def run(cases: Sequence[dict[str, Any]], end: float, seed: int | None) -> Iterator[dict[str, Any]]:
    """The outcome of every case, until the time is over: for every level the names of what differs on some rank."""
    pool = WorkerPool()
    try:
        for few in batches(cases, seed):
            if time.monotonic() > end:
                return
            ranks = pool.run("host_homes:compared", *few[0]["topology"], cases=few, timeout_s=900)
            outcomes = iter(zip(*ranks, strict=True))
            for case in few:
                levels = levels_of(case["strategy"])
                differs = {level: sorted({name for rank in next(outcomes) for name in rank}) for level in levels}
                yield {"case": case, "differs": differs}
    finally:
        pool.close()


def table(outcomes: Sequence[dict[str, Any]], cases: int) -> str:
    """What there is, by strategy and level."""
    ran, wrong = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for outcome in outcomes:
        for level, names in outcome["differs"].items():
            ran[outcome["case"]["strategy"], level] += 1
            wrong[outcome["case"]["strategy"], level] += bool(names)
    lines = [f"# Homes in the host's memory, bit by bit ({date.today()})", ""]
    lines += [
        f"{len(outcomes)} of {cases} cases; `python benchmarks/homes.py`, whose docstring says what they are.",
        "",
    ]
    lines += ["| strategy | level | cases | other bits |", "| --- | --- | --: | --: |"]
    lines += [
        f"| {name} | {level} | {number} | {wrong[name, level]} |" for (name, level), number in sorted(ran.items())
    ]
    for outcome in outcomes:
        for level, names in outcome["differs"].items():
            if names:
                lines += ["", f"{level}, {key_of(outcome['case'])}: {', '.join(names[:5])}"]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--out", type=Path, required=True, help="folder for cases.jsonl and table.md")
    parser.add_argument("--share", default="1/1", help="I/N: every N-th case from the I-th on")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no case after so many")
    parser.add_argument("--seed", type=int, help="run the cases in an order that it says, instead of by topology")
    words = parser.parse_args()
    number, shares = map(int, words.share.split("/"))
    everything = grid()
    words.out.mkdir(parents=True, exist_ok=True)
    path = words.out / "cases.jsonl"
    outcomes = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    done = {key_of(outcome["case"]) for outcome in outcomes}
    mine = [case for case in everything[number - 1 :: shares] if key_of(case) not in done]
    end = time.monotonic() + 60 * words.minutes
    with path.open("a") as file:
        for outcome in run(mine, end, words.seed):
            outcomes.append(outcome)
            file.write(json.dumps(outcome) + "\n")
            file.flush()
    text = table(outcomes, len(everything))
    (words.out / "table.md").write_text(text)
    print(text)
    return int(any(names for outcome in outcomes for names in outcome["differs"].values()))


if __name__ == "__main__":
    raise SystemExit(main())
