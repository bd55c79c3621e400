"""Traffic of links, counted from a schedule's actions. ``Strategy.traffic`` is the formula for comparison.

It is counted in elements, not bytes, because weights and gradients may travel in different dtypes.
"""

from __future__ import annotations

from collections.abc import Callable

from tawpipe.schedule.actions import Action, Lane, Op
from tawpipe.schedule.buffers import Buffer
from tawpipe.schedule.link_traffic import LinkTraffic
from tawpipe.schedule.spec import coded_part_bytes, compressed_bytes
from tawpipe.schedule.step import Schedule
from tawpipe.topology import Topology


def link_elements(schedule: Schedule, *, physical: Topology | None = None) -> tuple[LinkTraffic, ...]:
    """Return the elements of weights and gradients that every node's link carries, counted from the actions.

    A collective counts as a ring in the order of its members. A broadcast counts as a chain from its root, and a reduce
    as a chain to its root. Ranks without a program are skipped.

    Args:
        schedule: the schedule.
        physical: the real nodes, if the schedule was built for others (such as nodes of one rank each).
    """
    topology = physical or schedule.topology
    assert topology.world_size == schedule.topology.world_size
    counts = [[0, 0, 0, 0] for _ in range(topology.num_nodes)]
    for rank, program in enumerate(schedule.programs):
        if not program:
            continue
        node, sizes = topology.node_of(rank), schedule.buffer_elements(rank)
        for action in program:
            if action.op is Op.EXCHANGE:
                for transfer in action.transfers:
                    if topology.node_of(transfer.peer) != node and not transfer.buffer.is_activation:
                        offset = (0 if transfer.buffer.is_weight else 2) + (0 if transfer.send else 1)
                        counts[node][offset] += sizes[transfer.buffer]
            elif action.op is Op.COLLECTIVE and not (*action.reads, *action.writes)[0].is_activation:
                sent, received = _round_the_ring(schedule, topology, rank, action, sizes)
                offset = 0 if (*action.reads, *action.writes)[0].is_weight else 2
                counts[node][offset] += sent
                counts[node][offset + 1] += received
    return tuple(LinkTraffic(*four) for four in counts)


def borders_passed(
    schedule: Schedule, each: Callable[[int], int] = lambda _: 1, *, physical: Topology | None = None
) -> tuple[tuple[int, int], ...]:
    """Return for every node how many boundary activations and gradients it (sends, receives) over its link.

    Args:
        schedule: the schedule.
        each: function that returns the weight with which a micro-batch counts; 1 by default.
        physical: the real nodes, if the schedule was built for others.
    """
    topology = physical or schedule.topology
    counts = [[0, 0] for _ in range(topology.num_nodes)]
    for rank, program in enumerate(schedule.programs):
        node = topology.node_of(rank)
        for transfer in (transfer for action in program for transfer in action.transfers):
            if transfer.buffer.is_activation and topology.node_of(transfer.peer) != node:
                counts[node][0 if transfer.send else 1] += each(transfer.buffer.at[0])
    return tuple((sent, received) for sent, received in counts)


def scratch_bytes(schedule: Schedule, rank: int, gradient_bytes: int = 4) -> int:
    """Return the bytes of the buffers in which one rank codes and decodes messages; 0 without compression.

    Messages of one lane share a buffer.

    Args:
        schedule: the schedule.
        rank: the rank.
        gradient_bytes: bytes of one gradient element that travels.
    """
    sizes, most = schedule.buffer_elements(rank), dict[Lane, int]()
    for action in schedule.programs[rank]:
        if not action.compression:
            continue
        if action.op is Op.EXCHANGE:
            needed = sum(compressed_bytes(sizes[t.buffer]) for t in action.transfers)
        elif action.compression == "exact" and not action.refreshes:  # one message is sent, one is received
            needed = 2 * sum(coded_part_bytes(sizes[action.writes[0]], gradient_bytes))
        else:
            members = len(schedule.topology.group(action.group, rank))
            gathers = action.collective == "all_gather"
            shard_size = sizes[action.reads[0] if gathers else action.writes[0]]
            message = compressed_bytes(shard_size, action.compression)
            needed = message * (1 + members if gathers else 2 * members)
        most[action.lane] = max(most.get(action.lane, 0), needed)
    return sum(most.values())


def _round_the_ring(
    schedule: Schedule, topology: Topology, rank: int, action: Action, sizes: dict[Buffer, int]
) -> tuple[int, int]:
    """Return the elements that ``rank`` (sends, receives) over links between nodes in one collective.

    The members form a ring in their order. A broadcast is a chain from the root, a reduce a chain to the root.

    Args:
        schedule: the schedule.
        topology: the real nodes.
        rank: a member of the group.
        action: the collective.
        sizes: elements of every buffer of ``rank``.
    """
    members = schedule.topology.group(action.group, rank)
    steps, at = len(members) - 1, members.index(rank)
    before, after = (topology.node_of(members[(at + d) % len(members)]) != topology.node_of(rank) for d in (-1, 1))
    if action.collective in ("broadcast", "reduce"):
        whole = sizes[(*action.reads, *action.writes)[0]]
        place = (at - members.index(action.root)) % len(members)
        away, towards = whole * (place < steps), whole * (place > 0)
        return (
            (away * after, towards * before) if action.collective == "broadcast" else (towards * before, away * after)
        )
    if action.collective == "all_gather":
        moved = steps * sizes[action.reads[0]]
    elif action.collective == "reduce_scatter":
        moved = steps * sizes[action.writes[0]]
    else:
        moved = 2 * steps * sizes[action.reads[0]] // len(members)
    return moved * after, moved * before
