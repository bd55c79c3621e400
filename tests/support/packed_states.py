"""What worker processes run to save and load a pipeline with a frozen model in 4 bits."""

from __future__ import annotations

from typing import Any

import torch

from cases import batches, llama
from pipelines import make_pipeline
from tawpipe import Pipeline, adamw
from tawpipe.runtime.world import World


def _adapted(world: World) -> Pipeline:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(5)
    config: Any = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    model = get_peft_model(llama(torch.float64), config).double()
    return make_pipeline(model, optimizer=adamw(1e-2), dtype=torch.float64, world=world, quantize="nf4", strict=True)


def saved(world: World, *, folder: str) -> list[float]:
    """Losses after a save."""
    pipeline = _adapted(world)
    pipeline.step(batches(3, 1)[0])
    pipeline.save(folder)
    losses = [pipeline.step(batch).loss for batch in batches(3, 2)]
    pipeline.close()
    return losses


def loaded(world: World, *, folder: str) -> list[float]:
    """Losses after a load, of a pipeline whose base was another one before."""
    pipeline = _adapted(world)
    for unit in pipeline.storage.units:
        if unit.packing is not None and unit.index in pipeline.storage.master:
            pipeline.storage.master[unit.index].view(torch.uint8).zero_()
    pipeline.load(folder)
    losses = [pipeline.step(batch).loss for batch in batches(3, 2)]
    pipeline.close()
    return losses
