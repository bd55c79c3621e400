"""Distribution of a step's micro-batches over the ranks."""

from __future__ import annotations

from tawpipe.dealing.speeds import parse_speeds
from tawpipe.errors import UserError
from tawpipe.schedule.settings import ScheduleSettings
from tawpipe.schedule.spec import share_micro_batches
from tawpipe.topology import Topology

MOST_APART = 20
"""Largest ratio between the speeds of two devices. Every device has a micro-batch in each step."""


def share_in_cp_groups(count: int, topology: Topology, settings: ScheduleSettings) -> tuple[tuple[int, ...], ...]:
    """Return for every rank its micro-batches, out of 0..count-1, in proportion to the speeds of ``settings``.

    All ranks of a context-parallel group have equal lists.

    Raises:
        UserError: ``sequence_ranks`` does not divide the ranks of a node, or the speeds are not valid (``speeds_of``).
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
    """Return the relative speed per rank (fastest = 1) from ``device_speeds``; empty if all are equal.

    Raises:
        UserError: the number of speeds is not the number of ranks, or they differ too much.
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
