"""Computation of one rank: blocks forward and backward on micro-batches.

All methods run on the COMPUTE lane, except transfers. Boundary activations are kept under the schedule's buffer names,
and are dropped when an action frees them. Weights and gradients are passed in as buffers. Each kind of block has its
own file: ``embedding``, ``layer`` (on whole rows), ``cut_layer`` (in chunks, or in a context-parallel group),
``sliced`` (on a slice of a document), ``head``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from tawpipe.runtime.compute import cut_layer, embedding, head, moves, sliced
from tawpipe.runtime.compute.activations import DeviceBatch
from tawpipe.runtime.compute.blocks import Blocks
from tawpipe.runtime.compute.repeated import sums_when_new
from tawpipe.runtime.compute.step_input import StepInput
from tawpipe.runtime.frame import Frame
from tawpipe.schedule.actions import Action
from tawpipe.schedule.buffers import Buffer, Kind, context, input_gradient, linear


class Compute(Blocks):
    """Runs FORWARD and BACKWARD actions, and the actions that belong to them."""

    def forward(self, action: Action, frame: Frame[StepInput]) -> None:
        """Run FORWARD: compute a block, and keep its output.

        No graph is kept, unless the action writes one. The embedding keeps its graph if its backward pass needs no
        weights.
        """
        kind, m, step_input = self.spec.blocks[action.block].kind, action.micro_batch, frame.inputs
        self.bind(action, frame.buffers)
        before = sums_when_new(self, action) if kind != "head" else None
        held = self.held.batches[context(m)] if kind != "embedding" else None
        if held is None:
            embedding.forward(self, action, step_input, before)
        elif kind == "head":
            head.forward(self, action, held, step_input)
        else:
            held.runner.forward(self, action, held, step_input, before)
        self.release(action)

    def backward(self, action: Action, frame: Frame[StepInput]) -> None:
        """Run BACKWARD or BACKWARD_INPUT: a block's backward pass, whose weight gradients go to the action's buffers.

        The gradient of the block's input is kept if the action writes it. The graph is the one that was kept, or the
        block is recomputed. BACKWARD_INPUT, for layers on whole rows, leaves out the weight gradients of matrix
        products, and keeps what they are computed from."""
        kind, b, m, step_input = self.spec.blocks[action.block].kind, action.block, action.micro_batch, frame.inputs
        self.bind(action, frame.buffers)
        held = self.held.batches[context(m)]
        in_chunks = kind == "layer" and (self.sequence_chunk > 0 or held.dealt is not None)
        in_chunks |= kind == "head" and held.local.input_ids.numel() > self.chunk_tokens
        units = self._collect(action, frame.buffers, in_chunks=in_chunks)
        wanted, gradient = input_gradient(m, b) in action.writes, None
        if kind == "head":
            gradient = head.backward(self, action, held, step_input, wanted=wanted)
        elif kind == "layer":
            gradient = held.runner.backward(self, action, held, step_input, wanted=wanted)
        else:
            embedding.backward(self, action, held, step_input)
        if wanted:
            assert gradient is not None
            self.held.gradients[input_gradient(m, b)] = gradient
        for unit in units:
            self.chain.finish_collect(unit)
        self.release(action)

    def backward_weight(self, action: Action, frame: Frame[StepInput]) -> None:
        """Run BACKWARD_WEIGHT: compute the weight gradients that BACKWARD_INPUT has left out. It reads no weights."""
        units = self._collect(action, frame.buffers)
        self.held.deferred[linear(action.micro_batch, action.block)].run(self.chain.gradient_of)
        for unit in units:
            self.chain.finish_collect(unit)
        self.held.free(action)

    def _collect(
        self, action: Action, buffers: Mapping[Buffer, Tensor], *, in_chunks: bool = False, accumulate: bool = False
    ) -> Sequence[int]:
        """Direct the gradients of the block's trainable units into the action's buffers, and return these units.

        Args:
            action: The action.
            buffers: Tensors of the buffers.
            in_chunks: Gradients are added chunk by chunk.
            accumulate: Add to the buffers even if the action does not read them.
        """
        units = self.spec.trainable_units(action.block)
        for unit, buffer in zip(units, action.gradients, strict=True):
            adds = accumulate or buffer in action.reads
            self.chain.collect(unit, buffers[buffer], accumulate=adds, in_chunks=in_chunks)
        return units

    def prepare(self, action: Action, frame: Frame[StepInput]) -> None:
        """Run PREPARE: make and keep the arguments of layers apart from their input.

        It runs on a rank without the embedding, which therefore computes them itself."""
        m, step_input = action.micro_batch, frame.inputs
        batch, part = self.dealt(step_input, m)[0].to(self.chain.device), step_input.slices.get(m)
        # This runs the embedding side with the random numbers that it has on the embedding's rank.
        make = partial(self.chain.calls, batch) if part is None else partial(sliced.calls_of, self, step_input, m, part)
        calls = self.drawing(replace(action, block=0), step_input, make)
        runner = embedding.runner_of(self, None, part)
        piece = step_input.piece(batch)
        self.held.batches[context(m)] = DeviceBatch(batch, batch, None, calls, runner, None, part, piece)

    def keys(self, action: Action, frame: Frame[StepInput]) -> None:
        """Run KEYS: compute this rank's keys and values of a layer, and keep them for ``keys_together``."""
        self.bind(action, frame.buffers)
        cut_layer.make_keys(self, action, frame.inputs)
        self.release(action)

    def keys_together(self, action: Action, frame: Frame[StepInput]) -> None:
        """Run a COLLECTIVE of keys and values, or of their gradients, over the context-parallel group.

        The other ranks' parts are dropped later, with the sums, on the lane that made them and has waited for this one.
        If they were dropped here, their memory would stay unusable until then, for as many layers as the host is ahead.
        """
        (buffer,) = action.reads
        if buffer.kind is Kind.KEYS:
            dealt = self.held.batches[context(action.micro_batch)].dealt
            assert dealt is not None
            pairs = [(part[dealt.place], part) for part in self.held.keys[buffer]]
        else:
            pairs = self.held.key_gradients[buffer]
        frame.transport.together(action, [(part.view(-1), whole.view(-1)) for part, whole in pairs])

    def keys_backward(self, action: Action, frame: Frame[StepInput]) -> None:
        """Run KEYS_BACKWARD: the backward pass of this rank's keys and values, adding to weight and input gradients."""
        self.bind(action, frame.buffers)
        units = self._collect(action, frame.buffers, in_chunks=True, accumulate=True)
        cut_layer.keys_backward(self, action, frame.inputs)
        for unit in units:
            self.chain.finish_collect(unit)
        self.release(action)

    def travel(self, action: Action, frame: Frame[StepInput]) -> None:
        """Run an EXCHANGE of activations, in the lane of a direction between two ranks."""
        moves.travel(self, action, frame.transport, frame.inputs)

    def receive_buffers(self, action: Action, frame: Frame[StepInput]) -> dict[Buffer, Tensor]:
        """Return new tensors for the activations that an EXCHANGE receives."""
        return moves.receive_buffers(self, action, frame.inputs)

    def offload(self, action: Action, frame: Frame[StepInput]) -> None:
        """Run OFFLOAD: copy an activation into pinned CPU memory.

        A later action on COMPUTE, which waits for this one, drops the device's copy, so that its memory returns to the
        stream that made it.
        """
        moves.copy(self, action, to_host=True)

    def reload(self, action: Action, frame: Frame[StepInput]) -> None:
        """Run RELOAD: copy an offloaded activation back to the device."""
        moves.copy(self, action, to_host=False)

    def losses(self, action: Action, frame: Frame[StepInput]) -> list[Tensor]:
        """Remove and return the losses that NORM reads.

        On CUDA, their memory is not reused before the current stream, which runs NORM, has read them
        (``record_stream``)."""
        losses = [self.held.losses.pop(buffer) for buffer in action.frees if buffer.kind is Kind.LOSS]
        if self.chain.device.type == "cuda":
            for loss in losses:  # keeps the memory from being reused before NORM's lane has read it
                loss.record_stream(torch.cuda.current_stream())
        return losses
