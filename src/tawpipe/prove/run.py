"""Runs the checks on all processes and writes their results."""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tawpipe.console import Console, duration
from tawpipe.errors import RunError
from tawpipe.files import replace_text
from tawpipe.plan.cost.measure import device_name
from tawpipe.plan.machine.doctor import software
from tawpipe.prove.checks import CHECKS, Check, unproven
from tawpipe.prove.models import alone
from tawpipe.prove.outcome import FAILS, UNPROVEN, Outcome
from tawpipe.prove.private import local_names, option_names, scrub
from tawpipe.runtime.world import World


@dataclass(frozen=True)
class Proof:
    """Results of all checks, as they are written.

    Args:
        setting: date, names of the command's options, device, processes, versions and variables of NCCL.
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
        """Write the results to ``file`` as JSON. A crash leaves either the old or the new file."""
        replace_text(file, json.dumps(vars(self), indent=1) + "\n")


def prove(world: World, out: Path, *, only: Sequence[str] = (), more: Sequence[Check] = ()) -> Proof:
    """Run the checks and return their results. Call on all ranks.

    Rank 0 prints each result, and writes the file anew after every check. The file has no names of hosts, users or
    paths, and of an error only its type (of a ``RunError`` its message); the console has its message.

    Args:
        world: the processes.
        out: file to write.
        only: names of checks to run; all of ``CHECKS`` by default.
        more: checks of other packages, which run only if ``only`` names them.

    Raises:
        Exception: the error of a check that runs on several processes at the same time; the file has the results so
            far.
    """
    console = Console(world.rank)
    console.topology(f"{world.nodes}, {device_name(world.device)}")
    some = ", ".join(only) or f"{len(CHECKS)} checks (about ten minutes)"
    console.line(f"{some}; results in {out} after each one")
    setting = {
        "date": time.strftime("%Y-%m-%d %H:%M:%S"),
        "options": option_names(sys.argv[1:]),
        "device": device_name(world.device),
        "processes": str(world.nodes),
        "versions": dict(software()),
        "nccl": {name: value for name, value in sorted(os.environ.items()) if name.startswith("NCCL_")},
    }
    names = {name for text in world.gather_texts(json.dumps(local_names())) for name in json.loads(text)}
    proof = Proof(scrub(setting, names), {}, unproven(world))
    chosen = [*(check for check in CHECKS if not only or check.name in only), *(c for c in more if c.name in only)]
    width = max(len(check.name) for check in CHECKS)
    for check in chosen:
        began = time.perf_counter()

        def keep(outcome: Outcome, check: Check = check, began: float = began) -> None:
            """Add the outcome of a check, which may still run, to the results; rank 0 writes them."""
            row = {
                "status": outcome.status,
                "sentence": check.sentence,
                "note": outcome.note,
                "seconds": round(time.perf_counter() - began, 2),
                "numbers": outcome.numbers,
            }
            proof.checks[check.name] = row = scrub(row, names)
            if world.rank == 0:
                proof.write(out)
                if check.page is not None and outcome.numbers:
                    replace_text(page_file(out), check.page(proof.setting, row))

        outcome, error = _outcome(replace(check, run=partial(check.run, keep=keep)) if check.keeps else check, world)
        words = outcome.note if error is None else f"{type(error).__name__}: {error}"
        if error is not None:
            numbers = proof.checks.get(check.name, {}).get("numbers", {})
            outcome = replace(outcome, numbers=numbers | outcome.numbers)
        keep(outcome)
        seconds = time.perf_counter() - began
        console.line(f"{outcome.status:<8}  {check.name:<{width}}  {check.sentence}: {words} ({duration(seconds)})")
        if error is not None and world.size > 1 and not check.alone:
            raise error  # other ranks may still be inside of this check
    for claim, what in proof.unproven.items():
        console.line(f"{UNPROVEN:<8}  {'':<{width}}  {claim}: {what}")
    console.line(f"wrote {out}")
    return proof


def page_file(out: Path) -> Path:
    """Return the file of the HTML page beside the JSON file ``out``."""
    return out.with_suffix(".html" if out.suffix != ".html" else ".page.html")


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
        words = str(error) if isinstance(error, RunError) else type(error).__name__
        outcome, failed = Outcome(False, words, {"error": type(error).__name__}), error
        if check.alone:  # other errors are raised
            traceback.print_exc()
    if failed is not None and not check.alone:
        return outcome, failed
    if world.device.type == "cuda":
        torch.cuda.empty_cache()
    world.wait_patiently()
    return outcome, failed
