"""Seconds that a model's blocks take for passes of some tokens: measured on a device, or estimated from its data."""

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
"""Assumed share of the memory bandwidth with which weights are read, if nothing was measured."""
TOKENS = (1, 4, 16, 64, 256)
"""Tokens of the measured passes. Up to ``ALONE`` tokens, each belongs to another user; larger passes are one chunk."""
ALONE = 16


def estimated_passes(
    model: ModelSpec, *, flops: float, memory_rate: float, weights: WeightBytes, key_width: float
) -> tuple[PassCost, ...]:
    """Estimate from the data sheet of a device how many seconds each block takes for a pass of some tokens.

    A block takes the longer of two times: reading its weights, and multiplying with them. Reading keys and values adds
    to that. The embedding costs nothing.

    Args:
        model: sizes of the blocks and units.
        flops: floating-point operations per second of the device, from its data sheet.
        memory_rate: memory bandwidth of the device in bytes per second, from its data sheet.
        weights: bytes per element of each unit.
        key_width: bytes of the keys and values of one token in one layer.

    Returns:
        The cost of every block, in the order of the blocks.
    """
    costs = []
    for block in model.blocks:
        active, points = sum(model.units[unit].computing for unit in block.units), list[tuple[float, float]]()
        for tokens in (*(2**n for n in range(14)), FEW + 1):
            widths = weights.few if tokens <= FEW else weights.many
            sizes = [(model.units[unit], widths[unit]) for unit in block.units]
            everything, reached = (sum(getattr(u, name) * w for u, w in sizes) for name in ("parameters", "computing"))
            read = min(everything, tokens * reached) / (READS * memory_rate)  # of a mixture, the selected experts
            points.append((float(tokens), max(read, 2 * active * tokens / (EFFICIENCY * flops))))
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
    """Measure on a device how many seconds each block takes for a pass: one block of every kind, with random weights.

    The time to read keys and values is estimated: with the bandwidth at which weights are read for a single token.

    Args:
        chain: model on the meta device. It is prepared here and cannot be used for anything else afterwards.
        dtype: type to compute in.
        device: device to measure.
        form: format of the weights of linear layers.
        weights: bytes per element of each unit.

    Returns:
        The cost of every block, in the order of the blocks. Blocks of one kind have the same cost.
    """
    try:
        bench, costs = Bench(chain, device, dtype, chunk_tokens=max(TOKENS)), dict[int, PassCost]()
        clock, width = Clock(bench), key_bytes(chain.config.get_text_config(), dtype)[0]
        progress.info(f"measuring {len(bench.kinds())} kinds of blocks on passes of up to {max(TOKENS)} tokens")
        for (kind, *_), blocks in bench.kinds().items():
            if kind == "layer" and form != EXACT:  # the quantised modules compute from here on
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
