"""Routes of point-to-point exchanges, for units whose home is on one node.

Between nodes exchanges are staggered: in exchange t, node n receives what its visit t - n needs. Homes of neighbouring
blocks are on neighbouring nodes, so every link is busy with one send and one receive at a time. Gradients are staggered
in the same way. Inside a node there is one collective for each unit.
"""

from __future__ import annotations

from collections.abc import Iterator

from tawpipe.schedule.actions import Action, Lane, Op, Transfer, exchange
from tawpipe.schedule.buffers import Buffer, home_weight
from tawpipe.schedule.routes.route import Route, Tour
from tawpipe.schedule.routes.visits import Visit


def visits_of_exchange(number: int, nodes: int, visits: int) -> Iterator[tuple[int, int]]:
    """Yield (node, index of its visit) for every node that takes part in one exchange.

    Node n has visit t - n in exchange t, for visits 0..``visits`` - 1.

    Args:
        number: number of the exchange, t.
        nodes: number of nodes.
        visits: number of visits.

    >>> [list(visits_of_exchange(t, 2, 2)) for t in range(number_of_exchanges(2, 2))]
    [[(0, 0)], [(0, 1), (1, 0)], [(1, 1)]]
    """
    return ((node, number - node) for node in range(nodes) if 0 <= number - node < visits)


def number_of_exchanges(nodes: int, visits: int) -> int:
    """Return the number of exchanges until the last node has had its last visit."""
    return visits + nodes - 1


