"""Strategy with separate groups for weights, gradients and optimizer state (AsyncHZP, arXiv 2510.20111).

Ranks are numbered node by node. A group is an aligned block of ranks: part of a node, a node, several nodes, or all.

    weights     a group gathers weights once per step; each of its ranks keeps its shard of them for all visits
    gradients   the gradients of every visit are reduced over a group, and added up there for the step
    state       master weights, optimizer state and gradients at home are sharded over a group; there is one copy for
                each group of this size

The three sizes, the node size and the world size are *cuts*; each divides the next. Between two neighbouring cuts a < b
there is one hop in each direction. Its ranks have equal positions in their blocks of a ranks, and are in one block of b
ranks. Weights travel from b to a: a hop is run once per step if its cuts are not below the group of weights. Gradients
travel from a to b: a hop is run once per step if its cuts are not below the group of gradients. Outside the group of
the state there are copies, and gradients are summed between them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product

from tawpipe.errors import UserError
from tawpipe.schedule.actions import Lane
from tawpipe.schedule.link_traffic import LinkTraffic
from tawpipe.schedule.placement import Home
from tawpipe.schedule.routes.collective import CollectiveRoute, Hop
from tawpipe.schedule.routes.residency import STREAMING
from tawpipe.schedule.routes.route import Route, Tour
from tawpipe.schedule.settings import ScheduleSettings
from tawpipe.schedule.step import StepSpec, Strategy
from tawpipe.schedule.strategies.weight_strategy import WeightStrategy
from tawpipe.topology import Topology

MOST_TRIED = 4
"""Number of sizes of the state's group for which a plan tries several layouts."""
_SIZE = re.compile(r"([0-9]{1,6})(n?)")
_ROUNDED = "numbers pass several hops, and would be rounded at each"


@dataclass(frozen=True)
class GroupSizes:
    """Number of ranks in each of the three groups. The group of the state is the largest.

    Args:
        weights: ranks over which weights are kept.
        gradients: ranks over which gradients are reduced.
        state: ranks over which the optimizer state is sharded.
        text: the user's text, for messages.
    """

    weights: int
    gradients: int
    state: int
    text: str = ""

    def cuts(self, topology: Topology) -> tuple[int, ...]:
        """Return 1, the three sizes, the node size and the world size, ascending and without duplicates.

        Raises:
            UserError: a size does not divide the next one, or the group of the state is not the largest.
        """
        cuts = sorted({1, self.weights, self.gradients, self.state, topology.local_size, topology.world_size})
        if max(self.weights, self.gradients) > self.state or any(b % a for a, b in pairwise(cuts)):
            local, nodes = topology.local_size, topology.num_nodes
            usable = [n for n in range(1, local) if local % n == 0]
            usable += [local * n for n in range(1, nodes + 1) if nodes % n == 0]
            numbers = ", ".join(map(str, usable))
            expected = f"numbers of {numbers}, of which the smaller divide the larger and the last is the largest"
            raise UserError("schedule.groups", self.text, expected)
        return tuple(cuts)


