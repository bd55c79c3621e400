"""Nodes, and the ranks on each of them: which processes share a fast link.

The topology is determined again at every start, because launchers may number ranks differently after a restart.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import gcd

from tawpipe.errors import UserError

CP_GROUP = "set"
"""Prefix of the name of a context-parallel group: neighbouring ranks of a node that compute a row together."""


def cp_group_name(ranks: int) -> str:
    """Return the name of the context-parallel group of ``ranks`` neighbouring ranks of a node, for example ``set4``."""
    return f"{CP_GROUP}{ranks}"


@dataclass(frozen=True)
class Topology:
    """Mesh of processes. The outer axis is the slow link between nodes; the inner axis is the fast link inside a node.

    Args:
        nodes: for every node, the global ranks on it in the order of their local ranks. Schedules need the same number
            of ranks on all nodes, see ``evened``.

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
        """Build a topology of ``num_nodes`` nodes with ``local_size`` consecutive ranks each."""
        return cls(tuple(tuple(range(n * local_size, (n + 1) * local_size)) for n in range(num_nodes)))

    @classmethod
    def from_group_ranks(cls, group_ranks: list[tuple[int, int]]) -> Topology:
        """Build the topology from the (node number, local rank) of every global rank, as the launcher assigned them.

        Raises:
            UserError: global ranks do not increase with the node and the local rank. torch numbers the members of a
                process group by global rank.
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
        """Return a topology with the same ranks on nodes of equal size.

        If the sizes differ, each node is cut into groups of g neighbouring ranks, where g is the greatest common
        divisor of the sizes. Every device then keeps an equal share of the weights, and the busiest link carries no
        more than necessary: neighbouring groups are neighbours in the ring of a rail, so traffic between two groups of
        one machine stays inside the machine.

        >>> Topology(((0, 1, 2, 3), (4, 5))).evened().nodes
        ((0, 1), (2, 3), (4, 5))
        """
        size = gcd(*map(len, self.nodes))
        return Topology(tuple(node[i : i + size] for node in self.nodes for i in range(0, len(node), size)))

    @property
    def is_even(self) -> bool:
        """True if all nodes have equally many ranks."""
        return len({len(node) for node in self.nodes}) == 1

    @property
    def num_nodes(self) -> int:
        return len(self.nodes)

    @property
    def local_size(self) -> int:
        """Number of ranks on every node. Fails with AssertionError if the nodes differ in size."""
        assert self.is_even, self.nodes
        return len(self.nodes[0])

    @property
    def world_size(self) -> int:
        return sum(map(len, self.nodes))

    @cached_property
    def _position(self) -> dict[int, tuple[int, int]]:
        """Node number and local rank of every global rank."""
        return {rank: (n, i) for n, node in enumerate(self.nodes) for i, rank in enumerate(node)}

    def node_of(self, rank: int) -> int:
        """Return the number of the node that has the global rank ``rank``."""
        return self._position[rank][0]

    def local_of(self, rank: int) -> int:
        """Return the local rank of the global rank ``rank`` on its node."""
        return self._position[rank][1]

    def rail(self, local_rank: int) -> tuple[int, ...]:
        """Return the global ranks that have ``local_rank`` in all nodes, in the order of the nodes.

        Their traffic crosses the slow link between nodes.
        """
        return tuple(node[local_rank] for node in self.nodes)

    def group(self, name: str, rank: int) -> tuple[int, ...]:
        """Return the global ranks of the group called ``name`` that contains ``rank``, in the order of the group.

        Args:
            name: ``node``, ``rail`` or ``world``. ``set4``: the context-parallel group, an aligned block of 4
                neighbouring ranks of the node. ``2:8``: every second rank of an aligned block of 8 ranks of the world,
                see ``strided_group``.

        >>> Topology.grid(2, 4).group("set2", 6)
        (6, 7)
        >>> Topology.grid(2, 4).group("2:8", 5)
        (1, 3, 5, 7)
        """
        if name == "node":
            return self.nodes[self.node_of(rank)]
        if name.startswith(CP_GROUP) and name[len(CP_GROUP) :].isdecimal():
            size, node = int(name[len(CP_GROUP) :]), self.nodes[self.node_of(rank)]
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
        """Return the name of the groups that hold every ``stride``-th rank of an aligned block of ``size`` ranks.

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
        """Return True if ``name`` has the form ``stride:size`` and this topology can be cut into such groups.

        >>> [Topology.grid(2, 4).has_strided_group(name) for name in ("2:8", "2:6", "8:8", "node")]
        [True, False, False, False]
        """
        stride, _, size = name.partition(":")
        if not (stride.isdecimal() and size.isdecimal()):
            return False
        return 0 < int(stride) < int(size) and int(size) % int(stride) == 0 == self.world_size % int(size)

    def __str__(self) -> str:
        """Return a description such as ``4 processes = 2 nodes x 2``."""
        processes = f"{self.world_size} process" + ("es" if self.world_size > 1 else "")
        nodes = f"{self.num_nodes} node" + ("s" if self.num_nodes > 1 else "")
        if not self.is_even:
            even = self.evened()
            sizes = ", ".join(str(len(node)) for node in self.nodes)
            return f"{processes} = {nodes} of {sizes}, scheduled as {even.num_nodes} groups of {even.local_size}"
        return f"{processes} = {nodes} x {self.local_size}"
