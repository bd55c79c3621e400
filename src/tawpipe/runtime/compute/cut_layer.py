"""A layer in chunks of tokens, or on one rank's tokens of a context-parallel group: forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tawpipe.model.attention.chunked import KeyStore
from tawpipe.runtime.compute.activations import ROWS, DeviceBatch
from tawpipe.runtime.compute.blocks import Blocks
from tawpipe.runtime.compute.chunks import KeptAttention, LayerInChunks, spans_of
from tawpipe.runtime.compute.cp_groups import LayerInCpGroup
from tawpipe.runtime.compute.randomness import seed_of
from tawpipe.runtime.compute.repeated import compare, expect_unchanged
from tawpipe.runtime.compute.rows import OnDevice, Rows
from tawpipe.runtime.compute.step_input import StepInput
from tawpipe.schedule.actions import Action
from tawpipe.schedule.buffers import KEPT, OUTSIDE, Buffer, context, input_gradient, key_gradients, keys
from tawpipe.schedule.pieces import AT_ONCE


def forward(
    blocks: Blocks, action: Action, held: DeviceBatch, step_input: StepInput, before: list[Tensor] | None
) -> None:
    """Compute a layer in chunks, and keep its output in the buffer that the action writes.

    Input and output may be outside the device.

    Args:
        blocks: Model and kept values.
        action: FORWARD of the layer.
        held: The micro-batch.
        step_input: Inputs of the step.
        before: Weight checksums of the block's first run, which is then repeated and compared; else None.
    """
    source, layer = rows_of(blocks.input(action)), _layer(blocks, action, held, step_input)
    if isinstance(layer, LayerInCpGroup):
        layer.gather(blocks.held.keys[keys(action.micro_batch, action.block)])
    target = next(buffer for buffer in action.writes if buffer.kind in ROWS)
    kept = None
    if buffer := next((buffer for buffer in action.writes if buffer.kind in KEPT), None):
        blocks.held.kept[buffer] = kept = KeptAttention(partial(_make_rows, blocks, buffer), source.shape[1])
    output = _make_rows(blocks, target, "", source.shape, source.dtype)
    blocks.held.inputs[target] = output.tensor if isinstance(output, OnDevice) else output
    layer.forward(source, output, kept)
    if before is not None:
        again = layer.outputs(source)
        spans = spans_of(source.shape[1], layer.size)
        for first, (_, second) in zip(output.read(spans), again, strict=True):
            compare(blocks, action, first, second)
        expect_unchanged(blocks, action, before)


def backward(blocks: Blocks, action: Action, held: DeviceBatch, step_input: StepInput, *, wanted: bool) -> Tensor:
    """Run a layer's backward pass in chunks; return the tensor of the output's gradient, which is changed in place.

    If ``wanted``, this tensor holds the gradient of the input afterwards. Adds to the weight gradients. In a
    context-parallel group, the gradients of all keys and values are kept, and their part of the result is still
    missing."""
    m, b = action.micro_batch, action.block
    gradient = blocks.held.gradients[input_gradient(m, b + 1)]  # replaced in place, chunk by chunk
    kept: Any = next((blocks.held.kept[buffer] for buffer in action.reads if buffer.kind in KEPT), None)
    source, layer = rows_of(blocks.input(action)), _layer(blocks, action, held, step_input)
    if isinstance(layer, LayerInCpGroup):
        layer.gather(blocks.held.keys[keys(m, b)])
    layer.backward(source, gradient, wanted=wanted, kept=kept)
    if isinstance(layer, LayerInCpGroup):
        sums = [(part, torch.empty_like(part[0])) for part in layer.key_gradients()]
        blocks.held.key_gradients[key_gradients(m, b)] = sums
    return gradient


def make_keys(blocks: Blocks, action: Action, step_input: StepInput) -> None:
    """Compute and keep this rank's keys and values of a layer."""
    blocks.held.keys[action.writes[0]] = _in_cp_group(blocks, action, step_input).keys(rows_of(blocks.input(action)))


def keys_backward(blocks: Blocks, action: Action, step_input: StepInput) -> None:
    """Run the backward pass of this rank's keys and values, which adds to the gradients of weights and of the input."""
    m, b = action.micro_batch, action.block
    gradient = blocks.held.gradients[input_gradient(m, b)] if input_gradient(m, b) in action.writes else None
    source, sums = rows_of(blocks.input(action)), [total for _, total in blocks.held.key_gradients[key_gradients(m, b)]]
    _in_cp_group(blocks, action, step_input).keys_backward(source, sums, gradient)


def rows_of(held: Tensor | Rows) -> Rows:
    """Return a tensor as ``OnDevice``, and rows unchanged."""
    return OnDevice(held) if isinstance(held, Tensor) else held


def _make_rows(blocks: Blocks, target: Buffer, part: str, shape: Sequence[int], dtype: torch.dtype) -> Rows:
    """Allocate rows for a buffer, or for a named part of it, on the device or outside it as its kind requires."""
    if target.kind in OUTSIDE:
        return blocks.places.of(target, shape, dtype, part)
    return OnDevice(torch.empty(tuple(shape), dtype=dtype, device=blocks.chain.device))


def _layer(blocks: Blocks, action: Action, held: DeviceBatch, step_input: StepInput) -> LayerInChunks:
    """Return a new ``LayerInChunks`` for the action's layer, or a ``LayerInCpGroup`` in a context-parallel group.

    Nothing is computed. A ``LayerInCpGroup`` gets an empty store of keys and values."""
    state, seed, dealt = blocks.state(action), blocks.seed(action, step_input), held.dealt
    ranks, place = (dealt.ranks, dealt.place) if dealt else (1, 0)

    def draw(number: int, run: Callable[[], Tensor]) -> Tensor:
        """Call ``run`` with the random numbers of a chunk on this rank."""
        return blocks.random.run(state, seed_of(seed, number * ranks + place + 1), run)

    if dealt is None:
        return LayerInChunks(blocks.chain, action.block, held.calls, blocks.sequence_chunk, draw, piece=held.piece)
    size, store = blocks.sequence_chunk or min(dealt.most, AT_ONCE), KeyStore(1, sum(dealt.lengths))
    return LayerInCpGroup(blocks.chain, action.block, held.calls, size, draw, dealt, store, piece=held.piece)


def _in_cp_group(blocks: Blocks, action: Action, step_input: StepInput) -> LayerInCpGroup:
    """Return a new ``LayerInCpGroup`` for the action's layer."""
    layer = _layer(blocks, action, blocks.held.batches[context(action.micro_batch)], step_input)
    assert isinstance(layer, LayerInCpGroup)
    return layer
