"""How much crosses which link, counted from a schedule's actions; ``Strategy.traffic`` is the formula beside it.

Elements, not bytes: weights and gradients may travel in different dtypes.
"""

from __future__ import annotations

from collections.abc import Callable

from tawpipe.schedule.actions import Action, Lane, Op
from tawpipe.schedule.buffers import Buffer
from tawpipe.schedule.link_traffic import LinkTraffic
from tawpipe.schedule.spec import coded_rooms, compressed_bytes
from tawpipe.schedule.step import Schedule
from tawpipe.topology import Topology


def link_elements(schedule: Schedule, *, physical: Topology | None = None) -> tuple[LinkTraffic, ...]:
    """What every node's link carries of weights and gradients, from the actions of the ranks that have some.

    A collective is counted as a ring in the order of its members, broadcast and reduce as a chain from or to the root.

    Args:
        physical: the nodes that the ranks really are on, where the schedule was built for others (without grouping: for
            nodes of one rank each).
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
    """How many activations of a boundary's size every node sends to others, and receives; other arguments as above.

    Args:
        each: of a micro-batch what one counts.
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
    """Bytes of the room that one rank needs for messages that are coded; those of a lane share a place.

    Args:
        gradient_bytes: of an element of gradients that travel.
    """
    sizes, most = schedule.buffer_elements(rank), dict[Lane, int]()
    for action in schedule.programs[rank]:
        if not action.compression:
            continue
        if action.op is Op.EXCHANGE:
            needed = sum(compressed_bytes(sizes[t.buffer]) for t in action.transfers)
        elif action.compression == "exact" and not action.refreshes:  # one message leaves, one arrives
            needed = 2 * sum(coded_rooms(sizes[action.writes[0]], gradient_bytes))
        else:
            members = len(schedule.topology.group(action.group, rank))
            gathers = action.collective == "all_gather"
            stripe = sizes[action.reads[0] if gathers else action.writes[0]]
            message = compressed_bytes(stripe, action.compression)
            needed = message * (1 + members if gathers else 2 * members)
        most[action.lane] = max(most.get(action.lane, 0), needed)
    return sum(most.values())


def _round_the_ring(
    schedule: Schedule, topology: Topology, rank: int, action: Action, sizes: dict[Buffer, int]
) -> tuple[int, int]:
    """Elements that one member of a collective sends to the next one and receives from the one before, over slow
    links.
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
