"""A rank's computing: blocks forward and backward on micro-batches.

All calls happen on the COMPUTE lane, but for transfers. Boundary activations are held under the names that the schedule
gives them and are dropped when an action frees them; weights and gradients are handed in as buffers. What a block does
is in the file of its kind: ``embedding``, ``layer`` (on whole rows), ``cut_layer`` (in chunks, or in a set), ``sliced``
(on a slice of a document), ``head``.
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
    """Runs FORWARD and BACKWARD actions, and what belongs to them."""

    def forward(self, action: Action, frame: Frame[StepInput]) -> None:
        """FORWARD: no graph, unless the action writes one, and except the embedding's where its backward pass can use
        it without weights.
        """
        kind, m, given = self.spec.blocks[action.block].kind, action.micro_batch, frame.given
        self.bind(action, frame.buffers)
        before = sums_when_new(self, action) if kind != "head" else None
        held = self.held.batches[context(m)] if kind != "embedding" else None
        if held is None:
            embedding.forward(self, action, given, before)
        elif kind == "head":
            head.forward(self, action, held, given)
        else:
            held.runner.forward(self, action, held, given, before)
        self.release(action)

    def backward(self, action: Action, frame: Frame[StepInput]) -> None:
        """BACKWARD: propagate through the graph that was kept, or through one computed again; gradients of weights into
        their buffers. BACKWARD_INPUT, of a layer on whole rows: but for those of its products, and what these are
        computed from is held.
        """
        kind, b, m, given = self.spec.blocks[action.block].kind, action.block, action.micro_batch, frame.given
        self.bind(action, frame.buffers)
        held = self.held.batches[context(m)]
        in_chunks = kind == "layer" and (self.sequence_chunk > 0 or held.dealt is not None)
        in_chunks |= kind == "head" and held.local.input_ids.numel() > self.chunk_tokens
        units = self._collect(action, frame.buffers, in_chunks=in_chunks)
        wanted, gradient = input_gradient(m, b) in action.writes, None
        if kind == "head":
            gradient = head.backward(self, action, held, given, wanted=wanted)
        elif kind == "layer":
            gradient = held.runner.backward(self, action, held, given, wanted=wanted)
        else:
            embedding.backward(self, action, held, given)
        if wanted:
            assert gradient is not None
            self.held.gradients[input_gradient(m, b)] = gradient
        for unit in units:
            self.chain.finish_collect(unit)
        self.release(action)

    def backward_weight(self, action: Action, frame: Frame[StepInput]) -> None:
        """BACKWARD_WEIGHT: the gradients of a layer's weights that BACKWARD_INPUT has left out. It reads no weights."""
        units = self._collect(action, frame.buffers)
        self.held.deferred[linear(action.micro_batch, action.block)].run(self.chain.gradient_of)
        for unit in units:
            self.chain.finish_collect(unit)
        self.held.free(action)

    def _collect(
        self, action: Action, buffers: Mapping[Buffer, Tensor], *, in_chunks: bool = False, accumulate: bool = False
    ) -> Sequence[int]:
        """Let gradients of the block's units, which are returned, go into the action's buffers."""
        units = self.spec.trainable_units(action.block)
        for unit, buffer in zip(units, action.gradients, strict=True):
            adds = accumulate or buffer in action.reads
            self.chain.collect(unit, buffers[buffer], accumulate=adds, in_chunks=in_chunks)
        return units

    def prepare(self, action: Action, frame: Frame[StepInput]) -> None:
        """PREPARE: what layers are called with besides their input."""
        m, given = action.micro_batch, frame.given
        batch, part = self.dealt(given, m)[0].to(self.chain.device), given.slices.get(m)
        # The embedding side runs for it, and draws what it draws where the embedding is.
        make = partial(self.chain.calls, batch) if part is None else partial(sliced.calls_of, self, given, m, part)
        calls = self.drawing(replace(action, block=0), given, make)
        runner = embedding.runner_of(self, None, part)
        self.held.batches[context(m)] = DeviceBatch(batch, batch, None, calls, runner, None, part)

    def keys(self, action: Action, frame: Frame[StepInput]) -> None:
        """KEYS: this rank's keys and values of a layer."""
        self.bind(action, frame.buffers)
        cut_layer.make_keys(self, action, frame.given)
        self.release(action)

    def keys_together(self, action: Action, frame: Frame[StepInput]) -> None:
        """A COLLECTIVE of keys and values, or of their gradients. What of these is not this rank's goes with the sums,
        on the lane that made it and has waited for this one: dropped here it would be of no use to anybody until then,
        for as many layers as the host is ahead.
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
        """KEYS_BACKWARD: propagate the gradients of this rank's keys and values to the weights and to the input's."""
        self.bind(action, frame.buffers)
        units = self._collect(action, frame.buffers, in_chunks=True, accumulate=True)
        cut_layer.keys_backward(self, action, frame.given)
        for unit in units:
            self.chain.finish_collect(unit)
        self.release(action)

    def travel(self, action: Action, frame: Frame[StepInput]) -> None:
        """An EXCHANGE of activations, in the lane of a direction between two ranks."""
        moves.travel(self, action, frame.transport, frame.given)

    def room_for(self, action: Action, frame: Frame[StepInput]) -> dict[Buffer, Tensor]:
        """Memory for the activations that an EXCHANGE receives."""
        return moves.room_for(self, action, frame.given)

    def offload(self, action: Action, frame: Frame[StepInput]) -> None:
        """OFFLOAD: copy an activation into pinned memory of the host. A later action on COMPUTE, which waits for this
        one, drops the device's copy: its memory goes back to the stream that made it.
        """
        moves.copy(self, action, to_host=True)

    def reload(self, action: Action, frame: Frame[StepInput]) -> None:
        """RELOAD: bring it back."""
        moves.copy(self, action, to_host=False)

    def losses(self, action: Action, frame: Frame[StepInput]) -> list[Tensor]:
        """The losses that NORM reads, on another lane than that which made them; they are dropped here."""
        losses = [self.held.losses.pop(buffer) for buffer in action.frees if buffer.kind is Kind.LOSS]
        if self.chain.device.type == "cuda":
            for loss in losses:  # or its memory would be given away before that lane has read it
                loss.record_stream(torch.cuda.current_stream())
        return losses
