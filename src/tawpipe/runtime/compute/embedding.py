"""The embedding side of a model on one micro-batch. It copies the micro-batch to the device."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks

from tawpipe.errors import RunError
from tawpipe.model.batch import tokens_of
from tawpipe.runtime.compute import cut_layer, layer, sliced
from tawpipe.runtime.compute.activations import ROWS, DeviceBatch, LayerRunner
from tawpipe.runtime.compute.blocks import Blocks
from tawpipe.runtime.compute.chunks import spans_of
from tawpipe.runtime.compute.cp_groups import CpTokens
from tawpipe.runtime.compute.repeated import check_new
from tawpipe.runtime.compute.step_input import DocumentSlice, StepInput
from tawpipe.schedule.actions import Action
from tawpipe.schedule.buffers import Buffer, Kind, context, input_gradient


def forward(blocks: Blocks, action: Action, step_input: StepInput, before: list[Tensor] | None) -> None:
    """Embed a micro-batch on the device, and keep the output and the arguments of its layers.

    The graph is kept in training only if the backward pass needs no weights.

    Args:
        blocks: Model and kept values.
        action: FORWARD of the embedding.
        step_input: Inputs of the step.
        before: Weight checksums of the block's first run, which is then repeated and compared; else None.
    """
    chain, m = blocks.chain, action.micro_batch
    block = blocks.spec.blocks[action.block]
    keep = block.needs_backward and not block.backward_reads_weights and step_input.seed is not None
    whole, dealt = blocks.dealt(step_input, m)
    batch = whole.to(chain.device)  # copied in the lane's stream
    if (blocks.sequence_chunk or dealt) and not chain.along_tokens:
        chain.find_tokens()
    with torch.set_grad_enabled(keep), saved_tensors_hooks(partial(_check_saved, blocks), lambda tensor: tensor):
        hidden, calls = blocks.drawing(action, step_input, lambda: chain.embed(batch))
    check_new(blocks, action, step_input, before, hidden, lambda: chain.embed(batch)[0])
    if (part := step_input.slices.get(m)) is not None:
        calls = blocks.drawing(action, step_input, lambda: sliced.calls_of(blocks, step_input, m, part))
    local = batch.tokens_at(dealt.own) if dealt else batch
    with torch.set_grad_enabled(keep):
        hidden = tokens_of(hidden, dealt.own) if dealt else hidden
    edge = get_gradient_edge(hidden) if keep else None
    if context(m) in action.writes:
        runner = runner_of(blocks, dealt, part)
        piece = step_input.piece(batch, dealt.own if dealt else None)
        blocks.held.batches[context(m)] = DeviceBatch(batch, local, dealt, calls, runner, edge, part, piece)
    _keep_rows(blocks, next(buffer for buffer in action.writes if buffer.kind in ROWS), hidden.detach())


def backward(blocks: Blocks, action: Action, held: DeviceBatch, step_input: StepInput) -> None:
    """Run the embedding's backward pass, which adds to the weight gradients, on a kept or a recomputed graph."""
    arriving = blocks.held.gradients[input_gradient(action.micro_batch, action.block + 1)]
    with torch.enable_grad():
        if held.embedded is not None:
            graph, held.embedded = held.embedded, None
        else:
            output = blocks.drawing(action, step_input, lambda: blocks.chain.embed(held.batch))[0]
            graph = get_gradient_edge(tokens_of(output, held.dealt.own) if held.dealt else output)
        torch.autograd.backward(graph, arriving)


def runner_of(blocks: Blocks, dealt: CpTokens | None, part: DocumentSlice | None) -> LayerRunner:
    """Return the module that computes the layers of a micro-batch: ``sliced``, ``cut_layer`` or ``layer``."""
    if part is not None:
        return sliced
    return cut_layer if blocks.sequence_chunk or dealt else layer


def _keep_rows(blocks: Blocks, target: Buffer, hidden: Tensor) -> None:
    """Store an activation under its buffer for later actions.

    It stays on the device, or is written chunk by chunk to CPU memory or a file if the buffer's kind is OFFLOADED."""
    if target.kind is not Kind.OFFLOADED:
        blocks.held.inputs[target] = hidden
        return
    blocks.held.inputs[target] = rows = blocks.places.of(target, hidden.shape, hidden.dtype)
    for span in spans_of(hidden.shape[1], blocks.sequence_chunk):
        rows.write(span, hidden[:, span])
    rows.settle()


def _check_saved(blocks: Blocks, saved: Tensor) -> Tensor:
    """Raise an error if the embedding side's graph saves a weight, which would be gone before its backward pass."""
    place = saved.untyped_storage().data_ptr()
    if any(place == flat.untyped_storage().data_ptr() for flat in blocks.bound.values()):
        raise RunError("the embedding side keeps weights for its backward pass, which discovery has not seen")
    return saved
