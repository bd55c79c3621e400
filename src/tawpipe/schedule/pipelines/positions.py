"""Where the positions of a pipeline are: over all ranks, over the nodes, or over the devices of each node."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from tawpipe.schedule.spec import share_micro_batches
from tawpipe.topology import Topology

AXES = {"world": "over all devices", "nodes": "over the nodes", "locals": "inside each node"}
"""What a pipeline goes over, in words."""


@dataclass(frozen=True)
class Positions:
    """Pipelines of equal length side by side. The ranks that hold the same stages, one of each pipeline, share them.

    Args:
        axis: one of ``AXES``.
    """

    topology: Topology
    axis: str

    @cached_property
    def size(self) -> int:
        """Positions of one pipeline."""
        topology = self.topology
        return {"world": topology.world_size, "nodes": topology.num_nodes, "locals": topology.local_size}[self.axis]

    @property
    def replicas(self) -> int:
        """Pipelines side by side."""
        return self.topology.world_size // self.size

    def position(self, rank: int) -> int:
        """The place of a rank in its pipeline."""
        if self.axis == "world":
            return self.topology.group("world", 0).index(rank)
        return self.topology.node_of(rank) if self.axis == "nodes" else self.topology.local_of(rank)

    def replica(self, rank: int) -> int:
        """The number of a rank's pipeline."""
        if self.axis == "world":
            return 0
        return self.topology.local_of(rank) if self.axis == "nodes" else self.topology.node_of(rank)

    def rank(self, position: int, replica: int) -> int:
        if self.axis == "world":
            return self.topology.group("world", 0)[position]
        node, local = (position, replica) if self.axis == "nodes" else (replica, position)
        return self.topology.nodes[node][local]

    @property
    def nodes(self) -> tuple[int, ...]:
        """The node of every position of the first pipeline; empty where no two are on one."""
        nodes = tuple(self.topology.node_of(self.rank(position, 0)) for position in range(self.size))
        return nodes if len(set(nodes)) < len(nodes) else ()

    @property
    def group(self) -> str:
        """The group of the ranks that hold the same stages; empty where each is alone."""
        return "" if self.replicas == 1 else {"nodes": "node", "locals": "rail"}[self.axis]

    def holders(self, position: int) -> tuple[int, ...]:
        """The ranks that hold the stages of a position, in the order of their group."""
        rank = self.rank(position, 0)
        return self.topology.group(self.group, rank) if self.group else (rank,)

    def share(self, count: int, speeds: Sequence[float] = ()) -> tuple[tuple[int, ...], ...]:
        """For every rank the micro-batches of its pipeline, of 0..count-1.

        Args:
            speeds: of all ranks; empty where they are alike. A pipeline is as fast as its ranks together are.
        """
        ranks = range(self.topology.world_size)
        pipelines = range(self.replicas) if speeds else ()
        of_pipelines = [sum(speeds[r] for r in ranks if self.replica(r) == pipeline) for pipeline in pipelines]
        each = share_micro_batches(count, self.replicas, speeds=of_pipelines)
        return tuple(each[self.replica(rank)] for rank in ranks)

    def speeds(self, of_ranks: Sequence[float]) -> tuple[float, ...]:
        """Of every position that of its ranks, all pipelines together, for equally many micro-batches; empty where the
        positions are alike.

        Args:
            of_ranks: speeds of all ranks; empty where they are alike.
        """
        ranks = range(self.topology.world_size) if of_ranks else ()
        each = tuple(sum(of_ranks[r] for r in ranks if self.position(r) == place) for place in range(self.size))
        return each if max(each) - min(each) > 1e-9 else ()
