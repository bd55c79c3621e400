"""Steps with fewer rows than processes, after each other in mixed order: the cases, and the function of workers."""

from __future__ import annotations

import faulthandler
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cases import EPS, batches, llama, of_first, plain_loop, relative
from pipelines import make_pipeline
from pool import WorkerPool
from schedules import EVERY
from tawpipe.errors import UserError
from tawpipe.pipeline.batch import LocalBatch
from tawpipe.runtime.homes.optimizer import adamw
from tawpipe.runtime.world import World
from tawpipe.topology import Topology

ROWS = (3, 0, 1, 5, 2)
"""Of each step, for four processes."""
LEARNED = tuple(rows for rows in ROWS if rows)
"""Rows of each step that a pipeline does not refuse."""
TOPOLOGIES = {
    "2x2": Topology.grid(2, 2),
    "4x1": Topology.grid(4, 1),
    "3+1": Topology(((0, 1, 2), (3,))),
}
SETTINGS: dict[str, dict[str, Any]] = {
    "state": {"host_homes": "state"},
    "all": {"host_homes": "all"},
    "early": {"early_updates": True},
    "state, early": {"host_homes": "state", "early_updates": True},
    "all, early": {"host_homes": "all", "early_updates": True},
}
STAGES = ("1f1b", "interleaved-1f1b", "zero-bubble", "generated", "solved")
REFUSED = {
    (strategy, setting): f"state or none under {strategy}: its devices compute with weights that stay there"
    for strategy in STAGES
    for setting in ("all", "all, early")
}
"""What is refused on all nodes, with its reason."""
CASES = [(strategy, setting, nodes) for nodes in TOPOLOGIES for strategy in EVERY for setting in SETTINGS]
"""The whole grid: strategy, setting and nodes."""
LIMIT_S = 40
"""Seconds after which a case stalls."""
Case = tuple[str, str, str]


def layers_of(strategy: str) -> int:
    """Layers of a model that is small, and large enough for the stages of four processes."""
    return 8 if strategy in ("interleaved-1f1b", "zero-bubble") else 4 if strategy in (*STAGES, "weipipe") else 2


def trained(world: World, *, cases: Sequence[Case], progress: str) -> list[str]:
    """Train every case in one world; return for each how its numbers differ from one process's, or its refusal.

    Args:
        progress: a file to which the first rank writes a line as a case begins. One that stalls ends its process.
    """
    found = []
    for case in cases:
        if not world.rank:
            with Path(progress).open("a") as file:
                file.write(f"{', '.join(case)}\n")
        faulthandler.dump_traceback_later(LIMIT_S, exit=True)
        try:
            found.append(_trained(world, *case, strict=len(found) % 2 == 1))
        except UserError as error:
            found.append(f"refused: {error}")
        finally:
            faulthandler.cancel_dump_traceback_later()
    return found


def _trained(world: World, strategy: str, setting: str, nodes: str, *, strict: bool) -> str:
    clip, layers = None if "early" in setting else 1.0, layers_of(strategy)
    pipeline = make_pipeline(
        llama(torch.float64, layers=layers),
        optimizer=adamw(3e-4, eps=EPS),
        dtype=torch.float64,
        world=replace(world, nodes=TOPOLOGIES[nodes]),
        strict=strict,
        clip_norm=clip,
        strategy=strategy,
        **SETTINGS[setting],
    )
    results = []
    for rows, batch in zip(ROWS, batches(ROWS), strict=True):
        if rows:
            results.append(pipeline.step(batch))  # without waiting for it
            continue
        for empty in (batch, LocalBatch(0, 1, [])):
            with pytest.raises(UserError, match=r"batch: got '0 rows.*at least one row"):
                pipeline.step(empty)
    pipeline.drain()
    losses, norms, _, weights = of_first(
        world, lambda: plain_loop(torch.float64, False, LEARNED, clip, len(LEARNED), layers)
    )
    pairs = zip(results, losses, norms, strict=True)
    errors = [max(abs(one.loss / loss - 1), abs(one.grad_norm / norm - 1)) for one, loss, norm in pairs]
    for name in pipeline.parameter_names:
        if (value := pipeline.parameter(name)) is not None:
            errors.append(relative(value, weights[name]))
    pipeline.close()
    return "" if max(errors) < 1e-8 else f"differs by {max(errors):.0e}"


def outcomes(pool: WorkerPool, cases: Sequence[Case], folder: Path, *, stalls: int = 3) -> Iterator[tuple[Case, str]]:
    """Yield every case with ``""``, how it differs, its refusal or that it stalls, up to a number of those.

    A case that stalls ends the processes; those after it run in others.
    """
    left = list(cases)
    while left and stalls:
        progress = folder / f"{len(left)}.txt"
        progress.touch()
        try:
            ranks = pool.run(
                "uneven_rows:trained", 4, 1, cases=left, progress=str(progress), timeout_s=LIMIT_S * len(left)
            )
        except AssertionError as error:
            begun = max(1, len(progress.read_text().splitlines()))
            yield left[begun - 1], f"stalls, or fails: {str(error)[-1500:]}"
            left, stalls = left[begun:], stalls - 1
            continue
        for case, told in zip(left, zip(*ranks, strict=True), strict=True):
            yield case, "; ".join(sorted(set(filter(None, told))))
        return
