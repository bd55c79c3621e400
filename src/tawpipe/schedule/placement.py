"""Homes: a unit is cut into equal shards, and each shard has its home on a rank that the strategy chooses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

SHARD_ALIGNMENT = 8
"""Elements of which a shard's length is a multiple. Shards then start at multiples of 16 bytes in every dtype, as
collectives and vector loads need."""


@dataclass(frozen=True)
class Home:
    """Ranks that own the shards of one unit.

    Args:
        ranks: global rank of shard 0, 1, ... All shards are equally long and are in this order in the unit.
        shard_size: elements of a shard, including the padding at the unit's end.
        replicas: ranks of further copies of the weights, gradient and optimizer state, in the same order. Each copy is
            updated separately with equal numbers. No rank is in two copies.
    """

    ranks: tuple[int, ...]
    shard_size: int
    replicas: tuple[tuple[int, ...], ...] = ()

    @classmethod
    def over(cls, ranks: tuple[int, ...], numel: int, *, multiple: int = 1, **others: Any) -> Home:
        """Return the home of a unit of ``numel`` elements, cut into one shard for each of ``ranks``.

        Args:
            ranks: global rank of each shard.
            numel: elements of the unit without padding.
            multiple: a shard's length is a multiple of this many alignments (``SHARD_ALIGNMENT``).
            others: further fields of ``Home``.
        """
        return cls(ranks, padded_shard(numel, len(ranks), SHARD_ALIGNMENT * multiple), **others)

    @property
    def padded(self) -> int:
        """Elements of the whole unit with its padding."""
        return self.shard_size * len(self.ranks)

    @property
    def copies(self) -> tuple[tuple[int, ...], ...]:
        """Ranks of every copy of the unit, the first copy (``ranks``) first.

        Values that are read once (a checkpoint, the gradient norm) are read from the first copy."""
        return (self.ranks, *self.replicas)

    @cached_property
    def _indices(self) -> dict[int, int]:
        return {rank: index for ranks in self.copies for index, rank in enumerate(ranks)}

    def index(self, rank: int) -> int | None:
        """Return the index of the shard that ``rank`` owns, in any copy, or None."""
        return self._indices.get(rank)


def padded_shard(numel: int, parts: int, multiple: int = SHARD_ALIGNMENT) -> int:
    """Return the elements of each of ``parts`` equal shards that hold ``numel`` elements, rounded up to ``multiple``.

    >>> padded_shard(100, 3)
    40
    """
    shard_size = -(-numel // parts)
    return -(-shard_size // multiple) * multiple


ALIKE = 0.01
"""Units whose sizes differ by less than this share are padded to one size. An embedding and a head with the final norm
then share their buffers."""


def alike_sizes(sizes: Sequence[int]) -> list[int]:
    """Return ``sizes`` with every value replaced by the largest one that it nearly equals (see ``ALIKE``).

    >>> alike_sizes([1000, 400, 1004, 402, 999])
    [1004, 402, 1004, 402, 1004]
    """
    chosen: dict[int, int] = {}
    largest = 0
    for size in sorted(set(sizes), reverse=True):
        largest = largest if largest and size >= largest * (1 - ALIKE) else size
        chosen[size] = largest
    return [chosen[size] for size in sizes]
