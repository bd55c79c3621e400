"""Which ranks compute which micro-batches of a step."""

from __future__ import annotations

from tawpipe.errors import UserError
from tawpipe.schedule.settings import ScheduleSettings
from tawpipe.schedule.spec import share_micro_batches
from tawpipe.topology import Topology


def share_in_sets(count: int, topology: Topology, settings: ScheduleSettings) -> tuple[tuple[int, ...], ...]:
    """Micro-batches 0..count-1 for every rank, the same for all ranks of a set.

    Raises:
        UserError: sets of this size cannot be on these nodes.
    """
    ranks, local = 1 if settings.sequence_ranks is None else settings.sequence_ranks, topology.local_size
    if not isinstance(ranks, int) or ranks < 1 or local % ranks:
        good = [str(size) for size in range(1, local + 1) if local % size == 0]
        words = " or ".join([*([", ".join(good[:-1])] if good[1:] else []), good[-1]])
        many = f"must divide the {local} processes of every node"
        expected = f"{words}: it {many if local > 1 else 'counts processes of one node, and every node has one'}"
        raise UserError("schedule.sequence_ranks", ranks, expected)
    return share_micro_batches(count, topology.world_size, ranks)
