"""What evaluations measure besides their loss, on any number of processes."""

from __future__ import annotations

from typing import Any

import torch

from borders import llama, packed, rows_of, sgd
from model_families import VOCABULARY
from pipelines import make_pipeline
from tawpipe.runtime.compute.measures import AnswersByRow, LossByPosition
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
        evaluated = [pipeline.evaluate(packed([0], LENGTHS, seed=seed)[0], measure=curve) for seed in (4, 5)]
        steps.append(pipeline.step(packed([0], LENGTHS)[0]).loss)
        said = [(one.loss, one.tokens) for one in evaluated]
        found.append((curve.means(world) if curve else {}, said, steps))
        pipeline.close()
    return found


def asked_rows(model: Any) -> dict[str, torch.Tensor]:
    """Five rows with an answer of up to four tokens at their end: of rows 1 and 3 what the model takes for the
    likeliest, of row 4 all but one of these, of the others anything.
    """
    batch = rows_of(7, rows=5, length=22)
    with torch.no_grad():
        likeliest = model(input_ids=batch["input_ids"], use_cache=False).logits.argmax(-1)
    labels = torch.full_like(batch["labels"], -100)
    for row in range(5):
        answer = slice(22 - row, 22) if row else slice(20, 22)
        labels[row, answer] = batch["input_ids"][row, answer]
        if row in (1, 3, 4):
            labels[row, answer] = likeliest[row, answer.start - 1 : 21]
    labels[4, 20] = (labels[4, 20] + 1) % VOCABULARY
    return batch | {"labels": labels}


def answers(world: World, **knobs: Any) -> Any:
    """What a pipeline answers to the rows of ``asked_rows``, and the loss that it says."""
    model = llama()()
    batch = asked_rows(model)
    pipeline = make_pipeline(
        model, dtype=torch.float64, clip_norm=None, optimizer=sgd, world=world, strict=True, **knobs
    )
    measure = AnswersByRow(5, pipeline.micro_batch, world.device)
    said = pipeline.evaluate(batch, measure=measure)
    found = measure.answers(world)
    pipeline.close()
    return found, said.loss, said.tokens
