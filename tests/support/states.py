"""Small pipelines whose state the tests save and load."""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.optim import SGD
from transformers import LlamaForCausalLM

from cases import LAYERS, batches, llama
from pipelines import make_pipeline
from tawpipe import Pipeline, World, adamw
from tawpipe.checkpoint.store import Disk, Memory
from tawpipe.topology import Topology

ALONE = World(Topology.grid(1, 1), 0, torch.device("cpu"), None)


BATCHES = batches(2, 4)


momentum = partial(SGD, lr=0.05, momentum=0.9)


plain = partial(SGD, lr=0.05)


def make(optimizer=None, **knobs) -> Pipeline:
    return make_pipeline(llama(torch.float32), optimizer=optimizer or adamw(1e-2), world=ALONE, **knobs)


def train(pipeline: Pipeline, given=BATCHES) -> list[float]:
    losses = [result.loss for result in [pipeline.step(batch) for batch in given]]
    pipeline.drain()
    return losses


def everything(pipeline: Pipeline) -> dict[str, torch.Tensor]:
    """Weights, gradients on the device, and optimizer state."""
    found = {}
    for unit, pieces in pipeline.storage.pieces.items():
        for piece in pieces:
            found[f"weight {piece.name}"] = piece.value.detach().clone()
            if not pipeline.storage.in_host:
                found[f"gradient {piece.name}"] = piece.gradient.clone()
        for piece, state in zip(pipeline.optimizers.pieces[unit], pipeline.optimizers.states()[unit], strict=True):
            for key, value in state.items():
                found[f"{key} {piece.name}@{piece.start}"] = value.clone()
    return found


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def resumable(world: World, *, seed: int = 0, dtype: str = "float64", layers: int = LAYERS, **knobs: Any) -> Pipeline:
    """A pipeline whose numbers depend on its seed: initial weights and dropout."""
    kind = getattr(torch, dtype)
    with torch.device("meta"):
        model = LlamaForCausalLM(llama(torch.float32, dropout=0.2, layers=layers).config)
    return make_pipeline(model, optimizer=adamw(1e-3), dtype=kind, world=world, strict=True, seed=seed, **knobs)


def memory_of(world: World, folder: str) -> Memory:
    """A store in the memory of the nodes, each of which sees a folder of its own."""
    machine = Path(folder) / f"machine-{world.nodes.node_of(world.rank)}"
    return Memory(machine, world, world.with_group("copies", timedelta(seconds=60)))


def stepped() -> Pipeline:
    """A pipeline that has made one step; the caller closes it."""
    made = make(adamw(1e-3))
    train(made, BATCHES[:1])
    return made


def run_of(step: int) -> dict[str, int]:
    """What a run adds to its state after a step."""
    return {"step": step, "samples": step, "seed": 0}


def save_history(pipeline: Pipeline, output: Path) -> Path:
    """The checkpoints of steps 10, 20 and 30 in an output folder."""
    disk = Disk(output / "checkpoints", ALONE)
    for pipeline.step_number in (10, 20, 30):
        pipeline.save(disk, run=run_of(pipeline.step_number))
    return output
