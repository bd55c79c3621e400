"""Routes of collectives: one all-gather a hop on the way to the device, one reduction a hop on the way back.

For ``spread``, ``flat``, ``hybrid``, and every placement on one node but ``whole``. All members of a group issue their
operations in the order of the visits. Imports schedule only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tawpipe.schedule.actions import Action, Lane, Op
from tawpipe.schedule.routes.route import Route
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

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        across, inside = self.topology.num_nodes > 1, self.topology.local_size > 1
        if self.knobs.placement == "flat":
            several = across or inside
            self.there = [Hop(Lane.INTER_W, "world", "all_gather", across)] * several
            self.back = [Hop(Lane.INTER_G, "world", "reduce_scatter", across)] * several
            return
        hybrid = self.knobs.placement == "hybrid"
        far = "all_reduce" if hybrid else "reduce_scatter"
        self.there = [Hop(Lane.INTER_W, "rail", "all_gather", True)] * (across and not hybrid)
        self.there += [Hop(Lane.GATHER, "node", "all_gather", False)] * inside
        self.back = [Hop(Lane.REDUCE, "node", "reduce_scatter", False)] * inside
        self.back += [Hop(Lane.INTER_G, "rail", far, True)] * across

    def _size(self, hop: Hop) -> int:
        return len(self.topology.group(hop.group, self.rank))

    def pull(self, visit: Visit) -> Iterator[Action]:
        assert visit.weights is not None
        for unit in self.model.blocks[visit.block].units:
            source, elements = f"home.w.{unit}", self.homes[unit].stripe
            if held := self.holds(visit.weights, unit):
                source = self.resident[unit]
            for hop in () if held else self.there:
                elements *= self._size(hop)
                source, target = self._target(hop, visit.weights, unit, elements, source)
                if target:
                    yield self._collective(hop, unit, source, target)
                    source = target
            self.full[visit.weights, unit] = self.resident[unit] = source

    def _target(self, hop: Hop, index: int, unit: int, elements: int, source: str) -> tuple[str, str]:
        """Source and target of a hop; no target where a buffer, then the source, has what the hop would bring."""
        if hop.far and self.keeps(unit):
            if unit in self.kept:
                return self.kept[unit], ""
            self.kept[unit] = self._kept(unit, elements)
            return source, self.kept[unit]
        if hop == self.there[-1]:
            return source, self._full_slot(index, unit)
        slot = self._slice_slot(index, unit, elements)
        return (slot, "") if self.residency.holds_slice(index, unit) else (source, slot)

    def push(self, visit: Visit) -> Iterator[Action]:
        assert visit.gradients is not None
        for unit in self.model.trainable_units(visit.block):
            source, elements = self.gradient[visit.gradients, unit], self.homes[unit].padded
            for hop in self.back:
                if hop.far and self.sums_up(unit):
                    if unit not in self.sums:
                        self.sums[unit] = self._sum_buffer(unit, elements)
                    yield self._sum_up(unit, source, self.sums[unit])
                    if visit.gradients != self.pushes[unit][-1]:
                        break
                    source = self.sums[unit]
                target = source
                if hop.collective == "reduce_scatter":
                    elements //= self._size(hop)
                    target = self._gradient_slot("R" if hop == self.back[-1] else "H", unit, elements)
                yield self._collective(hop, unit, source, target)
                source = target
            else:
                if self.back:
                    yield self._add_home(unit, source, self.back[-1].lane)

    def _collective(self, hop: Hop, unit: int, source: str, target: str) -> Action:
        return Action(
            Op.COLLECTIVE,
            hop.lane,
            (source,),
            (target,),
            unit=unit,
            collective=hop.collective,
            group=hop.group,
            wire=self.wire(weights=hop.collective == "all_gather") if hop.far else "",
        )