class ExchangeRoute(Route):
    """Route with staggered point-to-point exchanges between nodes and collectives inside a node.

    Args:
        whole: True if a unit is on one device and is broadcast inside a node. False if it is sharded over all devices
            of one node, which gather it.
    """

    def __init__(self, rank: int, tour: Tour, *, whole: bool) -> None:
        super().__init__(rank, tour)
        self._whole = whole
        self._pulled = self._pushed = 0  # exchanges issued so far; pushes are numbered anew in every round
        self._arrivals = self._most_arrivals()
        self._arrived: dict[tuple[int, int], Buffer] = {}
        self._leaving: dict[tuple[int, int], Buffer] = {}

    def _carriers(self, unit: int, node: int) -> tuple[int, ...]:
        """Return the ranks of ``node`` that send or receive the shards of ``unit``, in the shards' order.

        They have the local ranks of the shards' owners."""
        local = [self.topology.local_of(rank) for rank in self.homes[unit].ranks]
        return tuple(self.topology.nodes[node][i] for i in local)

    def _home_node(self, unit: int) -> int:
        """Return the node of the home of ``unit``."""
        return self.topology.node_of(self.homes[unit].ranks[0])

    # weights

    def pull(self, visit: Visit) -> Iterator[Action]:
        """Yield the exchanges up to the one that serves ``visit``, then the gathers inside the node.

        Exchanges that earlier calls have yielded are left out."""
        assert visit.weight_index is not None
        while self._pulled <= visit.weight_index + self.node:
            yield from self._exchange_weights(self._pulled)
            self._pulled += 1
        for unit in self.model.blocks[visit.block].units:
            yield from self._gather(visit.weight_index, unit)

    def _exchange_weights(self, number: int) -> Iterator[Action]:
        """Yield the exchange of weights with this number; nothing if this rank neither sends nor receives."""
        transfers = []
        for node, index in visits_of_exchange(number, self.topology.num_nodes, len(self.with_weights)):
            for unit in self.model.blocks[self.with_weights[index].block].units:
                home = self._home_node(unit)
                if self.holds(index, unit) or self.residency.holds_shard(index, unit):
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
        """Return the buffer into which this rank receives a shard for a visit, and store it in ``_arrived``."""
        if self.residency.shards is None:
            buffer = self._full_buffer(index, unit)
        else:
            buffer = self._shard_buffer(index, unit, self.homes[unit].shard_size)
        self._arrived[index, unit] = buffer
        return buffer

    def _shard(self, index: int, unit: int) -> Buffer | None:
        """Return the buffer that has this rank's shard of a unit for a visit; None if it has no shard.

        It is the home, a shard kept from an earlier visit, or the shard that was received. The last one is removed from
        ``_arrived``."""
        if self.rank not in self._carriers(unit, self.node):
            return None
        if self._home_node(unit) == self.node:
            return home_weight(unit)
        if self.residency.holds_shard(index, unit):
            return self._shard_buffer(index, unit, self.homes[unit].shard_size)
        return self._arrived.pop((index, unit))

    def _gather(self, index: int, unit: int) -> Iterator[Action]:
        """Yield the all-gather or broadcast that puts a unit together inside the node; set ``full``.

        Yields nothing if the whole unit is still here from an earlier visit, or if nodes have one rank."""
        if self.holds(index, unit):
            self.full[index, unit] = self.resident[unit]
            return
        part = self._shard(index, unit)
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
        """Yield the remaining exchanges of weights, in which only other nodes still receive."""
        while self._pulled < number_of_exchanges(self.topology.num_nodes, len(self.with_weights)):
            yield from self._exchange_weights(self._pulled)
            self._pulled += 1

    # gradients

    def _round(self, number: int) -> list[Visit]:
        """Return the visits with gradients of round ``number``.

        Rounds do not share exchanges. Otherwise a node that waits in the middle of a round for the next round of
        another node would deadlock, because its own pulls delay that node.
        """
        return [visit for visit in self.with_gradients if visit.round == number]

    def push(self, visit: Visit) -> Iterator[Action]:
        """Yield the reductions inside the node, and all exchanges of gradients up to the one of ``visit``.

        The last visit of a round also yields the exchanges in which only other nodes still send."""
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
        """Yield the reduction of a gradient inside the node, and an ADD if gradients are added up over the step.

        The ADD is to a buffer of the node, or to the home if this is the node of the unit's home. Gradients that will
        be sent are stored in ``_leaving``."""
        index = visit.gradient_index
        assert index is not None
        source = self.gradient.pop((index, unit))
        carriers = self._carriers(unit, self.node)
        if self.topology.local_size > 1:
            target, collective, root = source, "reduce", carriers[0]
            if not self._whole:
                target, collective, root = (
                    self._gradient_buffer("H", unit, self.homes[unit].shard_size),
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
            yield self._sum_up(unit, source, self.homes[unit].shard_size)
            if index == self.pushes[unit][-1]:
                self._leaving[index, unit] = self.sums[unit]

    def sums_up(self, unit: int) -> bool:
        return self.topology.num_nodes > 1 and super().sums_up(unit)

    def _pushes(self, visits: list[Visit], number: int) -> Iterator[tuple[int, int, int, int]]:
        """Yield (index of the visit, unit, source rank, home rank) of every gradient that goes home in one exchange.

        Args:
            visits: visits of the round with gradients.
            number: number of the exchange in the round.
        """
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
        """Return for every size class the most shards of gradients that arrive here in one exchange.

        Each of them needs a buffer. The last round is examined."""
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
        """Yield exchange ``number`` of gradients in a round, then the ADD actions of gradients that have come home.

        Gradients that are at home on this rank already are added, too. Nothing is yielded if this rank takes no part.
        """
        transfers, additions = [], []
        for index, unit, source, target in self._pushes(visits, number):
            if source == target == self.rank:
                additions.append((unit, self._leaving.pop((index, unit))))
            elif source == self.rank:
                transfers.append(Transfer(True, target, unit, self._leaving.pop((index, unit))))
            elif target == self.rank:
                limit = max(self.settings.gradient_buffers, self._arrivals[self.pools.size_class(unit)])
                elements = self.homes[unit].shard_size
                buffer = self.pools.take("R", unit, elements=elements, limit=limit)
                transfers.append(Transfer(False, source, unit, buffer))
                additions.append((unit, buffer))
        if transfers:
            yield exchange(Lane.INTER_G, tuple(transfers), compression=self.compression(weights=False))
        for unit, source in additions:
            yield self._add_home(unit, source, Lane.INTER_G)
