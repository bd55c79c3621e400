"""Bytes that the rivals send between nodes.

W is the bytes of all weights, P the number of devices, R the number of rounds of gathers in a step.
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
        rounds: number of gathers for a step's micro-batches.
        forward, backward: weights in the forward and in the backward pass of every round.
        gradients: gradients in the backward pass of every round, or of the last one only (``reduce_last``).
        reduce_last: if True, gradients are reduced in the last round only.
        once: if True, weights cross in the first round only.
        first: share of W whose weights are kept from one round to the next.
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
        """Traffic of a step as a multiple of W."""
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
    """Return the shares of the weights that cross every node's link under a rival that shards.

    ``bounds.shipped_bounds`` has the formulas.

    Args:
        name: rival.
        micro_batches: number of micro-batches of a step, over all devices.
        topology: ranks and nodes.
        knobs: knobs of the rival.
        first: share of W that is kept from one round to the next.
        last: share of W that is kept from the forward to the backward pass.
        trained: share of W that has gradients.
    """
    per_gather = int(knobs.get("micro_batches_per_gather", 1))
    nodes, devices = topology.num_nodes, topology.world_size
    # Share of W over a link, in a ring over all ranks or node by node. Our collectives may replace gather or reduction.
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
    """Return for every node the bytes that its link sends in a step; it receives the same number of bytes.

    Args:
        name: rival.
        amount: bytes of the activations of all micro-batches at one boundary between stages.
        topology: ranks and nodes.
        each: number of stages of a rank.
    """
    moved = [0.0] * topology.num_nodes
    for here, target in pairwise(nodes_of_stages(name, topology, each)):
        if here != target:  # activations one way, gradients of equal size the other
            moved[here] += amount
            moved[target] += amount
    return tuple(moved)


def stages_per_rank(name: str) -> int:
    """Return the number of stages of a rank."""
    return 1 if name == "1f1b" else 2


def ranks_of_stages(name: str, ranks: int, each: int) -> list[int]:
    """Return the rank of every stage, in the order of the pipeline.

    Stages go round the ranks in order; for zbv they go to the last rank and back again.

    >>> ranks_of_stages("interleaved-1f1b", 3, 2), ranks_of_stages("zbv", 3, 2)
    ([0, 1, 2, 0, 1, 2], [0, 1, 2, 2, 1, 0])
    """
    return [*range(ranks), *reversed(range(ranks))] if name == "zbv" else [*range(ranks)] * each


def nodes_of_stages(name: str, topology: Topology, each: int) -> list[int]:
    """Return the node of every stage, in the order of the pipeline."""
    return [topology.node_of(rank) for rank in ranks_of_stages(name, topology.world_size, each)]
