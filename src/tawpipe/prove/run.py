"""Goes through the checks on all processes and writes what they found."""

from __future__ import annotations

import json
import shlex
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tawpipe.console import Console, duration
from tawpipe.plan.cost.measure import device_name
from tawpipe.plan.machine.doctor import software
from tawpipe.prove.checks import CHECKS, Check, unproven
from tawpipe.prove.models import alone
from tawpipe.prove.outcome import FAILS, UNPROVEN, Outcome
from tawpipe.runtime.world import World


@dataclass(frozen=True)
class Proof:
    """The results of all checks, as they are written.

    Args:
        checks: name -> status, sentence, note, seconds, numbers.
        unproven: what only other machines can show, with what would.
    """

    setting: dict[str, Any]
    checks: dict[str, dict[str, Any]]
    unproven: dict[str, str]

    @property
    def failed(self) -> list[str]:
        return [name for name, row in self.checks.items() if row["status"] == FAILS]

    def write(self, file: Path) -> None:
        """Write JSON."""
        file.write_text(json.dumps(vars(self), indent=1) + "\n", encoding="utf-8")


def prove(world: World, out: Path, *, only: Sequence[str] = ()) -> Proof:
    """Run the checks; call on all ranks. Rank 0 says and writes what was found, after each of them.

    Args:
        only: names of checks; all of them by default.
    """
    console = Console(world.rank)
    console.topology(f"{world.nodes}, {device_name(world.device)}")
    chosen = len(only) or len(CHECKS)
    console.line(f"{chosen} checks (all {len(CHECKS)} take about ten minutes); results in {out} after each one")
    setting = {
        "date": time.strftime("%Y-%m-%d %H:%M:%S"),
        "command": shlex.join(["tawpipe", *sys.argv[1:]]),
        "device": device_name(world.device),
        "processes": str(world.nodes),
        "versions": dict(software()),
    }
    proof = Proof(setting, {}, unproven(world))
    width = max(len(check.name) for check in CHECKS)
    for check in CHECKS:
        if only and check.name not in only:
            continue
        began = time.perf_counter()
        outcome, error = _outcome(check, world)
        seconds = time.perf_counter() - began
        proof.checks[check.name] = {
            "status": outcome.status,
            "sentence": check.sentence,
            "note": outcome.note,
            "seconds": round(seconds, 2),
            "numbers": outcome.numbers,
        }
        console.line(
            f"{outcome.status:<8}  {check.name:<{width}}  {check.sentence}: {outcome.note} ({duration(seconds)})"
        )
        if world.rank == 0:
            proof.write(out)
        if error is not None and world.size > 1 and not check.alone:
            raise error  # the others are somewhere in the middle of it
    for claim, what in proof.unproven.items():
        console.line(f"{UNPROVEN:<8}  {'':<{width}}  {claim}: {what}")
    console.line(f"wrote {out}")
    return proof


def _outcome(check: Check, world: World) -> tuple[Outcome, Exception | None]:
    """The outcome of one check on rank 0, on the others something to go on with; and the error that ended it."""
    if missing := check.missing(world):
        return Outcome(None, f"needs {missing}"), None
    outcome, failed = Outcome(True, ""), None
    try:
        if not check.alone:
            outcome = check.run(world)
        elif world.rank == 0:
            outcome = check.run(alone(world.device))
    except Exception as error:
        outcome = Outcome(False, f"{type(error).__name__}: {error}", {"traceback": traceback.format_exc()})
        failed = error
    if failed is not None and not check.alone:
        return outcome, failed
    if world.device.type == "cuda":
        torch.cuda.empty_cache()
    world.wait_patiently()
    return outcome, failed
