"""Base class of strategies in which all ranks visit the blocks in one order.

In every round the order is forward through all blocks, then backward through all blocks. A subclass defines where units
live (``home``) and how weights and gradients travel (``route``). This class defines the order of visits, which weights
stay in buffers between them, the actions that compute, and the end of the step.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import gcd

from tawpipe.errors import UserError
from tawpipe.schedule.actions import Action
from tawpipe.schedule.blocks import backward, forward, offload, reload
from tawpipe.schedule.buffers import Buffer, Pool
from tawpipe.schedule.link_traffic import LinkTraffic
from tawpipe.schedule.placement import Home, alike_sizes
from tawpipe.schedule.routes.residency import plan_residency
from tawpipe.schedule.routes.route import Route, Tour
from tawpipe.schedule.routes.visits import forward_visits, training_visits
from tawpipe.schedule.settings import spell_homes
from tawpipe.schedule.spec import ModelSpec, consecutive
from tawpipe.schedule.step import Schedule, StepSpec, Strategy
from tawpipe.schedule.step_end import StepEnd
from tawpipe.topology import Topology

MOST_REPEATED = 8
"""Most rounds in one period of a step, for devices of different speeds. Within a period each device has its share as
exactly as possible, so that one period represents the whole step."""


class WeightStrategy(Strategy):
    """A strategy that moves weights to the devices that hold the activations."""

    @abstractmethod
    def home(self, topology: Topology, numel: int, block: int, at: int | None) -> Home:
        """Return the home of a unit.

        Args:
            topology: the nodes and ranks.
            numel: elements of the unit.
            block: index of the first block that uses the unit.
            at: number of the place that the user chose, see ``places``; None for the default place.
        """

    @abstractmethod
    def route(self, rank: int, tour: Tour) -> Route:
        """Return the route of weights and gradients of one rank."""

    @abstractmethod
    def unit_traffic(self, topology: Topology, home: Home, node: int) -> LinkTraffic:
        """Return the link traffic of ``node`` for one unit: weights to every node, one gradient home.

        One transfer of the weights to every node, and one of the gradient to its home. Only used with several nodes."""

    def computes_in_place(self, topology: Topology) -> bool:
        """Return True if a device that receives a whole unit computes from the buffer in which it arrives.

        False in this class, whose units arrive as shards."""
        return False

    def cached(self, step: StepSpec) -> int:
        """Return the number of units whose copies are kept for the step, beyond what prefetching needs."""
        return step.step_cache if step.topology.num_nodes > 1 else 0

    def shards_busy(self, step: StepSpec) -> int | None:
        """Return the number of visits for which a received shard may still be in use after its own visit.

        None if a node does not receive units as shards.
        """
        return None

    def place(self, model: ModelSpec, topology: Topology, homes: tuple[int, ...] = ()) -> tuple[Home, ...]:
        """Return the home of every unit; units of nearly equal size are padded to one size.

        Raises:
            UserError: ``homes`` does not name one existing place for every unit.
        """
        units, places = model.units, self.places(topology)
        if homes:
            wanted = spell_homes(homes)
            if not places:
                raise UserError("schedule.homes", wanted, f"nothing under {self.name}: all units lie alike")
            if len(homes) != len(units) or not 0 <= min(homes) <= max(homes) < places:
                what = "nodes" if places == topology.num_nodes else "processes"
                expected = f"{len(units)} {what}, one for every unit, from 0 to {places - 1}"
                raise UserError("schedule.homes", wanted, expected)
        at: tuple[int | None, ...] = homes or (None,) * len(units)
        sizes = alike_sizes([unit.numel for unit in units])
        return tuple(
            self.home(topology, size, unit.blocks[0], where) for unit, size, where in zip(units, sizes, at, strict=True)
        )

    def tour(self, step: StepSpec, *, training: bool = True) -> Tour:
        """Return the visits of a step, and the plan of which weights stay in which buffers between them."""
        visits = training_visits(step) if training else forward_visits(step)
        return Tour(
            step,
            visits,
            plan_residency(
                step,
                visits,
                cached=self.cached(step),
                shards_busy=self.shards_busy(step),
                in_place=self.computes_in_place(step.topology),
            ),
        )

    def build(self, step: StepSpec, *, training: bool = True, ranks: Sequence[int] | None = None) -> Schedule:
        """Return the schedule of a step: for every rank the actions of its route, and the end of the step."""
        tour = self.tour(step, training=training)
        programs: list[tuple[Action, ...]] = [()] * step.topology.world_size
        pools: list[tuple[Pool, ...]] = [()] * step.topology.world_size
        for rank in range(step.topology.world_size) if ranks is None else ranks:
            route = self.route(rank, tour)
            end = StepEnd(rank, step, training=training)
            programs[rank] = tuple(end.close(tuple(_program(route, tour, training=training))))
            pools[rank] = (*route.pools.pools(), *end.pools)
        name = self.name if training else "evaluation"
        return Schedule(name, step, tuple(programs), tuple(pools), training)

    def traffic(self, step: StepSpec, *, training: bool) -> tuple[LinkTraffic, ...] | None:
        """Return the link traffic of every node in a step, as the sum of ``unit_traffic`` over all transfers.

        A unit's weights count once for each time they are received in a node. Gradients count once per visit, or once
        per step under ``gradients_scope: step``."""
        topology = step.topology
        if topology.num_nodes == 1:
            return (LinkTraffic(),)
        tour = self.tour(step, training=training)
        weights = list(tour.residency.arrivals())
        gradients = [
            u for v in tour.visits if v.gradient_index is not None for u in step.model.trainable_units(v.block)
        ]
        if step.settings.gradients_scope == "step":
            gradients = sorted(set(gradients))
        alike = bool(self.stand_ins(topology, inside_is_even=True))  # all nodes have equal traffic
        counts = [[0, 0, 0, 0] for _ in range(1 if alike else topology.num_nodes)]
        for node, total in enumerate(counts):
            units = [self.unit_traffic(topology, home, node) for home in step.homes]
            total[0] = sum(units[unit].weights_sent for unit in weights)
            total[1] = sum(units[unit].weights_received for unit in weights)
            total[2] = sum(units[unit].gradients_sent for unit in gradients)
            total[3] = sum(units[unit].gradients_received for unit in gradients)
        return tuple(LinkTraffic(*four) for four in (counts * topology.num_nodes if alike else counts))

    def extended(self, step: StepSpec, rounds: int) -> tuple[StepSpec, StepSpec, float]:
        """Return a step of about ``rounds`` rounds, a longer one, and a factor, see ``Strategy.extended``.

        The longer step has one period more: one round, or with devices of different speeds several. ``(step, step,
        0.0)`` is returned for short steps, packed micro-batches, and unequal numbers of micro-batches."""
        shares, k = step.micro_batches, step.settings.micro_batches_per_visit
        together, whole = step.sequence_ranks, [len(share) for share in shares[:: step.sequence_ranks]]
        # With devices of different speeds, rounds repeat (nearly) after `period` rounds.
        period = min(MOST_REPEATED, step.rounds // gcd(step.rounds, *whole)) if step.speeds else 1
        few = -(-rounds // period) * period
        uneven = not step.speeds and len(set(whole)) > 1
        if step.rounds < few + 2 * period or step.shared is not None or uneven:
            return step, step, 0.0

        def cut(to: int) -> StepSpec:
            """Return the step shortened to ``to`` rounds."""
            each = [-(-many * to // step.rounds) if step.speeds else many - k * (step.rounds - to) for many in whole]
            return replace(step, micro_batches=consecutive(each, together))

        return cut(few), cut(few + period), (step.rounds - few) / period


def _program(route: Route, tour: Tour, *, training: bool) -> Iterator[Action]:
    """Yield the actions of one rank without the end of the step.

    For each visit: transfers of weights (prefetched by ``look_ahead`` visits), computing with offloads and reloads, and
    transfers of gradients."""
    step, model, visits = tour.step, tour.step.model, tour.visits
    num_pulled = 0
    yield from route.begin()
    for position, visit in enumerate(visits):
        weights: tuple[Buffer, ...] = ()
        if visit.weight_index is not None:
            until = min(visit.weight_index + step.settings.look_ahead, len(route.with_weights) - 1)
            while num_pulled <= until:
                yield from route.pull(route.with_weights[num_pulled])
                num_pulled += 1
            weights = tuple(route.full[visit.weight_index, unit] for unit in model.blocks[visit.block].units)
        micro_batches = step.in_round(route.rank, visit.round)
        for soon in visits[position + 1 : position + 2]:  # one visit ahead: reload while this one computes
            if soon.backward and step.moves(soon.block):
                coming = step.in_round(route.rank, soon.round)
                yield from (reload(soon.block, m, place, step.keeps(soon.block)) for place, m in enumerate(coming))
        if visit.backward:
            gradients = route.gradient_buffers(visit) if visit.gradient_index is not None else {}
            yield from backward(step, visit.block, micro_batches, weights, gradients)
        else:
            for place, m in enumerate(micro_batches):
                yield forward(step, visit.block, m, weights, place=place, training=training)
                if training and visit.block >= model.first_backward and step.moves(visit.block):
                    yield offload(visit.block, m, place, step.keeps(visit.block))
        if visit.gradient_index is not None:
            yield from route.push(visit)
    yield from route.finish()
