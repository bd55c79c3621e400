"""Actions of one block: forward, backward, and the offload and reload of what it keeps.

Rows computed in chunks move between device and CPU memory inside FORWARD and BACKWARD (``StepSpec.streams``). No other
rank waits for a chunk, and one action for each chunk would make programs hundreds of times longer.

Whole rows are moved by actions of their own, OFFLOAD and RELOAD. The device frees its copy of an offloaded activation
two blocks later, in the action that computes then: so a device waits for its link to the host before activations pile
up. A reload waits for its buffer, which is free when the block two before it is done.

If a document is cut into slices, a layer reads the keys and values of the earlier slices. Their forward passes keep
them until the backward passes, in reverse order, have used them. Each backward pass adds to the key gradients of the
earlier slices, and finds the key gradients of its own slice complete. For a layer without a backward pass, the last
slice frees the keys and values.
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
    """Return the FORWARD action of one block on one micro-batch.

    Args:
        step: the step to be scheduled.
        block: index of the block.
        m: index of the micro-batch.
        weights: buffers of the block's units, in the order of the units.
        place: position of the micro-batch in its round.
        training: True if a backward pass follows.
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
    """Return the buffer of the input of ``block``, which is also the output of the block before.

    With chunked rows in training (``StepSpec.streams``) it is in CPU memory, else on the device.

    Args:
        m: index of the micro-batch.
        place: position of the micro-batch in its round.
        training: True if a backward pass follows.
    """
    return offloaded(place, block) if training and step.streams(block) else block_input(m, block)


def kept(step: StepSpec, saved: Kind, block: int, m: int, place: int) -> Buffer:
    """Return the buffer of an activation of kind ``saved`` that a block keeps for its backward pass.

    Args:
        m: index of the micro-batch.
        place: position of the micro-batch in its round.
    """
    return Buffer(Kind.OFFLOADED_ATTENTION, (place, block)) if step.streams(block) else Buffer(saved, (m, block))


def offload(block: int, m: int, place: int, kind: Kind = Kind.INPUT) -> Action:
    """Return the OFFLOAD action of an activation that a block keeps, for use after its forward pass.

    Args:
        m: index of the micro-batch.
        place: position of the micro-batch in its round.
        kind: kind of the activation.
    """
    reads, writes = (Buffer(kind, (m, block)),), (offloaded(place, block, kind),)
    return Action(Op.OFFLOAD, Lane.HOST, reads, writes, block=block, micro_batch=m)


def reload(block: int, m: int, place: int, kind: Kind = Kind.INPUT) -> Action:
    """Return the RELOAD action that copies an offloaded activation back before the backward pass of ``block``.

    Args:
        m: index of the micro-batch.
        place: position of the micro-batch in its round.
        kind: kind of the activation.
    """
    host_buffers, back = (offloaded(place, block, kind),), (reloaded(place, block, kind),)
    return Action(Op.RELOAD, Lane.HOST, host_buffers, back, host_buffers, block=block, micro_batch=m)


def left_behind(step: StepSpec, block: int, m: int) -> tuple[Buffer, ...]:
    """Return the device buffers of offloaded activations that ``block`` frees when it computes.

    These are activations of the block two before, which are in CPU memory by then. The head frees the activations of
    the last two layers. Empty with chunked rows or without offloading.

    Args:
        m: index of the micro-batch.
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
    """Yield a BACKWARD action of one block for each micro-batch of a visit.

    Without micro-batches, yields a ZERO action for every gradient that has no value to add to.

    Args:
        micro_batches: indices of the micro-batches, in the order in which they are computed.
        weights: buffers of the block's units, in order; empty if the backward pass reads no weights.
        gradients: for every trainable unit, the buffer to fill and True if the buffer already holds a value to add to.
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
    """Return the buffers of a layer's kept activations from which its backward pass starts.

    Usually one: the layer's input, or the activation that is kept instead (``StepSpec.keeps``), in its reloaded copy if
    it was offloaded. With chunked rows: the input, and the kept activation if there is one.

    Args:
        m: index of the micro-batch.
        place: position of the micro-batch in its round.
    """
    saved = step.saves(block, m)
    if step.settings.sequence_chunk:
        sources = [boundary(step, block, m, place, training=True)]
        return [*sources, kept(step, saved, block, m, place)] if saved else sources
    if step.offloads(block):
        return [reloaded(place, block, step.keeps(block))]
    return [Buffer(step.keeps(block, m), (m, block))]
