"""What a builder is given and what it makes: blocks, units, knobs, pools, the schedule.

Imports topology and schedule only.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from tawpipe.schedule.actions import Action, Op
from tawpipe.schedule.placement import Home
from tawpipe.topology import Topology


@dataclass(frozen=True)
class UnitSpec:
    """What travels as one.

    Args:
        numel: elements without padding.
        trainable: whether gradients and an update exist.
        blocks: the blocks that use it, ascending; two for a tied embedding.
    """

    numel: int
    trainable: bool
    blocks: tuple[int, ...]


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

    def trainable_units(self, block: int) -> tuple[int, ...]:
        return tuple(u for u in self.blocks[block].units if self.units[u].trainable)


STAYING = ("host", "slot")
"""Kinds of activations whose places are there for the whole run, see blocks.py."""
WIRES = ("dtype", "int8", "fp8")
"""What travels between nodes: numbers in their own type, or in 8 bits with a scale for every block of them."""
WIRE_BLOCK = 256
"""Elements that share a scale of four bytes."""


def wire_bytes(elements: int, wire: str) -> int:
    """Bytes of a message in 8 bits.

    >>> wire_bytes(1000, "int8")
    1016
    """
    assert wire in WIRES[1:], wire
    return elements + 4 * -(-elements // WIRE_BLOCK)


def wire_width(wire: str, width: float) -> float:
    """Bytes of an element that travels between nodes, whose own type has ``width``."""
    return width if wire in ("", "dtype") else 1 + 4 / WIRE_BLOCK


KEPT = {"full": "", "selective": "kept", "none": "graph"}
"""How much a backward pass computes again, and the name of what is kept instead."""


@dataclass(frozen=True)
class Knobs:
    """What may be chosen for a schedule.

    Args:
        placement: see ``placement.place``.
        micro_batches: for every rank the global indices of its micro-batches of one step.
        micro_batches_per_visit: how many of them share one visit of the weights. Rounds follow.
        look_ahead: how many visits ahead weights are pulled and gathered; one buffer of a unit's size each.
        gradient_buffers: full-size gradient buffers: one being computed, the others being reduced.
        weights_scope: how long a node keeps the slices of a unit that it has pulled: for a ``visit``, or for the
            ``step``, until the optimizer changes them; later visits then gather inside the node only.
        gradients_scope: how often gradients leave a node: after every ``visit``, or once per ``step``, when they have
            added up (in the reduce dtype) over all its visits.
        reuse: whether a unit that a buffer still holds from an earlier visit is not brought again, see residency.py.
        recompute: of every block, what its backward pass computes again: ``full``, all of its forward pass;
            ``selective``, all but attention, whose results are kept; ``none``, nothing. Empty: full everywhere.
        offloaded_layers: the first layers, as many, whose inputs wait for their backward pass in the host's memory.
        early_updates: whether a unit is updated as soon as its gradient is complete, without a look at the norm of all.
        weights_wire, gradients_wire: in what weights and gradients travel between nodes, see ``WIRES``.
        homes: under ``striped`` and ``whole``, for every unit the node or rank where it lives, see ``placement.place``;
            empty for the usual ones.
        kept_units: further units of which a device keeps its slice for later visits, under ``spread`` and ``striped``;
            each costs one buffer of a slice.
    """

    placement: str
    micro_batches: tuple[tuple[int, ...], ...]
    micro_batches_per_visit: int = 1
    look_ahead: int = 2
    gradient_buffers: int = 2
    weights_scope: str = "visit"
    gradients_scope: str = "visit"
    reuse: bool = True
    homes: tuple[int, ...] = ()
    kept_units: int = 0
    recompute: tuple[str, ...] = ()
    offloaded_layers: int = 0
    early_updates: bool = False
    weights_wire: str = "dtype"
    gradients_wire: str = "dtype"

    def recomputes(self, block: int) -> str:
        """What the backward pass of a block computes again: ``full``, ``selective`` or ``none``."""
        return self.recompute[block] if self.recompute else "full"

    def offloads(self, block: int) -> bool:
        """Whether the input of a block waits in the host's memory. Layers are the blocks from 1 on."""
        return 1 <= block <= self.offloaded_layers

    def keeps(self, block: int) -> str:
        """The kind of activation in which a block keeps results for its backward pass; empty if it keeps none."""
        return KEPT[self.recomputes(block)]

    @property
    def rounds(self) -> int:
        most = max(len(own) for own in self.micro_batches)
        return max(1, -(-most // self.micro_batches_per_visit))

    def in_round(self, rank: int, number: int) -> tuple[int, ...]:
        """The micro-batches of ``rank`` in one round; may be empty."""
        k = self.micro_batches_per_visit
        return self.micro_batches[rank][number * k : (number + 1) * k]


def share_micro_batches(count: int, world_size: int) -> tuple[tuple[int, ...], ...]:
    """Micro-batches 0..count-1 for every rank, consecutive, the first ranks one more where it does not divide.

    >>> share_micro_batches(5, 4)
    ((0, 1), (2,), (3,), (4,))
    """
    base, extra = divmod(count, world_size)
    starts = [rank * base + min(rank, extra) for rank in range(world_size + 1)]
    return tuple(tuple(range(a, b)) for a, b in itertools.pairwise(starts))


@dataclass(frozen=True)
class Pool:
    """Equally large buffers of one kind on one rank, named ``{name}.0``, ``{name}.1``, ...

    Args:
        kind: ``weight`` (compute dtype) or ``gradient`` (reduce dtype).
        elements: of one buffer.
    """

    name: str
    kind: str
    count: int
    elements: int


@dataclass(frozen=True)
class Schedule:
    """One step of every rank.

    Args:
        name: of the builder.
        programs: for every rank its actions in the order in which they are issued. The order within a lane is the same.
            Empty for ranks that another one stands for, see ``simulate.fold``.
        pools: for every rank the buffers that its program uses, homes and activations aside.
        homes: for every unit.
        training: False for a forward-only schedule.
    """

    name: str
    topology: Topology
    model: ModelSpec
    knobs: Knobs
    homes: tuple[Home, ...]
    programs: tuple[tuple[Action, ...], ...]
    pools: tuple[tuple[Pool, ...], ...]
    training: bool = True

    @cached_property
    def played(self) -> tuple[int, ...]:
        """The ranks that have a program."""
        return tuple(rank for rank, program in enumerate(self.programs) if program)

    @cached_property
    def micro_batches(self) -> tuple[int, ...]:
        return tuple(sorted(m for own in self.knobs.micro_batches for m in own))

    def text(self, rank: int) -> str:
        """The program of one rank, one action a line."""
        return "\n".join(str(action) for action in self.programs[rank])

    def pool_elements(self, rank: int, kind: str) -> int:
        return sum(pool.count * pool.elements for pool in self.pools[rank] if pool.kind == kind)

    def home_elements(self, rank: int, *, trainable: bool) -> int:
        """Elements of the stripes that live on ``rank``, of trainable or of frozen units."""
        units = zip(self.homes, self.model.units, strict=True)
        return sum(home.stripe for home, unit in units if unit.trainable == trainable and home.index(rank) is not None)

    def buffer_elements(self, rank: int) -> dict[str, int]:
        """Elements of every pool buffer and home of one rank, by name."""
        found = {f"{pool.name}.{i}": pool.elements for pool in self.pools[rank] for i in range(pool.count)}
        for unit, home in enumerate(self.homes):
            if home.index(rank) is not None:
                found[f"home.w.{unit}"] = found[f"home.g.{unit}"] = home.stripe
        return found

    def peak_activations(self, rank: int, sizes: Mapping[str, int] | None = None) -> int:
        """The most that a program keeps at one time for backward passes.

        Args:
            sizes: of one activation of a kind, the first part of its name; by default one of each boundary activation
                (inputs of blocks, and their gradients), so that these are counted.
        """
        sizes = {"x": 1, "dx": 1, "slot": 1} if sizes is None else sizes
        coming = {kind: size for kind, size in sizes.items() if kind not in STAYING}
        staying = {
            name for action in self.programs[rank] for name in action.writes if name.startswith(("host.", "slot."))
        }
        total = peak = sum(sizes.get(name.partition(".")[0], 0) for name in staying)
        for action in self.programs[rank]:
            total += sum(coming.get(name.partition(".")[0], 0) for name in action.writes)
            peak = max(peak, total)
            total -= sum(coming.get(name.partition(".")[0], 0) for name in action.frees)
        return peak

    def counts(self, rank: int) -> Counter[Op]:
        return Counter(action.op for action in self.programs[rank])
