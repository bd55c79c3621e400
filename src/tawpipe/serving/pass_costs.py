"""Seconds of a model's blocks on passes of some tokens: measured on a device, or estimated from its data sheet."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tawpipe.console import progress
from tawpipe.model.bits.lowbit import EXACT, FEW
from tawpipe.model.chain import Chain
from tawpipe.model.flops import key_bytes
from tawpipe.plan.cost.bench import Bench
from tawpipe.plan.cost.profile import EFFICIENCY, Clock
from tawpipe.runtime.memory import give_back
from tawpipe.schedule.spec import ModelSpec
from tawpipe.serving.held import WeightBytes, hold_weights
from tawpipe.serving.planner import PassCost

READS = 0.7
"""Share of a memory's rate at which weights are read where nothing was measured."""
TOKENS = (1, 4, 16, 64, 256)
"""Of the passes that are measured; up to ``ALONE`` each is of another user, the others are one chunk."""
ALONE = 16


def estimated_passes(
    model: ModelSpec, *, flops: float, memory_rate: float, weights: WeightBytes, key_width: float
) -> tuple[PassCost, ...]:
    """What reading the weights takes, or multiplying with them, whichever is longer; and reading keys and values.

    Args:
        flops, memory_rate: of the device, per second, as its data sheet says.
        weights: bytes of them.
        key_width: bytes of a layer's keys and values of a token.
    """
    costs = []
    for block in model.blocks:
        met, points = sum(model.units[unit].computing for unit in block.units), list[tuple[float, float]]()
        for tokens in (*(2**n for n in range(14)), FEW + 1):
            widths = weights.few if tokens <= FEW else weights.many
            sizes = [(model.units[unit], widths[unit]) for unit in block.units]
            everything, reached = (sum(getattr(u, name) * w for u, w in sizes) for name in ("parameters", "computing"))
            read = min(everything, tokens * reached) / (READS * memory_rate)  # of a mixture, the experts met
            points.append((float(tokens), max(read, 2 * met * tokens / (EFFICIENCY * flops))))
        cost = PassCost(tuple(sorted(points)), key_width / (READS * memory_rate) * (block.kind == "layer"))
        costs.append(PassCost() if block.kind == "embedding" else cost)
    return tuple(costs)


def measured_passes(
    chain: Chain,
    *,
    dtype: torch.dtype,
    device: torch.device,
    form: str = EXACT,
    weights: WeightBytes,
) -> tuple[PassCost, ...]:
    """One block of every kind, run with random weights. Keys and values are read as fast as the weights for one token.

    Args:
        chain: of a model on the meta device; it is prepared here and is of no other use afterwards.
        form: of matrices of linear layers.
        weights: bytes of them.
    """
    try:
        bench, costs = Bench(chain, device, dtype, chunk_tokens=max(TOKENS)), dict[int, PassCost]()
        clock, width = Clock(bench), key_bytes(chain.config.get_text_config(), dtype)[0]
        progress.info(f"measuring {len(bench.kinds())} kinds of blocks on passes of up to {max(TOKENS)} tokens")
        for (kind, *_), blocks in bench.kinds().items():
            if kind == "layer" and form != EXACT:  # from then on these modules compute, whatever is bound besides
                hold_weights(chain, blocks[:1], lambda unit: bench.values(unit.index), form=form)
            shapes: Sequence[tuple[int, ...]] = [(1,) * n if n <= ALONE else (n,) for n in TOKENS]
            seconds = [clock.seconds(blocks[0], shape, backward=False)[0] for shape in shapes]
            points = tuple(zip(map(float, TOKENS), seconds, strict=True))
            read = sum(chain.units[unit].numel * weights.few[unit] for unit in chain.blocks[blocks[0]].units)
            key_s = seconds[0] * width / read if kind == "layer" and read else 0.0
            costs |= dict.fromkeys(blocks, PassCost(points, key_s))
        return tuple(costs[block] for block in range(len(chain.blocks)))
    finally:
        give_back(device)
