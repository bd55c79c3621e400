"""The hunt for wrong numbers without a word: settings, data and plans drawn at random, beside what is plainly right.

    make hunt ARGS="--minutes 30 --seed 7"
    make hunt ARGS="--case 7.12:training"

A case is drawn from the run's seed, its number and its kind alone. A setting that is refused by its name is no find;
numbers or tokens that differ are, and so are a plan that takes too long or names nothing though something fits, and an
error that speaks of nothing that a user has set. Each find comes with what was drawn, what differs, and the line that
repeats it. The exit code is 1 if there is one.
"""

from __future__ import annotations

import argparse
import importlib
import json
import random
import re
import sys
import time
import traceback
from collections import Counter
from typing import Any

from tawpipe.errors import UserError

KINDS: dict[str, tuple[str, float]] = {
    "training": ("hunt_training", 6.0),
    "data": ("hunt_data", 3.0),
    "plans": ("plans", 2.0),
    "text": ("hunt_text", 1.0),
}
"""Kind to its module and its share of the time. A module has ``draw(random) -> case``, of plain values, and
``check(case) -> what differs``, empty if nothing does, which raises ``UserError`` for a case that is refused.
"""
CASE = re.compile(r"(\d+)\.(\d+):(\w+)")
SHOWN = 3000
"""Letters of what differs."""


def drawn(seed: int, number: int, kind: str) -> Any:
    """A case: the same for the same arguments, whatever ran before."""
    return importlib.import_module(KINDS[kind][0]).draw(random.Random(f"{seed}.{number}:{kind}"))


def examined(case: Any, kind: str) -> tuple[str, str]:
    """``right``, ``refused`` and by what, or ``WRONG`` and what differs."""
    try:
        differs = importlib.import_module(KINDS[kind][0]).check(case)
    except UserError as error:
        return "refused", error.setting.split()[0]
    except Exception:
        return "WRONG", traceback.format_exc()
    return ("WRONG", differs) if differs else ("right", "")


def find(seed: int, number: int, kind: str) -> tuple[str, str]:
    """Examine a case, and say what is wrong with it."""
    case = drawn(seed, number, kind)
    outcome, why = examined(case, kind)
    if outcome == "WRONG":
        print(f"WRONG  {json.dumps(case)}\n{why[-SHOWN:].rstrip()}")
        print(f'again: make hunt ARGS="--case {seed}.{number}:{kind}"\n', flush=True)
    return outcome, why


def hunt(seed: int, minutes: float, kinds: list[str], *, first: bool = False) -> int:
    """Examine cases for so long, or up to the ``first`` find; returns the number of finds."""
    print(f"seed {seed}, {minutes:g} minutes: {', '.join(kinds)}", flush=True)
    begin = time.monotonic()
    spent, outcomes = dict.fromkeys(kinds, 0.0), {kind: Counter[tuple[str, str]]() for kind in kinds}
    while (now := time.monotonic()) < begin + 60 * minutes:
        kind = min(kinds, key=lambda one: spent[one] / KINDS[one][1])
        outcome, why = find(seed, outcomes[kind].total(), kind)
        spent[kind] += time.monotonic() - now
        outcomes[kind][outcome, why if outcome == "refused" else ""] += 1
        if first and outcome == "WRONG":
            break
    for kind, counts in outcomes.items():
        refused = {why: count for (outcome, why), count in counts.most_common() if outcome == "refused"}
        most = ", ".join(f"{why} {count}" for why, count in [*refused.items()][:6])
        said = f", {sum(refused.values())} refused ({most})" if refused else ""
        print(f"{kind}: {counts.total()} cases in {spent[kind]:.0f} s{said}, {counts['WRONG', '']} wrong")
    return sum(counts["WRONG", ""] for counts in outcomes.values())


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make hunt", description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, help="drawn by default, and printed")
    parser.add_argument("--only", choices=KINDS, nargs="+", default=list(KINDS), help="kinds")
    parser.add_argument("--first", action="store_true", help="end at the first find")
    parser.add_argument("--case", metavar="SEED.NUMBER:KIND", help="one case alone, as a find names it")
    args = parser.parse_args(words)
    if args.case is None:
        seed = random.SystemRandom().randrange(10**6) if args.seed is None else args.seed
        return int(hunt(seed, args.minutes, args.only, first=args.first) > 0)
    found = CASE.fullmatch(args.case)
    if found is None or found[3] not in KINDS:
        parser.error(f"--case {args.case}: SEED.NUMBER:KIND, the kind one of {', '.join(KINDS)}")
    outcome, why = find(int(found[1]), int(found[2]), found[3])
    print(outcome, why if outcome == "refused" else "")
    return int(outcome == "WRONG")


if __name__ == "__main__":
    sys.exit(main())
