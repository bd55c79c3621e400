"""Positions of pipelines: over all ranks, over the nodes, or over the devices of each node."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from tawpipe.schedule.spec import share_micro_batches
from tawpipe.topology import Topology

AXES = {"world": "over all devices", "nodes": "over the nodes", "locals": "inside each node"}
"""Values of an axis, over which a pipeline extends -> description."""


@dataclass(frozen=True)
class Positions:
    """Pipelines of equal length side by side. The ranks with the same stages, one of each pipeline, share these stages.

    Args:
        topology: the nodes and ranks.
        axis: one of ``AXES``.
    """

    topology: Topology
    axis: str

    @cached_property
    def size(self) -> int:
        """Number of positions of one pipeline."""
        topology = self.topology
        return {"world": topology.world_size, "nodes": topology.num_nodes, "locals": topology.local_size}[self.axis]

    @property
    def replicas(self) -> int:
        """Number of pipelines side by side."""
        return self.topology.world_size // self.size

    def position(self, rank: int) -> int:
        """Return the position of ``rank`` in its pipeline."""
        if self.axis == "world":
            return self.topology.group("world", 0).index(rank)
        return self.topology.node_of(rank) if self.axis == "nodes" else self.topology.local_of(rank)

    def replica(self, rank: int) -> int:
        """Return the number of the pipeline of ``rank``."""
        if self.axis == "world":
            return 0
        return self.topology.local_of(rank) if self.axis == "nodes" else self.topology.node_of(rank)

    def rank(self, position: int, replica: int) -> int:
        """Return the global rank at ``position`` of pipeline ``replica``."""
        if self.axis == "world":
            return self.topology.group("world", 0)[position]
        node, local = (position, replica) if self.axis == "nodes" else (replica, position)
        return self.topology.nodes[node][local]

    @property
    def nodes(self) -> tuple[int, ...]:
        """Node of every position of the first pipeline; empty if each position is on a node of its own."""
        nodes = tuple(self.topology.node_of(self.rank(position, 0)) for position in range(self.size))
        return nodes if len(set(nodes)) < len(nodes) else ()

    @property
    def group(self) -> str:
        """Name of the process group of ranks with the same stages; ``""`` with a single pipeline."""
        return "" if self.replicas == 1 else {"nodes": "node", "locals": "rail"}[self.axis]

    def holders(self, position: int) -> tuple[int, ...]:
        """Return the ranks with the stages of ``position``, in the order of their group."""
        rank = self.rank(position, 0)
        return self.topology.group(self.group, rank) if self.group else (rank,)

    def share(self, count: int, speeds: Sequence[float] = ()) -> tuple[tuple[int, ...], ...]:
        """Return for every rank the micro-batches of its pipeline, out of 0..count-1.

        Args:
            count: number of micro-batches.
            speeds: relative speeds of all ranks; empty if equal. The speed of a pipeline is the sum over its ranks.
        """
        ranks = range(self.topology.world_size)
        pipelines = range(self.replicas) if speeds else ()
        of_pipelines = [sum(speeds[r] for r in ranks if self.replica(r) == pipeline) for pipeline in pipelines]
        each = share_micro_batches(count, self.replicas, speeds=of_pipelines)
        return tuple(each[self.replica(rank)] for rank in ranks)

    def speeds(self, of_ranks: Sequence[float]) -> tuple[float, ...]:
        """Return the sum of the speeds of all ranks at every position; empty if the sums are equal.

        All pipelines are included, and assumed to have equal numbers of micro-batches.

        Args:
            of_ranks: relative speeds of all ranks; empty if equal.
        """
        ranks = range(self.topology.world_size) if of_ranks else ()
        each = tuple(sum(of_ranks[r] for r in ranks if self.position(r) == place) for place in range(self.size))
        return each if max(each) - min(each) > 1e-9 else ()
