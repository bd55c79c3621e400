"""The rate at which updates of homes in the host's memory pass through a GPU."""

from __future__ import annotations

import time

import torch

from tawpipe.model.units import ParameterSlot, Unit
from tawpipe.plan.probe import host_link
from tawpipe.runtime.optimizer import adamw
from tawpipe.runtime.storage import Storage
from tawpipe.runtime.streaming import Streaming
from tawpipe.runtime.unit_optimizers import UnitOptimizers
from tawpipe.runtime.world import World
from tawpipe.schedule.placement import Home

ELEMENTS = 1 << 26
"""Of a unit: 16 slices, and 1 GiB of the host's memory."""
UP_BYTES = 16
"""That AdamW in fp32 brings for every element."""


def host_share(world: World) -> tuple[float, float]:
    """Bytes per second that updates bring to a device, and those that its host's link carries in both directions at
    once, while all ranks do the same; of the slowest rank.
    """
    numel, device = ELEMENTS, world.device
    unit = Unit(0, "unit", True, (ParameterSlot("unit", (numel,), 0, numel),), (0,), numel)
    storage = Storage(
        [unit],
        [Home.over((world.rank,), numel)],
        world.rank,
        device=device,
        compute_dtype=torch.bfloat16,
        master_dtype=torch.float32,
        host_homes="state",
    )
    streaming = Streaming(storage, UnitOptimizers(storage, adamw()))
    factor, seconds = torch.ones((), dtype=torch.float64, device=device), 0.0
    for _ in range(3):  # states are made in the first
        world.barrier()
        torch.cuda.synchronize(device)
        begin = time.perf_counter()
        streaming.update(0, factor, None, 1.0, None, early=False)
        torch.cuda.synchronize(device)
        seconds = time.perf_counter() - begin
    return UP_BYTES * numel / max(world.gather_numbers(seconds)), host_link(world).bytes_per_s
