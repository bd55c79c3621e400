"""Runs the checks on all processes and writes their results."""

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
    """Results of all checks, as they are written.

    Args:
        setting: date, command, device, processes and versions.
        checks: name -> status, sentence, note, seconds, numbers.
        unproven: claims that only other machines can prove, each with what would prove it.
    """

    setting: dict[str, Any]
    checks: dict[str, dict[str, Any]]
    unproven: dict[str, str]

    @property
    def failed(self) -> list[str]:
        """Names of the checks that failed."""
        return [name for name, row in self.checks.items() if row["status"] == FAILS]

    def write(self, file: Path) -> None:
        """Write the results to ``file`` as JSON."""
        file.write_text(json.dumps(vars(self), indent=1) + "\n", encoding="utf-8")


def prove(world: World, out: Path, *, only: Sequence[str] = ()) -> Proof:
    """Run the checks and return their results. Call on all ranks.

    Rank 0 prints each result, and writes the file anew after every check.

    Args:
        world: the processes.
        out: file to write.
        only: names of checks to run; all by default.

    Raises:
        Exception: the error of a check that runs on several processes at the same time; the file has the results so
            far.
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
            raise error  # other ranks may still be inside of this check
    for claim, what in proof.unproven.items():
        console.line(f"{UNPROVEN:<8}  {'':<{width}}  {claim}: {what}")
    console.line(f"wrote {out}")
    return proof


def _outcome(check: Check, world: World) -> tuple[Outcome, Exception | None]:
    """Run one check on all ranks, or on rank 0 only, and wait until all ranks have ended it.

    An error becomes an outcome that fails. After an error in a check that runs on all ranks, nothing is waited for.

    Returns:
        The outcome on rank 0 (on the other ranks a placeholder if the check runs on rank 0 only), and the error that
        ended the check, or None.
    """
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
