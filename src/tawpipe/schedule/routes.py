"""How weights reach a device and how gradients go home, for one rank and one placement. Imports schedule only.

A route turns a visit into transfer actions; it is the only place with index arithmetic about who sends what to whom.

* ``CollectiveRoute`` (``spread``, ``flat``, and every placement on one node but ``whole``): one all-gather a hop on the way to
  the device, one reduce-scatter a hop on the way back. All members of a group issue them in the order of the visits.
* ``ExchangeRoute`` (``striped``, ``whole`` on several nodes): point-to-point between nodes, staggered: in exchange t
  node n receives what its visit t - n needs, so that neighbouring blocks, whose homes are neighbouring nodes, keep every link
  busy with one send and one receive at a time. Gradients likewise.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

from tawpipe.schedule.actions import Action, Lane, Op, Transfer, exchange
from tawpipe.schedule.placement import Home
from tawpipe.schedule.spec import Knobs, ModelSpec, Pool
from tawpipe.schedule.visits import Visit
from tawpipe.topology import Topology


class Slots:
    """Hands out the buffers of one rank's pools in turn."""

    def __init__(self) -> None:
        self._pools: dict[str, tuple[str, int, int]] = {}
        self._next: dict[str, int] = {}

    def take(self, name: str, *, kind: str, elements: int, limit: int) -> str:
        """The next buffer of a pool that has at most ``limit`` of them."""
        number = self._next.get(name, 0)
        self._pools[name] = (kind, elements, limit)
        self._next[name] = number + 1
        return f"{name}.{number % limit}"

    def pools(self) -> tuple[Pool, ...]:
        return tuple(
            Pool(name, kind, min(limit, self._next[name]), elements)
            for name, (kind, elements, limit) in sorted(self._pools.items())
        )


class Route(ABC):
    """The transfers of one rank. Call ``pull`` for the visits with weights and ``push`` for those with gradients, each in order."""

    def __init__(
        self,
        rank: int,
        topology: Topology,
        model: ModelSpec,
        knobs: Knobs,
        homes: tuple[Home, ...],
        visits: tuple[Visit, ...],
    ) -> None:
        self.rank, self.topology, self.model, self.knobs, self.homes = rank, topology, model, knobs, homes
        self.node, self.local = topology.node_of(rank), topology.local_of(rank)
        self.with_weights = [visit for visit in visits if visit.weights is not None]
        self.with_gradients = [visit for visit in visits if visit.gradients is not None]
        self.slots = Slots()
        self.full: dict[tuple[int, int], str] = {}
        """(visit with weights, unit) -> buffer with the full unit."""
        self.gradient: dict[tuple[int, int], str] = {}
        """(visit with gradients, unit) -> buffer that the backward pass fills."""
        self.started: set[int] = set()
        """Units whose home gradient of this step holds something already."""
        sizes = sorted({home.padded for home in homes})
        self._class = [sizes.index(home.padded) for home in homes]
        self._together = {
            size: max(sum(self._class[u] == size for u in block.units) for block in model.blocks)
            for size in self._class
        }

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
        """For every trainable unit of a visit: the buffer to fill, and whether something of this step is in it already."""
        assert visit.gradients is not None
        found = {}
        for unit in self.model.trainable_units(visit.block):
            if self.homes[unit].ranks == (self.rank,) and self.topology.world_size == 1:
                buffer, accumulate = f"home.g.{unit}", unit in self.started
                self.started.add(unit)
            else:
                limit = self.knobs.gradient_buffers
                buffer, accumulate = self._take("G", unit, "gradient", self.homes[unit].padded, limit), False
            self.gradient[visit.gradients, unit] = buffer
            found[unit] = (buffer, accumulate)
        return found

    def _take(self, name: str, unit: int, kind: str, elements: int, limit: int) -> str:
        size = self._class[unit]
        return self.slots.take(f"{name}{size}", kind=kind, elements=elements, limit=limit * self._together[size])

    def _weight_slot(self, name: str, unit: int, elements: int) -> str:
        return self._take(name, unit, "weight", elements, self.knobs.look_ahead + 1)

    def _add_home(self, unit: int, source: str, lane: Lane) -> Action:
        target = f"home.g.{unit}"
        reads = (target, source) if unit in self.started else (source,)
        self.started.add(unit)
        return Action(Op.ADD, lane, reads, (target,), unit=unit)


