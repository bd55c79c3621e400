"""Which ranks compute which micro-batches of a step."""

from __future__ import annotations

from tawpipe.dealing.speeds import parse_speeds
from tawpipe.errors import UserError
from tawpipe.schedule.settings import ScheduleSettings
from tawpipe.schedule.spec import share_micro_batches
from tawpipe.topology import Topology

MOST_APART = 20
"""So many times as fast as the slowest device is the fastest at most: a step has a micro-batch for every one."""


def share_in_sets(count: int, topology: Topology, settings: ScheduleSettings) -> tuple[tuple[int, ...], ...]:
    """Micro-batches 0..count-1 for every rank, the same for all ranks of a set.

    Raises:
        UserError: sets of this size cannot be on these nodes, or there are more or fewer speeds than ranks.
    """
    ranks, local = 1 if settings.sequence_ranks is None else settings.sequence_ranks, topology.local_size
    if not isinstance(ranks, int) or ranks < 1 or local % ranks:
        good = [str(size) for size in range(1, local + 1) if local % size == 0]
        words = " or ".join([*([", ".join(good[:-1])] if good[1:] else []), good[-1]])
        many = f"must divide the {local} processes of every node"
        why = f"it {many if local > 1 else 'counts processes of one node, and every node has one'}"
        raise UserError("schedule.sequence_ranks", ranks, f"{words}: {why}", need=why)
    return share_micro_batches(count, topology.world_size, ranks, speeds_of(settings, topology))


def speeds_of(settings: ScheduleSettings, topology: Topology) -> tuple[float, ...]:
    """Speeds of all ranks, that of the fastest being 1; empty where they are alike.

    Raises:
        UserError: they are not as many as there are ranks, or too far apart.
    """
    speeds = parse_speeds(settings.device_speeds)
    if len(speeds) not in (0, topology.world_size):
        expected = f"{topology.world_size} speeds, one for every process, as in {topology.world_size}x1; or none"
        raise UserError("schedule.device_speeds", settings.device_speeds, expected)
    if speeds and max(speeds) > MOST_APART * min(speeds):
        why = "leave such devices out"
        expected = f"none that is {MOST_APART} times as slow as others: {why}"
        raise UserError("schedule.device_speeds", settings.device_speeds, expected, need=why)
    return tuple(speed / max(speeds) for speed in speeds) if len(set(speeds)) > 1 else ()
