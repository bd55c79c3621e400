"""Placing weights, run: the stripes of units go from homes to where they are wanted whole."""

from __future__ import annotations

import torch
from torch import Tensor

from tawpipe.runtime.homes.storage import Storage
from tawpipe.runtime.transport.transport import Transport
from tawpipe.schedule.buffers import Buffer, home_weight, pooled
from tawpipe.schedule.step import Schedule


def placed_weights(schedule: Schedule, storage: Storage, transport: Transport) -> dict[int, Tensor]:
    """Play a schedule of ``build_placing``: what this rank wants, by unit, as it travels, with the padding of its home.
    Call on all ranks, with nothing under way.

    Args:
        transport: with the groups of the schedule.
    """
    rank, buffers, placed = transport.rank, dict[Buffer, Tensor](), dict[int, Tensor]()
    for unit in storage.master:
        buffers[home_weight(unit)] = storage.compute_copy[unit]
    for unit in schedule.placed[rank]:
        home, here = schedule.homes[unit], storage.compute_copy.get(unit)
        dtype = storage.compute_dtype if here is None else here.dtype
        placed[unit] = torch.empty(home.padded, dtype=dtype, device=storage.device)
        for stripe, place in enumerate(placed[unit].view(-1, home.stripe)):
            buffers[pooled(f"W{unit}", stripe)] = place
            if here is not None and home.index(rank) == stripe:
                place.copy_(here)
    for action in schedule.programs[rank]:  # one thread may block in each
        transport.exchange(action, buffers)
    return placed
