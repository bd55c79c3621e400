"""What a rank computes, as actions: a block on its micro-batches, and what waits in the host's memory.

Rows that are computed in chunks come from there and go there within FORWARD and BACKWARD (``StepSpec.streams``): no
other rank waits for a chunk, and an action for each would make programs hundreds of times as long.

Otherwise they have actions of their own. A device's copy of what waits in the host's memory goes two blocks
later, with the action that then computes: a device waits for its link to the host rather than pile up what should have
left. And what comes back waits for its buffer, which is free when the block two before it is done.

A layer reads the keys and values of earlier slices of a document, which their forward passes leave, until backward
passes in reverse have used them; each adds to the gradients of those before its own, and finds those of its own
complete. Of a layer without a backward pass the last slice frees them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from tawpipe.schedule.actions import Action, Lane, Op
from tawpipe.schedule.buffers import (
    Buffer,
    Kind,
    block_input,
    context,
    input_gradient,
    key_gradients,
    keys,
    loss,
    offloaded,
    reloaded,
)
from tawpipe.schedule.step import StepSpec


def forward(
    step: StepSpec, block: int, m: int, weights: Sequence[Buffer], *, place: int = 0, training: bool = True
) -> Action:
    """FORWARD of one block on one micro-batch.

    Args:
        place: of the micro-batch in its round.
        weights: buffers of the block's units, in their order.
        training: a backward pass follows.
    """
    model = step.model
    if block == 0:
        writes = (boundary(step, 1, m, place, training=training), context(m))
        return Action(Op.FORWARD, Lane.COMPUTE, tuple(weights), writes, block=0, micro_batch=m)
    source = boundary(step, block, m, place, training=training)
    keep = training and block >= model.first_backward
    saved, left = step.saves(block, m) if keep else None, left_behind(step, block, m) if training else ()
    reads = (*weights, source, context(m), *left)
    if model.blocks[block].kind == "head":
        writes, frees = (loss(m),), (source, context(m))
    else:
        target = boundary(step, block + 1, m, place, training=training)
        in_its_place = saved and not step.settings.sequence_chunk
        writes, frees = (target,), left if keep and not in_its_place else (source, *left)
        if saved:
            writes = (*writes, kept(step, saved, block, m, place))
        if m in step.neighbours:
            before, behind = step.neighbours[m]
            earlier = tuple(keys(other, block) for other in before)
            reads = (*reads, *earlier)
            writes = (*writes, keys(m, block)) if keep or behind else writes
            frees = frees if keep or behind else (*frees, *earlier)
    return Action(Op.FORWARD, Lane.COMPUTE, reads, writes, tuple(frees), block=block, micro_batch=m)


def boundary(step: StepSpec, block: int, m: int, place: int, *, training: bool) -> Buffer:
    """The input of a block, as FORWARD finds it and as the block before leaves it."""
    return offloaded(place, block) if training and step.streams(block) else block_input(m, block)


def kept(step: StepSpec, saved: Kind, block: int, m: int, place: int) -> Buffer:
    """What a block keeps for its backward pass besides its input, or in its place."""
    return Buffer(Kind.OFFLOADED_ATTENTION, (place, block)) if step.streams(block) else Buffer(saved, (m, block))


def offload(block: int, m: int, place: int, kind: Kind = Kind.INPUT) -> Action:
    """OFFLOAD of what a block keeps, once its forward pass is over.

    Args:
        place: of the micro-batch in its round.
        kind: of what it keeps.
    """
    reads, writes = (Buffer(kind, (m, block)),), (offloaded(place, block, kind),)
    return Action(Op.OFFLOAD, Lane.HOST, reads, writes, block=block, micro_batch=m)


def reload(block: int, m: int, place: int, kind: Kind = Kind.INPUT) -> Action:
    """RELOAD of what a block keeps for its backward pass."""
    there, back = (offloaded(place, block, kind),), (reloaded(place, block, kind),)
    return Action(Op.RELOAD, Lane.HOST, there, back, there, block=block, micro_batch=m)


def left_behind(step: StepSpec, block: int, m: int) -> tuple[Buffer, ...]:
    """What is in the host's memory by then, and whose place on the device is given up when ``block`` computes:
    in its forward pass, or in the backward pass of the head, which has no other.
    """
    last = len(step.model.blocks) - 1
    if step.settings.sequence_chunk or not step.settings.offloaded_layers:
        return ()
    before = (last - 2, last - 1) if block == last else (block - 2,)
    return tuple(Buffer(step.keeps(b), (m, b)) for b in before if b >= step.model.first_backward and step.offloads(b))


def backward(
    step: StepSpec,
    block: int,
    micro_batches: Sequence[int],
    weights: Sequence[Buffer],
    gradients: Mapping[int, tuple[Buffer, bool]],
) -> Iterator[Action]:
    """BACKWARD of one block on every micro-batch of a visit, or, without micro-batches, ZERO of its gradients.

    Args:
        micro_batches: the micro-batches, in the order in which they are computed.
        weights: buffers of the block's units, in their order; none where its backward reads none.
        gradients: for every trainable unit the buffer to fill, and whether it holds something to add to.
    """
    model = step.model
    head = model.blocks[block].kind == "head"
    for place, m in enumerate(micro_batches):
        reads, writes, frees = [*weights], [], []
        if head:
            left = left_behind(step, block, m)
            reads += [block_input(m, block), context(m), *left]
            writes += [loss(m)]
            frees += [block_input(m, block), *left]
        else:
            reads += [input_gradient(m, block + 1), context(m)]
            frees += [input_gradient(m, block + 1)]
            if block > 0:
                sources = _sources(step, block, m, place)
                reads += sources
                frees += sources
                if m in step.neighbours:
                    before, behind = step.neighbours[m]
                    reads += [keys(other, block) for other in (*before, m)]
                    sums = [key_gradients(other, block) for other in before]
                    writes += sums
                    frees.append(keys(m, block))
                    if behind:
                        reads += [*sums, key_gradients(m, block)]
                        frees.append(key_gradients(m, block))
        if block > model.first_backward:
            writes.append(input_gradient(m, block))
        else:
            frees.append(context(m))
        for buffer, accumulate in gradients.values():
            writes.append(buffer)
            if accumulate or place > 0:
                reads.append(buffer)
        yield Action(Op.BACKWARD, Lane.COMPUTE, tuple(reads), tuple(writes), tuple(frees), block=block, micro_batch=m)
    if not micro_batches:
        for unit, (buffer, accumulate) in gradients.items():
            if not accumulate:
                yield Action(Op.ZERO, Lane.COMPUTE, (), (buffer,), unit=unit)


def _sources(step: StepSpec, block: int, m: int, place: int) -> list[Buffer]:
    """What a layer's backward pass starts from."""
    saved = step.saves(block, m)
    if step.settings.sequence_chunk:
        sources = [boundary(step, block, m, place, training=True)]
        return [*sources, kept(step, saved, block, m, place)] if saved else sources
    if step.offloads(block):
        return [reloaded(place, block, step.keeps(block))]
    return [Buffer(step.keeps(block, m), (m, block))]
