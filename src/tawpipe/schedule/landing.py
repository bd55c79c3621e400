"""Transfers between the device and homes in CPU memory: gradients on the way there, weights on the way back.

Gradients that a device adds to a home pass through the device in portions, on the lane HOME
(runtime/homes/streaming.py). In one process, and in a pipeline whose stages are not shared, a backward pass would fill
the gradient at home directly. With homes in CPU memory it fills a device buffer instead, from the pool ``L`` of
``gradient_buffers`` buffers.

A gradient moves from its buffer to its home after its last backward pass, or when another unit needs the buffer. In the
second case it is copied back before the next micro-batch adds to it, while the backward pass before that one computes.
It is copied back, and not added at home, because a backward pass may add several parts one by one. So every sum has the
order, and the bits, of a home on the device.

One process with early updates updates a unit directly from this buffer, if its gradient is complete there. Then the
gradient is never stored at home, and home needs no memory for it (``StepSpec.passes_gradients``).
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

PORTION_SIZE = 1 << 22
"""Elements of the largest portion of a home's vector that passes through a device; a multiple of 64. One portion is 64
MiB with its state and takes a few milliseconds to copy."""
LOAD_BUFFERS = 2
"""Number of portions that have buffers on the device at one time."""


class Landing:
    """Transfers of the gradients of one rank to and from homes in CPU memory, in one step."""

    def __init__(self, step: StepSpec) -> None:
        self._homes, self._at_once, self._passes = step.homes, step.settings.gradient_buffers, step.passes_gradients
        self._sizes = sorted({home.padded for home in step.homes})
        self._free: dict[str, list[Buffer]] = {}
        self._held: dict[int, Buffer] = {}
        """Unit -> device buffer of its gradient."""
        self._filled: set[int] = set()
        """Units of ``_held`` whose buffer holds values that are not at home."""
        self._home: set[int] = set()
        """Units whose home holds a gradient of this step."""
        self._uses: dict[int, deque[int]] = {}
        """Unit -> indices of the later actions whose backward passes add to its gradient."""
        self.pools: tuple[Pool, ...] = ()

    def through(self, program: Sequence[Action]) -> Iterator[Action]:
        """Yield the actions of ``program`` changed for homes in CPU memory, and set ``pools``.

        Backward passes fill device buffers instead of homes. ADD and UPDATE actions that move gradients between these
        buffers and their homes are inserted.

        Args:
            program: one rank's actions without the end of the step.
        """
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
            next_units = next((fills[later] for later in order if fills[later] != units), ())
            yield from self._bring(
                [unit for unit in next_units if unit in self._home], {*units, *next_units}, may_fail=True
            )
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
        """Set the lists of free buffers: each pool has ``gradient_buffers`` times the largest backward pass.

        Args:
            fills: for each backward pass, the units whose gradients it fills.
        """
        most: Counter[str] = Counter()
        for units in fills:
            most |= Counter(map(self._pool, units))
        self._free = {name: [pooled(name, i) for i in range(self._at_once * most[name])] for name in most}
        self._counts: dict[str, int] = {}

    def _pool(self, unit: int) -> str:
        return f"L{self._sizes.index(self._homes[unit].padded)}"

    def _bring(
        self, units: Sequence[int], needed: Sequence[int] | set[int], *, may_fail: bool = False
    ) -> Iterator[Action]:
        """Assign a device buffer to each of ``units`` that has none.

        If the home of the unit holds a gradient, an ADD that copies it into the buffer is yielded.

        If no buffer of the size is free, the gradient that is needed last gives up its buffer first (``_leave``, whose
        actions are yielded, too).

        Args:
            needed: units that must keep their buffers.
            may_fail: True to skip a unit for which no buffer can be freed.
        """
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
            self._counts[pool] = max(self._counts.get(pool, 0), place.at[0] + 1)
            self.pools = tuple(
                Pool(name, Kind.LANDING, count, self._sizes[int(name[1:])])
                for name, count in sorted(self._counts.items())
            )
            if unit in self._home:
                yield Action(Op.ADD, Lane.HOME, (home_gradient(unit),), (place,), unit=unit)

    def _leave(self, unit: int) -> Iterator[Action]:
        """Free the device buffer of a gradient.

        If the buffer holds values that are not at home yet, an ADD to the home is yielded.

        Yields an UPDATE instead, which reads the device buffer, if the gradient is complete, none of it is at home, and
        ``StepSpec.passes_gradients`` is True."""
        place = self._held.pop(unit)
        self._free[self._pool(unit)].append(place)  # appended last: this buffer is still being read
        if unit in self._filled:
            self._filled.discard(unit)
            if self._passes and unit not in self._home and not self._uses[unit]:
                home = home_weight(unit), home_gradient(unit)
                yield Action(Op.UPDATE, Lane.HOME, (COUNT, home[0], place), home, unit=unit)
                return
            self._home.add(unit)
            yield Action(Op.ADD, Lane.HOME, (place,), (home_gradient(unit),), unit=unit)

    def _added(self, action: Action) -> Iterator[Action]:
        """Yield an ADD action, on the lane HOME if it adds to a home.

        If it does, and the unit has a device buffer, the actions of ``_leave`` come first."""
        if action.writes != (home_gradient(action.unit),):
            yield action
            return
        if action.unit in self._held:
            yield from self._leave(action.unit)
        yield replace(action, lane=Lane.HOME)


def _fills(action: Action) -> tuple[int, ...]:
    """Return the units with a home on this rank whose gradients an action writes; empty for an ADD."""
    at_home = () if action.op is Op.ADD else (buffer for buffer in action.writes if buffer.kind is Kind.HOME_GRADIENT)
    return tuple(buffer.at[0] for buffer in at_home)


class Raising:
    """Copies of weights from homes in CPU memory to the device, for one rank in one step.

    Under ``schedule.host_homes: all`` the weights that travel are in CPU memory, too. An action that reads a unit's
    weights at home (a transfer, or a computation) reads a device buffer instead. The buffers are in pools ``B``, one
    shard each. RAISE fills them on a lane of its own.

    Two buffers of a size are enough for one to be read while the next one is filled. The buffer whose unit is needed
    again last is reused first, and among these the one that was read first, so that a RAISE does not wait for a reader.
    """

    def __init__(self, step: StepSpec) -> None:
        self._homes = step.homes
        self._sizes = sorted({home.shard_size for home in step.homes})
        self.pools: tuple[Pool, ...] = ()

    def through(self, program: Sequence[Action]) -> Iterator[Action]:
        """Yield the actions of ``program`` changed for homes in CPU memory, and set ``pools``.

        A RAISE is inserted before a read of weights that are not on the device, and reads of homes become reads of
        buffers.

        Args:
            program: one rank's actions without the end of the step.
        """
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
            """Return a sort key; the buffer of the unit with the largest key is reused first.

            The key is largest for the latest next use, and then for the earliest last use."""
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
        return f"B{self._sizes.index(self._homes[unit].shard_size)}"

    def _places(self, reads: Sequence[tuple[int, ...]]) -> Counter[str]:
        """Return the number of buffers of each pool: the most that two consecutive entries of ``reads`` need.

        Args:
            reads: units that each action reads, with equal neighbours merged.
        """
        most: Counter[str] = Counter()
        for before, after in pairwise(((), *reads)):
            most |= Counter(map(self._pool, {*before, *after}))
        return most


def _read(action: Action) -> tuple[int, ...]:
    """Return the units whose weights an action reads at home."""
    return tuple(buffer.at[0] for buffer in action.reads if buffer.kind is Kind.HOME_WEIGHT)


def _reading(action: Action, places: dict[Buffer, Buffer]) -> Action:
    """Return ``action`` with the buffers that are keys of ``places`` replaced by their values."""
    if action.op is Op.EXCHANGE:
        moved = tuple(replace(part, buffer=places.get(part.buffer, part.buffer)) for part in action.transfers)
        return exchange(action.lane, moved, action.group, compression=action.compression)
    return replace(action, reads=tuple(places.get(buffer, buffer) for buffer in action.reads))
