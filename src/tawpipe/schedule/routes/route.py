"""Base class of routes: the buffers of one rank, and the visits of each unit in a step.

A route turns a visit into transfer actions. Only routes compute which rank sends what to which other rank.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tawpipe.schedule.actions import Action, Lane, Op
from tawpipe.schedule.buffers import Buffer, Pool, home_gradient, pool_kind, pooled, weight_copy
from tawpipe.schedule.placement import Home
from tawpipe.schedule.routes.residency import Residency
from tawpipe.schedule.routes.visits import Visit
from tawpipe.schedule.step import StepSpec


class Pools:
    """Assign buffers of one rank's pools in rotation.

    A pool holds buffers of one size. Its name is its purpose followed by the number of the size class.

    Args:
        homes: homes of all units; units of equal padded size share their pools.
        visited: for every visit that can occur, the units that are on a device together.
        in_order: True if visits occur in this order, round after round, with other work between the rounds. Then units
            that are far apart, such as embedding and head, share buffers.
    """

    def __init__(self, homes: Sequence[Home], visited: Sequence[tuple[int, ...]], *, in_order: bool = False) -> None:
        sizes = sorted({home.padded for home in homes})
        self._class = [sizes.index(home.padded) for home in homes]
        self._in_order = in_order
        self._counts = [Counter(self._class[unit] for unit in units) for units in visited]
        """For every visit, number of its units of each size class."""
        self._most: dict[tuple[int, int], int] = {}
        self._sizes: dict[str, tuple[int, int]] = {}
        """Pool -> (elements of a buffer, limit of the number of buffers)."""
        self._next: dict[str, int] = {}
        self._planned: dict[str, dict[int, int]] = {}

    def size_class(self, unit: int) -> int:
        """Return the size class of ``unit``. Units of one class have buffers of one size."""
        return self._class[unit]

    def visiting(self, purpose: str, unit: int, *, elements: int, visits: int) -> Buffer:
        """Return the next buffer of a pool, in rotation over the buffers that ``visits`` visits need together.

        Args:
            purpose: letter of the pool, see ``buffers``.
            unit: the unit that uses the buffer.
            elements: elements of a buffer.
            visits: number of visits that hold their buffers at one time.
        """
        return self.take(purpose, unit, elements=elements, limit=self._at_once(self._class[unit], visits))

    def _at_once(self, size: int, visits: int) -> int:
        """Return the most units of a size class that ``visits`` visits have together.

        These are consecutive visits with ``in_order``, otherwise any."""
        if (size, visits) not in self._most:
            counts = [count[size] for count in self._counts]
            windows = (counts[i : i + visits] for i in range(max(1, len(counts) - visits + 1)))
            self._most[size, visits] = max(map(sum, windows)) if self._in_order else visits * max(counts)
        return self._most[size, visits]

    def take(self, purpose: str, unit: int, *, elements: int, limit: int) -> Buffer:
        """Return the next buffer of a pool with at most ``limit`` buffers, in rotation.

        Args:
            purpose: letter of the pool, see ``buffers``.
            unit: the unit that uses the buffer.
            elements: elements of a buffer.
            limit: number of buffers after which the first one is used again.
        """
        pool = f"{purpose}{self._class[unit]}"
        number = self._next.get(pool, 0)
        self._sizes[pool], self._next[pool] = (elements, limit), number + 1
        return pooled(pool, number % limit)

    def at(self, purpose: str, unit: int, number: int, *, elements: int) -> Buffer:
        """Return the buffer for index ``number`` of a plan, and add one to the pool if the index is new.

        Args:
            purpose: letter of the pool, see ``buffers``.
            unit: the unit that uses the buffer.
            number: index of the buffer in the plan; equal indices give one buffer.
            elements: elements of a buffer.
        """
        pool = f"{purpose}{self._class[unit]}"
        numbers = self._planned.setdefault(pool, {})
        place = numbers.setdefault(number, len(numbers))
        self._sizes[pool], self._next[pool] = (elements, len(numbers)), len(numbers)
        return pooled(pool, place)

    def copy(self, unit: int, *, elements: int) -> Buffer:
        """Return the buffer that keeps the weights of ``unit`` from step to step; it has a pool of its own."""
        buffer = weight_copy(unit)
        self._sizes[buffer.pool], self._next[buffer.pool] = (elements, 1), 1
        return buffer

    def pools(self) -> tuple[Pool, ...]:
        """Return all pools with the number of different buffers that were handed out so far."""
        return tuple(
            Pool(name, pool_kind(name), min(limit, self._next[name]), elements)
            for name, (elements, limit) in sorted(self._sizes.items())
        )


@dataclass(frozen=True)
class Tour:
    """Visits of a step, equal for all ranks, and the plan of which weights stay in buffers between them."""

    step: StepSpec
    visits: tuple[Visit, ...]
    residency: Residency


class Route(ABC):
    """Transfers of one rank. Call ``pull`` for visits with weights and ``push`` for visits with gradients, in order."""

    def __init__(self, rank: int, tour: Tour) -> None:
        step = tour.step
        self.step, self.residency = step, tour.residency
        self.rank, self.topology, self.model, self.settings, self.homes = (
            rank,
            step.topology,
            step.model,
            step.settings,
            step.homes,
        )
        self.node, self.local = self.topology.node_of(rank), self.topology.local_of(rank)
        self.with_weights = [visit for visit in tour.visits if visit.weight_index is not None]
        self.with_gradients = [visit for visit in tour.visits if visit.gradient_index is not None]
        backward = [visit.block for visit in self.with_gradients if visit.round == 0]
        self.pools = Pools(self.homes, [self.model.trainable_units(block) for block in backward], in_order=True)
        self.full: dict[tuple[int, int], Buffer] = {}
        """(Index of a visit with weights, unit) -> buffer with the full unit."""
        self.resident: dict[int, Buffer] = {}
        """Unit -> buffer that held the whole unit most recently: a pool buffer or the home."""
        self.gradient: dict[tuple[int, int], Buffer] = {}
        """(Index of a visit with gradients, unit) -> buffer that the backward pass fills."""
        self.sums: dict[int, Buffer] = {}
        """Unit -> buffer in which its gradients are added up for the step."""
        self.started: set[Buffer] = set()
        """Gradient buffers, at home or in the node, that already hold a value of this step."""
        self.pushes = _visits_of_units((v.gradient_index, self.model.trainable_units(v.block)) for v in tour.visits)

    def begin(self) -> Iterator[Action]:
        """Yield the actions before the first visit; none in this class."""
        yield from ()

    @abstractmethod
    def pull(self, visit: Visit) -> Iterator[Action]:
        """Yield the transfers that gather the units of ``visit`` on this rank, and set ``full``.

        Sends that other ranks need at the same time are included.
        """

    @abstractmethod
    def push(self, visit: Visit) -> Iterator[Action]:
        """Yield the transfers that send the gradients of ``visit`` home.

        Receives of gradients that other ranks push at the same time are included.
        """

    def finish(self) -> Iterator[Action]:
        """Yield the sends and receives that are left after this rank's last visit; none in this class."""
        yield from ()

    def gradient_buffers(self, visit: Visit) -> dict[int, tuple[Buffer, bool]]:
        """Return the gradient buffer of every trainable unit of ``visit``, and store the buffers in ``gradient``.

        A value is (buffer to fill, True if it already holds a value of this step to add to)."""
        assert visit.gradient_index is not None
        buffers = {}
        for unit in self.model.trainable_units(visit.block):
            buffers[unit] = self.gradient_buffer(unit)
            self.gradient[visit.gradient_index, unit] = buffers[unit][0]
        return buffers

    def gradient_buffer(self, unit: int) -> tuple[Buffer, bool]:
        """Return (gradient buffer to fill for ``unit``, True if it already holds a value of this step).

        On a single rank it is the home, else the next buffer of a pool."""
        if self.topology.world_size > 1:
            return self._gradient_buffer("G", unit, self.homes[unit].padded), False
        buffer = home_gradient(unit)
        accumulate = buffer in self.started
        self.started.add(buffer)
        return buffer, accumulate

    def compression(self, *, weights: bool) -> str:
        """Return the setting for compressing weights (or gradients) between nodes; ``""`` for none."""
        chosen = self.settings.weights_compression if weights else self.settings.gradients_compression
        return "" if chosen == "none" else chosen

    # sums of gradients over a step

    def sums_up(self, unit: int) -> bool:
        """Return True if gradients of ``unit`` are added up in the node over the step and sent home only once.

        That is so under ``gradients_scope: step``, if the unit has several visits with gradients."""
        return self.settings.gradients_scope == "step" and len(self.pushes[unit]) > 1

    def _sum_up(self, unit: int, source: Buffer, elements: int, lane: Lane = Lane.REDUCE) -> Action:
        """Return an ADD of ``source`` to the buffer with the sum of ``unit``; the first one of a step is a copy.

        It runs on the lane that made ``source``, so that a push in progress does not delay it.

        Args:
            unit: index of the unit.
            source: buffer with a gradient.
            elements: elements of the sum.
            lane: lane of the action.
        """
        if unit not in self.sums:
            self.sums[unit] = self.pools.take("A", unit, elements=elements, limit=len(self.homes))
        return self._add(unit, source, self.sums[unit], lane)

    # buffers

    def holds(self, index: int, unit: int) -> bool:
        """Return True if the whole unit is still here from an earlier visit at the ``index``-th visit with weights."""
        return self.residency.full[index][unit].held

    def _full_buffer(self, index: int, unit: int) -> Buffer:
        """Return the buffer planned for the whole ``unit`` in the ``index``-th visit with weights."""
        place = self.residency.full[index][unit].place
        return self.pools.at("W", unit, place, elements=self.homes[unit].padded)

    def _shard_buffer(self, index: int, unit: int, elements: int) -> Buffer:
        """Return the buffer planned for this device's shard of ``unit`` in the ``index``-th visit with weights."""
        assert self.residency.shards is not None
        return self.pools.at("S", unit, self.residency.shards[index][unit].place, elements=elements)

    def _gradient_buffer(self, purpose: str, unit: int, elements: int) -> Buffer:
        """Return the next buffer of a gradient pool, in rotation over ``settings.gradient_buffers`` visits."""
        return self.pools.visiting(purpose, unit, elements=elements, visits=self.settings.gradient_buffers)

    def _add_home(self, unit: int, source: Buffer, lane: Lane) -> Action:
        """Return an ADD of ``source`` to the gradient of ``unit`` at home; the first one of a step is a copy."""
        return self._add(unit, source, home_gradient(unit), lane)

    def _add(self, unit: int, source: Buffer, target: Buffer, lane: Lane) -> Action:
        """Return an ADD of ``source`` to ``target``; the first one of a step into ``target`` is a copy."""
        reads = (target, source) if target in self.started else (source,)
        self.started.add(target)
        return Action(Op.ADD, lane, reads, (target,), unit=unit)


def _visits_of_units(visits: Iterator[tuple[int | None, tuple[int, ...]]]) -> dict[int, list[int]]:
    """Return for every unit the numbers of its visits, ascending.

    Args:
        visits: (number, units) of every visit, in order. Visits with the number None are left out.
    """
    numbers: dict[int, list[int]] = {}
    for number, units in visits:
        for unit in units if number is not None else ():
            assert number is not None
            numbers.setdefault(unit, []).append(number)
    return numbers