@dataclass(frozen=True, repr=False, eq=False)
class Grouped(WeightStrategy):
    """AsyncHZP: separate groups for weights, gradients and optimizer state.

    Args:
        groups: see ``ScheduleSettings.groups``. If empty: a node, a node and the world, which is ``tawpipe-step``.
    """

    groups: str = ""

    name = "tawpipe-groups"
    summary = "weights kept, gradients summed and the optimizer's state cut over groups of three sizes (AsyncHZP)"
    one_order = True
    usual = False
    uses = ("groups",)
    defaults = {"gradients_scope": "step"}
    refusals = {
        "step_cache": "schedule.groups says what is kept",
        "weights_compression": _ROUNDED,
        "gradients_compression": _ROUNDED,
    }

    def configured(self, settings: ScheduleSettings) -> Strategy:
        return replace(self, groups=settings.groups) if settings.groups else self

    def settle(self, settings: ScheduleSettings) -> ScheduleSettings:
        return super().settle(replace(settings, groups=self.groups))

    def sizes(self, topology: Topology) -> GroupSizes:
        """Return the three group sizes on ``topology``, in ranks.

        Raises:
            UserError: ``groups`` is not three numbers.
        """
        if not self.groups:
            return GroupSizes(topology.local_size, topology.local_size, topology.world_size)
        words = [_SIZE.fullmatch(word) for word in self.groups.split("/")]
        numbers = [int(word[1]) * (topology.local_size if word[2] else 1) for word in words if word]
        if len(numbers) != 3 or len(words) != 3 or not all(numbers):
            expected = "the processes or nodes of three groups: weights, gradients, state, as in 4/8/16 or 1n/1n/2n"
            raise UserError("schedule.groups", self.groups, expected)
        return GroupSizes(*numbers, text=self.groups)

    def home(self, topology: Topology, numel: int, block: int, at: int | None) -> Home:
        """Return the home of a unit. Shards are in the order in which the hops put them together."""
        sizes = self.sizes(topology)
        cuts = [cut for cut in sizes.cuts(topology) if cut <= sizes.state]
        digits = [range(0, b, a) for a, b in pairwise(cuts)]
        world = topology.group("world", 0)
        ranks, *others = (
            tuple(world[first + sum(places)] for places in product(*digits))
            for first in range(0, topology.world_size, sizes.state)
        )
        return Home.over(ranks, numel, multiple=topology.world_size // sizes.state, replicas=tuple(others))

    def route(self, rank: int, tour: Tour) -> Route:
        """Return a route with one hop for each two neighbouring cuts."""
        topology = tour.step.topology
        sizes = self.sizes(topology)
        hops = list(pairwise(sizes.cuts(topology)))
        inner = [(a, b) for a, b in hops if b <= sizes.state]
        gather_hops = [self._hop(topology, a, b, "all_gather", back=False) for a, b in reversed(inner)]
        back = [
            self._hop(topology, a, b, "reduce_scatter" if b <= sizes.state else "all_reduce", back=True)
            for a, b in hops
        ]
        kept = sum(a >= self._held(topology) for a, _ in inner) - 1
        summed = sum(b <= sizes.gradients for _, b in hops)
        return CollectiveRoute(rank, tour, gather_hops=gather_hops, back=back, kept=kept, summed=summed)

    @staticmethod
    def _hop(topology: Topology, a: int, b: int, collective: str, *, back: bool) -> Hop:
        """Return the hop from groups of ``a`` ranks to groups of ``b`` ranks.

        Its lane follows from its direction, and from whether it is between nodes."""
        far = b > topology.local_size
        near, away = (Lane.REDUCE, Lane.INTER_G) if back else (Lane.GATHER, Lane.INTER_W)
        return Hop(away if far else near, topology.strided_group(a, b), collective, far)

    def _held(self, topology: Topology) -> int:
        """Return the number of ranks over which the shards of a unit are spread that stay on the devices.

        This is the size of the group of weights if that is smaller than the group of the state. Otherwise weights are
        received anew for every visit, and it is the smallest group size above 1, as under ``tawpipe-spread`` (1 if
        there is none)."""
        sizes = self.sizes(topology)
        if sizes.weights < sizes.state:
            return sizes.weights
        return next((cut for cut in sizes.cuts(topology) if cut > 1), 1)

    def shards_busy(self, step: StepSpec) -> int | None:
        """Return the number of visits for which a received shard may still be in use after its own visit.

        None if weights are not kept as shards."""
        held, prefetch = self._held(step.topology), step.settings.look_ahead
        if held == self.sizes(step.topology).state:
            return None
        return prefetch if held == 1 else min(prefetch, STREAMING - 1)

    def why_not_exact(self, step: StepSpec) -> str:
        """Return the reason why weights cannot be sent as changes with these groups, or ``""`` if they can."""
        topology = step.topology
        sizes, held = self.sizes(topology), self._held(topology)
        hops = [(a, b) for a, b in pairwise(sizes.cuts(topology)) if held <= a and b <= sizes.state]
        if sizes.weights == sizes.state:
            return "weights come anew for every visit from the group of the state; keep them over a smaller one"
        if sizes.state <= topology.local_size:
            return "no weights pass a link between nodes"
        if sizes.weights > topology.local_size or len(hops) > 1:
            return "weights take several hops; those of state / weights = nodes, as in 1n/1n/2n, take one"
        return ""

    def cached(self, step: StepSpec) -> int:
        sizes = self.sizes(step.topology)
        return len(step.model.units) if sizes.weights < sizes.state else 0

    def computes_in_place(self, topology: Topology) -> bool:
        return self._held(topology) == 1 < self.sizes(topology).state

    def unit_traffic(self, topology: Topology, home: Home, node: int) -> LinkTraffic:
        """Return the link traffic of a node for a unit that passes all hops between nodes once in each direction.

        It is equal for all nodes."""
        weights, gradients = (
            sum(elements for _, elements in self._far(topology, home, back)) for back in (False, True)
        )
        return LinkTraffic(weights, weights, gradients, gradients)

    def _far(self, topology: Topology, home: Home, back: bool) -> Iterator[tuple[int, int]]:
        """Yield for every hop between nodes (size of its larger groups, elements sent out of a node).

        Args:
            topology: the nodes and ranks.
            home: home of the unit.
            back: True for gradients, False for weights.
        """
        sizes = self.sizes(topology)
        for a, b in pairwise(sizes.cuts(topology)):
            if b > topology.local_size and (back or b <= sizes.state):
                copies = b > sizes.state
                # In a ring of b / a nodes a rank sends all shards but its own, twice in an all-reduce.
                each = 2 * home.shard_size * a // b if copies else home.padded // b
                yield b, topology.local_size * (b // a - 1) * each

    def traffic(self, step: StepSpec, *, training: bool) -> tuple[LinkTraffic, ...] | None:
        """Return the link traffic of every node in a step: each hop counts once per step, or once per visit."""
        topology, sizes, held = step.topology, self.sizes(step.topology), self._held(step.topology)
        if topology.num_nodes == 1:
            return (LinkTraffic(),)
        tour = self.tour(step, training=training)
        stays = tour.residency
        first, every = list(stays.arrivals()), [u for v in stays.full for u, stay in v.items() if not stay.held]
        pushed = [u for v in tour.visits if v.gradient_index is not None for u in step.model.trainable_units(v.block)]
        last = sorted(set(pushed)) if step.settings.gradients_scope == "step" else pushed
        weights = gradients = 0
        for unit, home in enumerate(step.homes):
            for b, elements in self._far(topology, home, False):
                weights += elements * (first if b > held else every).count(unit)
            for b, elements in self._far(topology, home, True):
                gradients += elements * (last if b > sizes.gradients else pushed).count(unit)
        return (LinkTraffic(weights, weights, gradients, gradients),) * topology.num_nodes

    def stand_ins(self, topology: Topology, *, inside_is_even: bool) -> tuple[int, ...]:
        return (0,)

    def layouts(self, topology: Topology) -> Sequence[Strategy]:
        """Return layouts with groups of several whole nodes, but not all, which no other strategy has.

        For each size of the state's group there are three: fewest transfers, a compromise, and least memory.
        """
        if self.groups or topology.num_nodes == 1:
            return (self,)
        nodes = topology.num_nodes
        several = [n for n in range(2, nodes) if nodes % n == 0]
        chosen = dict.fromkeys(several[i * len(several) // MOST_TRIED] for i in range(MOST_TRIED) if several)
        sizes = [(w, g, n) for n in chosen for w, g in ((1, 1), (1, n), (n, n))]
        return [replace(self, groups=f"{w}n/{g}n/{n}n") for w, g, n in sizes] or (self,)
