"""Weights on their way from homes in the host's memory.

Under ``schedule.host_homes: all`` what travels lives there, too. Whatever reads a unit's weights at home, a transfer or
the device that computes with them, reads a place on the device instead: of a pool ``B`` of stripes, to which RAISE has
brought them on a lane of its own. Two places of a size are enough for one to be read while the next one comes. What is
needed again last gives way, and of that what was read first, so that nothing waits for what is being read.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby, pairwise
from math import inf

from tawpipe.schedule.actions import Action, Lane, Op, exchange
from tawpipe.schedule.buffers import Buffer, Kind, Pool, home_weight, pooled
from tawpipe.schedule.step import StepSpec


class Raising:
    """The weights at home of one rank in one step."""

    def __init__(self, step: StepSpec) -> None:
        self._homes = step.homes
        self._sizes = sorted({home.stripe for home in step.homes})
        self.pools: tuple[Pool, ...] = ()

    def through(self, program: Sequence[Action]) -> Iterator[Action]:
        """A program but for its end, as homes in the host's memory have it; fills ``pools``."""
        reads = {i: units for i, action in enumerate(program) if (units := _read(action))}
        places = self._places([units for units, _ in groupby(reads.values())])
        self.pools = tuple(
            Pool(name, Kind.WEIGHT, count, self._sizes[int(name[1:])]) for name, count in sorted(places.items())
        )
        free = {name: [pooled(name, place) for place in range(count)] for name, count in places.items()}
        held, last = dict[int, Buffer](), dict[int, int]()
        uses: dict[int, deque[int]] = {}
        for index, units in reads.items():
            for unit in units:
                uses.setdefault(unit, deque()).append(index)

        def goes(unit: int) -> tuple[float, int]:
            return uses[unit][0] if uses[unit] else inf, -last[unit]

        for index, action in enumerate(program):
            units = reads.get(index, ())
            for unit in units:
                pool = self._pool(unit)
                if unit not in held and not free[pool]:
                    others = [other for other in held if self._pool(other) == pool and other not in units]
                    free[pool].append(held.pop(max(others, key=goes)))
                if unit not in held:
                    held[unit] = free[pool].pop(0)
                    yield Action(Op.RAISE, Lane.RAISE, (home_weight(unit),), (held[unit],), unit=unit)
                uses[unit].popleft()
                last[unit] = index
            yield _reading(action, {home_weight(unit): held[unit] for unit in units}) if units else action

    def _pool(self, unit: int) -> str:
        return f"B{self._sizes.index(self._homes[unit].stripe)}"

    def _places(self, reads: Sequence[tuple[int, ...]]) -> Counter[str]:
        """As many places of every size as two actions after one another read that read different units."""
        most: Counter[str] = Counter()
        for before, after in pairwise(((), *reads)):
            most |= Counter(map(self._pool, {*before, *after}))
        return most


def _read(action: Action) -> tuple[int, ...]:
    """The units whose weights an action reads at home."""
    return tuple(buffer.at[0] for buffer in action.reads if buffer.kind is Kind.HOME_WEIGHT)


def _reading(action: Action, places: dict[Buffer, Buffer]) -> Action:
    """An action with places instead of homes."""
    if action.op is Op.EXCHANGE:
        moved = tuple(replace(part, buffer=places.get(part.buffer, part.buffer)) for part in action.transfers)
        return exchange(action.lane, moved, action.group, compression=action.compression)
    return replace(action, reads=tuple(places.get(buffer, buffer) for buffer in action.reads))
