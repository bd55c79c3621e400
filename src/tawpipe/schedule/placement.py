"""Homes: a unit is cut in equal stripes, and each stripe has its home on a rank. Strategies say on which."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

STRIPE_ALIGNMENT = 8
"""Elements: stripes start at multiples of 16 bytes in every dtype, which collectives and vector loads want."""


@dataclass(frozen=True)
class Home:
    """Where the stripes of one unit live.

    Args:
        ranks: global rank of stripe 0, 1, ...; all stripes are equally long and lie in this order in the unit.
        stripe: elements in a stripe, the padding of the unit's end included.
        replicas: the ranks, in the same order, of further copies of everything: weights, gradient and optimizer state.
            Every copy is updated by itself with the same numbers. No rank is in two copies.
    """

    ranks: tuple[int, ...]
    stripe: int
    replicas: tuple[tuple[int, ...], ...] = ()

    @classmethod
    def over(cls, ranks: tuple[int, ...], numel: int, *, multiple: int = 1, **others: Any) -> Home:
        """The home of ``numel`` elements in stripes over some ranks, each a multiple of ``multiple`` alignments."""
        return cls(ranks, padded_stripe(numel, len(ranks), STRIPE_ALIGNMENT * multiple), **others)

    @property
    def padded(self) -> int:
        """Elements of the whole unit with its padding."""
        return self.stripe * len(self.ranks)

    @property
    def copies(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of every copy. What is read once (a checkpoint, the gradient's norm) is read from the first."""
        return (self.ranks, *self.replicas)

    @cached_property
    def _indices(self) -> dict[int, int]:
        return {rank: index for ranks in self.copies for index, rank in enumerate(ranks)}

    def index(self, rank: int) -> int | None:
        """Which stripe lives on ``rank``, in whichever copy, or None."""
        return self._indices.get(rank)


def padded_stripe(numel: int, parts: int, multiple: int = STRIPE_ALIGNMENT) -> int:
    """Elements of each of ``parts`` equal stripes that hold ``numel`` elements, a multiple of ``multiple``.

    >>> padded_stripe(100, 3)
    40
    """
    stripe = -(-numel // parts)
    return -(-stripe // multiple) * multiple


ALIKE = 0.01
"""Units whose sizes differ by less than this share are padded to one size: an embedding and a head with the final norm
then share their buffers.
"""


def alike_sizes(sizes: Sequence[int]) -> list[int]:
    """The elements that homes are made for, in place of ``sizes``.

    >>> alike_sizes([1000, 400, 1004, 402, 999])
    [1004, 402, 1004, 402, 1004]
    """
    chosen: dict[int, int] = {}
    largest = 0
    for size in sorted(set(sizes), reverse=True):
        largest = largest if largest and size >= largest * (1 - ALIKE) else size
        chosen[size] = largest
    return [chosen[size] for size in sizes]
