"""Plan of which weights are still in a buffer when they are needed again.

A step visits the blocks forward, then backward, then forward again. The blocks used last before a turn are used first
after it. So the buffers that prefetching needs anyway work as caches: a unit that is still in one is not received
again. Which unit to evict is decided when the schedule is built, with all later uses known: the one that is needed
again last, which is optimal (Belady 1966). The plan depends only on the order of the visits, so it is equal on all
ranks. Weights do not change within a step, so no cached unit is out of date.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf

from tawpipe.schedule.routes.visits import Visit
from tawpipe.schedule.step import StepSpec

STREAMING = 2
"""Number of shards that pass through a node at one time: one arrives while the one before is being gathered."""


@dataclass(frozen=True)
class Stay:
    """A unit in a buffer during one visit.

    Args:
        place: number of the buffer, among buffers of its size.
        held: True if the unit is there from an earlier visit; False if it must be received.
    """

    place: int
    held: bool


def plan_stays(uses: Sequence[Sequence[int]], *, capacity: int, busy: int, reuse: bool = True) -> list[dict[int, Stay]]:
    """Return for every visit the buffer of each unit that it needs, as a dict from unit to ``Stay``.

    A unit that is needed and not in a buffer evicts the one that is needed again last.

    >>> [list(visit.values())[0].held for visit in plan_stays([[0], [1], [2], [2], [1], [0]], capacity=2, busy=1)]
    [False, False, False, True, True, False]

    Args:
        uses: for every visit the units of one size that it needs.
        capacity: number of buffers of this size.
        busy: number of earlier visits that may still be computing when a visit's units arrive; their units are not
            evicted.
        reuse: False to receive every unit anew in every visit, with all buffers used in rotation.
    """
    later: list[dict[int, float]] = [{} for _ in uses]  # visit -> unit -> next visit that uses it
    following: dict[int, float] = {}
    for number in range(len(uses) - 1, -1, -1):
        for unit in uses[number]:
            later[number][unit] = following.get(unit, inf)
        following.update(dict.fromkeys(uses[number], number))
    holds: list[int | None] = [None] * capacity
    next_use: list[float] = [inf] * capacity
    last_use = [-1] * capacity
    stays: list[dict[int, Stay]] = []
    for number, units in enumerate(uses):
        stays.append({})
        for unit in units:
            held = reuse and unit in holds
            if held:
                place = holds.index(unit)
            else:
                free = [p for p in range(capacity) if last_use[p] < number - busy or holds[p] is None]
                # Among buffers not needed again, one that was used before is taken, so that fewer buffers are used.
                place = max(
                    free, key=lambda p: (next_use[p] if reuse else 0, reuse and last_use[p] >= 0, -last_use[p], -p)
                )
            holds[place], next_use[place], last_use[place] = unit, later[number][unit], number
            stays[number][unit] = Stay(place, held)
    return stays


@dataclass(frozen=True)
class Residency:
    """Buffers of all units in all visits with weights of a step.

    Args:
        full: for every visit: whole unit -> its stay on the device.
        shards: for every visit: unit -> stay of the device's shard of it. None if a node does not receive units as
            shards. A visit whose whole unit is held has no entry.
    """

    full: tuple[dict[int, Stay], ...]
    shards: tuple[dict[int, Stay], ...] | None

    def holds_shard(self, visit: int, unit: int) -> bool:
        """Return True if the device still has its shard of ``unit`` from an earlier visit."""
        return self.shards is not None and self.shards[visit][unit].held

    @property
    def arriving(self) -> tuple[dict[int, Stay], ...]:
        """For every visit, the stays that begin with a transfer between nodes unless ``held`` is True.

        These are ``shards`` if nodes receive units as shards, else ``full``."""
        return self.full if self.shards is None else self.shards

    def arrivals(self) -> Iterator[int]:
        """Yield each unit once for every visit for which it is received, not where it is still held."""
        for visit in self.arriving:
            for unit, stay in visit.items():
                if not stay.held:
                    yield unit


def plan_residency(
    step: StepSpec, visits: Sequence[Visit], *, cached: int, shards_busy: int | None, in_place: bool = False
) -> Residency:
    """Plan which buffer each unit, and each received shard, is in during every visit of a step with weights.

    Args:
        step: the step.
        visits: all visits of the step.
        cached: number of units whose copies are kept, beyond what prefetching needs.
        shards_busy: number of visits for which a received shard may be in use after the visit for which it was
            received. None if a node does not receive units as shards.
        in_place: True if a device computes from its shard, which is the whole unit. The shard is then used in every
            visit of the unit.
    """
    uses = [step.model.blocks[visit.block].units for visit in visits if visit.weight_index is not None]
    prefetch, reuse, in_shards = step.settings.look_ahead, step.settings.reuse, shards_busy is not None
    full: list[dict[int, Stay]] = [{} for _ in uses]
    shards: list[dict[int, Stay]] = [{} for _ in uses]
    for size in {home.padded for home in step.homes}:
        visit_units = [[unit for unit in units if step.homes[unit].padded == size] for units in uses]
        most = max(map(len, visit_units), default=0)
        if not most:
            continue
        capacity = prefetch + 1 + (0 if in_shards else cached)
        whole = plan_stays(visit_units, capacity=capacity * most, busy=prefetch, reuse=reuse)
        missing = (
            visit_units if in_place else [[unit for unit, stay in stays.items() if not stay.held] for stays in whole]
        )
        passing = plan_stays(missing, capacity=(prefetch + 1 + cached) * most, busy=shards_busy or 0, reuse=reuse)
        for number in range(len(uses)):
            full[number].update(whole[number])
            shards[number].update(passing[number])
    return Residency(tuple(full), tuple(shards) if in_shards else None)
