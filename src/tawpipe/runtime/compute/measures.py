"""Measures of an evaluation in addition to its loss: the use of distant context, and the correctness of answers.

They are computed where the head computes its loss, chunk by chunk, so that no logits are kept for them.
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
"""Function from hidden states, shifted labels and the slice of positions to the sum of their loss."""


class Measure(Protocol):
    """Interface of a measure that replaces the head in an evaluation."""

    def head(self, chain: Chain, batch: MicroBatch, number: int) -> Head:
        """Return a replacement of ``chain.head`` for the micro-batch ``batch`` (on the CPU) with index ``number``."""
        ...


def position_edges(buckets: int, length: int) -> tuple[int, ...]:
    """Return the upper edges of ``buckets`` buckets of positions: powers of two, and last the row's length.

    >>> position_edges(3, 1024), position_edges(3, 1000), position_edges(9, 4)
    ((256, 512, 1024), (256, 512, 1000), (1, 2, 4))
    """
    powers = [2**power for power in range((length - 1).bit_length())]
    return (*powers[max(0, len(powers) - buckets + 1) :], length)


class LossByPosition:
    """Sums of an evaluation's loss, in buckets by the number of document tokens that a prediction can use.

    Args:
        edges: Upper edges of the buckets. A bucket holds predictions from at most that many tokens, and more than the
            edge before. The last bucket also holds all longer ones.
        device: Device of the losses.
    """

    def __init__(self, edges: tuple[int, ...], device: torch.device) -> None:
        self.edges = edges
        self._sums = torch.zeros(len(edges), dtype=torch.float64, device=device)
        self._tokens = torch.zeros(len(edges), dtype=torch.int64, device="cpu")

    def head(self, chain: Chain, batch: MicroBatch, number: int) -> Head:
        """Return a head for one micro-batch that computes the loss and adds it to the buckets."""
        last = len(self.edges) - 1
        buckets = torch.bucketize(batch.position_ids + 1, torch.tensor(self.edges, device="cpu")).clamp(max=last)
        buckets = buckets.masked_fill(batch.labels == IGNORE, -1)
        self._tokens += torch.bincount(buckets[buckets >= 0], minlength=len(self.edges))

        def head(hidden: Tensor, labels: Tensor, cut: slice) -> Tensor:
            """Return the summed loss of some positions, and add its parts to the buckets."""
            chunk_buckets = buckets[:, cut]
            here = [bucket for bucket in chunk_buckets.unique().tolist() if bucket >= 0]
            bucket_labels = [labels.masked_fill((chunk_buckets != bucket).to(labels.device), IGNORE) for bucket in here]
            total, *parts = chain.heads(hidden, [labels, *(bucket_labels if len(here) > 1 else [])])
            for bucket, part in zip(here, parts or [total], strict=False):
                self._sums[bucket] += part
            return total

        return head

    def means(self, world: World) -> dict[str, float | None]:
        """Return the mean loss per token over all ranks, by the edge of its bucket; None if no token counts.

        Call on all ranks, with no action under way.
        """
        pairs = zip(self.edges, *over_ranks(world, self._sums, self._tokens), strict=True)
        return {str(edge): total / count if count else None for edge, total, count in pairs}


@dataclass(frozen=True)
class Answer:
    """Quality of the predictions of a row's tokens that count, each made from the true tokens before it.

    Args:
        loss: Sum of the cross-entropies.
        right: Number of tokens that have the highest probability.
        tokens: Number of tokens that count.
    """

    loss: float
    right: int
    tokens: int

    @property
    def exact_match(self) -> bool:
        """True if greedy decoding would have written all tokens that count."""
        return self.right == self.tokens


class AnswersByRow:
    """Answers in the rows of one evaluation.

    Logits are computed only between the first and the last position that count. The loss is their cross-entropy.

    Args:
        rows: Rows of the global batch.
        micro_batch: Rows in one micro-batch.
        device: Device of the losses.
    """

    def __init__(self, rows: int, micro_batch: int, device: torch.device) -> None:
        self._micro_batch = micro_batch
        self._sums = torch.zeros(rows, dtype=torch.float64, device=device)
        self._right = torch.zeros(rows, dtype=torch.int64, device=device)
        self._tokens = torch.zeros(rows, dtype=torch.int64, device="cpu")

    def head(self, chain: Chain, batch: MicroBatch, number: int) -> Head:
        """Return a head for one micro-batch that computes the loss, and records loss and right tokens by row."""
        first = number * self._micro_batch
        rows = slice(first, first + batch.labels.shape[0])
        counts = batch.labels != IGNORE
        self._tokens[rows] += counts.sum(1)

        def head(hidden: Tensor, labels: Tensor, cut: slice) -> Tensor:
            """Return the summed loss of some positions, and add to the sums of their rows."""
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
        """Return the ``Answer`` of every row, summed over all ranks. Call on all ranks, with no action under way."""
        return [Answer(*row) for row in zip(*over_ranks(world, self._sums, self._right, self._tokens), strict=True)]


def over_ranks(world: World, *numbers: Tensor) -> list[list[float]]:
    """Return the sums of the given vectors over all ranks, element by element. Call on all ranks."""
    everyone = world.together(lambda: [each.tolist() for each in numbers])
    return [[sum(elements) for elements in zip(*each, strict=True)] for each in zip(*everyone, strict=True)]
