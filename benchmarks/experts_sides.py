"""The strategies that benchmarks/experts.py compares: today's, experts that stay, and a copy on every device."""

from __future__ import annotations

from collections.abc import Iterator

from tawpipe.schedule.actions import Action, Lane
from tawpipe.schedule.buffers import Buffer, home_weight
from tawpipe.schedule.link_traffic import LinkTraffic
from tawpipe.schedule.placement import Home
from tawpipe.schedule.routes.collective import CollectiveRoute, Hop
from tawpipe.schedule.routes.route import Route, Tour
from tawpipe.schedule.step import Strategy
from tawpipe.schedule.strategies.table import find
from tawpipe.schedule.strategies.weights import Hybrid, Step
from tawpipe.schedule.weight_strategy import WeightStrategy
from tawpipe.topology import Topology

STAY = ("exposed", "free")
"""Sides on which experts stay."""


class StayingRoute(CollectiveRoute):
    """Experts come as far as their device of the node, their gradients add up there and leave once a step."""

    def stays(self, unit: int) -> bool:
        """True for the second unit of a layer."""
        block = self.model.blocks[self.model.units[unit].blocks[0]]
        return block.kind == "layer" and unit == block.units[1]

    def bring(self, index: int, unit: int) -> Iterator[Action]:
        if not self.stays(unit):
            yield from super().bring(index, unit)
            return
        for hop in self.there[:-1]:  # of tawpipe-step; under hsdp they are in the node
            if unit not in self.resident:
                target = self._slice_buffer(index, unit, self.slice(unit))
                yield self._collective(hop, unit, home_weight(unit), target)
                self.resident[unit] = target
        self.full[index, unit] = self.resident.setdefault(unit, home_weight(unit))

    def slice(self, unit: int) -> int:
        """Elements of a device's experts."""
        return self.homes[unit].padded // self.topology.local_size

    def gradient_buffer(self, unit: int) -> tuple[Buffer, bool]:
        if not self.stays(unit):
            return super().gradient_buffer(unit)
        started = unit in self.sums
        if not started:
            self.sums[unit] = self.pools.take("A", unit, elements=self.slice(unit), limit=len(self.homes))
        return self.sums[unit], started

    def take_home(self, index: int, unit: int) -> Iterator[Action]:
        if not self.stays(unit):
            yield from super().take_home(index, unit)
        elif index == self.pushes[unit][-1]:
            hop, source = self.back[-1], self.sums[unit]
            target = source
            if hop.collective == "reduce_scatter":
                target = self._gradient_buffer("R", unit, self.homes[unit].stripe)
            yield self._collective(hop, unit, source, target)
            yield self._add_home(unit, target, hop.lane)


class _Staying(WeightStrategy):
    """A strategy whose routes let experts stay."""

    def route(self, rank: int, tour: Tour) -> Route:
        usual = super().route(rank, tour)
        assert isinstance(usual, CollectiveRoute)
        return StayingRoute(rank, tour, there=usual.there, back=usual.back)


class StayingForAStep(_Staying, Step):
    """Experts that stay, their optimizer state over all devices."""

    name = "experts stay for a step"


class StayingForGood(_Staying, Hybrid):
    """Experts that stay, with all that belongs to them in every node."""

    name = "experts stay for good"


class Copies(Hybrid):
    """A copy of everything on every device (DDP): only gradients travel."""

    name = "a copy on every device"

    def home(self, topology: Topology, numel: int, block: int, at: int | None) -> Home:
        first, *others = topology.group("world", 0)
        return Home.over((first,), numel, multiple=topology.world_size, replicas=tuple((rank,) for rank in others))

    def route(self, rank: int, tour: Tour) -> Route:
        return CollectiveRoute(rank, tour, there=[], back=[Hop(Lane.INTER_G, "world", "all_reduce", far=True)])

    def unit_traffic(self, topology: Topology, home: Home, node: int) -> LinkTraffic:
        return LinkTraffic(0, 0, *[2 * home.padded * (topology.world_size - 1) // topology.world_size] * 2)

    def stand_ins(self, topology: Topology, *, inside_is_even: bool) -> tuple[int, ...]:
        return (0,) if inside_is_even else ()


STAYING = (StayingForAStep(), StayingForGood())
SIDES: dict[str, tuple[Strategy, ...]] = {
    "today": tuple(map(find, ("tawpipe-step", "tawpipe-spread", "hsdp", "flat"))),
    "copies": (Copies(),),
    "exposed": STAYING,
    "free": STAYING,
}
