"""Routes of exchanges, for units that live on one node each.

Point-to-point between nodes, staggered: in exchange t node n receives what its visit t - n needs, so that neighbouring
blocks, whose homes are neighbouring nodes, keep every link busy with one send and one receive at a time. Gradients
likewise. Inside a node one collective a unit.
"""

from __future__ import annotations

from collections.abc import Iterator

from tawpipe.schedule.actions import Action, Lane, Op, Transfer, exchange
from tawpipe.schedule.buffers import Buffer, home_weight
from tawpipe.schedule.routes.route import Route, Tour
from tawpipe.schedule.routes.visits import Visit


def visits_of_exchange(number: int, nodes: int, visits: int) -> Iterator[tuple[int, int]]:
    """(node, its visit) in one exchange: node n has visit t - n in exchange t.

    >>> [list(visits_of_exchange(t, 2, 2)) for t in range(number_of_exchanges(2, 2))]
    [[(0, 0)], [(0, 1), (1, 0)], [(1, 1)]]
    """
    return ((node, number - node) for node in range(nodes) if 0 <= number - node < visits)


def number_of_exchanges(nodes: int, visits: int) -> int:
    """After which the last node has had its last visit."""
    return visits + nodes - 1


class ExchangeRoute(Route):
    """Point-to-point between nodes in staggered exchanges, collectives inside a node.

    Args:
        whole: a unit lives on one device and is broadcast inside a node; otherwise on all devices of one node, which
            gather it.
    """

    def __init__(self, rank: int, tour: Tour, *, whole: bool) -> None:
        super().__init__(rank, tour)
        self._whole = whole
        self._pulled = self._pushed = 0  # exchanges issued so far; pushes are numbered anew in every round
        self._arrivals = self._most_arrivals()
        self._arrived: dict[tuple[int, int], Buffer] = {}
        self._leaving: dict[tuple[int, int], Buffer] = {}

    def _carriers(self, unit: int, node: int) -> tuple[int, ...]:
        """The ranks of a node that the stripes of a unit pass through, in the order of the stripes."""
        local = [self.topology.local_of(rank) for rank in self.homes[unit].ranks]
        return tuple(self.topology.nodes[node][i] for i in local)

    def _home_node(self, unit: int) -> int:
        return self.topology.node_of(self.homes[unit].ranks[0])

    # weights

    def pull(self, visit: Visit) -> Iterator[Action]:
        assert visit.weight_index is not None
        while self._pulled <= visit.weight_index + self.node:
            yield from self._exchange_weights(self._pulled)
            self._pulled += 1
        for unit in self.model.blocks[visit.block].units:
            yield from self._gather(visit.weight_index, unit)

    def _exchange_weights(self, number: int) -> Iterator[Action]:
        transfers = []
        for node, index in visits_of_exchange(number, self.topology.num_nodes, len(self.with_weights)):
            for unit in self.model.blocks[self.with_weights[index].block].units:
                home = self._home_node(unit)
                if self.holds(index, unit) or self.residency.holds_slice(index, unit):
                    continue
                if home == node or self.node not in (home, node):
                    continue
                for source, target in zip(self.homes[unit].ranks, self._carriers(unit, node), strict=True):
                    if source == self.rank:
                        transfers.append(Transfer(True, target, unit, home_weight(unit)))
                    elif target == self.rank:
                        buffer = self._arrival(index, unit)
                        transfers.append(Transfer(False, source, unit, buffer))
        if transfers:
            yield exchange(Lane.INTER_W, tuple(transfers), compression=self.compression(weights=True))

    def _arrival(self, index: int, unit: int) -> Buffer:
        """The buffer for a slice that arrives at this rank for a visit."""
        if self.residency.slices is None:
            buffer = self._full_buffer(index, unit)
        else:
            buffer = self._slice_buffer(index, unit, self.homes[unit].stripe)
        self._arrived[index, unit] = buffer
        return buffer

    def _slice(self, index: int, unit: int) -> Buffer | None:
        """Where this rank has its slice of a unit for a visit, if it is one of those that carry the unit."""
        if self.rank not in self._carriers(unit, self.node):
            return None
        if self._home_node(unit) == self.node:
            return home_weight(unit)
        if self.residency.holds_slice(index, unit):
            return self._slice_buffer(index, unit, self.homes[unit].stripe)
        return self._arrived.pop((index, unit))

    def _gather(self, index: int, unit: int) -> Iterator[Action]:
        if self.holds(index, unit):
            self.full[index, unit] = self.resident[unit]
            return
        part = self._slice(index, unit)
        if self.topology.local_size == 1:
            assert part is not None
            self.full[index, unit] = self.resident[unit] = part
            return
        target = self._full_buffer(index, unit) if part is None or not self._whole else part
        if self._whole:
            reads, writes, collective, root = (), (target,), "broadcast", self._carriers(unit, self.node)[0]
            if self.rank == root:
                reads, writes = (target,), ()
        else:
            assert part is not None
            reads, writes, collective, root = (part,), (target,), "all_gather", -1
        yield Action(
            Op.COLLECTIVE, Lane.GATHER, reads, writes, unit=unit, collective=collective, group="node", root=root
        )
        self.full[index, unit] = self.resident[unit] = target

    def finish(self) -> Iterator[Action]:
        while self._pulled < number_of_exchanges(self.topology.num_nodes, len(self.with_weights)):
            yield from self._exchange_weights(self._pulled)
            self._pulled += 1

    # gradients

    def _round(self, number: int) -> list[Visit]:
        """The visits with gradients of one round.

        Rounds do not share exchanges: a node that waited in the middle of a round's pushes for another node's next
        round would wait for ever, because the pulls hold that node back.
        """
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

    def _reduce(self, visit: Visit, unit: int) -> Iterator[Action]:
        """Inside the node; then, where gradients add up in the node, into the sum, which at home is the home itself."""
        index = visit.gradient_index
        assert index is not None
        source = self.gradient.pop((index, unit))
        carriers = self._carriers(unit, self.node)
        if self.topology.local_size > 1:
            target, collective, root = source, "reduce", carriers[0]
            if not self._whole:
                target, collective, root = (
                    self._gradient_buffer("H", unit, self.homes[unit].stripe),
                    "reduce_scatter",
                    -1,
                )
            yield Action(
                Op.COLLECTIVE,
                Lane.REDUCE,
                (source,),
                (target,),
                unit=unit,
                collective=collective,
                group="node",
                root=root,
            )
            source = target
        if self.rank not in carriers:
            return
        if not self.sums_up(unit):
            self._leaving[index, unit] = source
        elif self.rank in self.homes[unit].ranks:
            yield self._add_home(unit, source, Lane.REDUCE)
        else:
            yield self._sum_up(unit, source, self.homes[unit].stripe)
            if index == self.pushes[unit][-1]:
                self._leaving[index, unit] = self.sums[unit]

    def sums_up(self, unit: int) -> bool:
        return self.topology.num_nodes > 1 and super().sums_up(unit)

    def _pushes(self, visits: list[Visit], number: int) -> Iterator[tuple[int, int, int, int]]:
        """(visit with gradients, unit, source rank, home rank) of everything that goes home in one exchange."""
        for node, index in visits_of_exchange(number, self.topology.num_nodes, len(visits)):
            visit = visits[index]
            assert visit.gradient_index is not None
            for unit in self.model.trainable_units(visit.block):
                last = visit.gradient_index == self.pushes[unit][-1]
                if self.sums_up(unit) and (not last or self._home_node(unit) == node):
                    continue
                for target, source in zip(self.homes[unit].ranks, self._carriers(unit, node), strict=True):
                    yield visit.gradient_index, unit, source, target

    def _most_arrivals(self) -> dict[int, int]:
        """For every size class the most stripes of it that one exchange brings here: each needs a buffer of its own."""
        most: dict[int, int] = {}
        visits = self._round(self.step.rounds - 1)
        for number in range(number_of_exchanges(self.topology.num_nodes, len(visits))):
            here: dict[int, int] = {}
            for _, unit, source, target in self._pushes(visits, number):
                if target == self.rank != source:
                    size = self.pools.size_class(unit)
                    here[size] = here.get(size, 0) + 1
            most = {size: max(most.get(size, 0), here.get(size, 0)) for size in most | here}
        return most

    def _exchange_gradients(self, visits: list[Visit], number: int) -> Iterator[Action]:
        transfers, additions = [], []
        for index, unit, source, target in self._pushes(visits, number):
            if source == target == self.rank:
                additions.append((unit, self._leaving.pop((index, unit))))
            elif source == self.rank:
                transfers.append(Transfer(True, target, unit, self._leaving.pop((index, unit))))
            elif target == self.rank:
                limit = max(self.settings.gradient_buffers, self._arrivals[self.pools.size_class(unit)])
                elements = self.homes[unit].stripe
                buffer = self.pools.take("R", unit, elements=elements, limit=limit)
                transfers.append(Transfer(False, source, unit, buffer))
                additions.append((unit, buffer))
        if transfers:
            yield exchange(Lane.INTER_G, tuple(transfers), compression=self.compression(weights=False))
        for unit, source in additions:
            yield self._add_home(unit, source, Lane.INTER_G)
