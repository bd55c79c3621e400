"""Seconds of a model's blocks on passes of some tokens: measured on a device, or estimated from its data sheet."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from tawpipe.model.chain import Chain
from tawpipe.model.flops import key_bytes
from tawpipe.plan.bench import Bench
from tawpipe.plan.profile import EFFICIENCY, Clock
from tawpipe.plan.serving import PassCost
from tawpipe.runtime.memory import give_back
from tawpipe.schedule.spec import ModelSpec

READS = 0.7
"""Share of a memory's rate at which weights are read where nothing was measured."""
TOKENS = (1, 4, 16, 64, 256)
"""Of the passes that are measured; up to ``ALONE`` each is of another user, the others are one chunk."""
ALONE = 16


def estimated_passes(
    model: ModelSpec, *, flops: float, memory_rate: float, width: float, key_width: float
) -> tuple[PassCost, ...]:
    """What reading the weights takes, or multiplying with them, whichever is longer; and reading keys and values.

    Args:
        flops, memory_rate: of the device, per second, as its data sheet says.
        width: bytes of an element of a weight.
        key_width: bytes of a layer's keys and values of a token.
    """
    costs = []
    for block in model.blocks:
        units = [model.units[unit] for unit in block.units]
        everything, met = sum(unit.parameters for unit in units), sum(unit.computing for unit in units)
        points = []
        for tokens in (2**n for n in range(14)):
            read = min(everything, tokens * met) * width / (READS * memory_rate)  # of a mixture, the experts met
            points.append((float(tokens), max(read, 2 * met * tokens / (EFFICIENCY * flops))))
        layer = block.kind == "layer"
        costs.append(PassCost(tuple(points), key_width / (READS * memory_rate) * layer))
    return tuple(
        PassCost() if block.kind == "embedding" else cost for block, cost in zip(model.blocks, costs, strict=True)
    )


def measured_passes(
    chain: Chain, *, dtype: torch.dtype, device: torch.device, tell: Callable[[str], None] = lambda _: None
) -> tuple[PassCost, ...]:
    """One block of every kind, run with random weights. Keys and values are read as fast as the weights for one token.

    Args:
        chain: of a model on the meta device; it is prepared here and is of no other use afterwards.
    """
    try:
        bench, costs = Bench(chain, device, dtype, chunk_tokens=max(TOKENS)), dict[int, PassCost]()
        clock, width = Clock(bench, tell), key_bytes(chain.config.get_text_config(), dtype)[0]
        tell(f"measuring {len(bench.kinds())} kinds of blocks on passes of up to {max(TOKENS)} tokens")
        for (kind, *_), blocks in bench.kinds().items():
            shapes: Sequence[tuple[int, ...]] = [(1,) * n if n <= ALONE else (n,) for n in TOKENS]
            seconds = [clock.seconds(blocks[0], shape, backward=False)[0] for shape in shapes]
            points = tuple(zip(map(float, TOKENS), seconds, strict=True))
            weights = sum(chain.units[unit].numel for unit in chain.blocks[blocks[0]].units) * dtype.itemsize
            key_s = seconds[0] * width / weights if kind == "layer" and weights else 0.0
            costs |= dict.fromkeys(blocks, PassCost(points, key_s))
        return tuple(costs[block] for block in range(len(chain.blocks)))
    finally:
        give_back(device)
