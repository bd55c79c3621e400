"""What all routes share: the buffers of one rank, and which visits a unit has in a step. Imports schedule only.

A route turns a visit into transfer actions; index arithmetic about who sends what to whom is in routes alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

from tawpipe.schedule.actions import Action, Lane, Op
from tawpipe.schedule.placement import Home
from tawpipe.schedule.residency import Residency
from tawpipe.schedule.spec import Knobs, ModelSpec, Pool
from tawpipe.schedule.visits import Visit
from tawpipe.topology import Topology


class Slots:
    """Hands out the buffers of one rank's pools in turn. A pool holds buffers of one size: ``{name}{size
    class}.{number}``.

    Args:
        homes: of all units; units of one padded size share their pools.
        visited: the units that are on a device together, for every visit that can occur.
    """

    def __init__(self, homes: Sequence[Home], visited: Sequence[tuple[int, ...]]) -> None:
        sizes = sorted({home.padded for home in homes})
        self._class = [sizes.index(home.padded) for home in homes]
        self._together = {
            size: max(sum(self._class[unit] == size for unit in units) for units in visited)
            for size in range(len(sizes))
        }
        self._pools: dict[str, tuple[str, int, int]] = {}
        self._next: dict[str, int] = {}
        self._planned: dict[str, dict[int, int]] = {}

    def size_class(self, unit: int) -> int:
        """Units of one class have buffers of one size."""
        return self._class[unit]

    def visiting(self, name: str, unit: int, *, kind: str, elements: int, visits: int) -> str:
        """The next buffer of a pool that serves ``visits`` visits at a time."""
        return self.take(name, unit, kind=kind, elements=elements, limit=visits * self._together[self._class[unit]])

    def take(self, name: str, unit: int, *, kind: str, elements: int, limit: int) -> str:
        """The next buffer of a pool that has at most ``limit`` of them."""
        name = f"{name}{self._class[unit]}"
        number = self._next.get(name, 0)
        self._pools[name] = (kind, elements, limit)
        self._next[name] = number + 1
        return f"{name}.{number % limit}"

    def at(self, name: str, unit: int, number: int, *, kind: str, elements: int) -> str:
        """Buffer ``number`` of a plan, in a pool that has as many as are asked for."""
        name = f"{name}{self._class[unit]}"
        numbers = self._planned.setdefault(name, {})
        place = numbers.setdefault(number, len(numbers))
        self._pools[name], self._next[name] = (kind, elements, len(numbers)), len(numbers)
        return f"{name}.{place}"

    def pools(self) -> tuple[Pool, ...]:
        """All pools, with as many buffers as were used."""
        return tuple(
            Pool(name, kind, min(limit, self._next[name]), elements)
            for name, (kind, elements, limit) in sorted(self._pools.items())
        )


class Route(ABC):
    """The transfers of one rank. Call ``pull`` for the visits with weights, ``push`` for those with gradients, in
    order.
    """

    def __init__(
        self,
        rank: int,
        topology: Topology,
        model: ModelSpec,
        knobs: Knobs,
        homes: tuple[Home, ...],
        visits: tuple[Visit, ...],
        residency: Residency,
    ) -> None:
        self.residency = residency
        self.rank, self.topology, self.model, self.knobs, self.homes = rank, topology, model, knobs, homes
        self.node, self.local = topology.node_of(rank), topology.local_of(rank)
        self.with_weights = [visit for visit in visits if visit.weights is not None]
        self.with_gradients = [visit for visit in visits if visit.gradients is not None]
        self.slots = Slots(homes, [block.units for block in model.blocks])
        self.full: dict[tuple[int, int], str] = {}
        """(visit with weights, unit) -> buffer with the full unit."""
        self.resident: dict[int, str] = {}
        """Unit -> buffer that held it whole when it came last: a slot, its home, or the copy kept for the step."""
        self.gradient: dict[tuple[int, int], str] = {}
        """(visit with gradients, unit) -> buffer that the backward pass fills."""
        self.kept: dict[int, str] = {}
        """Unit -> buffer in which this rank keeps its slice of it for the step."""
        self.sums: dict[int, str] = {}
        """Unit -> buffer in which its gradients add up for the step."""
        self.started: set[str] = set()
        """Gradient buffers at home or in the node that hold something of this step already."""
        self.pulls = _visits_of_units((v.weights, model.blocks[v.block].units) for v in self.with_weights)
        self.pushes = _visits_of_units((v.gradients, model.trainable_units(v.block)) for v in self.with_gradients)

    @abstractmethod
    def pull(self, visit: Visit) -> Iterator[Action]:
        """Bring the units of a visit here, and send what others need at the same time; fills ``full``."""

    @abstractmethod
    def push(self, visit: Visit) -> Iterator[Action]:
        """Take the gradients of a visit home, and receive what others push at the same time."""

    def finish(self) -> Iterator[Action]:
        """What is left to send and receive after this rank's last visit."""
        yield from ()

    def gradient_buffers(self, visit: Visit) -> dict[int, tuple[str, bool]]:
        """For every trainable unit of a visit: the buffer to fill, and whether something of this step is in it."""
        assert visit.gradients is not None
        found = {}
        for unit in self.model.trainable_units(visit.block):
            buffer, accumulate = f"home.g.{unit}", False
            if self.topology.world_size == 1:
                accumulate = buffer in self.started
                self.started.add(buffer)
            else:
                visits, elements = self.knobs.gradient_buffers, self.homes[unit].padded
                buffer = self.slots.visiting("G", unit, kind="gradient", elements=elements, visits=visits)
            self.gradient[visit.gradients, unit] = buffer
            found[unit] = (buffer, accumulate)
        return found

    def wire(self, *, weights: bool) -> str:
        """Of an action that takes weights, or gradients, to another node; empty for their own type."""
        chosen = self.knobs.weights_wire if weights else self.knobs.gradients_wire
        return "" if chosen == "dtype" else chosen

    # scopes

    def keeps(self, unit: int) -> bool:
        """Whether a node that pulls the unit keeps it for the later visits of the step."""
        return self.knobs.weights_scope == "step" and self.topology.num_nodes > 1 and len(self.pulls[unit]) > 1

    def sums_up(self, unit: int) -> bool:
        """Whether a unit's gradients add up in the node until its last visit of the step."""
        return self.knobs.gradients_scope == "step" and self.topology.num_nodes > 1 and len(self.pushes[unit]) > 1

    def _kept(self, unit: int, elements: int) -> str:
        """The buffer in which the node keeps its slice of a unit; each unit has one of its own."""
        return self.slots.take("K", unit, kind="weight", elements=elements, limit=len(self.homes))

    def _sum_up(self, unit: int, source: str, buffer: str) -> Action:
        """ADD to the node's sum. In the lane that made ``source``: a push under way must not hold it up."""
        return self._add(unit, source, buffer, Lane.REDUCE)

    def _sum_buffer(self, unit: int, elements: int) -> str:
        """The buffer in which a unit's gradients add up in the node; each unit has one of its own."""
        return self.slots.take("A", unit, kind="gradient", elements=elements, limit=len(self.homes))

    # buffers

    def holds(self, index: int, unit: int) -> bool:
        """Whether the whole unit is here from an earlier visit when the ``index``-th visit with weights needs it."""
        return self.residency.full[index][unit].held

    def _full_slot(self, index: int, unit: int) -> str:
        """The buffer for a whole unit in a visit with weights."""
        slot = self.residency.full[index][unit].slot
        return self.slots.at("W", unit, slot, kind="weight", elements=self.homes[unit].padded)

    def _slice_slot(self, index: int, unit: int, elements: int) -> str:
        """The buffer for this device's slice of a unit that passes through."""
        assert self.residency.slices is not None
        slot = self.residency.slices[index][unit].slot
        return self.slots.at("S", unit, slot, kind="weight", elements=elements)

    def _gradient_slot(self, name: str, unit: int, elements: int) -> str:
        return self.slots.visiting(name, unit, kind="gradient", elements=elements, visits=self.knobs.gradient_buffers)

    def _add_home(self, unit: int, source: str, lane: Lane) -> Action:
        return self._add(unit, source, f"home.g.{unit}", lane)

    def _add(self, unit: int, source: str, target: str, lane: Lane) -> Action:
        reads = (target, source) if target in self.started else (source,)
        self.started.add(target)
        return Action(Op.ADD, lane, reads, (target,), unit=unit)


def _visits_of_units(visits: Iterator[tuple[int | None, tuple[int, ...]]]) -> dict[int, list[int]]:
    """For every unit the numbers of its visits, ascending."""
    found: dict[int, list[int]] = {}
    for number, units in visits:
        assert number is not None
        for unit in units:
            found.setdefault(unit, []).append(number)
    return found
