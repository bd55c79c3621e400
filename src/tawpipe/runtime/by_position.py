"""The loss of an evaluation by position in the document: how far back does a model look to some profit?

It is summed where the head computes its loss, chunk by chunk, so that no logits are kept for it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tawpipe.model.batch import IGNORE, MicroBatch
from tawpipe.model.chain import Chain
from tawpipe.runtime.world import World

Head = Callable[[Tensor, Tensor, slice], Tensor]
"""Hidden states and shifted labels of some positions, and which these are -> the sum of their loss."""


def position_edges(buckets: int, length: int) -> tuple[int, ...]:
    """Ends of buckets of positions: powers of two, and as the last one the row's length.

    >>> position_edges(3, 1024), position_edges(3, 1000), position_edges(9, 4)
    ((256, 512, 1024), (256, 512, 1000), (1, 2, 4))
    """
    powers = [2**power for power in range((length - 1).bit_length())]
    return (*powers[max(0, len(powers) - buckets + 1) :], length)


class LossByPosition:
    """Sums of the loss of evaluations, by how many tokens of its document a prediction is made from.

    Args:
        edges: of the buckets. One holds what is predicted from as many tokens as its edge says or fewer, but more than
            the edge before; the last one also what is beyond.
        device: of the losses.
    """

    def __init__(self, edges: tuple[int, ...], device: torch.device) -> None:
        self.edges = edges
        self._sums = torch.zeros(len(edges), dtype=torch.float64, device=device)
        self._tokens = torch.zeros(len(edges), dtype=torch.int64, device="cpu")

    def head(self, chain: Chain, batch: MicroBatch) -> Head:
        """``chain.head`` for one micro-batch, which adds the loss to the buckets besides.

        Args:
            batch: on the CPU.
        """
        last = len(self.edges) - 1
        buckets = torch.bucketize(batch.position_ids + 1, torch.tensor(self.edges, device="cpu")).clamp(max=last)
        buckets = buckets.masked_fill(batch.labels == IGNORE, -1)
        self._tokens += torch.bincount(buckets[buckets >= 0], minlength=len(self.edges))

        def head(hidden: Tensor, labels: Tensor, cut: slice) -> Tensor:
            mine = buckets[:, cut]
            here = [bucket for bucket in mine.unique().tolist() if bucket >= 0]
            own = [labels.masked_fill((mine != bucket).to(labels.device), IGNORE) for bucket in here]
            total, *parts = chain.heads(hidden, [labels, *(own if len(here) > 1 else [])])
            for bucket, part in zip(here, parts or [total], strict=False):
                self._sums[bucket] += part
            return total

        return head

    def means(self, world: World) -> dict[str, float | None]:
        """Mean loss per token over all ranks, by the edge of its bucket; None where no token counts. Call on all ranks,
        with nothing under way.
        """
        everyone = world.together(lambda: [self._sums.tolist(), self._tokens.tolist()])
        sums, tokens = ([sum(own) for own in zip(*each, strict=True)] for each in zip(*everyone, strict=True))
        pairs = zip(self.edges, sums, tokens, strict=True)
        return {str(edge): total / count if count else None for edge, total, count in pairs}
