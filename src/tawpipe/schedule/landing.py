"""Gradients on their way to homes in the host's memory.

What a device adds to a gradient at home passes through it in slices, on the lane HOME (runtime/streaming.py). Where a
backward pass would fill the home's gradient itself, as one process does and a pipeline whose stages nobody shares, it
fills a buffer on the device instead: of a pool ``L`` with ``gradient_buffers`` places. From there the gradient goes
home when nothing more comes to it, or when another unit's backward pass needs the place; then it is fetched back before
the next micro-batch adds to it, while the backward pass before that one computes. It is fetched, and not added at home,
because a backward pass may add several parts one by one: every sum has the order, and the bits, of a home on the
device. One process whose updates are early updates a unit from that place, if its gradient is complete there: then it
never goes home, and home has no memory for it (``StepSpec.passes_gradients``).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from tawpipe.schedule.actions import Action, Lane, Op
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
