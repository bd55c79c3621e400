"""Routes of collectives: one all-gather per hop on the way to the device, one reduction per hop on the way home.

All members of a group issue their collectives in the order of the visits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tawpipe.schedule.actions import Action, Lane, Op
from tawpipe.schedule.buffers import SIZE, Buffer, home_weight, weight_copy
from tawpipe.schedule.routes.residency import STREAMING
from tawpipe.schedule.routes.route import Route, Tour
from tawpipe.schedule.routes.visits import Visit


@dataclass(frozen=True)
class Hop:
    """One collective on the way of a unit.

    Args:
        lane: lane on which it runs.
        group: name of the process group.
        collective: name of the operation, see ``COLLECTIVES``.
        far: True if the group contains several nodes.
    """

    lane: Lane
    group: str
    collective: str
    far: bool


class CollectiveRoute(Route):
    """Route of all-gathers towards the device, and reduce-scatters (or all-reduces between copies of a home) back.

    Args:
        gather_hops: hops towards the device, in order.
        back: hops towards home, in order.
        kept: index in ``gather_hops`` of the hop whose result may stay in a buffer, see ``Residency.slices``. By
            default the last but one.
        summed: index in ``back`` of the first hop that runs once per step if gradients are added up over the step. By
            default the first hop between nodes.
    """

    def __init__(
        self,
        rank: int,
        tour: Tour,
        *,
        gather_hops: Sequence[Hop],
        back: Sequence[Hop],
        kept: int | None = None,
        summed: int | None = None,
    ) -> None:
        super().__init__(rank, tour)
        self.gather_hops, self.back = list(gather_hops), list(back)
        self.kept = len(self.gather_hops) - 2 if kept is None else kept
        far = (place for place, hop in enumerate(self.back) if hop.far)
        self.summed = next(far, len(self.back)) if summed is None else summed

    def _size(self, hop: Hop) -> int:
        """Return the number of ranks in the group of a hop."""
        return len(self.topology.group(hop.group, self.rank))

    def begin(self) -> Iterator[Action]:
        """Yield one SIZE for all units that arrive in this step, if copies of weights are refreshed.

        Yields nothing otherwise. SIZE counts the changes of weights at home, so that later all-gathers can send only
        these."""
        if self.step.refreshes:
            units = sorted(set(self.residency.arrivals()))
            reads = tuple(buffer for unit in units for buffer in (home_weight(unit), weight_copy(unit)))
            yield Action(Op.SIZE, Lane.INTER_G, reads, (SIZE,), group=self.gather_hops[0].group)

    def pull(self, visit: Visit) -> Iterator[Action]:
        """Yield the all-gathers of every unit of ``visit``."""
        assert visit.weight_index is not None
        for unit in self.model.blocks[visit.block].units:
            yield from self.bring(visit.weight_index, unit)

    def bring(self, index: int, unit: int) -> Iterator[Action]:
        """Yield the all-gathers of a unit for the ``index``-th visit with weights; set ``full``, ``resident``.

        Yields nothing if the whole unit is still here from an earlier visit. Hops up to ``kept`` are left out if the
        device still has its shard."""
        source, elements = home_weight(unit), self.homes[unit].shard_size
        if held := self.holds(index, unit):
            source = self.resident[unit]
        stays = not held and self.residency.holds_shard(index, unit)
        for place, hop in enumerate(() if held else self.gather_hops):
            elements *= self._size(hop)
            if place == 0 and self.step.refreshes:
                target = self.pools.copy(unit, elements=elements)
            elif place == self.kept:
                target = self._shard_buffer(index, unit, elements)
            elif place == len(self.gather_hops) - 1:
                target = self._full_buffer(index, unit)
            else:  # intermediate result: STREAMING buffers
                target = self.pools.take(f"S{place}x", unit, elements=elements, limit=STREAMING)
            if not (stays and place <= self.kept):
                yield self._collective(hop, unit, source, target, refreshes=place == 0 and self.step.refreshes)
            source = target
        self.full[index, unit] = self.resident[unit] = source

    def push(self, visit: Visit) -> Iterator[Action]:
        """Yield the reductions of every gradient of ``visit``."""
        assert visit.gradient_index is not None
        for unit in self.model.trainable_units(visit.block):
            yield from self.take_home(visit.gradient_index, unit)

    def take_home(self, index: int, unit: int) -> Iterator[Action]:
        """Yield the reductions of one unit's gradient of the ``index``-th visit with gradients, and the ADD at home.

        If gradients are added up over the step, they are added to a sum before hop ``summed``. This hop and those after
        it run only in the unit's last visit."""
        source, elements = self.gradient[index, unit], self.homes[unit].padded
        for place, hop in enumerate(self.back):
            if place == self.summed and self.sums_up(unit):
                yield self._sum_up(unit, source, elements, self.back[place - 1].lane if place else Lane.REDUCE)
                if index != self.pushes[unit][-1]:
                    break
                source = self.sums[unit]
            target = source
            if hop.collective == "reduce_scatter":
                elements //= self._size(hop)
                last = place == len(self.back) - 1
                target = self._gradient_buffer("R" if last else f"H{place}x" if place else "H", unit, elements)
            yield self._collective(hop, unit, source, target)
            source = target
        else:
            if self.back:
                yield self._add_home(unit, source, self.back[-1].lane)

    def _collective(self, hop: Hop, unit: int, source: Buffer, target: Buffer, *, refreshes: bool = False) -> Action:
        """Return the COLLECTIVE action of ``hop``, from buffer ``source`` to ``target``.

        It is compressed as the settings say if the hop is between nodes.

        Args:
            refreshes: True if the ranks send only changes of weights, which are applied to the copy ``target`` that
                stays from step to step. The action then reads ``target`` and SIZE, too.
        """
        gathers = hop.collective == "all_gather"
        how = self.compression(weights=gathers) if hop.far else ""
        return Action(
            Op.COLLECTIVE,
            hop.lane,
            (source, target, SIZE) if refreshes else (source,),
            (target,),
            unit=unit,
            collective=hop.collective,
            group=hop.group,
            compression="" if how == "exact" and gathers and not refreshes else how,
        )
