"""Placement: in which stripes a unit is cut, and on which rank each stripe has its home. Imports topology and
errors only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tawpipe.errors import UserError
from tawpipe.topology import Topology

PLACEMENTS = ("spread", "striped", "whole", "flat")
"""Those that keep one copy of everything and fit every model and cluster; see ``place``."""
ALL_PLACEMENTS = (*PLACEMENTS, "hybrid", "ring")
"""And one copy per node, and WeiPipe's ring, see ``ring.place_on_ring``."""
ALIKE = ("spread", "flat", "hybrid")
"""Those under which all ranks of equally large nodes do the same, but for the names of their peers."""
AT_ONE_PLACE = ("striped", "whole")
"""Those under which a unit lives on one node, so that it can be said on which."""
STRIPE_ALIGNMENT = 8
"""Elements: stripes start at multiples of 16 bytes in every dtype, which collectives and vector loads want."""


@dataclass(frozen=True)
class Home:
    """Where the stripes of one unit live.

    Args:
        ranks: global rank of stripe 0, 1, ...; all stripes are equally long and lie in this order in the unit.
        stripe: elements in a stripe, the padding of the unit's end included.
        replicas: the ranks, in the same order, of further copies of everything: weights, gradient and optimizer state.
            Every copy is updated by itself with the same numbers. No rank is in two copies.
    """

    ranks: tuple[int, ...]
    stripe: int
    replicas: tuple[tuple[int, ...], ...] = ()

    @property
    def padded(self) -> int:
        """Elements of the whole unit with its padding."""
        return self.stripe * len(self.ranks)

    @property
    def copies(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of every copy. What is read once (a checkpoint, the gradient's norm) is read from the first."""
        return (self.ranks, *self.replicas)

    def index(self, rank: int) -> int | None:
        """Which stripe lives on ``rank``, in whichever copy, or None."""
        for ranks in self.copies:
            if rank in ranks:
                return ranks.index(rank)
        return None


def home_node(block: int, topology: Topology) -> int:
    """The node that keeps the units of a block under ``striped`` and ``whole``: neighbours have different nodes."""
    return block % topology.num_nodes


def home_local(block: int, topology: Topology) -> int:
    """The local rank that keeps the units of a block under ``whole``."""
    return block // topology.num_nodes % topology.local_size


def parse_homes(text: str) -> tuple[int, ...]:
    """The setting ``schedule.homes``: of every unit the node (``striped``) or the rank (``whole``) that keeps it.

    >>> parse_homes("0,1, 0")
    (0, 1, 0)

    Raises:
        UserError: something else than numbers and commas.
    """
    words = [word.strip() for word in text.split(",")] if text.strip() else []
    if not all(word.isdecimal() and word.isascii() and len(word) < 10 for word in words):
        raise UserError("schedule.homes", text, "numbers of nodes (striped) or processes (whole), as in 0,1,2,0")
    return tuple(map(int, words))


def spell_homes(homes: Sequence[int]) -> str:
    """The text that ``parse_homes`` reads."""
    return ",".join(map(str, homes))


def place(placement: str, topology: Topology, numel: int, block: int, at: int | None = None) -> Home:
    """The home of a unit of ``numel`` elements whose first block is ``block``.

    * ``spread``: over all devices. Stripe l * nodes + n is on local rank l of node n, so that gathering over a rail,
      then inside the node, puts the stripes in order.
    * ``striped``: over the devices of one node, number ``at``; by default nodes in turn.
    * ``whole``: on one device, rank ``at``; by default one of each node in turn.
    * ``flat``: over all devices, in the order of their ranks, as flat sharding does.
    * ``hybrid``: over the devices of every node, one copy a node, as HSDP does. Stripes divide by the number of nodes,
      so that an all-reduce between these cuts them evenly.

    >>> place("spread", Topology.grid(2, 2), 100, 0).ranks
    (0, 2, 1, 3)
    >>> place("hybrid", Topology.grid(2, 2), 100, 0).copies
    ((0, 1), (2, 3))
    """
    replicas: tuple[tuple[int, ...], ...] = ()
    multiple = STRIPE_ALIGNMENT
    if placement == "spread":
        ranks = tuple(node[i] for i in range(topology.local_size) for node in topology.nodes)
    elif placement == "striped":
        ranks = topology.nodes[home_node(block, topology) if at is None else at]
    elif placement == "whole":
        usual = topology.nodes[home_node(block, topology)][home_local(block, topology)]
        ranks = (usual if at is None else at,)
    elif placement == "flat":
        ranks = topology.group("world", 0)
    else:
        assert placement == "hybrid", placement
        ranks, *others = topology.nodes
        replicas, multiple = tuple(others), STRIPE_ALIGNMENT * topology.num_nodes
    return Home(ranks, padded_stripe(numel, len(ranks), multiple), replicas)


def padded_stripe(numel: int, parts: int, multiple: int = STRIPE_ALIGNMENT) -> int:
    """Elements of each of ``parts`` equal stripes that hold ``numel`` elements, a multiple of ``multiple``.

    >>> padded_stripe(100, 3)
    40
    """
    stripe = -(-numel // parts)
    return -(-stripe // multiple) * multiple
