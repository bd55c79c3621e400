"""Steps of documents of uneven lengths, beside one process that is given one document at a time."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cases import EPS, VOCABULARY, llama, of_first, random_delays, relative
from pipelines import make_pipeline
from tawpipe.model.batch import MicroBatch
from tawpipe.runtime.homes.optimizer import adamw
from tawpipe.runtime.world import World

MOST = 40
"""Tokens of a document at most."""


def steps_of(seed: int, steps: int = 2) -> list[list[MicroBatch]]:
    """Documents of some steps: many short ones, a few long ones, prompts that are not learned."""
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    found = []
    for _ in range(steps):
        documents = []
        for _ in range(draw.choice([3, 7, 12])):
            length = min(MOST, max(2, int(draw.lognormvariate(2, 1))))
            ids = torch.randint(0, VOCABULARY, (1, length), generator=generator)
            labels = ids.clone()
            labels[:, : draw.randrange(length)] = -100
            documents.append(MicroBatch.of_documents(ids, labels, [length]))
        ids = torch.randint(0, VOCABULARY, (1, MOST), generator=generator)
        found.append([*documents, MicroBatch.of_documents(ids, ids, [MOST])])
    return found


def plain(seed: int) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Losses, gradient norms and the weights after all steps."""
    model = llama(torch.float64)
    groups = [
        {"params": [p for p in model.parameters() if (p.ndim > 1) == matrix], "weight_decay": 0.1 * matrix}
        for matrix in (True, False)
    ]
    optimizer = torch.optim.AdamW(groups, lr=3e-4, betas=(0.9, 0.95), eps=EPS)
    losses, norms = [], []
    for documents in steps_of(seed):
        tokens, total = sum(one.tokens for one in documents), 0.0
        for one in documents:
            logits = model(one.input_ids).logits
            loss = F.cross_entropy(logits.flatten(0, 1), one.labels.flatten(), ignore_index=-100, reduction="sum")
            (loss / tokens).backward()
            total += float(loss) / tokens
        losses.append(total)
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms, {name: p.detach().clone() for name, p in model.named_parameters()}


def trained(world: World, *, seed: int, delays: float = 0.0, **knobs: Any) -> Any:
    """Losses, norms, weights (rank 0) after all steps, and the shapes of the steps."""
    pipeline = make_pipeline(
        llama(torch.float64),
        optimizer=adamw(3e-4, eps=EPS),
        dtype=torch.float64,
        world=world,
        strict=True,
        loss_chunk_tokens=8,
        delay=(lambda lane: random_delays(hash((lane, world.rank)), delays)) if delays else None,
        **knobs,
    )
    losses, norms, shapes = [], [], []
    for documents in steps_of(seed):
        batch = pipeline.part_of_documents([sum(one.lengths) for one in documents], documents.__getitem__)
        assert batch.packs is not None
        shapes.append(batch.packs.shape)
        result = pipeline.step(batch)
        losses.append(result.loss)
        norms.append(result.grad_norm)
    weights = {name: pipeline.parameter(name) for name in pipeline.parameter_names}
    pipeline.close()
    return losses, norms, weights, shapes


def exact(world: World, *, settings: list[dict[str, Any]]) -> list[tuple[float, list[tuple[int, int]]]]:
    """For every setting the largest relative difference to one process, and the shapes of its steps."""
    found = []
    for knobs in settings:
        losses, norms, weights, shapes = trained(world, **knobs)
        expected = of_first(world, partial(plain, knobs["seed"]))
        worst = max(abs(a / b - 1) for a, b in zip([*losses, *norms], [*expected[0], *expected[1]], strict=True))
        for name, value in weights.items():
            if value is not None:
                worst = max(worst, relative(value, expected[2][name]))
        found.append((worst, shapes))
    return found
