"""Costs of blocks as text, for settings, and estimated from sizes if they were not measured."""

from __future__ import annotations

import itertools
import math
from dataclasses import fields

from tawpipe.errors import UserError
from tawpipe.schedule.pipelines.work import BlockTimes, PipelineCosts
from tawpipe.schedule.spec import ModelSpec

USUAL = (None, None, None, *(field.default for field in fields(BlockTimes)[3:]))
"""Default values of the numbers of a block. Trailing numbers that equal them are omitted from the text."""
OTHERS = ("hop", "pace", "memory", "host", "near_hop", "nodes", "link")
BY_POSITION = ("nodes", "pace")
"""Fields of ``OTHERS`` that have one number for every position."""
OF_PRODUCTS = 16.0
"""Memory of a layer between the two parts of its backward pass, in boundary activations, if it was not measured. Llama
3 8B needs 17."""
EXPECTED = "times of all blocks (forward/input gradient/weight gradient), as in 1/2/0,32x10/20/10,5/30/5;hop=3"


def spell_times(costs: PipelineCosts) -> str:
    """Return costs as text, which ``parse_times`` reads.

    Each block is written as forward/backward_input/backward_weight, then /kept, /kept_for_weights, /resident and /stays
    up to the last one that is not the default. Equal blocks in a row are written once, with their number. Other costs
    that are not the default follow as ``name=value``.

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
    """Return the costs whose text (``spell_times``) is ``text``.

    Raises:
        UserError: ``text`` is not the text of costs.

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
    """Return the costs of all blocks, estimated from their parameters, for a model without measured times.

    Times are in proportion to the parameters that one token is multiplied with. One product of a micro-batch with all
    weights of the largest block takes 1000. A forward pass takes one product. The backward pass for inputs takes two,
    one of them for recomputation. The backward pass for weights takes one with the trained weights. The embedding is a
    look-up and takes no time. The head runs only in its backward pass, which is not split.

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
    """Return the numbers of one block as text, without trailing default values."""
    values = [getattr(block, field.name) for field in fields(BlockTimes)]
    while len(values) > 3 and values[-1] == USUAL[len(values) - 1]:
        values.pop()
    return "/".join(map(_number, values))


def _number(value: float) -> str:
    return str(int(value)) if float(value).is_integer() else repr(float(value))


def _positive(word: str) -> float:
    """Return the number that ``word`` spells.

    Raises:
        ValueError: it is not a number of at least 0.
    """
    if not (value := float(word)) >= 0:
        raise ValueError(word)
    return value
