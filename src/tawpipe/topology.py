"""Nodes and local ranks: which processes share a fast link.

A topology is derived anew at every start, because launchers number ranks differently after a restart.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import gcd

from tawpipe.errors import UserError

SET = "set"
"""Begins the name of a group of so many neighbouring ranks of a node."""


def set_group(ranks: int) -> str:
    """The name of the group of so many neighbouring ranks of a node, which compute a row together."""
    return f"{SET}{ranks}"


@dataclass(frozen=True)
class Topology:
    """The mesh of processes: the outer axis is the slow link between nodes, the inner one the fast link inside a node.

    Args:
        nodes: for every node the global ranks on it, in the order of their local ranks. Schedules need equally many on
            all nodes, see ``evened``.

    >>> topology = Topology.grid(2, 3)
    >>> topology.nodes
    ((0, 1, 2), (3, 4, 5))
    >>> topology.node_of(4), topology.local_of(4), topology.rail(1)
    (1, 1, (1, 4))
    """

    nodes: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        ranks = sorted(rank for node in self.nodes for rank in node)
        assert ranks == list(range(len(ranks))) and ranks, f"ranks must be 0..n-1, each once: {self.nodes}"

    @classmethod
    def grid(cls, num_nodes: int, local_size: int) -> Topology:
        """``num_nodes`` nodes of ``local_size`` consecutive ranks each."""
        return cls(tuple(tuple(range(n * local_size, (n + 1) * local_size)) for n in range(num_nodes)))

    @classmethod
    def from_group_ranks(cls, group_ranks: list[tuple[int, int]]) -> Topology:
        """The mesh of the (node number, local rank) of every global rank, as the launcher gave them.

        Raises:
            UserError: ranks do not follow nodes and local ranks: groups of torch number their members by rank.
        """
        nodes: dict[int, list[tuple[int, int]]] = {}
        for rank, (node, local) in enumerate(group_ranks):
            nodes.setdefault(node, []).append((local, rank))
        in_order = tuple(tuple(rank for _, rank in sorted(nodes[node])) for node in sorted(nodes))
        flat = [rank for node in in_order for rank in node]
        if flat != sorted(flat):
            raise UserError("RANK", in_order, "ranks that count up through the local ranks of node after node")
        return cls(in_order)

    def evened(self) -> Topology:
        """The same ranks on equally large nodes: where they are not, each is cut into groups of as many as divide all.

        Every device then keeps as much as every other, and the busiest link carries no more than it must: neighbouring
        groups are neighbours in the ring of a rail, so that what passes between two of one machine stays in it.

        >>> Topology(((0, 1, 2, 3), (4, 5))).evened().nodes
        ((0, 1), (2, 3), (4, 5))
        """
        size = gcd(*map(len, self.nodes))
        return Topology(tuple(node[i : i + size] for node in self.nodes for i in range(0, len(node), size)))

    @property
    def is_even(self) -> bool:
        return len({len(node) for node in self.nodes}) == 1

    @property
    def num_nodes(self) -> int:
        return len(self.nodes)

    @property
    def local_size(self) -> int:
        """Ranks on every node; there is no such number where nodes differ."""
        assert self.is_even, self.nodes
        return len(self.nodes[0])

    @property
    def world_size(self) -> int:
        return sum(map(len, self.nodes))

    @cached_property
    def _position(self) -> dict[int, tuple[int, int]]:
        return {rank: (n, i) for n, node in enumerate(self.nodes) for i, rank in enumerate(node)}

    def node_of(self, rank: int) -> int:
        return self._position[rank][0]

    def local_of(self, rank: int) -> int:
        return self._position[rank][1]

    def rail(self, local_rank: int) -> tuple[int, ...]:
        """The ranks of one local rank in all nodes, in the order of the nodes: the group that crosses the slow link."""
        return tuple(node[local_rank] for node in self.nodes)

    def group(self, name: str, rank: int) -> tuple[int, ...]:
        """The members of the group ``node``, ``rail`` or ``world`` of ``rank``, in their group order; of its set
        (``set2``, ``set4``, ...), the aligned block of so many ranks of its node; or of every so manieth rank of an
        aligned block of the world (``2:8``), see ``strided_group``.

        >>> Topology.grid(2, 4).group("set2", 6)
        (6, 7)
        >>> Topology.grid(2, 4).group("2:8", 5)
        (1, 3, 5, 7)
        """
        if name == "node":
            return self.nodes[self.node_of(rank)]
        if name.startswith(SET) and name[len(SET) :].isdecimal():
            size, node = int(name[len(SET) :]), self.nodes[self.node_of(rank)]
            assert size and len(node) % size == 0, (name, node)
            first = self.local_of(rank) // size * size
            return node[first : first + size]
        if name == "rail":
            return self.rail(self.local_of(rank))
        world = tuple(rank for node in self.nodes for rank in node)
        stride, colon, size = name.partition(":")
        if colon:
            place = world.index(rank)
            first = place // int(size) * int(size)
            return world[first + place % int(stride) : first + int(size) : int(stride)]
        assert name == "world", name
        return world

    def strided_group(self, stride: int, size: int) -> str:
        """The name of the group of every ``stride``-th rank of an aligned block of ``size`` ranks.

        >>> [Topology.grid(2, 4).strided_group(*each) for each in ((1, 4), (4, 8), (2, 4))]
        ['node', 'rail', '2:4']
        """
        usual = {
            (1, self.local_size): "node",
            (self.local_size, self.world_size): "rail",
            (1, self.world_size): "world",
        }
        return usual.get((stride, size), f"{stride}:{size}")

    def has_strided_group(self, name: str) -> bool:
        """True for the name of such a group.

        >>> [Topology.grid(2, 4).has_strided_group(name) for name in ("2:8", "2:6", "8:8", "node")]
        [True, False, False, False]
        """
        stride, _, size = name.partition(":")
        if not (stride.isdecimal() and size.isdecimal()):
            return False
        return 0 < int(stride) < int(size) and int(size) % int(stride) == 0 == self.world_size % int(size)

    def __str__(self) -> str:
        processes = f"{self.world_size} process" + ("es" if self.world_size > 1 else "")
        nodes = f"{self.num_nodes} node" + ("s" if self.num_nodes > 1 else "")
        if not self.is_even:
            even = self.evened()
            sizes = ", ".join(str(len(node)) for node in self.nodes)
            return f"{processes} = {nodes} of {sizes}, scheduled as {even.num_nodes} groups of {even.local_size}"
        return f"{processes} = {nodes} x {self.local_size}"
