"""Sampling of tokens from logits: the likeliest token, or a random one among sufficiently likely tokens.

The random number of a token depends only on the seed of its request and its position. A request therefore gets the same
text, whatever else is computed in the same pass. One random number selects among all tokens by their cumulated
probabilities. Creating a generator for each token would take as long as the draw itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tawpipe.runtime.compute.randomness import seed_of
from tawpipe.serving.passes import Drawn, Sampling

LIKELY = 1024
"""Number of likeliest tokens that are sorted first for ``top_p``. They mostly suffice, without a sort of all tokens."""


def draw(logits: Tensor, rows: Sequence[tuple[int, int, Sampling]]) -> list[Drawn]:
    """Sample one token for each row of ``logits``, and return a ``Drawn`` per row in the order of ``rows``.

    With temperature 0, the likeliest token is selected. Otherwise the random number depends only on the request's seed
    and on the position of the token.

    Args:
        logits: [rows, vocabulary], of any floating-point type.
        rows: (slot, position of the new token, sampling settings) for each row of ``logits``; at least one. The slot is
            only copied to the result.
    """
    logprobs = _logprobs(logits)
    tokens = logprobs.argmax(-1)  # one operation on the device for all rows
    for at, (_, position, sampling) in enumerate(rows):
        if sampling.temperature > 0:
            tokens[at] = _chosen(logits[at], sampling, uniform(sampling.seed, position))
    return _told(logprobs, tokens, [(slot, position, sampling.logprobs) for slot, position, sampling in rows])


def score(logits: Tensor, tokens: Sequence[int], slot: int, first: int, likeliest: int) -> list[Drawn]:
    """Return a ``Drawn`` with the logprob of each token in ``tokens``, in their order. Nothing is sampled.

    Args:
        logits: [tokens, vocabulary], of any floating-point type; row i predicts ``tokens[i]``.
        tokens: ids of the known tokens.
        slot: slot of the request; only copied to the result.
        first: position of the first token.
        likeliest: number of likeliest tokens that are reported along with each token.
    """
    ids = torch.tensor(tokens, device="cpu").to(logits.device)
    return _told(_logprobs(logits), ids, [(slot, first + place, likeliest) for place in range(len(tokens))])


def _logprobs(logits: Tensor) -> Tensor:
    """Return the log-softmax of logits, in fp32 or in their own type if that is wider."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)


def _told(logprobs: Tensor, tokens: Tensor, rows: Sequence[tuple[int, int, int]]) -> list[Drawn]:
    """Build the ``Drawn`` of one token in each row of ``logprobs``: its logprob, and the likeliest tokens of the row.

    Args:
        logprobs: [rows, vocabulary].
        tokens: [rows], the token ids.
        rows: (slot, position, number of likeliest tokens to report) for each row.
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
    """Return a number in [0, 1) that depends only on ``seed`` and ``position``."""
    return (seed_of(seed, position) >> 11) * 2.0**-53


def _chosen(logits: Tensor, sampling: Sampling, number: float) -> Tensor:
    """Return the id of the token that the random number ``number`` selects from one row of logits.

    Args:
        logits: [vocabulary].
        sampling: temperature above 0, ``top_k`` and ``top_p``.
        number: random number in [0, 1).
    """
    chances = (logits.double() / sampling.temperature).softmax(-1)
    ids: Tensor | None = None
    if sampling.top_k and sampling.top_k < len(chances):
        chances, ids = chances.topk(sampling.top_k)
        chances = chances / chances.sum()
    if sampling.top_p < 1:
        if ids is None:
            chances, ids = _likeliest(chances, sampling.top_p)
        # top_p keeps the fewest likeliest tokens that reach it: a token stays if the tokens before it sum to less.
        kept = chances.cumsum(0) - chances < sampling.top_p
        kept[0] = True
        chances, ids = chances[kept], ids[kept]
    sums = chances.cumsum(0)
    # Limit the index to the last token with a probability above 0, whatever rounding or NaN logits do to the sums.
    last = (sums < sums[-1]).sum().clamp(max=len(sums) - 1)
    place = torch.searchsorted(sums, sums[-1:] * number, right=True)[0].clamp(max=last)
    return place if ids is None else ids[place]


def _likeliest(chances: Tensor, share: float) -> tuple[Tensor, Tensor]:
    """Return the likeliest probabilities and their token ids, in descending order, enough to reach the sum ``share``.

    The ``LIKELY`` likeliest tokens are returned if their sum reaches ``share``, else all tokens.

    Args:
        chances: [vocabulary], probabilities.
        share: sum of probabilities to reach, at most 1.
    """
    if len(chances) > LIKELY:
        likely = chances.topk(LIKELY)
        if likely.values.sum() >= share:
            return likely
    return chances.sort(descending=True)
