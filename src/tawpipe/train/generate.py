"""A short text from the model in training, its weights still spread over all processes. Imports pipeline.

For a glance at the end of a run, not for serving: greedy, every token is a forward pass over the text so far, and each pass
brings all weights here once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tawpipe.model.batch import IGNORE, MicroBatch
from tawpipe.pipeline import LocalBatch, Pipeline


def generate(pipeline: Pipeline, prompt: list[int], *, tokens: int, window: int, stop: int | None = None) -> list[int]:
    """Continue ``prompt`` greedily; call on all ranks, with the same arguments. All ranks get the result.

    Args:
        prompt: token ids, at least one.
        tokens: how many to add at most.
        window: how many of the last tokens the model sees.
        stop: a token that ends the text.
    """
    ids = list(prompt)
    chosen = torch.zeros(1, dtype=torch.long)

    def pick(logits: Tensor, labels: Tensor) -> Tensor:
        chosen[0] = int(logits[0, -1].argmax())
        return logits.new_zeros(())

    with pipeline.chain.loss_replaced(pick):
        for _ in range(tokens):
            seen = torch.tensor([ids[-window:]])
            shares = pipeline.shares(1)
            batch = MicroBatch.from_rows(seen, torch.full_like(seen, IGNORE))
            pipeline.evaluate(LocalBatch(1, seen.shape[1], [batch] if shares else []))
            token = int(pipeline.world.broadcast(chosen))
            ids.append(token)
            if token == stop:
                break
    return ids
