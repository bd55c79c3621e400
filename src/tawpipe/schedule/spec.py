"""Sizes of a model: all that a schedule needs to know about a model, without weights and without torch."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from tawpipe.dealing.speeds import by_speed, slowest_of


@dataclass(frozen=True)
class UnitSpec:
    """Sizes of one unit: parameters that travel together.

    Args:
        numel: elements without padding.
        trainable: True if the unit has gradients and is updated.
        blocks: indices of the blocks that use the unit, ascending; two for tied embeddings.
        packed: number of parameters, if the elements are bytes of packed (quantised) weights that cannot be computed
            with; else 0.
        active: number of parameters that one token is multiplied with, if the unit holds experts of a mixture; else 0.
    """

    numel: int
    trainable: bool
    blocks: tuple[int, ...]
    packed: int = 0
    active: int = 0

    @property
    def parameters(self) -> int:
        """Number of parameters of the unit."""
        return self.packed or self.numel

    @property
    def computing(self) -> int:
        """Number of parameters that one token is multiplied with."""
        return self.active or self.parameters


@dataclass(frozen=True)
class BlockSpec:
    """Description of one block: the embedding, one layer, or the head with its loss.

    Args:
        units: indices of the block's units.
        kind: ``embedding``, ``layer`` or ``head``.
        backward_reads_weights: True if the backward pass needs the weights on the device.
        needs_backward: False for blocks before the first trainable parameter.
    """

    units: tuple[int, ...]
    kind: str
    backward_reads_weights: bool = True
    needs_backward: bool = True


@dataclass(frozen=True)
class ModelSpec:
    """Sizes of a model as a chain of blocks. Block 0 is the embedding, the last block is the head.

    Args:
        blocks: the blocks.
        units: the units.
        balances: True if a loss balances the experts of its layers.
    """

    blocks: tuple[BlockSpec, ...]
    units: tuple[UnitSpec, ...]
    balances: bool = False

    @cached_property
    def first_backward(self) -> int:
        """Index of the first block that has a backward pass; blocks before it have no trained parameter."""
        return min(i for i, block in enumerate(self.blocks) if block.needs_backward)

    @property
    def identity(self) -> dict[str, int]:
        """Numbers by which a saved plan or run recognises its model: blocks, parameters, trained parameters.

        The keys are ``blocks``, ``parameters`` and ``trained``. If the number of elements that travel is not that of
        the parameters, it is in ``travels``."""
        parameters, travels = sum(unit.parameters for unit in self.units), sum(unit.numel for unit in self.units)
        trained = sum(unit.numel for unit in self.units if unit.trainable)
        others = {"travels": travels} if travels != parameters else {}
        return {"blocks": len(self.blocks), "parameters": parameters, "trained": trained, **others}

    @cached_property
    def num_layers(self) -> int:
        """Number of layers, without embedding and head."""
        return sum(block.kind == "layer" for block in self.blocks)

    @cached_property
    def _trainable_units(self) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(u for u in block.units if self.units[u].trainable) for block in self.blocks)

    def trainable_units(self, block: int) -> tuple[int, ...]:
        """Return the indices of the trainable units of ``block``."""
        return self._trainable_units[block]


COMPRESSION_BLOCK = 256
"""Number of elements that share one scale of four bytes when numbers travel in 8 bits."""


CHANGE_BITS = ((1e-5, 2.2), (1e-4, 3.4), (3e-4, 4.4), (1e-3, 6.0), (2e-3, 6.7))
"""Bits in which one bf16 weight change of one step travels, as (learning rate at most, bits). Measured after the first
steps of a run (benchmarks/coding.py)."""
SUM_BITS = ((1, 12.6), (8, 21.1), (16, 22.7), (32, 26.3))
"""Bits of an fp32 sum of bf16 gradients coded without loss, as (number of summands at most, bits). Measured by
benchmarks/coding.py."""
GRADIENT_BITS = 12.3
"""Bits of a bf16 gradient coded without loss. Measured by benchmarks/coding.py."""
CODED_PART = 1 << 18
"""Elements of a gradient that are coded as one message. While one message travels, the next one is coded."""
CODED_HEADER = 8


def coded_bytes(elements: int, width: int) -> int:
    """Return the most bytes that a message of ``elements`` coded gradients takes.

    The size after the header is rounded up to a multiple of four.

    Args:
        elements: elements in the message.
        width: bytes of one element before coding.

    >>> coded_bytes(1001, 2)
    2012
    """
    return CODED_HEADER + -(-elements * width // 4) * 4


def coded_part_bytes(elements: int, width: int) -> list[int]:
    """Return the most bytes of each message into which a shard of ``elements`` coded gradients is cut.

    The shard is sent in messages of ``CODED_PART`` elements; the last may be shorter.

    Args:
        elements: elements of the shard.
        width: bytes of one element before coding.
    """
    parts = [min(CODED_PART, elements - begin) for begin in range(0, elements, CODED_PART)]
    return [coded_bytes(part, width) for part in parts]


def change_width(learning_rate: float) -> float:
    """Return the bytes in which one bf16 weight change travels at an AdamW learning rate.

    The width was measured at the smallest rate in ``CHANGE_BITS`` that is at least ``learning_rate``; above all of them
    it is 2 bytes.

    >>> change_width(3e-4), change_width(1.0)
    (0.55, 2.0)
    """
    return next((bits for rate, bits in CHANGE_BITS if learning_rate <= rate), 16) / 8


EXACT_WIDTH = change_width(3e-4)
"""Bytes in which one weight change travels, if the learning rate of the run is unknown."""


def sum_width(width: float, summands: int) -> float:
    """Return the bytes in which one element of a sum of bf16 gradients travels, coded without loss.

    Args:
        width: bytes of one element of the sum before coding.
        summands: number of gradients in the sum.

    >>> sum_width(4, 1) < sum_width(4, 3) < sum_width(4, 100) == 4
    True
    """
    bits = GRADIENT_BITS if width == 2 else next((bits for most, bits in SUM_BITS if summands <= most), 8 * width)
    return min(width, bits / 8)


def compressed_bytes(elements: int, compression: str = "int8") -> int:
    """Return the bytes of a message of ``elements`` numbers in 8 bits, scales included.

    With ``compression`` ``exact``: the most bytes that changes of bf16 weights take.

    >>> compressed_bytes(1000), compressed_bytes(1000, "exact")
    (1016, 2000)
    """
    if compression == "exact":
        return 2 * elements
    return elements + 4 * -(-elements // COMPRESSION_BLOCK)


def compressed_width(compression: str, width: float, exact: float) -> float:
    """Return the bytes of one element that travels between nodes.

    Args:
        compression: ``""`` or ``none``, ``int8``, ``fp8`` or ``exact``.
        width: bytes of one element in its own dtype.
        exact: bytes of one element coded without loss.
    """
    if compression == "exact":
        return exact
    return width if compression in ("", "none") else 1 + 4 / COMPRESSION_BLOCK


def share_micro_batches(
    count: int, world_size: int, ranks: int = 1, speeds: Sequence[float] = ()
) -> tuple[tuple[int, ...], ...]:
    """Return for every rank its consecutive micro-batches, out of 0..count-1.

    With equal speeds the shares are equal; if that is impossible, the first ranks get one more. Otherwise a share is in
    proportion to the speed.

    Args:
        count: number of micro-batches.
        world_size: number of ranks.
        ranks: number of neighbouring ranks that compute a micro-batch together, as fast as the slowest of them.
        speeds: relative speeds of all ranks; empty if equal.

    >>> share_micro_batches(5, 4), share_micro_batches(3, 4, 2)
    (((0, 1), (2,), (3,), (4,)), ((0, 1), (0, 1), (2,), (2,)))
    >>> share_micro_batches(6, 3, speeds=(1, 0.5, 0.5))
    ((0, 1, 2), (3, 4), (5,))
    """
    return consecutive(by_speed(count, slowest_of(speeds, ranks) or (1.0,) * (world_size // ranks)), ranks)


def consecutive(each: Sequence[int], ranks: int) -> tuple[tuple[int, ...], ...]:
    """Number micro-batches consecutively, group of ranks after group, and return the numbers for every rank.

    Args:
        each: number of micro-batches of every group.
        ranks: number of neighbouring ranks in a group; all of them get the numbers of their group.
    """
    starts = itertools.accumulate(each, initial=0)
    return tuple(tuple(range(a, b)) for a, b in itertools.pairwise(starts) for _ in range(ranks))


def share_packs(shared_rounds: int, rounds: int, world_size: int, ranks: int = 1) -> tuple[tuple[int, ...], ...]:
    """Return for every rank the indices of its packed micro-batches in a step, one for every round.

    Packed micro-batches of context-parallel groups have the lowest numbers (below ``shared_rounds * world_size /
    ranks``), and are first in every rank's list. All ranks of a group have equal ones.

    Args:
        shared_rounds: number of rounds in which each context-parallel group computes one packed micro-batch.
        rounds: number of rounds in which each rank computes one packed micro-batch alone.
        world_size: number of ranks.
        ranks: number of ranks in a context-parallel group.

    >>> share_packs(1, 1, 4, 2), share_packs(0, 2, 2)
    (((0, 2), (0, 3), (1, 4), (1, 5)), ((0, 1), (2, 3)))
    """
    group_packs = shared_rounds * (world_size // ranks)
    return tuple(
        (
            *range(rank // ranks * shared_rounds, (rank // ranks + 1) * shared_rounds),
            *range(group_packs + rank * rounds, group_packs + (rank + 1) * rounds),
        )
        for rank in range(world_size)
    )
