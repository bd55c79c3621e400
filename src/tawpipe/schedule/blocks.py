"""What a rank computes, as actions: a block on its micro-batches, and the inputs that wait in the host's memory.

A device's copy of an input that waits in the host's memory goes two blocks later, with the action that then computes: a
device waits for its link to the host rather than pile up what should have left. And what comes back waits for its
buffer, which is free when the block two before it is done.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from tawpipe.schedule.actions import Action, Lane, Op
from tawpipe.schedule.buffers import Buffer, Kind, block_input, context, input_gradient, loss, offloaded, reloaded
from tawpipe.schedule.step import StepSpec


def forward(step: StepSpec, block: int, m: int, weights: Sequence[Buffer], *, training: bool = True) -> Action:
    """FORWARD of one block on one micro-batch.

    Args:
        weights: buffers of the block's units, in their order.
        training: a backward pass follows.
    """
    model = step.model
    if block == 0:
        writes = (block_input(m, 1), context(m))
        return Action(Op.FORWARD, Lane.COMPUTE, tuple(weights), writes, block=0, micro_batch=m)
    source, keep = block_input(m, block), training and block >= model.first_backward
    saved, left = step.saves(block) if keep else None, left_behind(step, block, m) if training else ()
    reads = (*weights, source, context(m), *left)
    if model.blocks[block].kind == "head":
        writes, frees = (loss(m),), (source, context(m))
    else:
        writes, frees = (block_input(m, block + 1),), left if keep and not saved else (source, *left)
        if saved:
            writes = (*writes, Buffer(saved, (m, block)))
    return Action(Op.FORWARD, Lane.COMPUTE, reads, writes, tuple(frees), block=block, micro_batch=m)


def offload(block: int, m: int, place: int) -> Action:
    """OFFLOAD of a block's input, once its forward pass has read it.

    Args:
        place: of the micro-batch in its round.
    """
    reads, writes = (block_input(m, block),), (offloaded(place, block),)
    return Action(Op.OFFLOAD, Lane.HOST, reads, writes, block=block, micro_batch=m)


def reload(block: int, m: int, place: int) -> Action:
    """RELOAD of a block's input for its backward pass."""
    there, back = (offloaded(place, block),), (reloaded(place, block),)
    return Action(Op.RELOAD, Lane.HOST, there, back, there, block=block, micro_batch=m)


def left_behind(step: StepSpec, block: int, m: int) -> tuple[Buffer, ...]:
    """Inputs that are in the host's memory by then, and whose place on the device is given up when ``block`` computes:
    in its forward pass, or in the backward pass of the head, which has no other.
    """
    last = len(step.model.blocks) - 1
    before = (last - 2, last - 1) if block == last else (block - 2,)
    return tuple(block_input(m, b) for b in before if b >= step.model.first_backward and step.offloads(b))


def backward(
    step: StepSpec,
    block: int,
    own: Sequence[int],
    weights: Sequence[Buffer],
    gradients: Mapping[int, tuple[Buffer, bool]],
) -> Iterator[Action]:
    """BACKWARD of one block on every micro-batch of a visit, or, without micro-batches, ZERO of its gradients.

    Args:
        own: the micro-batches, in the order in which they are computed.
        weights: buffers of the block's units, in their order; none where its backward reads none.
        gradients: for every trainable unit the buffer to fill, and whether it holds something to add to.
    """
    model = step.model
    head = model.blocks[block].kind == "head"
    for place, m in enumerate(own):
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
                kind = step.saves(block) or Kind.INPUT
                source = reloaded(place, block) if step.offloads(block) else Buffer(kind, (m, block))
                reads.append(source)
                frees.append(source)
        if block > model.first_backward:
            writes.append(input_gradient(m, block))
        else:
            frees.append(context(m))
        for buffer, accumulate in gradients.values():
            writes.append(buffer)
            if accumulate or place > 0:
                reads.append(buffer)
        yield Action(Op.BACKWARD, Lane.COMPUTE, tuple(reads), tuple(writes), tuple(frees), block=block, micro_batch=m)
    if not own:
        for unit, (buffer, accumulate) in gradients.items():
            if not accumulate:
                yield Action(Op.ZERO, Lane.COMPUTE, (), (buffer,), unit=unit)
