"""What all routes share: the buffers of one rank, and which visits a unit has in a step.

A route turns a visit into transfer actions; index arithmetic about who sends what to whom is in routes alone.
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
    """Hands out the buffers of one rank's pools in turn. A pool holds buffers of one size; its name is that of its
    purpose and the number of the size class.

    Args:
        homes: of all units; units of one padded size share their pools.
        visited: the units that are on a device together, for every visit that can occur.
        in_order: visits occur in this order, round after round with something else between the rounds. Then units that
            are far apart, as those of the embedding and the head are, do with the buffers of one.
    """

    def __init__(self, homes: Sequence[Home], visited: Sequence[tuple[int, ...]], *, in_order: bool = False) -> None:
        sizes = sorted({home.padded for home in homes})
        self._class = [sizes.index(home.padded) for home in homes]
        self._in_order = in_order
        self._counts = [Counter(self._class[unit] for unit in units) for units in visited]
        """For every visit the units of each size class."""
        self._most: dict[tuple[int, int], int] = {}
        self._made: dict[str, tuple[int, int]] = {}
        """Pool -> elements of a buffer, most buffers."""
        self._next: dict[str, int] = {}
        self._planned: dict[str, dict[int, int]] = {}

    def size_class(self, unit: int) -> int:
        """Units of one class have buffers of one size."""
        return self._class[unit]

    def visiting(self, purpose: str, unit: int, *, elements: int, visits: int) -> Buffer:
        """The next buffer of a pool that serves ``visits`` visits at a time."""
        return self.take(purpose, unit, elements=elements, limit=self._at_once(self._class[unit], visits))

    def _at_once(self, size: int, visits: int) -> int:
        """The most units of a size class in so many visits."""
        if (size, visits) not in self._most:
            counts = [count[size] for count in self._counts]
            windows = (counts[i : i + visits] for i in range(max(1, len(counts) - visits + 1)))
            self._most[size, visits] = max(map(sum, windows)) if self._in_order else visits * max(counts)
        return self._most[size, visits]

    def take(self, purpose: str, unit: int, *, elements: int, limit: int) -> Buffer:
        """The next buffer of a pool that has at most ``limit`` of them."""
        pool = f"{purpose}{self._class[unit]}"
        number = self._next.get(pool, 0)
        self._made[pool], self._next[pool] = (elements, limit), number + 1
        return pooled(pool, number % limit)

    def at(self, purpose: str, unit: int, number: int, *, elements: int) -> Buffer:
        """Buffer ``number`` of a plan, in a pool that has as many as are asked for."""
        pool = f"{purpose}{self._class[unit]}"
        numbers = self._planned.setdefault(pool, {})
        place = numbers.setdefault(number, len(numbers))
        self._made[pool], self._next[pool] = (elements, len(numbers)), len(numbers)
        return pooled(pool, place)

    def copy(self, unit: int, *, elements: int) -> Buffer:
        """The buffer that keeps a unit's weights from step to step."""
        buffer = weight_copy(unit)
        self._made[buffer.pool], self._next[buffer.pool] = (elements, 1), 1
        return buffer

    def pools(self) -> tuple[Pool, ...]:
        """All pools, with as many buffers as were used."""
        return tuple(
            Pool(name, pool_kind(name), min(limit, self._next[name]), elements)
            for name, (elements, limit) in sorted(self._made.items())
        )


@dataclass(frozen=True)
class Tour:
    """The visits of a step, the same for all ranks, and which weights stay in buffers between them."""

    step: StepSpec
    visits: tuple[Visit, ...]
    residency: Residency


