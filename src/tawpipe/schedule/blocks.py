"""What a rank computes, as actions: a block on its micro-batches, the end of a step. Imports topology and schedule.

Boundary activations have names: ``x.m.b`` is the input of block b for micro-batch m, ``dx.m.b`` its gradient,
``ctx.m`` what every layer is called with besides, ``loss.m`` the loss.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from tawpipe.schedule.actions import Action, Lane, Op
from tawpipe.schedule.placement import Home
from tawpipe.schedule.spec import ModelSpec
from tawpipe.topology import Topology


def forward(model: ModelSpec, block: int, m: int, weights: Sequence[str], *, keep: bool) -> Action:
    """FORWARD of one block on one micro-batch.

    Args:
        weights: buffers of the block's units, in their order.
        keep: whether the backward pass will need the block's input.
    """
    if block == 0:
        return Action(Op.FORWARD, Lane.COMPUTE, tuple(weights), (f"x.{m}.1", f"ctx.{m}"), block=0, micro_batch=m)
    source = f"x.{m}.{block}"
    reads = (*weights, source, f"ctx.{m}")
    if model.blocks[block].kind == "head":
        writes, frees = (f"loss.{m}",), (source, f"ctx.{m}")
    else:
        writes, frees = (f"x.{m}.{block + 1}",), () if keep else (source,)
    return Action(Op.FORWARD, Lane.COMPUTE, reads, writes, frees, block=block, micro_batch=m)


def backward(
    model: ModelSpec,
    block: int,
    own: Sequence[int],
    weights: Sequence[str],
    gradients: Mapping[int, tuple[str, bool]],
) -> Iterator[Action]:
    """BACKWARD of one block on every micro-batch of a visit, or, without micro-batches, ZERO of its gradients.

    Args:
        own: the micro-batches, in the order in which they are computed.
        weights: buffers of the block's units, in their order; none where its backward reads none.
        gradients: for every trainable unit the buffer to fill, and whether it holds something to add to.
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
                reads.append(f"x.{m}.{block}")
                frees.append(f"x.{m}.{block}")
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


def end_of_step(
    rank: int,
    topology: Topology,
    model: ModelSpec,
    homes: Sequence[Home],
    micro_batches: Sequence[int],
    *,
    training: bool,
) -> Iterator[Action]:
    """NORM, and in training UPDATE of every trainable unit at home here, first blocks first.

    NORM reads the gradients of first copies only: the sum over the world counts every gradient once. In training it
    adds to what ``norm`` holds, so that a number that was not finite is not forgotten.
    """
    mine = [u for u, home in enumerate(homes) if model.units[u].trainable and home.index(rank) is not None]
    lane = Lane.INTER_G if topology.world_size > 1 else Lane.COMPUTE
    gradients = tuple(f"home.g.{unit}" for unit in mine if rank in homes[unit].ranks) if training else ()
    losses = tuple(f"loss.{m}" for m in micro_batches)
    before = ("norm",) if training else ()
    yield Action(Op.NORM, lane, (*gradients, *losses, *before), ("norm",), losses, group="world")
    if training:
        for unit in sorted(mine, key=lambda u: model.units[u].blocks[0]):
            names = (f"home.w.{unit}", f"home.g.{unit}")
            yield Action(Op.UPDATE, Lane.COMPUTE, ("norm", *names), names, unit=unit)
