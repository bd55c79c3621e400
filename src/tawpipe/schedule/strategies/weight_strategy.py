"""Strategies whose blocks all ranks visit in the same order: forward through all, backward through all, round by round.

A subclass says where units live (``home``) and which way weights and gradients take (``route``); the order of visits,
what stays in buffers between them, the actions that compute and the end of the step are here.
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
"""Rounds in which devices of several speeds have their shares, as nearly as can be; they stand for all of a step."""


class WeightStrategy(Strategy):
    """A strategy that moves weights to where activations are."""

    @abstractmethod
    def home(self, topology: Topology, numel: int, block: int, at: int | None) -> Home:
        """The home of a unit.

        Args:
            numel: its elements.
            block: the first one that uses it.
            at: the number of the place where the user wants it, see ``places``; None for the usual one.
        """

    @abstractmethod
    def route(self, rank: int, tour: Tour) -> Route:
        """The way of weights and gradients on one rank."""

    @abstractmethod
    def unit_traffic(self, topology: Topology, home: Home, node: int) -> LinkTraffic:
        """What one node's link carries when a unit's weights come to every node once and its gradient goes home once,
        on several nodes.
        """

    def computes_in_place(self, topology: Topology) -> bool:
        """True if a device to which a whole unit is sent computes from where it arrives."""
        return False

    def cached(self, step: StepSpec) -> int:
        """Units whose copies are kept for the step beyond what look-ahead needs."""
        return step.step_cache if step.topology.num_nodes > 1 else 0

    def slices_busy(self, step: StepSpec) -> int | None:
        """For how many visits a device's slice of a unit may still be in use after the one that it came for; None
        where units do not come into a node as slices.
        """
        return None

    def place(self, model: ModelSpec, topology: Topology, homes: tuple[int, ...] = ()) -> tuple[Home, ...]:
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
        """The visits of a step, and what stays in buffers between them."""
        visits = training_visits(step) if training else forward_visits(step)
        return Tour(
            step,
            visits,
            plan_residency(
                step,
                visits,
                cached=self.cached(step),
                slices_busy=self.slices_busy(step),
                in_place=self.computes_in_place(step.topology),
            ),
        )

    def build(self, step: StepSpec, *, training: bool = True, ranks: Sequence[int] | None = None) -> Schedule:
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
        """Every time that a unit's weights come into a node, and every time that its gradient leaves it, which is once
        a visit or once a step, what ``unit_traffic`` says.
        """
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
        alike = bool(self.stand_ins(topology, inside_is_even=True))  # one node's link stands for all
        counts = [[0, 0, 0, 0] for _ in range(1 if alike else topology.num_nodes)]
        for node, total in enumerate(counts):
            units = [self.unit_traffic(topology, home, node) for home in step.homes]
            total[0] = sum(units[unit].weights_sent for unit in weights)
            total[1] = sum(units[unit].weights_received for unit in weights)
            total[2] = sum(units[unit].gradients_sent for unit in gradients)
            total[3] = sum(units[unit].gradients_received for unit in gradients)
        return tuple(LinkTraffic(*four) for four in (counts * topology.num_nodes if alike else counts))

    def extended(self, step: StepSpec, rounds: int) -> tuple[StepSpec, StepSpec, float]:
        shares, k = step.micro_batches, step.settings.micro_batches_per_visit
        together, whole = step.sequence_ranks, [len(share) for share in shares[:: step.sequence_ranks]]
        # With devices of several speeds, so many rounds repeat each other, or do nearly.
        period = min(MOST_REPEATED, step.rounds // gcd(step.rounds, *whole)) if step.speeds else 1
        few = -(-rounds // period) * period
        uneven = not step.speeds and len(set(whole)) > 1
        if step.rounds < few + 2 * period or step.shared is not None or uneven:
            return step, step, 0.0

        def cut(to: int) -> StepSpec:
            each = [-(-many * to // step.rounds) if step.speeds else many - k * (step.rounds - to) for many in whole]
            return replace(step, micro_batches=consecutive(each, together))

        return cut(few), cut(few + period), (step.rounds - few) / period


def _program(route: Route, tour: Tour, *, training: bool) -> Iterator[Action]:
    """One rank's actions but for the end of the step."""
    step, model, visits = tour.step, tour.step.model, tour.visits
    ahead = 0
    yield from route.begin()
    for position, visit in enumerate(visits):
        weights: tuple[Buffer, ...] = ()
        if visit.weight_index is not None:
            until = min(visit.weight_index + step.settings.look_ahead, len(route.with_weights) - 1)
            while ahead <= until:
                yield from route.pull(route.with_weights[ahead])
                ahead += 1
            weights = tuple(route.full[visit.weight_index, unit] for unit in model.blocks[visit.block].units)
        micro_batches = step.in_round(route.rank, visit.round)
        for soon in visits[position + 1 : position + 2]:  # a visit ahead, so that it comes back while this one computes
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
