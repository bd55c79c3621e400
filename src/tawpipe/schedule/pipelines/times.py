"""Costs of blocks as text, for settings, and from sizes, where nobody has measured."""

from __future__ import annotations

import itertools
import math
from dataclasses import fields

from tawpipe.errors import UserError
from tawpipe.schedule.pipelines.work import BlockTimes, PipelineCosts
from tawpipe.schedule.spec import ModelSpec

USUAL = (None, None, None, *(field.default for field in fields(BlockTimes)[3:]))
"""What is left out at the end of a block, if it is this."""
OTHERS = ("hop", "pace", "memory", "host", "near_hop", "nodes", "link")
BY_POSITION = ("nodes", "pace")
"""Those of them that have a number for every position."""
OF_PRODUCTS = 16.0
"""Boundaries for which W of a layer has memory, where nothing was measured; 17 in Llama 3 8B."""
EXPECTED = "times of all blocks (forward/input gradient/weight gradient), as in 1/2/0,32x10/20/10,5/30/5;hop=3"


def spell_times(costs: PipelineCosts) -> str:
    """Costs as text: for every block forward/backward_input/backward_weight, and as much of /kept/kept_for_weights
    and /resident and /stays as is not usual; equal blocks in a row once; then what else there is.

    >>> spell_times(PipelineCosts((BlockTimes(1, 2.5, 0), *[BlockTimes(10, 20, 10, 1, 4)] * 32), hop=3))
    '1/2.5/0,32x10/20/10/1/4;hop=3'
    """
    runs = [(len(list(same)), block) for block, same in itertools.groupby(costs.blocks)]
    parts = [",".join(f"{count}x{_spell_block(block)}" if count > 1 else _spell_block(block) for count, block in runs)]
    usual = PipelineCosts(())
    for name in OTHERS:
        if (value := getattr(costs, name)) != getattr(usual, name):
            parts.append(f"{name}={'/'.join(map(_number, value if name in BY_POSITION else (value,)))}")
    return ";".join(parts)


def parse_times(text: str) -> PipelineCosts:
    """The inverse of ``spell_times``.

    Raises:
        UserError: something else.

    >>> parse_times("2x1/2/1,4/5/6;pace=1/2").blocks[1:] == (BlockTimes(1, 2, 1), BlockTimes(4, 5, 6))
    True
    >>> parse_times("1/2")
    Traceback (most recent call last):
    tawpipe.errors.UserError: schedule.block_times: got '1/2'; times of all blocks (forward/input gradient/weight \
gradient), as in 1/2/0,32x10/20/10,5/30/5;hop=3
    """
    first, *rest = text.replace(" ", "").split(";")
    blocks: list[BlockTimes] = []
    others: dict[str, float | tuple[float, ...]] = {}
    try:
        for part in first.split(","):
            count, _, numbers = part.rpartition("x")
            values = [_positive(word) for word in numbers.split("/")]
            if math.inf in values:
                raise ValueError(part)
            blocks += [BlockTimes(*values)] * int(count or 1)
        for part in rest:
            name, _, words = part.partition("=")
            values = tuple(_positive(word) for word in words.split("/"))
            if name not in OTHERS or name in others or (name not in BY_POSITION and len(values) != 1):
                raise ValueError(part)
            if name == "nodes":
                values = tuple(map(int, words.split("/")))
            others[name] = values if name in BY_POSITION else values[0]
    except (TypeError, ValueError) as error:
        raise UserError("schedule.block_times", text, EXPECTED) from error
    return PipelineCosts(tuple(blocks), **others)  # type: ignore[arg-type]


def times_from_sizes(model: ModelSpec) -> PipelineCosts:
    """Times in proportion to the parameters that a token meets, for want of measured ones: thousandths of the largest
    block's.

    A forward pass is one product of a micro-batch with every weight, and so is each part of a backward pass; the part
    for inputs begins with the recomputation. The embedding is looked up. The head runs in its backward pass alone,
    and that as a whole.

    >>> from tawpipe.schedule.spec import BlockSpec, UnitSpec
    >>> units = UnitSpec(8000, True, (0, 3)), UnitSpec(1000, True, (1,)), UnitSpec(1000, True, (2,))
    >>> kinds = ("embedding", "layer", "layer", "head")
    >>> blocks = tuple(BlockSpec((unit,), kind) for unit, kind in zip((0, 1, 2, 0), kinds, strict=True))
    >>> spell_times(times_from_sizes(ModelSpec(blocks, units)))
    '0/0/0,2x125/250/125/1/16,0/3000/0'
    """
    sizes, trained = [], []
    for block in model.blocks:
        computes = block.kind != "embedding"
        units = [model.units[unit] for unit in block.units if computes]
        sizes.append(sum(unit.computing for unit in units))
        trained.append(sum(unit.computing for unit in units if unit.trainable))
    largest = max(sizes)
    times = []
    for block, size, trained_size in zip(model.blocks, sizes, trained, strict=True):
        forward, weights = (-(-1000 * number // largest) for number in (size, trained_size))
        if block.kind == "head":
            times.append(BlockTimes(0, 2 * forward + weights, 0))
        else:
            kept = OF_PRODUCTS if block.kind == "layer" and weights else 0.0
            times.append(
                BlockTimes(forward, 2 * forward if block.needs_backward else 0, weights, kept_for_weights=kept)
            )
    return PipelineCosts(tuple(times))


def _spell_block(block: BlockTimes) -> str:
    values = [getattr(block, field.name) for field in fields(BlockTimes)]
    while len(values) > 3 and values[-1] == USUAL[len(values) - 1]:
        values.pop()
    return "/".join(map(_number, values))


def _number(value: float) -> str:
    return str(int(value)) if float(value).is_integer() else repr(float(value))


def _positive(word: str) -> float:
    if not (value := float(word)) >= 0:
        raise ValueError(word)
    return value
