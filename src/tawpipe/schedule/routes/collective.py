"""Routes of collectives: one all-gather a hop on the way to the device, one reduction a hop on the way back.

All members of a group issue their operations in the order of the visits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tawpipe.schedule.actions import Action, Lane, Op
from tawpipe.schedule.buffers import Buffer, home_weight
from tawpipe.schedule.routes.route import Route, Tour
from tawpipe.schedule.visits import Visit


@dataclass(frozen=True)
class Hop:
    """A collective on the way.

    Args:
        far: whether the group crosses nodes.
    """

    lane: Lane
    group: str
    collective: str
    far: bool


class CollectiveRoute(Route):
    """Hops of all-gathers there; reduce-scatters, or an all-reduce between the copies of a home, back."""

    def __init__(self, rank: int, tour: Tour, *, there: Sequence[Hop], back: Sequence[Hop]) -> None:
        super().__init__(rank, tour)
        self.there, self.back = list(there), list(back)

    def _size(self, hop: Hop) -> int:
        return len(self.topology.group(hop.group, self.rank))

    def pull(self, visit: Visit) -> Iterator[Action]:
        assert visit.weight_index is not None
        for unit in self.model.blocks[visit.block].units:
            yield from self.bring(visit.weight_index, unit)

    def bring(self, index: int, unit: int) -> Iterator[Action]:
        """``pull`` of one unit, for the ``index``-th visit with weights."""
        source, elements = home_weight(unit), self.homes[unit].stripe
        if held := self.holds(index, unit):
            source = self.resident[unit]
        for hop in () if held else self.there:
            elements *= self._size(hop)
            if hop == self.there[-1]:
                target = self._full_buffer(index, unit)
            else:
                target = self._slice_buffer(index, unit, elements)
                if self.residency.holds_slice(index, unit):
                    source = target
                    continue
            yield self._collective(hop, unit, source, target)
            source = target
        self.full[index, unit] = self.resident[unit] = source

    def push(self, visit: Visit) -> Iterator[Action]:
        assert visit.gradient_index is not None
        for unit in self.model.trainable_units(visit.block):
            yield from self.take_home(visit.gradient_index, unit)

    def take_home(self, index: int, unit: int) -> Iterator[Action]:
        """``push`` of one unit, of the ``index``-th visit with gradients."""
        source, elements = self.gradient[index, unit], self.homes[unit].padded
        for hop in self.back:
            if hop.far and self.sums_up(unit):
                yield self._sum_up(unit, source, elements)
                if index != self.pushes[unit][-1]:
                    break
                source = self.sums[unit]
            target = source
            if hop.collective == "reduce_scatter":
                elements //= self._size(hop)
                target = self._gradient_buffer("R" if hop == self.back[-1] else "H", unit, elements)
            yield self._collective(hop, unit, source, target)
            source = target
        else:
            if self.back:
                yield self._add_home(unit, source, self.back[-1].lane)

    def _collective(self, hop: Hop, unit: int, source: Buffer, target: Buffer) -> Action:
        return Action(
            Op.COLLECTIVE,
            hop.lane,
            (source,),
            (target,),
            unit=unit,
            collective=hop.collective,
            group=hop.group,
            compression=self.compression(weights=hop.collective == "all_gather") if hop.far else "",
        )
