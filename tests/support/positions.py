"""Evaluations by position of packed documents, on any number of processes."""

from __future__ import annotations

from typing import Any

import torch

from borders import llama, packed, sgd
from pipelines import make_pipeline
from tawpipe.runtime.by_position import LossByPosition
from tawpipe.runtime.world import World

LENGTHS = [[20, 4], [24], [1, 2, 21], [7, 8, 9], [24], [3, 21]]
"""Documents in six rows of 24 tokens."""
EDGES = (2, 4, 8, 16, 32)


def by_position(world: World, *, chunk: int, micro_batch: int, **knobs: Any) -> Any:
    """Two evaluations summed into one curve between two steps: the curve and what both said, the losses of the steps;
    and the same without a curve.
    """
    found = []
    for asked in (True, False):
        pipeline = make_pipeline(
            llama()(),
            dtype=torch.float64,
            clip_norm=None,
            optimizer=sgd,
            world=world,
            strict=True,
            loss_chunk_tokens=chunk,
            micro_batch=micro_batch,
            **knobs,
        )
        curve = LossByPosition(EDGES, world.device) if asked else None
        steps = [pipeline.step(packed([0], LENGTHS)[0]).loss]
        evaluated = [pipeline.evaluate(packed([0], LENGTHS, seed=seed)[0], by_position=curve) for seed in (4, 5)]
        steps.append(pipeline.step(packed([0], LENGTHS)[0]).loss)
        said = [(one.loss, one.tokens) for one in evaluated]
        found.append((curve.means(world) if curve else {}, said, steps))
        pipeline.close()
    return found
