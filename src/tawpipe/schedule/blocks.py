"""What a rank computes, as actions: a block on its micro-batches. Imports errors and schedule.

Activations have names: ``x.m.b`` is the input of block b for micro-batch m, ``dx.m.b`` its gradient, ``graph.m.b`` or
``kept.m.b`` what the block keeps for its backward pass instead of its input, ``host.m.b`` its input in the host's
memory, ``ctx.m`` what every layer is called with besides, ``loss.m`` the loss.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from tawpipe.errors import UserError
from tawpipe.schedule.actions import Action, Lane, Op
from tawpipe.schedule.spec import KEPT, ModelSpec


def recompute_of_blocks(setting: str, model: ModelSpec) -> tuple[str, ...]:
    """``Knobs.recompute`` from its setting.

    >>> from tawpipe.schedule.spec import BlockSpec
    >>> ends = BlockSpec((), "embedding"), BlockSpec((), "head")
    >>> model = ModelSpec((ends[0], *[BlockSpec((), "layer")] * 4, ends[1]), ())
    >>> recompute_of_blocks("none:1,selective:2,full", model)
    ('full', 'full', 'selective', 'selective', 'none', 'full')

    Args:
        setting: ``full``, ``selective`` or ``none`` for all layers; or a list separated by commas, each with a number
            of layers, from the last one backwards, and the rest without a number.

    Raises:
        UserError: anything else.
    """
    wanted: list[str] = []
    layers = sum(block.kind == "layer" for block in model.blocks)
    parts = setting.split(",")
    for i, part in enumerate(parts):
        how, colon, number = part.strip().partition(":")
        last = i == len(parts) - 1
        if how not in KEPT or (colon and not number.isdecimal()) or not (colon or last):
            raise UserError("schedule.recompute", setting, f"{', '.join(KEPT)}, or for example none:4,selective:8,full")
        wanted += [how] * (int(number) if colon else layers)
    wanted = [*wanted, *["full"] * layers][:layers]
    return ("full", *reversed(wanted), "full")


def forward(model: ModelSpec, block: int, m: int, weights: Sequence[str], *, keep: bool, kept: str = "") -> Action:
    """FORWARD of one block on one micro-batch.

    Args:
        weights: buffers of the block's units, in their order.
        keep: whether the backward pass will need the block's input.
        kept: what it will find instead, ``graph`` or ``kept``; empty if it recomputes from the input.
    """
    if block == 0:
        return Action(Op.FORWARD, Lane.COMPUTE, tuple(weights), (f"x.{m}.1", f"ctx.{m}"), block=0, micro_batch=m)
    source = f"x.{m}.{block}"
    reads = (*weights, source, f"ctx.{m}")
    if model.blocks[block].kind == "head":
        writes, frees = (f"loss.{m}",), (source, f"ctx.{m}")
    else:
        writes, frees = (f"x.{m}.{block + 1}",), () if keep and not kept else (source,)
        if keep and kept:
            writes = (*writes, f"{kept}.{m}.{block}")
    return Action(Op.FORWARD, Lane.COMPUTE, reads, writes, frees, block=block, micro_batch=m)


def offload(block: int, m: int) -> Action:
    """OFFLOAD of a block's input, once its forward pass has read it."""
    here, there = f"x.{m}.{block}", f"host.{m}.{block}"
    return Action(Op.OFFLOAD, Lane.HOST, (here,), (there,), (here,), block=block, micro_batch=m)


def reload(block: int, m: int) -> Action:
    """RELOAD of a block's input for its backward pass."""
    here, there = f"x.{m}.{block}", f"host.{m}.{block}"
    return Action(Op.RELOAD, Lane.HOST, (there,), (here,), (there,), block=block, micro_batch=m)


def backward(
    model: ModelSpec,
    block: int,
    own: Sequence[int],
    weights: Sequence[str],
    gradients: Mapping[int, tuple[str, bool]],
    *,
    kept: str = "",
) -> Iterator[Action]:
    """BACKWARD of one block on every micro-batch of a visit, or, without micro-batches, ZERO of its gradients.

    Args:
        own: the micro-batches, in the order in which they are computed.
        weights: buffers of the block's units, in their order; none where its backward reads none.
        gradients: for every trainable unit the buffer to fill, and whether it holds something to add to.
        kept: as ``forward`` was given it.
    """
    head = model.blocks[block].kind == "head"
    for i, m in enumerate(own):
        reads, writes, frees = [*weights], [], []
        if head:
            reads += [f"x.{m}.{block}", f"ctx.{m}"]
            writes += [f"loss.{m}"]
            frees += [f"x.{m}.{block}"]
        else:
            reads += [f"dx.{m}.{block + 1}", f"ctx.{m}"]
            frees += [f"dx.{m}.{block + 1}"]
            if block > 0:
                source = f"{kept or 'x'}.{m}.{block}"
                reads.append(source)
                frees.append(source)
        if block > model.first_backward:
            writes.append(f"dx.{m}.{block}")
        else:
            frees.append(f"ctx.{m}")
        for buffer, accumulate in gradients.values():
            writes.append(buffer)
            if accumulate or i > 0:
                reads.append(buffer)
        yield Action(Op.BACKWARD, Lane.COMPUTE, tuple(reads), tuple(writes), tuple(frees), block=block, micro_batch=m)
    if not own:
        for unit, (buffer, accumulate) in gradients.items():
            if not accumulate:
                yield Action(Op.ZERO, Lane.COMPUTE, (), (buffer,), unit=unit)