class CollectiveRoute(Route):
    """Hops of all-gathers there and reduce-scatters back."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        across, inside = self.topology.num_nodes > 1, self.topology.local_size > 1
        if self.knobs.placement == "flat":
            self.there = [(Lane.INTER_W, "world")] if across or inside else []
            self.back = [(Lane.INTER_G, "world")] if across or inside else []
        else:
            self.there = [(Lane.INTER_W, "rail")] * across + [(Lane.GATHER, "node")] * inside
            self.back = [(Lane.REDUCE, "node")] * inside + [(Lane.INTER_G, "rail")] * across

    def _size(self, group: str) -> int:
        return len(self.topology.group(group, self.rank))

    def pull(self, visit: Visit) -> Iterator[Action]:
        assert visit.weights is not None
        for unit in self.model.blocks[visit.block].units:
            source, elements = f"home.w.{unit}", self.homes[unit].stripe
            for hop, (lane, group) in enumerate(self.there):
                elements *= self._size(group)
                target = self._weight_slot("W" if hop == len(self.there) - 1 else "S", unit, elements)
                yield Action(Op.COLLECTIVE, lane, (source,), (target,), unit=unit, collective="all_gather", group=group)
                source = target
            self.full[visit.weights, unit] = source

    def push(self, visit: Visit) -> Iterator[Action]:
        assert visit.gradients is not None
        for unit in self.model.trainable_units(visit.block):
            source, elements = self.gradient[visit.gradients, unit], self.homes[unit].padded
            for hop, (lane, group) in enumerate(self.back):
                elements //= self._size(group)
                last = hop == len(self.back) - 1
                target = self._take("R" if last else "H", unit, "gradient", elements, self.knobs.gradient_buffers)
                yield Action(
                    Op.COLLECTIVE, lane, (source,), (target,), unit=unit, collective="reduce_scatter", group=group
                )
                source = target
            if self.back:
                yield self._add_home(unit, source, self.back[-1][0])


class ExchangeRoute(Route):
    """Point-to-point between nodes in staggered exchanges, collectives inside a node."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self._pulled = self._pushed = 0  # exchanges issued so far; pushes are numbered anew in every round
        self._arrivals = self._most_arrivals()
        self._arrived: dict[tuple[int, int], str] = {}
        self._leaving: dict[tuple[int, int], str] = {}

    def _whole(self) -> bool:
        return self.knobs.placement == "whole"

    def _carriers(self, unit: int, node: int) -> tuple[int, ...]:
        """The ranks of a node that the stripes of a unit pass through, in the order of the stripes."""
        local = [self.topology.local_of(rank) for rank in self.homes[unit].ranks]
        return tuple(self.topology.nodes[node][i] for i in local)

    def _home_node(self, unit: int) -> int:
        return self.topology.node_of(self.homes[unit].ranks[0])

    # weights

    def pull(self, visit: Visit) -> Iterator[Action]:
        assert visit.weights is not None
        while self._pulled <= visit.weights + self.node:
            yield from self._exchange_weights(self._pulled)
            self._pulled += 1
        for unit in self.model.blocks[visit.block].units:
            yield from self._gather(visit.weights, unit)

    def _exchange_weights(self, number: int) -> Iterator[Action]:
        transfers = []
        for node in range(self.topology.num_nodes):
            index = number - node
            if not 0 <= index < len(self.with_weights):
                continue
            for unit in self.model.blocks[self.with_weights[index].block].units:
                home = self._home_node(unit)
                if home == node or self.node not in (home, node):
                    continue
                for source, target in zip(self.homes[unit].ranks, self._carriers(unit, node), strict=True):
                    if source == self.rank:
                        transfers.append(Transfer(True, target, unit, f"home.w.{unit}"))
                    elif target == self.rank:
                        direct = self._whole() or self.topology.local_size == 1
                        buffer = self._weight_slot("W" if direct else "S", unit, self.homes[unit].stripe)
                        self._arrived[index, unit] = buffer
                        transfers.append(Transfer(False, source, unit, buffer))
        if transfers:
            yield exchange(Lane.INTER_W, tuple(transfers))

    def _gather(self, index: int, unit: int) -> Iterator[Action]:
        here = self._home_node(unit) == self.node
        carriers = self._carriers(unit, self.node)
        own = (f"home.w.{unit}" if here else self._arrived.pop((index, unit))) if self.rank in carriers else None
        if self.topology.local_size == 1:
            assert own is not None
            self.full[index, unit] = own
        elif self._whole():
            root = carriers[0]
            target = own or self._weight_slot("W", unit, self.homes[unit].padded)
            reads, writes = ((own,), ()) if own else ((), (target,))
            yield Action(
                Op.COLLECTIVE, Lane.GATHER, reads, writes, unit=unit, collective="broadcast", group="node", root=root
            )
            self.full[index, unit] = target
        else:
            assert own is not None
            target = self._weight_slot("W", unit, self.homes[unit].padded)
            yield Action(
                Op.COLLECTIVE, Lane.GATHER, (own,), (target,), unit=unit, collective="all_gather", group="node"
            )
            self.full[index, unit] = target

    # gradients

    def _round(self, number: int) -> list[Visit]:
        """The visits with gradients of one round. Rounds do not share exchanges: a node that waited in the middle of a round's pushes
        for another node's next round would wait for ever, because the pulls hold that node back."""
        return [visit for visit in self.with_gradients if visit.round == number]

    def push(self, visit: Visit) -> Iterator[Action]:
        visits = self._round(visit.round)
        position = visits.index(visit)
        while self._pushed < position + self.node:
            yield from self._exchange_gradients(visits, self._pushed)
            self._pushed += 1
        for unit in self.model.trainable_units(visit.block):
            yield from self._reduce(visit, unit)
        last = position == len(visits) - 1
        until = position + self.node + 1 if not last else position + self.topology.num_nodes
        while self._pushed < until:
            yield from self._exchange_gradients(visits, self._pushed)
            self._pushed += 1
        if last:
            self._pushed = 0

    def finish(self) -> Iterator[Action]:
        while self._pulled < len(self.with_weights) + self.topology.num_nodes - 1:
            yield from self._exchange_weights(self._pulled)
            self._pulled += 1

    def _reduce(self, visit: Visit, unit: int) -> Iterator[Action]:
        assert visit.gradients is not None
        index = visit.gradients
        source = self.gradient.pop((index, unit))
        carriers = self._carriers(unit, self.node)
        if self.topology.local_size == 1:
            self._leaving[index, unit] = source
        elif self._whole():
            root = carriers[0]
            yield Action(
                Op.COLLECTIVE,
                Lane.REDUCE,
                (source,),
                (source,),
                unit=unit,
                collective="reduce",
                group="node",
                root=root,
            )
            if self.rank == root:
                self._leaving[index, unit] = source
        else:
            target = self._take("H", unit, "gradient", self.homes[unit].stripe, self.knobs.gradient_buffers)
            yield Action(
                Op.COLLECTIVE, Lane.REDUCE, (source,), (target,), unit=unit, collective="reduce_scatter", group="node"
            )
            self._leaving[index, unit] = target

    def _pushes(self, visits: list[Visit], number: int) -> Iterator[tuple[int, int, int, int]]:
        """(visit with gradients, unit, source rank, home rank) of everything that goes home in one exchange, own parts included."""
        for node in range(self.topology.num_nodes):
            if 0 <= number - node < len(visits):
                visit = visits[number - node]
                assert visit.gradients is not None
                for unit in self.model.trainable_units(visit.block):
                    for target, source in zip(self.homes[unit].ranks, self._carriers(unit, node), strict=True):
                        yield visit.gradients, unit, source, target

    def _most_arrivals(self) -> dict[int, int]:
        """For every size of unit the most stripes of it that one exchange brings here: each needs a buffer of its own."""
        most: dict[int, int] = {}
        visits = self._round(0)
        for number in range(len(visits) + self.topology.num_nodes - 1):
            arriving = [
                unit for _, unit, source, target in self._pushes(visits, number) if target == self.rank != source
            ]
            for size in self._class:
                most[size] = max(most.get(size, 0), sum(self._class[unit] == size for unit in arriving))
        return most

    def _exchange_gradients(self, visits: list[Visit], number: int) -> Iterator[Action]:
        transfers, additions = [], []
        for index, unit, source, target in self._pushes(visits, number):
            if source == target == self.rank:
                additions.append((unit, self._leaving.pop((index, unit))))
            elif source == self.rank:
                transfers.append(Transfer(True, target, unit, self._leaving.pop((index, unit))))
            elif target == self.rank:
                size = self._class[unit]
                limit = max(self.knobs.gradient_buffers, self._arrivals[size])
                buffer = self.slots.take(f"R{size}", kind="gradient", elements=self.homes[unit].stripe, limit=limit)
                transfers.append(Transfer(False, source, unit, buffer))
                additions.append((unit, buffer))
        if transfers:
            yield exchange(Lane.INTER_G, tuple(transfers))
        for unit, source in additions:
            yield self._add_home(unit, source, Lane.INTER_G)


def make_route(
    rank: int, topology: Topology, model: ModelSpec, knobs: Knobs, homes: tuple[Home, ...], visits: tuple[Visit, ...]
) -> Route:
    """The route for the knobs' placement; on one node ``striped`` is a single hop of collectives, on one device none at all."""
    staggered = knobs.placement == "whole" and topology.world_size > 1
    staggered |= knobs.placement == "striped" and topology.num_nodes > 1
    kind = ExchangeRoute if staggered else CollectiveRoute
    return kind(rank, topology, model, knobs, homes, visits)
