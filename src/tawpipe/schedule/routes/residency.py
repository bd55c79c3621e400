"""Which weights are still in a buffer when they are needed again.

A step goes through the blocks forward, then backward, then forward again: what was used last before a turn is used
first after it. Buffers that look-ahead needs anyway are therefore caches: a unit that is still in one is not pulled
again. Which one to give up for another unit is decided when the schedule is built, knowing all that will be needed (the
one needed again last, which is optimal: Belady 1966). The plan depends on the order of the visits alone, so that it is
the same for all ranks. Weights do not change within a step, so that no copy is ever stale.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf

from tawpipe.schedule.routes.visits import Visit
from tawpipe.schedule.step import StepSpec

STREAMING = 2
"""Slices that are on their way through a node at one time: one arrives while the one before is gathered from."""


@dataclass(frozen=True)
class Stay:
    """A unit in a buffer during one visit.

    Args:
        place: number of the buffer, among those of its size.
        held: it is there from an earlier visit; otherwise it has to come.
    """

    place: int
    held: bool


def plan_stays(uses: Sequence[Sequence[int]], *, capacity: int, busy: int, reuse: bool = True) -> list[dict[int, Stay]]:
    """For every visit the stays of the units that it needs.

    >>> [list(visit.values())[0].held for visit in plan_stays([[0], [1], [2], [2], [1], [0]], capacity=2, busy=1)]
    [False, False, False, True, True, False]

    Args:
        uses: the units of one size that a visit needs, visit after visit.
        capacity: buffers of that size.
        busy: so many visits before a visit may still be under way when its units come: theirs stay.
        reuse: False to bring every unit anew for every visit, in turn into all buffers.
    """
    later: list[dict[int, float]] = [{} for _ in uses]  # for every visit and each of its units, when it is used next
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
                # Of what is not needed again, what was used before: fewer buffers may do.
                place = max(
                    free, key=lambda p: (next_use[p] if reuse else 0, reuse and last_use[p] >= 0, -last_use[p], -p)
                )
            holds[place], next_use[place], last_use[place] = unit, later[number][unit], number
            stays[number][unit] = Stay(place, held)
    return stays


@dataclass(frozen=True)
class Residency:
    """The stays of a step, by the numbers of the visits with weights.

    Args:
        full: of whole units on a device.
        slices: of a device's slices of units, where units come into a node so, else None; of a visit for which the
            whole unit is held, there are none.
    """

    full: tuple[dict[int, Stay], ...]
    slices: tuple[dict[int, Stay], ...] | None

    def holds_slice(self, visit: int, unit: int) -> bool:
        """Whether a device has its slice of the unit from an earlier visit."""
        return self.slices is not None and self.slices[visit][unit].held

    @property
    def arriving(self) -> tuple[dict[int, Stay], ...]:
        """The stays that begin with a way over the link between nodes, where ``held`` is False."""
        return self.full if self.slices is None else self.slices

    def arrivals(self) -> Iterator[int]:
        """The units that come into a node in the course of the step."""
        for visit in self.arriving:
            for unit, stay in visit.items():
                if not stay.held:
                    yield unit


def plan_residency(
    step: StepSpec, visits: Sequence[Visit], *, cached: int, slices_busy: int | None, in_place: bool = False
) -> Residency:
    """Stays for all sizes of units.

    Args:
        cached: units whose copies are kept beyond what look-ahead needs.
        slices_busy: for how many visits a device's slice of a unit may still be in use after the one that it came for;
            None where units do not come into a node as slices.
        in_place: a device computes from its slice, which is the whole unit: it is needed as often as the unit is.
    """
    uses = [step.model.blocks[visit.block].units for visit in visits if visit.weight_index is not None]
    ahead, reuse, in_slices = step.settings.look_ahead, step.settings.reuse, slices_busy is not None
    full: list[dict[int, Stay]] = [{} for _ in uses]
    slices: list[dict[int, Stay]] = [{} for _ in uses]
    for size in {home.padded for home in step.homes}:
        mine = [[unit for unit in units if step.homes[unit].padded == size] for units in uses]
        most = max(map(len, mine), default=0)
        if not most:
            continue
        capacity = ahead + 1 + (0 if in_slices else cached)
        whole = plan_stays(mine, capacity=capacity * most, busy=ahead, reuse=reuse)
        missing = mine if in_place else [[unit for unit, stay in stays.items() if not stay.held] for stays in whole]
        passing = plan_stays(missing, capacity=(ahead + 1 + cached) * most, busy=slices_busy or 0, reuse=reuse)
        for number in range(len(uses)):
            full[number].update(whole[number])
            slices[number].update(passing[number])
    return Residency(tuple(full), tuple(slices) if in_slices else None)
