"""Placement: in which stripes a unit is cut, and on which rank each stripe has its home. Imports topology only."""

from __future__ import annotations

from dataclasses import dataclass

from tawpipe.topology import Topology

PLACEMENTS = ("spread", "striped", "whole", "flat")
STRIPE_ALIGNMENT = 8
"""Elements: stripes start at multiples of 16 bytes in every dtype, which collectives and vector loads want."""


@dataclass(frozen=True)
class Home:
    """Where the stripes of one unit live.

    Args:
        ranks: global rank of stripe 0, 1, ...; all stripes are equally long and lie in this order in the unit.
        stripe: elements in a stripe, the padding of the unit's end included.
    """

    ranks: tuple[int, ...]
    stripe: int

    @property
    def padded(self) -> int:
        """Elements of the whole unit with its padding."""
        return self.stripe * len(self.ranks)

    def index(self, rank: int) -> int | None:
        """Which stripe lives on ``rank``, or None."""
        return self.ranks.index(rank) if rank in self.ranks else None


def home_node(block: int, topology: Topology) -> int:
    """The node that keeps the units of a block under ``striped`` and ``whole``: neighbours have different nodes."""
    return block % topology.num_nodes


def home_local(block: int, topology: Topology) -> int:
    """The local rank that keeps the units of a block under ``whole``."""
    return block // topology.num_nodes % topology.local_size


def place(placement: str, topology: Topology, numel: int, block: int) -> Home:
    """The home of a unit of ``numel`` elements whose first block is ``block``.

    * ``spread``: over all devices. Stripe l * nodes + n is on local rank l of node n, so that gathering over a rail, then
      inside the node, puts the stripes in order.
    * ``striped``: over the devices of one node.
    * ``whole``: on one device.
    * ``flat``: over all devices, in the order of their ranks, as flat sharding does.

    >>> place("spread", Topology.grid(2, 2), 100, 0).ranks
    (0, 2, 1, 3)
    """
    if placement == "spread":
        ranks = tuple(node[i] for i in range(topology.local_size) for node in topology.nodes)
    elif placement == "striped":
        ranks = topology.nodes[home_node(block, topology)]
    elif placement == "whole":
        ranks = (topology.nodes[home_node(block, topology)][home_local(block, topology)],)
    else:
        assert placement == "flat", placement
        ranks = topology.group("world", 0)
    stripe = -(-numel // len(ranks))
    stripe = -(-stripe // STRIPE_ALIGNMENT) * STRIPE_ALIGNMENT
    return Home(ranks, stripe)
