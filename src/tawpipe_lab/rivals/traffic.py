"""Bytes that the rivals as shipped pass between nodes.

W is the bytes of all weights, P the devices, R the rounds of gathers in a step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from tawpipe.topology import Topology


@dataclass(frozen=True)
class ShardedTraffic:
    """Shares of W that cross a node's link per round, in each direction.

    Args:
        rounds: gathers of a step's micro-batches.
        forward, backward: weights in the forward and in the backward pass of every round.
        gradients: in the backward pass of every round, or of the last one only (``reduce_last``).
        once: weights cross in the first round only.
        first: of the weights that are kept from one round to the next, as a share of W.
        trained: share of W that has gradients.
    """

    rounds: int
    forward: float
    backward: float
    gradients: float
    reduce_last: bool = False
    once: bool = False
    first: float = 0.0
    trained: float = 1.0

    @property
    def gathers(self) -> int:
        return 1 if self.once else self.rounds

    @property
    def total(self) -> float:
        """Traffic of a step, as a multiple of W."""
        reductions = 1 if self.reduce_last else self.rounds
        kept = (self.gathers - 1) * self.forward * self.first
        return self.gathers * (self.forward + self.backward) - kept + reductions * self.gradients * self.trained


def sharded_traffic(
    name: str,
    micro_batches: int,
    topology: Topology,
    knobs: Mapping[str, Any],
    *,
    first: float,
    last: float,
    trained: float = 1.0,
) -> ShardedTraffic:
    """Traffic of rivals that shard over every node's link; see ``bounds.shipped_bounds``.

    Args:
        first, last: shares of W of what is kept from one round to the next, and from the forward to the backward pass.
        trained: share of W that has gradients.
    """
    per_gather = int(knobs.get("micro_batches_per_gather", 1))
    nodes, devices = topology.num_nodes, topology.world_size
    # Over which ranks weights are gathered and gradients reduced, each by itself: either may be replaced by ours.
    ring, tree = (1 - 1 / devices if nodes > 1 else 0.0), 1 - 1 / nodes
    rounds = max(1, -(-micro_batches // (devices * per_gather)))
    if name == "hsdp":
        return ShardedTraffic(rounds, 0.0, 0.0, 2 * tree, reduce_last=True, trained=trained)
    hierarchical = name == "fsdp2-hierarchical"
    gathered = tree if hierarchical else ring
    reduction = knobs.get("reduction", "hierarchical" if hierarchical else "gloo")
    reduced = tree if reduction == "hierarchical" else ring
    keep = bool(knobs.get("keep_weights", False)) or name == "zero-hpz"
    inside = name == "fsdp2-node" or keep
    return ShardedTraffic(
        rounds=rounds,
        forward=gathered,
        backward=0.0 if inside else gathered * (1 - last),
        gradients=reduced,
        reduce_last=not knobs.get("reduce_every_round", True),
        once=keep,
        first=first,
        trained=trained,
    )


def pipeline_bytes(name: str, amount: float, topology: Topology, each: int) -> tuple[float, ...]:
    """Bytes that every node's link carries, out and in alike.

    Args:
        amount: bytes of the activations of all micro-batches at one boundary between stages.
    """
    moved = [0.0] * topology.num_nodes
    for here, there in pairwise(nodes_of_stages(name, topology, each)):
        if here != there:  # activations one way, as many gradients the other
            moved[here] += amount
            moved[there] += amount
    return tuple(moved)


def stages_per_rank(name: str) -> int:
    """Stages of a rank."""
    return 1 if name == "1f1b" else 2


def ranks_of_stages(name: str, ranks: int, each: int) -> list[int]:
    """The rank of every stage, in the order of the pipeline: round after round, for zbv there and back again.

    >>> ranks_of_stages("interleaved-1f1b", 3, 2), ranks_of_stages("zbv", 3, 2)
    ([0, 1, 2, 0, 1, 2], [0, 1, 2, 2, 1, 0])
    """
    return [*range(ranks), *reversed(range(ranks))] if name == "zbv" else [*range(ranks)] * each


def nodes_of_stages(name: str, topology: Topology, each: int) -> list[int]:
    """The node of every stage, in the order of the pipeline."""
    return [topology.node_of(rank) for rank in ranks_of_stages(name, topology.world_size, each)]
