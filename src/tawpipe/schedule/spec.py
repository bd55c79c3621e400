"""A model as sizes: all that a schedule needs to know of it, so that it can be planned without weights or torch."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from tawpipe.dealing.speeds import by_speed, slowest_of


@dataclass(frozen=True)
class UnitSpec:
    """What travels as one.

    Args:
        numel: elements without padding.
        trainable: whether gradients and an update exist.
        blocks: the blocks that use it, ascending; two for a tied embedding.
        packed: parameters in it where the elements are none but bytes of them, with which nothing computes; else 0.
        met: parameters in it that a token meets, where a mixture sends it to some experts only; else 0.
    """

    numel: int
    trainable: bool
    blocks: tuple[int, ...]
    packed: int = 0
    met: int = 0

    @property
    def parameters(self) -> int:
        return self.packed or self.numel

    @property
    def computing(self) -> int:
        """Parameters that a token is multiplied with."""
        return self.met or self.parameters


@dataclass(frozen=True)
class BlockSpec:
    """What computes as one.

    Args:
        units: indices of its units.
        backward_reads_weights: whether its backward needs the weights on the device.
        needs_backward: False for blocks before the first trainable parameter.
        kind: ``embedding``, ``layer`` or ``head``.
    """

    units: tuple[int, ...]
    kind: str
    backward_reads_weights: bool = True
    needs_backward: bool = True


@dataclass(frozen=True)
class ModelSpec:
    """The chain as sizes. Block 0 is the embedding, the last one the head."""

    blocks: tuple[BlockSpec, ...]
    units: tuple[UnitSpec, ...]

    @cached_property
    def first_backward(self) -> int:
        """The first block that gradients reach."""
        return min(i for i, block in enumerate(self.blocks) if block.needs_backward)

    @property
    def identity(self) -> dict[str, int]:
        """By what a model is told from another one: the numbers of blocks, of parameters, of those that are trained,
        and of the elements that travel where those are others.
        """
        parameters, travels = sum(unit.parameters for unit in self.units), sum(unit.numel for unit in self.units)
        trained = sum(unit.numel for unit in self.units if unit.trainable)
        others = {"travels": travels} if travels != parameters else {}
        return {"blocks": len(self.blocks), "parameters": parameters, "trained": trained, **others}

    @cached_property
    def num_layers(self) -> int:
        return sum(block.kind == "layer" for block in self.blocks)

    @cached_property
    def _trainable_units(self) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(u for u in block.units if self.units[u].trainable) for block in self.blocks)

    def trainable_units(self, block: int) -> tuple[int, ...]:
        return self._trainable_units[block]


COMPRESSION_BLOCK = 256
"""Elements that share a scale of four bytes where numbers travel in 8 bits."""


CHANGE_BITS = ((1e-5, 2.2), (1e-4, 3.4), (3e-4, 4.4), (1e-3, 6.0), (2e-3, 6.7))
"""Bits in which the change of a bf16 weight in one step travels at a learning rate, and at less: what was measured
(benchmarks/coding.py), past the first steps."""
SUM_BITS = ((1, 12.6), (8, 21.1), (16, 22.7), (32, 26.3))
"""Bits of the sum of so many bf16 gradients in fp32, and of fewer, coded without loss: measured likewise."""
GRADIENT_BITS = 12.3
"""The same of a gradient in bf16."""
CODED_PART = 1 << 18
"""Elements of a gradient that are coded as one message: while one travels, the next is made."""
CODED_HEADER = 8


def coded_room(elements: int, width: int) -> int:
    """Bytes that a message of coded gradients takes at most, a multiple of four.

    >>> coded_room(1001, 2)
    2012
    """
    return CODED_HEADER + -(-elements * width // 4) * 4


def coded_rooms(elements: int, width: int) -> list[int]:
    """The same of all messages of a stripe."""
    parts = [min(CODED_PART, elements - begin) for begin in range(0, elements, CODED_PART)]
    return [coded_room(part, width) for part in parts]


def change_width(learning_rate: float) -> float:
    """Bytes in which the change of a bf16 weight travels where AdamW's learning rate is at most this.

    >>> change_width(3e-4), change_width(1.0)
    (0.55, 2.0)
    """
    return next((bits for rate, bits in CHANGE_BITS if learning_rate <= rate), 16) / 8


EXACT_WIDTH = change_width(3e-4)
"""Of a weight, where nobody has said which learning rate a run has."""


def sum_width(width: float, summands: int) -> float:
    """Bytes in which the sum of so many bf16 gradients travels, coded without loss, whose type has ``width``.

    >>> sum_width(4, 1) < sum_width(4, 3) < sum_width(4, 100) == 4
    True
    """
    bits = GRADIENT_BITS if width == 2 else next((bits for most, bits in SUM_BITS if summands <= most), 8 * width)
    return min(width, bits / 8)


def compressed_bytes(elements: int, compression: str = "int8") -> int:
    """Bytes of a message in 8 bits, or the most that a change of bf16 takes.

    >>> compressed_bytes(1000), compressed_bytes(1000, "exact")
    (1016, 2000)
    """
    if compression == "exact":
        return 2 * elements
    return elements + 4 * -(-elements // COMPRESSION_BLOCK)


def compressed_width(compression: str, width: float, exact: float) -> float:
    """Bytes of an element that travels between nodes, whose own type has ``width``.

    Args:
        exact: of one that travels coded without loss.
    """
    if compression == "exact":
        return exact
    return width if compression in ("", "none") else 1 + 4 / COMPRESSION_BLOCK


def share_micro_batches(
    count: int, world_size: int, ranks: int = 1, speeds: Sequence[float] = ()
) -> tuple[tuple[int, ...], ...]:
    """Micro-batches 0..count-1 for every rank, consecutive, the first ranks one more where it does not divide; or as
    many as suit their speeds.

    Args:
        ranks: so many neighbours compute the same micro-batches together, all as fast as the slowest of them.
        speeds: of all ranks; empty where they are alike.

    >>> share_micro_batches(5, 4), share_micro_batches(3, 4, 2)
    (((0, 1), (2,), (3,), (4,)), ((0, 1), (0, 1), (2,), (2,)))
    >>> share_micro_batches(6, 3, speeds=(1, 0.5, 0.5))
    ((0, 1, 2), (3, 4), (5,))
    """
    return consecutive(by_speed(count, slowest_of(speeds, ranks) or (1.0,) * (world_size // ranks)), ranks)


def consecutive(each: Sequence[int], ranks: int) -> tuple[tuple[int, ...], ...]:
    """So many micro-batches for every set of so many neighbours, numbered one after the other, for every rank."""
    starts = itertools.accumulate(each, initial=0)
    return tuple(tuple(range(a, b)) for a, b in itertools.pairwise(starts) for _ in range(ranks))


def share_bins(shared_rounds: int, rounds: int, world_size: int, ranks: int = 1) -> tuple[tuple[int, ...], ...]:
    """Micro-batches of a step of bins (balance.py) for every rank: one in every round. Those that sets compute come
    first, in a rank's list as well as by number; all below ``shared_rounds * world_size / ranks`` are such.

    >>> share_bins(1, 1, 4, 2), share_bins(0, 2, 2)
    (((0, 2), (0, 3), (1, 4), (1, 5)), ((0, 1), (2, 3)))
    """
    of_sets = shared_rounds * (world_size // ranks)
    return tuple(
        (
            *range(rank // ranks * shared_rounds, (rank // ranks + 1) * shared_rounds),
            *range(of_sets + rank * rounds, of_sets + (rank + 1) * rounds),
        )
        for rank in range(world_size)
    )
