"""Gradients on their way to homes in the host's memory, and weights on their way from there.

What a device adds to a gradient at home passes through it in slices, on the lane HOME (runtime/homes/streaming.py).
Where a backward pass would fill the home's gradient itself, as one process does and a pipeline whose stages nobody
shares, it fills a buffer on the device instead: of a pool ``L`` with ``gradient_buffers`` places. From there the
gradient goes home when nothing more comes to it, or when another unit's backward pass needs the place; then it is
fetched back before the next micro-batch adds to it, while the backward pass before that one computes. It is fetched,
and not added at home, because a backward pass may add several parts one by one: every sum has the order, and the bits,
of a home on the device. One process whose updates are early updates a unit from that place, if its gradient is complete
there: then it never goes home, and home has no memory for it (``StepSpec.passes_gradients``).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby, pairwise
from math import inf

from tawpipe.schedule.actions import Action, Lane, Op, exchange
from tawpipe.schedule.buffers import COUNT, Buffer, Kind, Pool, home_gradient, home_weight, pooled
from tawpipe.schedule.step import StepSpec

SLICE = 1 << 22
"""Elements of the largest slice of a home's vector that passes through a device; a multiple of 64. What is brought at
once is 64 MiB, which takes a few milliseconds; at each end of a unit one slice is on its way and nothing else."""
ROOMS = 2
"""Slices that have memory on the device at one time."""


class Landing:
    """The gradients of one rank in one step."""

    def __init__(self, step: StepSpec) -> None:
        self._homes, self._at_once, self._passes = step.homes, step.settings.gradient_buffers, step.passes_gradients
        self._sizes = sorted({home.padded for home in step.homes})
        self._free: dict[str, list[Buffer]] = {}
        self._held: dict[int, Buffer] = {}
        """Unit -> the place of its gradient on the device."""
        self._filled: set[int] = set()
        """Those of them that hold what their home does not."""
        self._home: set[int] = set()
        """Units whose home holds something of this step."""
        self._uses: dict[int, deque[int]] = {}
        """Unit -> the actions to come whose backward passes add to its gradient."""
        self.pools: tuple[Pool, ...] = ()

    def through(self, program: Sequence[Action]) -> Iterator[Action]:
        """A program but for its end, as homes in the host's memory have it; fills ``pools``."""
        fills = {i: units for i, action in enumerate(program) if (units := _fills(action))}
        self._open(fills.values())
        for index, units in fills.items():
            for unit in units:
                self._uses.setdefault(unit, deque()).append(index)
        order = deque(fills)
        for index, action in enumerate(program):
            if index not in fills:
                yield from self._added(action) if action.op is Op.ADD else (action,)
                continue
            units = fills[index]
            order.popleft()
            yield from self._bring(units, units)
            ahead = next((fills[later] for later in order if fills[later] != units), ())
            yield from self._bring([unit for unit in ahead if unit in self._home], {*units, *ahead}, may_fail=True)
            place = {home_gradient(unit): self._held[unit] for unit in units}
            reads, writes = (
                tuple(place.get(buffer, buffer) for buffer in side) for side in (action.reads, action.writes)
            )
            yield replace(action, reads=reads, writes=writes)
            self._filled.update(units)
            for unit in units:
                self._uses[unit].popleft()
                if not self._uses[unit]:
                    yield from self._leave(unit)

    def _open(self, fills: Iterable[tuple[int, ...]]) -> None:
        """As many places of every size as ``gradient_buffers`` backward passes fill."""
        most: Counter[str] = Counter()
        for units in fills:
            most |= Counter(map(self._pool, units))
        self._free = {name: [pooled(name, i) for i in range(self._at_once * most[name])] for name in most}
        self._made: dict[str, int] = {}

    def _pool(self, unit: int) -> str:
        return f"L{self._sizes.index(self._homes[unit].padded)}"

    def _bring(
        self, units: Sequence[int], needed: Sequence[int] | set[int], *, may_fail: bool = False
    ) -> Iterator[Action]:
        """Places for the gradients of units, with what their homes hold; others leave for them."""
        for unit in units:
            if unit in self._held:
                continue
            pool = self._pool(unit)
            if not self._free[pool]:
                others = [other for other in self._held if self._pool(other) == pool and other not in needed]
                if not others and may_fail:
                    continue
                yield from self._leave(max(others, key=lambda other: self._uses[other][0]))
            place = self._held[unit] = self._free[pool].pop(0)
            self._made[pool] = max(self._made.get(pool, 0), place.at[0] + 1)
            self.pools = tuple(
                Pool(name, Kind.LANDING, count, self._sizes[int(name[1:])])
                for name, count in sorted(self._made.items())
            )
            if unit in self._home:
                yield Action(Op.ADD, Lane.HOME, (home_gradient(unit),), (place,), unit=unit)

    def _leave(self, unit: int) -> Iterator[Action]:
        """Take a gradient home, if its home does not hold all of it."""
        place = self._held.pop(unit)
        self._free[self._pool(unit)].append(place)  # others first: this one is still being read
        if unit in self._filled:
            self._filled.discard(unit)
            if self._passes and unit not in self._home and not self._uses[unit]:
                home = home_weight(unit), home_gradient(unit)
                yield Action(Op.UPDATE, Lane.HOME, (COUNT, home[0], place), home, unit=unit)
                return
            self._home.add(unit)
            yield Action(Op.ADD, Lane.HOME, (place,), (home_gradient(unit),), unit=unit)

    def _added(self, action: Action) -> Iterator[Action]:
        """An ADD: on the lane HOME where it is one to a home."""
        if action.writes != (home_gradient(action.unit),):
            yield action
            return
        if action.unit in self._held:
            yield from self._leave(action.unit)
        yield replace(action, lane=Lane.HOME)


def _fills(action: Action) -> tuple[int, ...]:
    """The units at home here whose gradients an action that computes fills."""
    at_home = () if action.op is Op.ADD else (buffer for buffer in action.writes if buffer.kind is Kind.HOME_GRADIENT)
    return tuple(buffer.at[0] for buffer in at_home)


class Raising:
    """The weights at home of one rank in one step.

    Under ``schedule.host_homes: all`` what travels lives in the host's memory, too. Whatever reads a unit's weights at
    home, a transfer or the device that computes with them, reads a place on the device instead: of a pool ``B`` of
    stripes, to which RAISE has brought them on a lane of its own. Two places of a size are enough for one to be read
    while the next one comes. What is needed again last gives way, and of that what was read first, so that nothing
    waits for what is being read.
    """

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
