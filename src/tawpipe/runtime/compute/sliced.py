"""A layer on one slice of a document whose slices pass the stages of a pipeline one after the other.

Slices are connected in a layer only by keys and values, and by the states of mixers. They pass from slice to slice, as
from chunk to chunk (chunks.py), but between actions: one object for each document and layer holds them until the
backward pass, in reverse order, has used them. There a slice is recomputed against the kept keys. It adds to the sums
of the gradients of all keys before it, in fp32. The sums for its own keys are complete by then.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from tawpipe.model.attention.chunked import Chunk, KeyStore
from tawpipe.model.stubs import LayerCall
from tawpipe.runtime.compute.activations import DeviceBatch
from tawpipe.runtime.compute.blocks import Blocks
from tawpipe.runtime.compute.chunks import LayerInChunks, States
from tawpipe.runtime.compute.repeated import compare, expect_unchanged
from tawpipe.runtime.compute.step_input import DocumentSlice, StepInput
from tawpipe.schedule.actions import Action, Op
from tawpipe.schedule.buffers import block_input, context, input_gradient, key_gradients, keys, linear


@dataclass(eq=False)
class HandedOn:
    """Values that the slices of a document pass to each other in one layer.

    Args:
        store: Keys and values of the document.
        arrived: Micro-batch -> the states of mixers before it.
        behind: In the backward pass, gradients of the states that the next slice to be computed leaves.
    """

    store: KeyStore
    arrived: dict[int, States] = field(default_factory=dict)
    behind: list[Tensor] = field(default_factory=list)


def calls_of(blocks: Blocks, step_input: StepInput, m: int, part: DocumentSlice) -> tuple[LayerCall, ...]:
    """Return the arguments of every layer for a whole document, of which micro-batch ``m`` is one slice.

    They are taken from another slice of the document that is on the device. If there is none, they are computed anew.

    Args:
        blocks: Model and kept values.
        step_input: Inputs of the step.
        m: Micro-batch of the slice.
        part: The slice.
    """
    if not blocks.chain.along_tokens:
        blocks.chain.find_tokens()
    for number in part.numbers:
        if (batch := blocks.held.batches.get(context(number))) is not None:
            return batch.calls
    return blocks.chain.calls(step_input.micro_batches[m].to(blocks.chain.device))


def forward(
    blocks: Blocks, action: Action, held: DeviceBatch, step_input: StepInput, before: list[Tensor] | None
) -> None:
    """Compute a layer on a slice; keep its output, and its keys, values and states for the slices that follow.

    Args:
        blocks: Model and kept values.
        action: FORWARD of the layer.
        held: The micro-batch, a slice of a document.
        step_input: Inputs of the step.
        before: Weight checksums of the block's first run, which is then repeated and compared; else None.
    """
    m, b, hidden = action.micro_batch, action.block, blocks.input(action)
    layer, chunk, handed = _layer(blocks, action, held, step_input)
    output = layer.push(chunk, hidden)
    if m != _part(held).numbers[-1]:
        handed.arrived[m + 1] = chunk.left
    if before is not None:
        chunk.arrived = _copied(handed.arrived.get(m, {}))
        compare(blocks, action, output, layer.push(chunk, hidden))
        expect_unchanged(blocks, action, before)
    blocks.held.inputs[block_input(m, b + 1)] = output
    if keys(m, b) in action.writes:
        blocks.held.keys[keys(m, b)] = handed


def backward(
    blocks: Blocks, action: Action, held: DeviceBatch, step_input: StepInput, *, wanted: bool
) -> Tensor | None:
    """Recompute a layer on a slice and run its backward pass; return the gradient of its input.

    Returns None if that gradient is not ``wanted``. Adds to the weight gradients. Sums of key gradients, and gradients
    of states, are kept for the slices before it. BACKWARD_INPUT leaves out the weight gradients of matrix products, and
    keeps what they are computed from."""
    m, b = action.micro_batch, action.block
    layer, chunk, handed = _layer(blocks, action, held, step_input)
    if layer.deferred is not None:
        blocks.held.deferred[linear(m, b)] = layer.deferred
    arriving = blocks.held.gradients[input_gradient(m, b + 1)]
    gradient, handed.behind = layer.pull(chunk, blocks.input(action), arriving, handed.behind, wanted=wanted)
    for other in _part(held).numbers:
        if other < m:
            blocks.held.key_gradients[key_gradients(other, b)] = handed
    return gradient


def _layer(
    blocks: Blocks, action: Action, held: DeviceBatch, step_input: StepInput
) -> tuple[LayerInChunks, Chunk, HandedOn]:
    """Return the layer, the slice as a chunk, and the values that the slices of its document share.

    The shared values are made new for the first slice of a document. The chunk gets copies of the states before it."""
    part, m, b = _part(held), action.micro_batch, action.block
    handed = next((blocks.held.keys[keys(n, b)] for n in part.numbers if keys(n, b) in blocks.held.keys), None)
    if handed is None:
        handed = HandedOn(KeyStore(1, step_input.micro_batches[m].input_ids.shape[1]))

    def draw(_: int, run: Callable[[], Tensor]) -> Tensor:
        return blocks.drawing(action, step_input, run)

    deferred = blocks.defers(b) if action.op is Op.BACKWARD_INPUT else None
    size = part.end - part.begin
    layer = LayerInChunks(blocks.chain, b, held.calls, size, draw, deferred=deferred, piece=held.piece)
    chunk = Chunk(handed.store, part.begin, part.end)
    chunk.arrived = _copied(handed.arrived.get(m, {}))
    return layer, chunk, handed


def _part(held: DeviceBatch) -> DocumentSlice:
    assert held.part is not None
    return held.part


def _copied(states: States) -> States:
    """Return a copy of the states in new tensors, which the receiver may change."""
    return {
        mixer: {row: {key: state.detach().clone() for key, state in of_row.items()} for row, of_row in rows.items()}
        for mixer, rows in states.items()
    }
