"""What a rank computes, as actions: a block on its micro-batches. Imports errors and schedule.

Activations have names: ``x.m.b`` is the input of block b for micro-batch m, ``dx.m.b`` its gradient, ``graph.m.b`` or
``kept.m.b`` what the block keeps for its backward pass instead of its input, ``ctx.m`` what every layer is called with
besides, ``loss.m`` the loss.

Inputs that wait in the host's memory: ``host.j.b`` is that of block b for the j-th micro-batch of a round, and
``slot.p.j`` is where it comes back, for even and odd blocks in turn. The device's copy goes two blocks later, with the
action that then computes: a device waits for its link to the host rather than pile up what should have left. And what
comes back waits for the slot, which is free when the block two before it is done.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from tawpipe.errors import UserError
from tawpipe.schedule.actions import Action, Lane, Op
from tawpipe.schedule.spec import KEPT, Knobs, ModelSpec


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


def forward(
    model: ModelSpec,
    block: int,
    m: int,
    weights: Sequence[str],
    *,
    keep: bool,
    kept: str = "",
    left: Sequence[str] = (),
) -> Action:
    """FORWARD of one block on one micro-batch.

    Args:
        weights: buffers of the block's units, in their order.
        keep: whether the backward pass will need the block's input.
        kept: what it will find instead, ``graph`` or ``kept``; empty if it recomputes from the input.
        left: what ``left_behind`` says.
    """
    if block == 0:
        return Action(Op.FORWARD, Lane.COMPUTE, tuple(weights), (f"x.{m}.1", f"ctx.{m}"), block=0, micro_batch=m)
    source = f"x.{m}.{block}"
    reads = (*weights, source, f"ctx.{m}", *left)
    if model.blocks[block].kind == "head":
        writes, frees = (f"loss.{m}",), (source, f"ctx.{m}")
    else:
        writes, frees = (f"x.{m}.{block + 1}",), left if keep and not kept else (source, *left)
        if keep and kept:
            writes = (*writes, f"{kept}.{m}.{block}")
    return Action(Op.FORWARD, Lane.COMPUTE, reads, writes, tuple(frees), block=block, micro_batch=m)


def offload(block: int, m: int, number: int) -> Action:
    """OFFLOAD of a block's input, once its forward pass has read it.

    Args:
        number: of the micro-batch in its round.
    """
    return Action(Op.OFFLOAD, Lane.HOST, (f"x.{m}.{block}",), (f"host.{number}.{block}",), block=block, micro_batch=m)


def reload(block: int, m: int, number: int) -> Action:
    """RELOAD of a block's input for its backward pass."""
    there, slot = f"host.{number}.{block}", slot_of(block, number)
    return Action(Op.RELOAD, Lane.HOST, (there,), (slot,), (there,), block=block, micro_batch=m)


def slot_of(block: int, number: int) -> str:
    """Where the input of a block comes back."""
    return f"slot.{block % 2}.{number}"


def left_behind(model: ModelSpec, knobs: Knobs, block: int, m: int) -> tuple[str, ...]:
    """Inputs that are in the host's memory by then, and whose place on the device is given up when ``block`` computes:
    in its forward pass, or in the backward pass of the head, which has no other.
    """
    last = len(model.blocks) - 1
    before = (last - 2, last - 1) if block == last else (block - 2,)
    return tuple(f"x.{m}.{b}" for b in before if b >= model.first_backward and knobs.offloads(b))


def backward(
    model: ModelSpec,
    block: int,
    own: Sequence[int],
    weights: Sequence[str],
    gradients: Mapping[int, tuple[str, bool]],
    *,
    kept: str = "",
    knobs: Knobs | None = None,
) -> Iterator[Action]:
    """BACKWARD of one block on every micro-batch of a visit, or, without micro-batches, ZERO of its gradients.

    Args:
        own: the micro-batches, in the order in which they are computed.
        weights: buffers of the block's units, in their order; none where its backward reads none.
        gradients: for every trainable unit the buffer to fill, and whether it holds something to add to.
        kept: as ``forward`` was given it.
        knobs: where inputs may wait in the host's memory.
    """
    head = model.blocks[block].kind == "head"
    back = knobs is not None and knobs.offloads(block)
    for i, m in enumerate(own):
        reads, writes, frees = [*weights], [], []
        if head:
            left = left_behind(model, knobs, block, m) if knobs is not None else ()
            reads += [f"x.{m}.{block}", f"ctx.{m}", *left]
            writes += [f"loss.{m}"]
            frees += [f"x.{m}.{block}", *left]
        else:
            reads += [f"dx.{m}.{block + 1}", f"ctx.{m}"]
            frees += [f"dx.{m}.{block + 1}"]
            if block > 0:
                source = slot_of(block, i) if back else f"{kept or 'x'}.{m}.{block}"
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
