"""Placing weights, run: every rank gets what it wants, bit by bit, from wherever training keeps it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from schedules import llama, step_for
from tawpipe.model.units import ParameterSlot, Unit
from tawpipe.runtime.homes.storage import Storage
from tawpipe.runtime.transport.transport import Transport
from tawpipe.runtime.world import World
from tawpipe.schedule.decode_steps import build_decode_steps
from tawpipe.serving.placed import placed_weights
from tawpipe.serving.placing import build_placing


def placed(world: World, strategy: str) -> dict[int, bool]:
    """In a worker: whether each unit of a stage came as it is at home, all of whose elements are numbered."""
    model = llama(world.size + 1, tied=True)
    units = [
        Unit(n, f"u{n}", True, (ParameterSlot(f"u{n}", (u.numel,), 0, u.numel),), u.blocks, u.numel)
        for n, u in enumerate(model.units)
    ]
    homes = step_for(model, world.topology, world.size, strategy=strategy).homes
    types: Any = {"compute_dtype": torch.float32, "master_dtype": torch.float32}
    storage = Storage(units, homes, world.rank, device=world.device, **types)
    for unit, home in enumerate(homes):
        if (stripe := home.index(world.rank)) is not None:
            whole = torch.arange(home.padded, dtype=torch.float32) + 1e5 * unit
            storage.compute_copy[unit].copy_(whole[stripe * home.shard_size : (stripe + 1) * home.shard_size])
    stages = build_decode_steps(model, world.topology, 1).homes
    wanted = [[u for u, home in enumerate(stages) if home.index(rank) is not None] for rank in range(world.size)]
    schedule = build_placing(model, world.topology, homes, wanted)
    transport = Transport(world.topology, world.rank, [schedule], device=world.device, strict=True)
    found = placed_weights(schedule, storage, transport)
    again = placed_weights(schedule, storage, transport)
    transport.close()
    assert list(found) == list(schedule.placed[world.rank]) == wanted[world.rank]
    return {
        unit: torch.equal(flat, torch.arange(flat.numel()) + 1e5 * unit) and torch.equal(flat, again[unit])
        for unit, flat in found.items()
    }


@pytest.mark.parametrize(
    ("strategy", "nodes", "local"), [("tawpipe-spread", 3, 1), ("tawpipe-whole", 2, 2), ("hsdp", 2, 2), ("flat", 2, 1)]
)
def test_weight_placing_delivers_whole_units_bit_by_bit(pool, strategy, nodes, local):
    for found in pool.run(f"{__name__}:placed", nodes, local, strategy=strategy):
        assert found and all(found.values())
