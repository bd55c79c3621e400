"""Execution of a placing schedule: sends the shards of units from their homes to the ranks that need whole units."""

from __future__ import annotations

import torch
from torch import Tensor

from tawpipe.runtime.homes.storage import Storage
from tawpipe.runtime.transport.transport import Transport
from tawpipe.schedule.buffers import Buffer, home_weight, pooled
from tawpipe.schedule.step import Schedule


def placed_weights(schedule: Schedule, storage: Storage, transport: Transport) -> dict[int, Tensor]:
    """Run a schedule of ``build_placing`` and return the whole units that this rank needs. Call on all ranks.

    No other action may be running.

    Args:
        schedule: the placing schedule.
        storage: home memory of this rank's shards.
        transport: has the communication groups of the schedule.

    Returns:
        For each unit, its flat weights in the format in which they travel, with the padding of its home.
    """
    rank, buffers, placed = transport.rank, dict[Buffer, Tensor](), dict[int, Tensor]()
    for unit in storage.master:
        buffers[home_weight(unit)] = storage.compute_copy[unit]
    for unit in schedule.placed[rank]:
        home, here = schedule.homes[unit], storage.compute_copy.get(unit)
        dtype = storage.compute_dtype if here is None else here.dtype
        placed[unit] = torch.empty(home.padded, dtype=dtype, device=storage.device)
        for shard, place in enumerate(placed[unit].view(-1, home.shard_size)):
            buffers[pooled(f"W{unit}", shard)] = place
            if here is not None and home.index(rank) == shard:
                place.copy_(here)
    for action in schedule.programs[rank]:  # each exchange may block; their order prevents deadlock
        transport.exchange(action, buffers)
    return placed
