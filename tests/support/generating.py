"""What worker processes run for texts from a model in training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from cases import batches, llama
from pipelines import make_pipeline
from states import everything, plain, same, train
from tawpipe.runtime.world import World


def generated(world: World, *, prompts: Sequence[Sequence[int]], **knobs: Any) -> tuple[list[list[int]], bool]:
    """The texts of a model, and whether training afterwards is what it is without them."""
    given = batches(world.size, 2)
    pipelines = [
        make_pipeline(llama(torch.float64), dtype=torch.float64, optimizer=plain, world=world, **knobs)
        for _ in range(2)
    ]
    texts = pipelines[0].generate(prompts, 6, temperature=0.0)
    again = pipelines[0].generate(prompts, 6, temperature=0.0)
    losses = [train(pipeline, given) for pipeline in pipelines]
    alike = losses[0] == losses[1] and same(*map(everything, pipelines)) and texts == again
    for pipeline in pipelines:
        pipeline.close()
    return [list(text.ids) for text in texts], alike
