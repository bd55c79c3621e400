"""First use of every operation of a schedule, before the first step, so that no step pays for it.

At the first use of an operation, NCCL connects two ranks and loads what it needs, and the host waits for that. One
thread issues the actions of all lanes of a process. So such a wait in one lane would delay the others, and the peers it
waits for may wait in turn. Therefore every operation of a rank's programs is run once on a few numbers, in an order
that all ranks share: group by group, collectives before pairs, pairs by their ranks. All ranks of the first unfinished
operation in that order have reached it, so it can always run, and no deadlock is possible.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from tawpipe.schedule.actions import Action, Lane, Op, Transfer, exchange
from tawpipe.schedule.buffers import Buffer, pooled
from tawpipe.schedule.step import Schedule
from tawpipe.topology import Topology

ELEMENTS = 8
"""Elements of the shard that a rank contributes."""
SOURCE, TARGET = pooled("W", 0), pooled("W", 1)


def first_uses(schedules: Iterable[Schedule], rank: int) -> Iterator[Action]:
    """Yield one action for each kind of operation in a rank's programs, in the order that all ranks share.

    Kinds differ by lane, group, collective, root, peer and compression. With every peer, numbers are sent both ways."""
    collectives: set[tuple[Lane, str, str, int, str]] = set()
    pairs: set[tuple[Lane, str, tuple[int, int], str]] = set()
    for schedule in schedules:
        for action in schedule.programs[rank]:
            if action.op is Op.EXCHANGE:
                for peer in {transfer.peer for transfer in action.transfers}:
                    pair = (min(rank, peer), max(rank, peer))
                    pairs.add((action.lane, action.group, pair, action.compression))
            elif action.group:  # COUNT and NORM sum over all ranks, SIZE takes the maximum
                collective = action.collective or "all_reduce"
                # exact coding uses the messages of the uncompressed operation
                compression = action.compression.replace("exact", "")
                collectives.add((action.lane, action.group, collective, action.root, compression))
    for lane, group in sorted({(use[0], use[1]) for use in (*collectives, *pairs)}):
        for *_, collective, root, compression in sorted(use for use in collectives if use[:2] == (lane, group)):
            in_place = collective in ("all_reduce", "reduce", "broadcast")
            yield Action(
                Op.COLLECTIVE,
                lane,
                (SOURCE,),
                (SOURCE if in_place else TARGET,),
                collective=collective,
                group=group,
                root=root,
                compression=compression,
            )
        for *_, pair, compression in sorted(use for use in pairs if use[:2] == (lane, group)):
            peer = pair[0] if pair[1] == rank else pair[1]
            yield exchange(
                lane,
                (Transfer(True, peer, 0, SOURCE), Transfer(False, peer, 0, TARGET)),
                group,
                compression=compression,
            )


def few_numbers(action: Action, topology: Topology, rank: int, device: torch.device) -> dict[Buffer, Tensor]:
    """Return small zero tensors for the buffers of an action of ``first_uses``."""
    members = len(topology.group(action.group, rank)) if action.op is Op.COLLECTIVE else 1
    sizes = {
        "all_gather": (ELEMENTS, ELEMENTS * members),
        "reduce_scatter": (ELEMENTS * members, ELEMENTS),
    }.get(action.collective, (ELEMENTS, ELEMENTS))
    return {buffer: torch.zeros(size, device=device) for buffer, size in zip((SOURCE, TARGET), sizes, strict=True)}
