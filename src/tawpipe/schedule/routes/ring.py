"""Who holds what and when on WeiPipe's ring: stages, turns, and the journeys of units.

P ranks in the order of the world form a ring; what travels goes from position p to p + 1. Consecutive blocks form P
stages. A *pass* is one rank's work on its micro-batches of one round: pass v = round * P + position, and pass v + 1 is
always one turn behind pass v. Forward of stage j in pass v is in turn v + j, backward in turn v + 2P - 1 - j. So in
every turn of the steady state a rank does one forward and one backward of different micro-batches, and what it uses in
a turn is what the next position uses in the next one: three streams (weights for forward, weights for backward,
gradients) move one place a turn.

The home of stage j is at position -j mod P: its weights reach position 0 in j turns, just when pass 0 needs them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from tawpipe.errors import UserError
from tawpipe.schedule.link_traffic import LinkTraffic
from tawpipe.schedule.placement import Home, padded_stripe
from tawpipe.schedule.refusal import LeastLayers
from tawpipe.schedule.spec import ModelSpec
from tawpipe.schedule.step import StepSpec
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
        stage: for whose blocks it travels; a tied embedding travels for two stages.
        start: the position where it begins: its home, or for gradients the first rank that makes some.
        departure: the turn at whose end it makes its first hop.
        hops: how many it makes, one at the end of each turn.
    """

    stream: Stream
    unit: int
    stage: int
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


def stages_of_blocks(model: ModelSpec, size: int) -> tuple[int, ...]:
    """The stage of every block: layers are shared evenly, the embedding joins the first stage and the head the last.

    Raises:
        UserError: there are fewer layers than ranks.
    """
    layers = len(model.blocks) - 2
    if layers < size:
        expected = f"at least {size}, one for every process of the ring of weipipe"
        raise UserError("layers of the model", layers, expected, need=LeastLayers(size))
    return (0, *(layer * size // layers for layer in range(layers)), size - 1)


def place_on_ring(model: ModelSpec, topology: Topology) -> tuple[Home, ...]:
    """The homes: every unit whole on the rank that keeps the stage of its first block.

    Raises:
        UserError: there are fewer layers than ranks.
    """
    ranks = topology.group("world", 0)
    stages = stages_of_blocks(model, len(ranks))
    return tuple(Home((ranks[-stages[u.blocks[0]] % len(ranks)],), padded_stripe(u.numel, 1)) for u in model.units)


@dataclass(frozen=True)
class Ring:
    """The geometry of one step.

    Args:
        training: False for forward passes alone.
    """

    step: StepSpec
    training: bool

    @property
    def model(self) -> ModelSpec:
        return self.step.model

    @property
    def topology(self) -> Topology:
        return self.step.topology

    @property
    def ranks(self) -> tuple[int, ...]:
        """The rank at every position."""
        return self.topology.group("world", 0)

    @property
    def size(self) -> int:
        return self.topology.world_size

    @cached_property
    def stages(self) -> tuple[tuple[int, ...], ...]:
        """The blocks of every stage, ascending."""
        of_blocks = stages_of_blocks(self.model, self.size)
        return tuple(tuple(b for b, stage in enumerate(of_blocks) if stage == j) for j in range(self.size))

    @cached_property
    def passes(self) -> tuple[int, ...]:
        """The passes that have micro-batches, ascending."""
        every = range(self.step.rounds * self.size)
        return tuple(v for v in every if self.micro_batches(v))

    @cached_property
    def _working(self) -> frozenset[int]:
        return frozenset(self.passes)

    def micro_batches(self, number: int) -> tuple[int, ...]:
        """Those of one pass."""
        return self.step.in_round(self.ranks[number % self.size], number // self.size)

    # turns

    def forward_turn(self, number: int, stage: int) -> int:
        """The turn in which a pass goes forward through a stage."""
        return number + stage

    def backward_turn(self, number: int, stage: int) -> int:
        """The turn in which a pass goes backward through a stage."""
        return number + 2 * self.size - 1 - stage

    def forward_at(self, position: int, turn: int) -> tuple[int, int] | None:
        """(pass, stage) that a position goes forward through in a turn, if there is a pass with micro-batches."""
        stage = (turn - position) % self.size
        return (turn - stage, stage) if turn - stage in self._working else None

    def backward_at(self, position: int, turn: int) -> tuple[int, int] | None:
        """(pass, stage) that a position goes backward through in a turn, like ``forward_at``."""
        stage = (position - turn - 1) % self.size
        number = turn + stage + 1 - 2 * self.size
        return (number, stage) if number in self._working else None

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

    def forward_blocks(self, stage: int) -> tuple[int, ...]:
        """Blocks with a forward visit, ascending. In training the head has only a backward one."""
        return tuple(b for b in self.stages[stage] if not self.training or self.model.blocks[b].kind != "head")

    def backward_blocks(self, stage: int) -> tuple[int, ...]:
        """Blocks with a backward visit, descending."""
        blocks = self.model.blocks
        return tuple(
            b
            for b in reversed(self.stages[stage])
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
        for stage in range(self.size):
            for unit in _units(self.model.blocks[b].units for b in self.forward_blocks(stage)):
                yield self._weights(Stream.FORWARD, unit, stage, self.forward_turn(first, stage), last - first)
            for unit in _units(self.backward_weights(b) for b in self.backward_blocks(stage)):
                yield self._weights(Stream.BACKWARD, unit, stage, self.backward_turn(first, stage), last - first)
            for unit in _units(self.model.trainable_units(b) for b in self.backward_blocks(stage)):
                hops = last - first + (self.home(unit) - last) % self.size
                turn = self.backward_turn(first, stage)
                yield Journey(Stream.GRADIENT, unit, stage, first % self.size, turn, hops)

    def _weights(self, stream: Stream, unit: int, stage: int, first_use: int, between: int) -> Journey:
        """From home to the first pass, which needs it in turn ``first_use``, and ``between`` hops on to the last."""
        home = self.home(unit)
        before = (self.passes[0] - home) % self.size
        return Journey(stream, unit, stage, home, first_use - before, before + between)

    def home(self, unit: int) -> int:
        """The position of a unit's home."""
        return self.ranks.index(self.step.homes[unit].ranks[0])


def _units(groups: Iterator[tuple[int, ...]]) -> list[int]:
    return sorted({unit for units in groups for unit in units})


def ring_traffic(step: StepSpec, *, training: bool) -> tuple[LinkTraffic, ...]:
    """What every node's link carries in a step: all of a unit at every hop from a node's last rank."""
    topology, homes, ring = step.topology, step.homes, Ring(step, training)
    out = [[0, 0] for _ in range(topology.num_nodes)]
    for journey in ring.journeys:
        for node, counts in enumerate(out):
            last = (node + 1) * topology.local_size - 1
            elements = homes[journey.unit].padded * journey.passes(last, ring.size)
            counts[journey.stream is Stream.GRADIENT] += elements
    # What leaves a node enters the next one.
    return tuple(LinkTraffic(w, out[n - 1][0], g, out[n - 1][1]) for n, (w, g) in enumerate(out))
