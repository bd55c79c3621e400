"""Who holds what and when on WeiPipe's ring: slots, turns, and the journeys of units. Imports topology and schedule.

P ranks in the order of the world form a ring; what travels goes from position p to p + 1. Consecutive blocks form P
slots. A *pass* is one rank's work on its micro-batches of one round: pass v = round * P + position, and pass v + 1 is
always one turn behind pass v. Forward of slot j in pass v is in turn v + j, backward in turn v + 2P - 1 - j. So in
every turn of the steady state a rank does one forward and one backward of different micro-batches, and what it uses in
a turn is what the next position uses in the next one: three streams (weights for forward, weights for backward,
gradients) move one place a turn.

The home of slot j is at position -j mod P: its weights reach position 0 in j turns, just when pass 0 needs them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from tawpipe.errors import UserError
from tawpipe.schedule.placement import Home, padded_stripe
from tawpipe.schedule.spec import Knobs, ModelSpec
from tawpipe.topology import Topology


class Stream(StrEnum):
    """What travels on the ring."""

    FORWARD = "F"
    """Weights for the forward pass."""
    BACKWARD = "B"
    """Weights for the backward pass."""
    GRADIENT = "G"
    """Gradients, adding up on the way."""


@dataclass(frozen=True)
class Journey:
    """One unit on its way round the ring in one step.

    Args:
        slot: for whose blocks it travels; a tied embedding travels for two slots.
        start: the position where it begins: its home, or for gradients the first rank that makes some.
        departure: the turn at whose end it makes its first hop.
        hops: how many it makes, one at the end of each turn.
    """

    stream: Stream
    unit: int
    slot: int
    start: int
    departure: int
    hops: int

    @property
    def arrival(self) -> int:
        """The turn before which the last hop has been made."""
        return self.departure + self.hops

    def passes(self, position: int, size: int) -> int:
        """How often it goes from ``position`` to the next one of a ring of ``size``.

        >>> [Journey(Stream.FORWARD, 0, 0, start=2, departure=0, hops=4).passes(p, 3) for p in range(3)]
        [1, 1, 2]
        """
        return max(0, -(-(self.hops - (position - self.start) % size) // size))


def slots_of_blocks(model: ModelSpec, size: int) -> tuple[int, ...]:
    """The slot of every block: layers are shared evenly, the embedding joins the first slot and the head the last.

    Raises:
        UserError: there are fewer layers than ranks.
    """
    layers = len(model.blocks) - 2
    if layers < size:
        raise UserError("schedule.placement", "ring", f"at most {layers} processes for {layers} layers, not {size}")
    return (0, *(layer * size // layers for layer in range(layers)), size - 1)


def place_on_ring(model: ModelSpec, topology: Topology) -> tuple[Home, ...]:
    """The homes: every unit whole on the rank that keeps the slot of its first block.

    Raises:
        UserError: there are fewer layers than ranks.
    """
    ranks = topology.group("world", 0)
    slots = slots_of_blocks(model, len(ranks))
    return tuple(Home((ranks[-slots[u.blocks[0]] % len(ranks)],), padded_stripe(u.numel, 1)) for u in model.units)


@dataclass(frozen=True)
class Ring:
    """The geometry of one step.

    Args:
        training: False for forward passes alone.
    """

    model: ModelSpec
    topology: Topology
    knobs: Knobs
    homes: tuple[Home, ...]
    training: bool

    @property
    def ranks(self) -> tuple[int, ...]:
        """The rank at every position."""
        return self.topology.group("world", 0)

    @property
    def size(self) -> int:
        return self.topology.world_size

    @cached_property
    def slots(self) -> tuple[tuple[int, ...], ...]:
        """The blocks of every slot, ascending."""
        found = slots_of_blocks(self.model, self.size)
        return tuple(tuple(b for b, slot in enumerate(found) if slot == j) for j in range(self.size))

    @cached_property
    def passes(self) -> tuple[int, ...]:
        """The passes that have micro-batches, ascending."""
        every = range(self.knobs.rounds * self.size)
        return tuple(v for v in every if self.micro_batches(v))

    @cached_property
    def _working(self) -> frozenset[int]:
        return frozenset(self.passes)

    def micro_batches(self, number: int) -> tuple[int, ...]:
        """Those of one pass."""
        return self.knobs.in_round(self.ranks[number % self.size], number // self.size)

    # turns

    def forward_turn(self, number: int, slot: int) -> int:
        """The turn in which a pass goes forward through a slot."""
        return number + slot

    def backward_turn(self, number: int, slot: int) -> int:
        """The turn in which a pass goes backward through a slot."""
        return number + 2 * self.size - 1 - slot

    def forward_at(self, position: int, turn: int) -> tuple[int, int] | None:
        """(pass, slot) that a position goes forward through in a turn, if there is a pass with micro-batches."""
        slot = (turn - position) % self.size
        return (turn - slot, slot) if turn - slot in self._working else None

    def backward_at(self, position: int, turn: int) -> tuple[int, int] | None:
        """(pass, slot) that a position goes backward through in a turn, like ``forward_at``."""
        slot = (position - turn - 1) % self.size
        number = turn + slot + 1 - 2 * self.size
        return (number, slot) if number in self._working else None

    @property
    def num_turns(self) -> int:
        """Until the last work is done and the last journey has ended."""
        work = (
            self.backward_turn(self.passes[-1], 0)
            if self.training
            else self.forward_turn(self.passes[-1], self.size - 1)
        )
        return 1 + max(work, *(journey.arrival for journey in self.journeys))

    # journeys

    def forward_blocks(self, slot: int) -> tuple[int, ...]:
        """Blocks with a forward visit, ascending. In training the head has only a backward one."""
        return tuple(b for b in self.slots[slot] if not self.training or self.model.blocks[b].kind != "head")

    def backward_blocks(self, slot: int) -> tuple[int, ...]:
        """Blocks with a backward visit, descending."""
        blocks = self.model.blocks
        return tuple(
            b
            for b in reversed(self.slots[slot])
            if self.training and (blocks[b].kind == "head" or blocks[b].needs_backward)
        )

    def backward_weights(self, block: int) -> tuple[int, ...]:
        """The units that a block's backward visit reads."""
        spec = self.model.blocks[block]
        return spec.units if spec.kind == "head" or spec.backward_reads_weights else ()

    @cached_property
    def journeys(self) -> tuple[Journey, ...]:
        """All of a step, in the order in which an exchange lists them."""
        return tuple(self._journeys())

    def _journeys(self) -> Iterator[Journey]:
        first, last = self.passes[0], self.passes[-1]
        for slot in range(self.size):
            for unit in _units(self.model.blocks[b].units for b in self.forward_blocks(slot)):
                yield self._weights(Stream.FORWARD, unit, slot, self.forward_turn(first, slot), last - first)
            for unit in _units(self.backward_weights(b) for b in self.backward_blocks(slot)):
                yield self._weights(Stream.BACKWARD, unit, slot, self.backward_turn(first, slot), last - first)
            for unit in _units(self.model.trainable_units(b) for b in self.backward_blocks(slot)):
                hops = last - first + (self.home(unit) - last) % self.size
                turn = self.backward_turn(first, slot)
                yield Journey(Stream.GRADIENT, unit, slot, first % self.size, turn, hops)

    def _weights(self, stream: Stream, unit: int, slot: int, first_use: int, between: int) -> Journey:
        """From home to the first pass, which needs it in turn ``first_use``, and ``between`` hops on to the last."""
        home = self.home(unit)
        before = (self.passes[0] - home) % self.size
        return Journey(stream, unit, slot, home, first_use - before, before + between)

    def home(self, unit: int) -> int:
        """The position of a unit's home."""
        return self.ranks.index(self.homes[unit].ranks[0])


def _units(groups: Iterator[tuple[int, ...]]) -> list[int]:
    return sorted({unit for units in groups for unit in units})
