"""What an evaluation measures besides its loss: how far back does a model look to some profit, and does it find there
what it is asked for?

It is measured where the head computes its loss, chunk by chunk, so that no logits are kept for it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from tawpipe.model.batch import IGNORE, MicroBatch
from tawpipe.model.chain import Chain
from tawpipe.runtime.world import World

Head = Callable[[Tensor, Tensor, slice], Tensor]
"""Hidden states and shifted labels of some positions, and which these are -> the sum of their loss."""


class Measure(Protocol):
    """Looks at the heads of an evaluation."""

    def head(self, chain: Chain, batch: MicroBatch, number: int) -> Head:
        """Takes the place of ``chain.head`` for one micro-batch, which is on the CPU and has this number."""
        ...


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

    def head(self, chain: Chain, batch: MicroBatch, number: int) -> Head:
        """``chain.head`` for one micro-batch, which adds the loss to the buckets besides."""
        last = len(self.edges) - 1
        buckets = torch.bucketize(batch.position_ids + 1, torch.tensor(self.edges, device="cpu")).clamp(max=last)
        buckets = buckets.masked_fill(batch.labels == IGNORE, -1)
        self._tokens += torch.bincount(buckets[buckets >= 0], minlength=len(self.edges))

        def head(hidden: Tensor, labels: Tensor, cut: slice) -> Tensor:
            mine = buckets[:, cut]
            here = [bucket for bucket in mine.unique().tolist() if bucket >= 0]
            bucket_labels = [labels.masked_fill((mine != bucket).to(labels.device), IGNORE) for bucket in here]
            total, *parts = chain.heads(hidden, [labels, *(bucket_labels if len(here) > 1 else [])])
            for bucket, part in zip(here, parts or [total], strict=False):
                self._sums[bucket] += part
            return total

        return head

    def means(self, world: World) -> dict[str, float | None]:
        """Mean loss per token over all ranks, by the edge of its bucket; None where no token counts. Call on all ranks,
        with nothing under way.
        """
        pairs = zip(self.edges, *over_ranks(world, self._sums, self._tokens), strict=True)
        return {str(edge): total / count if count else None for edge, total, count in pairs}


@dataclass(frozen=True)
class Answer:
    """How well the tokens of a row that count are predicted, each from what really stands before it.

    Args:
        loss: sum of the cross-entropies.
        right: tokens that are the likeliest of all.
        tokens: that count.
    """

    loss: float
    right: int
    tokens: int

    @property
    def found(self) -> bool:
        """True if the model would have written all of it, always taking the likeliest token."""
        return self.right == self.tokens


class AnswersByRow:
    """The answers in the rows of one evaluation. Logits are computed for the positions that count alone, and the loss
    is their cross-entropy.

    Args:
        rows: of the global batch.
        micro_batch: rows in one.
    """

    def __init__(self, rows: int, micro_batch: int, device: torch.device) -> None:
        self._micro_batch = micro_batch
        self._sums = torch.zeros(rows, dtype=torch.float64, device=device)
        self._right = torch.zeros(rows, dtype=torch.int64, device=device)
        self._tokens = torch.zeros(rows, dtype=torch.int64, device="cpu")

    def head(self, chain: Chain, batch: MicroBatch, number: int) -> Head:
        first = number * self._micro_batch
        rows = slice(first, first + batch.labels.shape[0])
        counts = batch.labels != IGNORE
        self._tokens[rows] += counts.sum(1)

        def head(hidden: Tensor, labels: Tensor, cut: slice) -> Tensor:
            columns = counts[:, cut].any(0).nonzero().flatten().tolist()
            if not columns:
                return self._sums.new_zeros(())
            some = slice(columns[0], columns[-1] + 1)
            logits, labels = chain.logits(hidden[:, some]), labels[:, some]
            wide = logits.to(torch.promote_types(logits.dtype, torch.float32)).transpose(1, 2)
            losses = F.cross_entropy(wide, labels, ignore_index=IGNORE, reduction="none").double().sum(1)
            self._sums[rows] += losses
            self._right[rows] += (logits.argmax(-1) == labels).sum(1)
            return losses.sum()

        return head

    def answers(self, world: World) -> list[Answer]:
        """Of every row, over all ranks. Call on all ranks, with nothing under way."""
        return [Answer(*row) for row in zip(*over_ranks(world, self._sums, self._right, self._tokens), strict=True)]


def over_ranks(world: World, *numbers: Tensor) -> list[list[float]]:
    """The sums of vectors over all ranks, element by element, in the order of the ranks."""
    everyone = world.together(lambda: [each.tolist() for each in numbers])
    return [[sum(elements) for elements in zip(*each, strict=True)] for each in zip(*everyone, strict=True)]
