"""A layer on whole rows: forward, and backward in one part or in two."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from tawpipe.model.stubs import LayerCall
from tawpipe.runtime.compute.activations import READ, SAVED, DeviceBatch, LayerGraph
from tawpipe.runtime.compute.attention_results import AttentionResults
from tawpipe.runtime.compute.blocks import Blocks
from tawpipe.runtime.compute.recompute import Saved, keep_graph
from tawpipe.runtime.compute.repeated import check_new
from tawpipe.runtime.compute.step_input import StepInput
from tawpipe.schedule.actions import Action, Op
from tawpipe.schedule.buffers import Kind, block_input, input_gradient, linear


def forward(
    blocks: Blocks, action: Action, held: DeviceBatch, step_input: StepInput, before: list[Tensor] | None
) -> None:
    """Compute a layer, and keep its output and what its backward pass starts from.

    Args:
        blocks: Model and kept values.
        action: FORWARD of the layer.
        held: The micro-batch.
        step_input: Inputs of the step.
        before: Weight checksums of the block's first run, which is then repeated and compared; else None.
    """
    hidden, b = blocks.input(action), action.block
    output = _output(blocks, action, hidden, held, step_input)
    check_new(blocks, action, step_input, before, output, lambda: blocks.chain.layer(b, hidden, held.calls))
    blocks.held.inputs[block_input(action.micro_batch, b + 1)] = output


def _output(blocks: Blocks, action: Action, hidden: Tensor, batch: DeviceBatch, step_input: StepInput) -> Tensor:
    """Return a layer's output; keep its graph, or the results of attention, if the action or the step asks for it."""
    b, m, held, calls = action.block, action.micro_batch, blocks.held, batch.calls
    layer = partial(blocks.chain.layer, b, calls=calls, piece=batch.piece)
    kept = next((buffer for buffer in action.writes if buffer.kind in SAVED), None)
    if kept is None and not _keeps(action, step_input):
        with torch.no_grad():
            return blocks.drawing(action, step_input, lambda: layer(hidden))
    leaf, saved = hidden.detach().requires_grad_(b > blocks.spec.first_backward), Saved()
    if kept is not None and kept.kind is Kind.ATTENTION:
        results = AttentionResults(catches=blocks.catches)
        output = blocks.drawing(action, step_input, lambda: results.keep(lambda: layer(hidden)))
        held.kept[kept] = LayerGraph(leaf, results, None, results.tensors)
        return output
    deferred, units = blocks.defers(b) if blocks.split_backward else None, blocks.spec.blocks[b].units
    layer = deferred.around(layer) if deferred else layer
    graph = partial(keep_graph, notes=kept is not None and kept.kind is Kind.PRODUCTS)
    output = blocks.drawing(action, step_input, lambda: graph(layer, leaf, units, blocks.bound, saved))
    edge = get_gradient_edge(output)
    if kept is None:  # the input stays for the backward pass anyway; keep the graph with it
        held.inputs[block_input(m, b)] = LayerGraph(leaf, edge, deferred)
    else:  # the output is not kept here: its memory is freed with the next block's input
        held.kept[kept] = LayerGraph(leaf, edge, deferred, _alone(saved, output, calls[b - 1]))
    return output.detach()


def backward(
    blocks: Blocks, action: Action, batch: DeviceBatch, step_input: StepInput, *, wanted: bool
) -> Tensor | None:
    """Run a layer's backward pass on the graph that was kept, or on a recomputed one; return the gradient of its input.

    Adds to the weight gradients. Returns None if the input's gradient is not ``wanted``. BACKWARD_INPUT leaves out the
    weight gradients of matrix products, and keeps what they are computed from."""
    m, b, held = action.micro_batch, action.block, blocks.held
    arriving = held.gradients[input_gradient(m, b + 1)]
    source = next(buffer for buffer in action.reads if buffer.kind in READ)
    kept = held.tables[source.kind][source]
    with torch.enable_grad():
        graph = kept.graph if isinstance(kept, LayerGraph) else None
        leaf = kept.leaf if isinstance(kept, LayerGraph) else kept.detach().requires_grad_(wanted)
        if isinstance(graph, GradientEdge):
            edge, deferred = graph, kept.deferred
        else:
            deferred = blocks.defers(b) if action.op is Op.BACKWARD_INPUT else None
            layer = partial(blocks.chain.layer, b, calls=batch.calls, piece=batch.piece)
            layer = partial(deferred.around(layer) if deferred else layer, leaf)
            layer = partial(graph.reuse, layer) if graph else layer
            edge = get_gradient_edge(blocks.drawing(action, step_input, layer))
        if isinstance(kept, LayerGraph):
            kept.forget()
        torch.autograd.backward(edge, arriving)
    if action.op is Op.BACKWARD_INPUT:
        assert deferred is not None
        held.deferred[linear(m, b)] = deferred
    elif deferred is not None:
        deferred.run(blocks.chain.gradient_of)
    return leaf.grad


def _keeps(action: Action, step_input: StepInput) -> bool:
    """Return True if a layer that would be recomputed keeps its graph for this micro-batch."""
    stays = block_input(action.micro_batch, action.block) not in action.frees and step_input.seed is not None
    return stays and action.block in step_input.kept.get(action.micro_batch, ())


def _alone(saved: Saved, output: Tensor, call: LayerCall) -> Saved:
    """Return the saved tensors whose memory belongs only to this layer: not to its output or its arguments."""
    shared = {tensor.untyped_storage()._cdata for tensor in (output, *call.tensors)}
    return [tensor for tensor in saved if tensor.untyped_storage()._cdata not in shared]
