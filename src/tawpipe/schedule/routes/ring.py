"""Geometry of WeiPipe's ring: stages, turns and the journeys of units.

P ranks, in the order of the world, form a ring; data travels from position p to p + 1. Consecutive blocks form P
stages. A *pass* is one rank's work on its micro-batches of one round. Pass v = round * P + position, and pass v + 1 is
always one turn behind pass v. Pass v goes forward through stage j in turn v + j, and backward in turn v + 2P - 1 - j.
So in every turn of the steady state a rank runs one forward and one backward pass of different micro-batches. The next
position uses in the next turn what a position uses in this one. So three streams (weights for forward, weights for
backward, gradients) move one position per turn.

The home of stage j is at position -j mod P: its weights reach position 0 in j turns, just when pass 0 needs them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from tawpipe.errors import UserError
from tawpipe.schedule.link_traffic import LinkTraffic
from tawpipe.schedule.placement import Home, padded_shard
from tawpipe.schedule.refusal import LeastLayers
from tawpipe.schedule.spec import ModelSpec
from tawpipe.schedule.step import StepSpec
from tawpipe.topology import Topology


class Stream(StrEnum):
    """Data that travels on the ring."""

    FORWARD = "F"
    """Weights for the forward pass."""
    BACKWARD = "B"
    """Weights for the backward pass."""
    GRADIENT = "G"
    """Gradients, which are added up on the way."""


@dataclass(frozen=True)
class Journey:
    """Way of one unit round the ring in one step.

    Args:
        stream: what travels.
        unit: index of the unit.
        stage: stage for whose blocks it travels; tied embeddings travel for two stages.
        start: position at which it begins: its home, or for gradients the first rank that computes some.
        departure: turn at whose end it makes its first hop.
        hops: number of hops, one at the end of each turn.
    """

    stream: Stream
    unit: int
    stage: int
    start: int
    departure: int
    hops: int

    @property
    def arrival(self) -> int:
        """First turn in which all hops have been made."""
        return self.departure + self.hops

    def passes(self, position: int, size: int) -> int:
        """Return how often the unit goes from ``position`` to the next one, in a ring of ``size`` positions.

        >>> [Journey(Stream.FORWARD, 0, 0, start=2, departure=0, hops=4).passes(p, 3) for p in range(3)]
        [1, 1, 2]
        """
        return max(0, -(-(self.hops - (position - self.start) % size) // size))


def stages_of_blocks(model: ModelSpec, size: int) -> tuple[int, ...]:
    """Return the stage of every block, for ``size`` stages.

    Layers are divided evenly; the embedding joins the first stage and the head the last.

    Raises:
        UserError: the model has fewer layers than ranks.
    """
    layers = len(model.blocks) - 2
    if layers < size:
        expected = f"at least {size}, one for every process of the ring of weipipe"
        raise UserError("layers of the model", layers, expected, need=LeastLayers(size))
    return (0, *(layer * size // layers for layer in range(layers)), size - 1)


def place_on_ring(model: ModelSpec, topology: Topology) -> tuple[Home, ...]:
    """Return the home of every unit: whole, on the rank that owns the stage of the unit's first block.

    Raises:
        UserError: the model has fewer layers than ranks.
    """
    ranks = topology.group("world", 0)
    stages = stages_of_blocks(model, len(ranks))
    return tuple(Home((ranks[-stages[u.blocks[0]] % len(ranks)],), padded_shard(u.numel, 1)) for u in model.units)


@dataclass(frozen=True)
class Ring:
    """Geometry of one step on the ring.

    Args:
        step: the step.
        training: False for forward passes only.
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
        """Global rank at every position."""
        return self.topology.group("world", 0)

    @property
    def size(self) -> int:
        return self.topology.world_size

    @cached_property
    def stages(self) -> tuple[tuple[int, ...], ...]:
        """Blocks of every stage, ascending."""
        of_blocks = stages_of_blocks(self.model, self.size)
        return tuple(tuple(b for b, stage in enumerate(of_blocks) if stage == j) for j in range(self.size))

    @cached_property
    def passes(self) -> tuple[int, ...]:
        """Passes that have micro-batches, ascending."""
        every = range(self.step.rounds * self.size)
        return tuple(v for v in every if self.micro_batches(v))

    @cached_property
    def _working(self) -> frozenset[int]:
        return frozenset(self.passes)

    def micro_batches(self, number: int) -> tuple[int, ...]:
        """Return the micro-batches of pass ``number``."""
        return self.step.in_round(self.ranks[number % self.size], number // self.size)

    # turns

    def forward_turn(self, number: int, stage: int) -> int:
        """Return the turn in which pass ``number`` goes forward through ``stage``."""
        return number + stage

    def backward_turn(self, number: int, stage: int) -> int:
        """Return the turn in which pass ``number`` goes backward through ``stage``."""
        return number + 2 * self.size - 1 - stage

    def forward_at(self, position: int, turn: int) -> tuple[int, int] | None:
        """Return the (pass, stage) that ``position`` goes forward through in ``turn``, or None.

        None if no pass with micro-batches goes forward there.
        """
        stage = (turn - position) % self.size
        return (turn - stage, stage) if turn - stage in self._working else None

    def backward_at(self, position: int, turn: int) -> tuple[int, int] | None:
        """Return the (pass, stage) that ``position`` goes backward through in ``turn``, or None.

        None if no pass with micro-batches goes backward there.
        """
        stage = (position - turn - 1) % self.size
        number = turn + stage + 1 - 2 * self.size
        return (number, stage) if number in self._working else None

    @property
    def num_turns(self) -> int:
        """Number of turns until the last pass and the last journey have ended."""
        work = (
            self.backward_turn(self.passes[-1], 0)
            if self.training
            else self.forward_turn(self.passes[-1], self.size - 1)
        )
        return 1 + max(work, *(journey.arrival for journey in self.journeys))

    # journeys

    def forward_blocks(self, stage: int) -> tuple[int, ...]:
        """Return the blocks of ``stage`` with a forward visit, ascending.

        In training the head has only a backward visit.
        """
        return tuple(b for b in self.stages[stage] if not self.training or self.model.blocks[b].kind != "head")

    def backward_blocks(self, stage: int) -> tuple[int, ...]:
        """Return the blocks of ``stage`` with a backward visit, descending."""
        blocks = self.model.blocks
        return tuple(
            b
            for b in reversed(self.stages[stage])
            if self.training and (blocks[b].kind == "head" or blocks[b].needs_backward)
        )

    def backward_weights(self, block: int) -> tuple[int, ...]:
        """Return the units that the backward visit of ``block`` reads."""
        spec = self.model.blocks[block]
        return spec.units if spec.kind == "head" or spec.backward_reads_weights else ()

    @cached_property
    def journeys(self) -> tuple[Journey, ...]:
        """All journeys of units in a step, in the order in which an exchange lists their transfers."""
        return tuple(self._journeys())

    def _journeys(self) -> Iterator[Journey]:
        """Yield the journeys of all units, stage by stage: weights forward, weights backward, then gradients."""
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
        """Return the journey of a unit's weights: from home to the first pass, then on to all further passes.

        Args:
            stream: FORWARD or BACKWARD.
            unit: index of the unit.
            stage: stage that uses it.
            first_use: turn in which the first pass needs the weights.
            between: number of hops from the first pass to the last.
        """
        home = self.home(unit)
        before = (self.passes[0] - home) % self.size
        return Journey(stream, unit, stage, home, first_use - before, before + between)

    def home(self, unit: int) -> int:
        """Return the position of the home of ``unit``."""
        return self.ranks.index(self.step.homes[unit].ranks[0])


def _units(groups: Iterator[tuple[int, ...]]) -> list[int]:
    return sorted({unit for units in groups for unit in units})


def ring_traffic(step: StepSpec, *, training: bool) -> tuple[LinkTraffic, ...]:
    """Return the traffic of every node's link in a step, counted from the journeys.

    A unit crosses a link with each hop from the last rank of a node."""
    topology, homes, ring = step.topology, step.homes, Ring(step, training)
    out = [[0, 0] for _ in range(topology.num_nodes)]
    for journey in ring.journeys:
        for node, counts in enumerate(out):
            last = (node + 1) * topology.local_size - 1
            elements = homes[journey.unit].padded * journey.passes(last, ring.size)
            counts[journey.stream is Stream.GRADIENT] += elements
    # A node receives what the node before it sends.
    return tuple(LinkTraffic(w, out[n - 1][0], g, out[n - 1][1]) for n, (w, g) in enumerate(out))
