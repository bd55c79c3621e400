"""A short text from the model in training, its weights still spread over all processes.

For a glance at the end of a run, not for serving: every token is a forward pass over the text so far, and each pass
brings all weights here once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tawpipe.data.prepare import PreparedData
from tawpipe.model.batch import IGNORE, MicroBatch
from tawpipe.model.build import longest_allowed
from tawpipe.pipeline.batches import LocalBatch
from tawpipe.pipeline.pipeline import Pipeline
from tawpipe.train.config import TrainConfig

CHOICES = 40
"""Tokens among which each next one is drawn: the likeliest."""


def generate(
    pipeline: Pipeline, prompt: list[int], *, tokens: int, window: int, seed: int, stop: int | None = None
) -> list[int]:
    """Continue ``prompt``; call on all ranks, with the same arguments. All ranks get the result.

    Args:
        prompt: token ids, at least one.
        tokens: how many to add at most.
        window: how many of the last tokens the model sees.
        seed: of the draws.
        stop: a token that ends the text.
    """
    ids = list(prompt)
    chosen = torch.zeros(1, dtype=torch.long)
    generator = torch.Generator().manual_seed(seed)
    last: list[Tensor] = []

    def keep(logits: Tensor, labels: Tensor) -> Tensor:
        last[:] = [logits[0, -1]]  # of the last chunk, in the end
        return logits.new_zeros(())

    with pipeline.chain.loss_replaced(keep):
        for _ in range(tokens):
            seen = torch.tensor([ids[-window:]])
            shares = pipeline.shares(1)
            batch = MicroBatch.from_rows(seen, torch.full_like(seen, IGNORE))
            pipeline.evaluate(LocalBatch(1, seen.shape[1], [batch] if shares else []))
            if last:
                likely = last[0].float().cpu().topk(min(CHOICES, last[0].numel()))
                chosen[0] = likely.indices[torch.multinomial(likely.values.softmax(-1), 1, generator=generator)]
            token = int(pipeline.world.broadcast(chosen))
            ids.append(token)
            if token == stop:
                break
    return ids


def sample(config: TrainConfig, pipeline: Pipeline, data: PreparedData) -> str:
    """The text that ``config.sample`` asks for; call on all ranks."""
    tokenizer = data.tokenizer
    prompt = tokenizer.encode(config.sample.prompt, add_special_tokens=False) or [0]
    stop = tokenizer.eos_token_id
    ids = generate(
        pipeline,
        prompt,
        tokens=config.sample.tokens,
        window=min(config.document_tokens, longest_allowed(pipeline.chain.config)),
        seed=config.seed,
        stop=stop if isinstance(stop, int) else None,
    )
    return repr(tokenizer.decode(ids, skip_special_tokens=True))
