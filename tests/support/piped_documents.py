"""Steps of documents of uneven lengths under pipelines, beside a plain model that is given one document at a time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import every_family
from borders import base_of
from cases import llama, random_delays
from model_families import keep_fp64
from pipelines import make_pipeline
from tawpipe.model.batch import MicroBatch
from tawpipe.pipeline.pipeline import Pipeline
from tawpipe.runtime.world import World

STEPS = ((40, 3, 9, 1, 17, 6, 12), (31, 4, 26), (40, 38, 2, 5, 7, 1, 1, 14, 9))
"""Lengths of the documents of some steps."""
TOLERANCE = 1e-10


def documents_of(step: int) -> list[MicroBatch]:
    """The documents of a step; all of their tokens are learned."""
    generator = torch.Generator().manual_seed(step)
    tokens = every_family.ORDINARY_TOKENS
    ids = [torch.randint(tokens.start, tokens.stop, (1, length), generator=generator) for length in STEPS[step]]
    return [MicroBatch.of_documents(row, row, [row.shape[1]]) for row in ids]


def model_of(name: str, dropout: float = 0.0) -> Any:
    """A model in fp64: a small llama, with tied ends or adapters, half frozen, or plain, or one of a family."""
    if name not in ("plain", "tied", "lora", "frozen"):
        return every_family.random_model(name)
    model: Any = llama(torch.float64, tied=name == "tied", dropout=dropout)
    if name == "frozen":
        for parameter in (*model.model.embed_tokens.parameters(), *model.model.layers[:2].parameters()):
            parameter.requires_grad_(False)
    if name == "lora":
        peft = pytest.importorskip("peft")
        torch.manual_seed(5)
        wanted = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        model = peft.get_peft_model(model, wanted).double()
    return model


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01)


def with_momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


def pipeline_of(world: World, model: Any, *, delays: float = 0.0, check: str = "never", **knobs: Any) -> Pipeline:
    return make_pipeline(
        model,
        dtype=torch.float64,
        clip_norm=None,
        check=check,
        strict=True,
        loss_chunk_tokens=6,
        delay=(lambda lane: random_delays(hash((lane, world.rank)), delays)) if delays else None,
        world=world,
        **{"bin_tokens": 48, "optimizer": sgd, **knobs},
    )


def batch_of(pipeline: Pipeline, step: int, *, training: bool = True) -> Any:
    documents = documents_of(step)
    lengths = [sum(document.lengths) for document in documents]
    return pipeline.part_of_documents(lengths, documents.__getitem__, training=training)


def compared(world: World, *, cases: Sequence[tuple[str, dict[str, Any]]]) -> list[list[str]]:
    """What differs in an evaluation of the first step's documents and in the other steps, with an update between them,
    by case; on rank 0.
    """
    found: list[list[str]] = []
    for name, knobs in cases:
        with pytest.MonkeyPatch.context() as patch:
            keep_fp64(patch)
            plain = base_of(model_of(name))
            pipeline = pipeline_of(world, model_of(name), **knobs)
            evaluated = pipeline.evaluate(batch_of(pipeline, 0, training=False)).loss
            losses = {step: pipeline.step(batch_of(pipeline, step)).loss for step in range(1, len(STEPS))}
            gradients = {n: pipeline.gradient(n) for n, p in plain.named_parameters() if p.requires_grad}
            pipeline.close()
            found.append([] if world.rank else _differing(plain, losses, gradients, evaluated))
    return found


def _differing(plain: Any, losses: dict[int, float], gradients: dict[str, Any], evaluated: float) -> list[str]:
    value = every_family.plain_step(plain, documents_of(0))[0]
    differing = [] if abs(evaluated / value - 1) < 1e-12 else [f"evaluated {evaluated} instead of {value}"]
    optimizer, expected = sgd(plain.parameters()), (0.0, {})
    for step, loss in losses.items():
        expected = every_family.plain_step(plain, documents_of(step))
        if not abs(loss / expected[0] - 1) < TOLERANCE:
            differing.append(f"loss {loss} of step {step} instead of {expected[0]}")
        if step == max(losses):
            differing += every_family.differences((loss, gradients), expected, TOLERANCE)
        optimizer.step()
    return differing


def trained(world: World, *, name: str = "plain", dropout: float = 0.0, **knobs: Any) -> Any:
    """Losses and weights (rank 0) after all steps."""
    pipeline = pipeline_of(world, model_of(name, dropout), **knobs)
    losses = [pipeline.step(batch_of(pipeline, step)).loss for step in range(len(STEPS))]
    weights: dict[str, Tensor | None] = {name: pipeline.parameter(name) for name in pipeline.parameter_names}
    pipeline.close()
    return losses, weights


def goes_on(world: World, *, folder: str, name: str = "plain", **knobs: Any) -> list[float]:
    """The losses of the steps from the second one on, of a run that is saved after the first one, or goes on there."""
    state = Path(folder) / "state"
    with pytest.MonkeyPatch.context() as patch:
        keep_fp64(patch)
        return _goes_on(pipeline_of(world, model_of(name), optimizer=with_momentum, **knobs), state)


def _goes_on(pipeline: Pipeline, state: Path) -> list[float]:
    if state.exists():
        pipeline.load(state)
    else:
        pipeline.step(batch_of(pipeline, 0))
        pipeline.save(state)
    losses = [pipeline.step(batch_of(pipeline, step)).loss for step in range(1, len(STEPS))]
    pipeline.close()
    return losses


def cut(world: World) -> list[bool]:
    """Whether a document is cut that takes much longer than others: of llama, without a check, and of diffllama."""
    results = []
    for name, check in (("plain", "auto"), ("plain", "never"), ("diffllama", "auto")):
        with pytest.MonkeyPatch.context() as patch:
            keep_fp64(patch)
            pipeline = pipeline_of(world, model_of(name), strategy="1f1b", check=check)
            bins = pipeline.deal([40, 3, 4, 5])
            results.append(bool(bins.slices))
            pipeline.step(batch_of(pipeline, 0))
            pipeline.close()
    return results
