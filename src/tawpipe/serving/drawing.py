"""Tokens drawn from logits: the likeliest, or at random among those that are likely enough.

A token's random number follows from its request's seed and its position alone, so that a request gets the same text
whatever else is computed with it. One number chooses among all tokens, by their cumulated chances: a generator for each
token would be as dear as the draw.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tawpipe.runtime.compute.randomness import seed_of
from tawpipe.serving.passes import Drawn, Sampling

LIKELY = 1024
"""Tokens that are sorted first where ``top_p`` asks for the likeliest: mostly enough, and all of them are many."""


def draw(logits: Tensor, rows: Sequence[tuple[int, int, Sampling]]) -> list[Drawn]:
    """Draw the next token of some requests.

    Args:
        logits: [rows, vocabulary], of any floating type.
        rows: of each the slot, the position of the token, and how it is drawn; at least one.
    """
    logprobs = _logprobs(logits)
    tokens = logprobs.argmax(-1)  # on the device, for all rows at once
    for at, (_, position, sampling) in enumerate(rows):
        if sampling.temperature > 0:
            tokens[at] = _chosen(logits[at], sampling, uniform(sampling.seed, position))
    return _told(logprobs, tokens, [(slot, position, sampling.logprobs) for slot, position, sampling in rows])


def score(logits: Tensor, tokens: Sequence[int], slot: int, first: int, likeliest: int) -> list[Drawn]:
    """Tell the logprobs of tokens that are known.

    Args:
        logits: [tokens, vocabulary], of any floating type: those before each token.
        first: position of the first token.
        likeliest: number of the likeliest tokens that are told besides each.
    """
    ids = torch.tensor(tokens, device="cpu").to(logits.device)
    return _told(_logprobs(logits), ids, [(slot, first + place, likeliest) for place in range(len(tokens))])


def _logprobs(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)


def _told(logprobs: Tensor, tokens: Tensor, rows: Sequence[tuple[int, int, int]]) -> list[Drawn]:
    """One token of each row of [rows, vocabulary] logprobs.

    Args:
        rows: slot, position and number of the likeliest tokens that are told, of each row.
    """
    chosen = logprobs.gather(1, tokens[:, None])[:, 0].tolist()
    most = min(max(count for _, _, count in rows), logprobs.shape[1])
    values, likeliest = (tensor.tolist() for tensor in logprobs.topk(most))
    return [
        Drawn(slot, position, token, logprob, tuple(zip(ids, of_ids, strict=True))[:count])
        for (slot, position, count), token, logprob, ids, of_ids in zip(
            rows, tokens.tolist(), chosen, likeliest, values, strict=True
        )
    ]


def uniform(seed: int, position: int) -> float:
    """A number from 0 up to, not including, 1, that depends on these two alone."""
    return (seed_of(seed, position) >> 11) * 2.0**-53


def _chosen(logits: Tensor, sampling: Sampling, number: float) -> Tensor:
    """The token that ``number`` falls to, of [vocabulary] logits."""
    chances = (logits.double() / sampling.temperature).softmax(-1)
    ids: Tensor | None = None
    if sampling.top_k and sampling.top_k < len(chances):
        chances, ids = chances.topk(sampling.top_k)
        chances = chances / chances.sum()
    if sampling.top_p < 1:
        if ids is None:
            chances, ids = _likeliest(chances, sampling.top_p)
        # The fewest whose chances reach it: a token stays if those before it do not.
        kept = chances.cumsum(0) - chances < sampling.top_p
        kept[0] = True
        chances, ids = chances[kept], ids[kept]
    sums = chances.cumsum(0)
    # Behind the last that has a chance at all is nothing, however the sum was rounded; or logits that are no numbers.
    last = (sums < sums[-1]).sum().clamp(max=len(sums) - 1)
    place = torch.searchsorted(sums, sums[-1:] * number, right=True)[0].clamp(max=last)
    return place if ids is None else ids[place]


def _likeliest(chances: Tensor, share: float) -> tuple[Tensor, Tensor]:
    """The likeliest tokens, in their order, at least those whose chances reach ``share``; and their ids."""
    if len(chances) > LIKELY:
        likely = chances.topk(LIKELY)
        if likely.values.sum() >= share:
            return likely
    return chances.sort(descending=True)
