"""A layer on one slice of a document whose slices pass the stages of a pipeline one after the other.

What ties slices together in a layer are keys and values, and the states of mixers. They are handed on from slice to
slice, as from chunk to chunk (chunks.py), but between actions: an object for each document and layer holds them until
the backward pass, which comes in reverse, has used them. A slice is computed again there, against the keys that are
still in place, and adds to the sums of the gradients of all keys before it, in fp32; those of its own are complete.
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
    """What slices of a document hand on in a layer.

    Args:
        arrived: by micro-batch, the states before it.
        behind: in the backward pass, gradients of the states that the next slice to come leaves.
    """

    store: KeyStore
    arrived: dict[int, States] = field(default_factory=dict)
    behind: list[Tensor] = field(default_factory=list)


def calls_of(blocks: Blocks, given: StepInput, m: int, part: DocumentSlice) -> tuple[LayerCall, ...]:
    """The layers' calls for the whole document: those of another slice where they are still there."""
    if not blocks.chain.along_tokens:
        blocks.chain.find_tokens()
    for number in part.numbers:
        if (there := blocks.held.batches.get(context(number))) is not None:
            return there.calls
    return blocks.chain.calls(given.micro_batches[m].to(blocks.chain.device))


def forward(blocks: Blocks, action: Action, held: DeviceBatch, given: StepInput, before: list[Tensor] | None) -> None:
    """The layer's output; its keys and values, and the states behind it, for the slices that follow."""
    m, b, hidden = action.micro_batch, action.block, blocks.input(action)
    layer, chunk, handed = _layer(blocks, action, held, given)
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


def backward(blocks: Blocks, action: Action, held: DeviceBatch, given: StepInput, *, wanted: bool) -> Tensor | None:
    """The gradient of the input, if it is ``wanted``. BACKWARD_INPUT holds what gradients of products are made of."""
    m, b = action.micro_batch, action.block
    layer, chunk, handed = _layer(blocks, action, held, given)
    if layer.deferred is not None:
        blocks.held.deferred[linear(m, b)] = layer.deferred
    arriving = blocks.held.gradients[input_gradient(m, b + 1)]
    gradient, handed.behind = layer.pull(chunk, blocks.input(action), arriving, handed.behind, wanted=wanted)
    for other in _part(held).numbers:
        if other < m:
            blocks.held.key_gradients[key_gradients(other, b)] = handed
    return gradient


def _layer(
    blocks: Blocks, action: Action, held: DeviceBatch, given: StepInput
) -> tuple[LayerInChunks, Chunk, HandedOn]:
    part, m, b = _part(held), action.micro_batch, action.block
    handed = next((blocks.held.keys[keys(n, b)] for n in part.numbers if keys(n, b) in blocks.held.keys), None)
    if handed is None:
        handed = HandedOn(KeyStore(1, given.micro_batches[m].input_ids.shape[1]))

    def draw(_: int, run: Callable[[], Tensor]) -> Tensor:
        return blocks.drawing(action, given, run)

    deferred = blocks.defers(b) if action.op is Op.BACKWARD_INPUT else None
    layer = LayerInChunks(blocks.chain, b, held.calls, part.end - part.begin, draw, deferred=deferred)
    chunk = Chunk(handed.store, part.begin, part.end)
    chunk.arrived = _copied(handed.arrived.get(m, {}))
    return layer, chunk, handed


def _part(held: DeviceBatch) -> DocumentSlice:
    assert held.part is not None
    return held.part


def _copied(states: States) -> States:
    """The same in tensors that whoever gets them may change."""
    return {
        mixer: {row: {key: state.detach().clone() for key, state in of_row.items()} for row, of_row in rows.items()}
        for mixer, rows in states.items()
    }
