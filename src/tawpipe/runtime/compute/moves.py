"""Transfers of activations: to another rank, and between the device and CPU memory."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from tawpipe.errors import UserError
from tawpipe.runtime.compute.activations import ROWS, LayerGraph, WaitingGraph
from tawpipe.runtime.compute.blocks import Blocks
from tawpipe.runtime.compute.chunks import spans_of
from tawpipe.runtime.compute.rows import GrowingBuffer
from tawpipe.runtime.compute.step_input import StepInput
from tawpipe.runtime.transport.transport import Transport
from tawpipe.schedule.actions import Action, Op
from tawpipe.schedule.buffers import Buffer, Kind
from tawpipe.schedule.sizes.footprint import TRAVELLING

ALIGNED = 512
"""Alignment, in bytes, of storages in CPU memory."""


def receive_buffers(blocks: Blocks, action: Action, step_input: StepInput) -> dict[Buffer, Tensor]:
    """Return a new, uninitialised tensor on the device for every activation that an EXCHANGE receives, by buffer."""
    tensors, width, dtype, device = dict[Buffer, Tensor](), blocks.chain.width, blocks.chain.dtype, blocks.chain.device
    for buffer in action.writes:
        tensors[buffer] = torch.empty((*blocks.shape(step_input, buffer.at[0]), width), dtype=dtype, device=device)
    return tensors


def travel(blocks: Blocks, action: Action, transport: Transport, step_input: StepInput) -> None:
    """Run an EXCHANGE of activations: send kept tensors and drop them, receive others and keep them.

    On CUDA it first waits while too many transfers of the lane are in flight.

    Raises:
        UserError: If a tensor to send has not the expected shape and dtype.
    """
    on_cuda, tensors = blocks.chain.device.type == "cuda", dict[Buffer, Tensor]()
    under_way = blocks.under_way[action.lane]
    if len(under_way) == TRAVELLING:
        under_way.popleft().synchronize()
    for transfer in action.transfers:
        (m, block), width = transfer.buffer.at, blocks.chain.width
        shape, dtype = (*blocks.shape(step_input, m), width), blocks.chain.dtype
        if transfer.send:
            held = blocks.held.tables[transfer.buffer.kind][transfer.buffer]
            if tuple(held.shape) != shape or held.dtype != dtype:
                name = f"{blocks.chain.block_name(block - 1)} of {blocks.chain.name}"
                expected = f"hidden states {shape} in {dtype} where a stage ends; or a strategy whose weights travel"
                raise UserError(name, f"{tuple(held.shape)} in {held.dtype}", expected)
            tensors[transfer.buffer] = held.contiguous()
    if transport.early_transfers is None:
        tensors |= receive_buffers(blocks, action, step_input)
    tensors |= transport.exchange(action, tensors)
    for transfer in action.transfers:
        table = blocks.held.tables[transfer.buffer.kind]
        if not transfer.send:
            table[transfer.buffer] = tensors[transfer.buffer]
        held = table.pop(transfer.buffer) if transfer.send else tensors[transfer.buffer]
        if on_cuda:  # keeps the memory from being reused before the other lane has read it
            held.record_stream(torch.cuda.current_stream() if transfer.send else blocks.stream)
    if on_cuda:
        under_way.append(torch.cuda.current_stream().record_event())


def copy(blocks: Blocks, action: Action, *, to_host: bool) -> None:
    """Copy what a block's backward pass starts from between the device and CPU memory: its input, or its kept graph.

    Args:
        blocks: Model and kept values.
        action: OFFLOAD or RELOAD.
        to_host: Copy to CPU memory, else back to the device.
    """
    if action.reads[0].kind not in ROWS:
        move(blocks, action, to_host=to_host)
        return
    source: Any = blocks.held.inputs[action.reads[0]]
    target = action.writes[0]
    if target.kind is Kind.INPUT:  # a tensor of its own on the device, like any input
        destination = torch.empty(source.shape, dtype=source.dtype, device=blocks.chain.device)
    else:
        destination = place(blocks, target, source.shape, source.dtype, to_host=to_host)
    blocks.held.inputs[target] = destination.copy_(source, non_blocking=True)
    if blocks.chain.device.type == "cuda" and action.frees:
        (source if to_host else destination).record_stream(torch.cuda.current_stream() if to_host else blocks.stream)
    blocks.held.free(action)


def move(blocks: Blocks, action: Action, *, to_host: bool) -> None:
    """Move the tensors of a layer's kept graph to CPU memory, or back to the device.

    The graph itself stays, and finds equal numbers in other memory.
    """
    source, target = (next(x for x in side if x.kind is not Kind.TURN) for side in (action.reads, action.writes))
    kept = blocks.held.kept[source]
    if to_host:
        assert isinstance(kept, LayerGraph)
        kept = _leave(kept, _growing_buffer(blocks, target, torch.uint8, to_host=True))
    else:
        assert isinstance(kept, WaitingGraph)
        kept = _return(kept, blocks)
    blocks.held.kept[target] = kept
    blocks.held.free(action)


def _leave(graph: LayerGraph, destination: GrowingBuffer) -> WaitingGraph:
    """Copy a graph's storages into ``destination``, and free their device memory; return the waiting graph."""
    by_storage: dict[int, list[Tensor]] = {}
    for tensor in (graph.leaf, *graph.saved):
        by_storage.setdefault(tensor.untyped_storage()._cdata, []).append(tensor)
    storages, end = [], 0
    for tensors in by_storage.values():
        begin, end = end, end + tensors[0].untyped_storage().nbytes()
        storages.append((begin, end, tuple((t, t.shape, t.stride(), t.storage_offset()) for t in tensors)))
        end = -(-end // ALIGNED) * ALIGNED
    memory = destination.of((end,))
    for begin, end, tensors in storages:
        first = tensors[0][0]
        here = torch.empty(0, dtype=torch.uint8, device=first.device).set_(first.untyped_storage())
        memory[begin:end].copy_(here, non_blocking=True)
        if here.is_cuda:
            here.record_stream(torch.cuda.current_stream())
        for tensor, *_ in tensors:
            tensor.data = tensor.new_empty(0)
    return WaitingGraph(graph, memory, tuple(storages))


def _return(waiting: WaitingGraph, blocks: Blocks) -> LayerGraph:
    """Copy a waiting graph's storages into new device memory, and make its tensors use it; return the graph."""
    for begin, end, tensors in waiting.storages:
        back = torch.empty(end - begin, dtype=torch.uint8, device=blocks.chain.device)
        back.copy_(waiting.memory[begin:end], non_blocking=True)
        if back.is_cuda:  # keeps the memory from being reused before the other lane has read it
            back.record_stream(blocks.stream)
        for tensor, size, stride, offset in tensors:
            tensor.data = tensor.new_empty(0).set_(back.untyped_storage(), offset, size, stride)
    return waiting.graph


def place(blocks: Blocks, target: Buffer, shape: torch.Size, dtype: torch.dtype, *, to_host: bool) -> Tensor:
    """Return the reused tensor for an input: in CPU memory if it is offloaded (``to_host``), else on the device."""
    return _growing_buffer(blocks, target, dtype, to_host=to_host).of(shape)


def _growing_buffer(blocks: Blocks, target: Buffer, dtype: torch.dtype, *, to_host: bool) -> GrowingBuffer:
    """Return the reused buffer for a schedule buffer: pinned CPU memory with ``to_host``, else on the device."""
    key = target, dtype
    if key not in blocks.growing_buffers:
        pinned = to_host and blocks.chain.device.type == "cuda"
        blocks.growing_buffers[key] = GrowingBuffer(dtype, "cpu" if to_host else blocks.chain.device, pinned=pinned)
    return blocks.growing_buffers[key]


def make_places(
    blocks: Blocks, program: Iterable[Action], step_input: StepInput, dtype: torch.dtype, tokens: int = 0
) -> None:
    """Allocate the CPU memory and files for offloaded inputs before a step.

    Pinning memory blocks the thread that issues all lanes until all issued work is done. A model whose hidden states
    are not [rows, S, hidden size] in ``dtype`` gets its buffers at their first use.

    Args:
        blocks: Model and kept values.
        program: Actions of this rank.
        step_input: Inputs of the step.
        dtype: Dtype of the hidden states.
        tokens: Largest number of tokens of a micro-batch if steps differ; 0 if they are equal.
    """
    width = blocks.chain.config.get_text_config().hidden_size
    shapes = {
        m: (1, tokens, width) if tokens else (*blocks.shape(step_input, m), width) for m in step_input.micro_batches
    }
    for action in program:
        if action.op in (Op.OFFLOAD, Op.RELOAD) and action.reads[0].kind in ROWS:
            growing_buffer = _growing_buffer(blocks, action.writes[0], dtype, to_host=action.op is Op.OFFLOAD)
            growing_buffer.reserve(shapes[action.micro_batch])
        for buffer in action.writes:
            if buffer.kind is Kind.OFFLOADED and action.op is Op.FORWARD:
                shape = shapes[action.micro_batch]
                blocks.places.reserve(buffer, shape, dtype, spans_of(shape[1], blocks.sequence_chunk))