class Route(ABC):
    """The transfers of one rank. Call ``pull`` for the visits with weights, ``push`` for those with gradients, in
    order.
    """

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
        """(visit with weights, unit) -> buffer with the full unit."""
        self.resident: dict[int, Buffer] = {}
        """Unit -> buffer that held it whole when it came last: one of a pool, or its home."""
        self.gradient: dict[tuple[int, int], Buffer] = {}
        """(visit with gradients, unit) -> buffer that the backward pass fills."""
        self.sums: dict[int, Buffer] = {}
        """Unit -> buffer in which its gradients add up for the step."""
        self.started: set[Buffer] = set()
        """Gradient buffers at home or in the node that hold something of this step already."""
        self.pushes = _visits_of_units((v.gradient_index, self.model.trainable_units(v.block)) for v in tour.visits)

    def begin(self) -> Iterator[Action]:
        """What comes before the first visit."""
        yield from ()

    @abstractmethod
    def pull(self, visit: Visit) -> Iterator[Action]:
        """Bring the units of a visit here, and send what others need at the same time; fills ``full``."""

    @abstractmethod
    def push(self, visit: Visit) -> Iterator[Action]:
        """Take the gradients of a visit home, and receive what others push at the same time."""

    def finish(self) -> Iterator[Action]:
        """What is left to send and receive after this rank's last visit."""
        yield from ()

    def gradient_buffers(self, visit: Visit) -> dict[int, tuple[Buffer, bool]]:
        """For every trainable unit of a visit: the buffer to fill, and whether something of this step is in it."""
        assert visit.gradient_index is not None
        buffers = {}
        for unit in self.model.trainable_units(visit.block):
            buffers[unit] = self.gradient_buffer(unit)
            self.gradient[visit.gradient_index, unit] = buffers[unit][0]
        return buffers

    def gradient_buffer(self, unit: int) -> tuple[Buffer, bool]:
        """``gradient_buffers`` for one unit."""
        if self.topology.world_size > 1:
            return self._gradient_buffer("G", unit, self.homes[unit].padded), False
        buffer = home_gradient(unit)
        accumulate = buffer in self.started
        self.started.add(buffer)
        return buffer, accumulate

    def compression(self, *, weights: bool) -> str:
        """Of an action that takes weights, or gradients, to another node; empty for their own type."""
        chosen = self.settings.weights_compression if weights else self.settings.gradients_compression
        return "" if chosen == "none" else chosen

    # sums over a step

    def sums_up(self, unit: int) -> bool:
        """True if a unit's gradients add up on their way home until its last visit of the step."""
        return self.settings.gradients_scope == "step" and len(self.pushes[unit]) > 1

    def _sum_up(self, unit: int, source: Buffer, elements: int, lane: Lane = Lane.REDUCE) -> Action:
        """ADD to the sum of a unit, which has a buffer of its own. In the lane that made ``source``: a push under way
        must not hold it up.
        """
        if unit not in self.sums:
            self.sums[unit] = self.pools.take("A", unit, elements=elements, limit=len(self.homes))
        return self._add(unit, source, self.sums[unit], lane)

    # buffers

    def holds(self, index: int, unit: int) -> bool:
        """True if the whole unit is here from an earlier visit when the ``index``-th visit with weights needs it."""
        return self.residency.full[index][unit].held

    def _full_buffer(self, index: int, unit: int) -> Buffer:
        """The buffer for a whole unit in a visit with weights."""
        place = self.residency.full[index][unit].place
        return self.pools.at("W", unit, place, elements=self.homes[unit].padded)

    def _slice_buffer(self, index: int, unit: int, elements: int) -> Buffer:
        """The buffer for this device's slice of a unit that passes through."""
        assert self.residency.slices is not None
        return self.pools.at("S", unit, self.residency.slices[index][unit].place, elements=elements)

    def _gradient_buffer(self, purpose: str, unit: int, elements: int) -> Buffer:
        return self.pools.visiting(purpose, unit, elements=elements, visits=self.settings.gradient_buffers)

    def _add_home(self, unit: int, source: Buffer, lane: Lane) -> Action:
        return self._add(unit, source, home_gradient(unit), lane)

    def _add(self, unit: int, source: Buffer, target: Buffer, lane: Lane) -> Action:
        reads = (target, source) if target in self.started else (source,)
        self.started.add(target)
        return Action(Op.ADD, lane, reads, (target,), unit=unit)


def _visits_of_units(visits: Iterator[tuple[int | None, tuple[int, ...]]]) -> dict[int, list[int]]:
    """For every unit the numbers of its visits, ascending; visits without a number are left out."""
    numbers: dict[int, list[int]] = {}
    for number, units in visits:
        for unit in units if number is not None else ():
            assert number is not None
            numbers.setdefault(unit, []).append(number)
    return numbers
