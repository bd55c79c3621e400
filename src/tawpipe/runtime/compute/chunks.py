"""Passes of a layer over a row in chunks: one visit runs all chunks of a row through the layer.

Keys and values exist for one layer at a time. All other intermediate values exist for one chunk at a time. In the
forward pass, chunks run in order. The backward pass first runs every chunk up to its attention, which makes keys and
values again. Then it recomputes the chunks in reverse order against these, and replaces the gradient of the output by
the gradient of the input, chunk by chunk. The receiver of weight gradients sums them over chunks. Attention outputs may
be kept (``KeptAttention``), and are then not recomputed.

A mixer's state passes from chunk to chunk in order: detached in the first pass, and its gradient in reverse. The states
of a layer are kept in place of attention outputs, or are made again for the backward pass. Then the states of one layer
exist at a time, one for each border between chunks. If a layer has both attention and a mixer, the states are made
again together with keys and values.

Inputs and outputs are ``Rows``: tensors on the device, or outside it and copied chunk by chunk.

Results equal the results on whole rows up to rounding. Dropout is drawn for every chunk, so another chunk size draws
other numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import repeat
from typing import TypeVar

import torch
from torch import Tensor, nn

from tawpipe.model.attention.chunked import Chunk, KeysReached, KeyStore, State
from tawpipe.model.chain import Chain
from tawpipe.model.experts.balance import RoutedTokens
from tawpipe.model.mixers.find_mixers import Mixing
from tawpipe.model.refuse import unsupported
from tawpipe.model.stubs import LayerCall
from tawpipe.runtime.compute.rows import Rows
from tawpipe.runtime.compute.split import DeferredProducts

T = TypeVar("T")
States = dict[nn.Module, dict[int, State]]
Draw = Callable[[int, Callable[[], Tensor]], Tensor]
"""Function that runs another function with the random numbers of a chunk, given the chunk's index."""


Make = Callable[[str, Sequence[int], torch.dtype], Rows]
"""Function that makes ``Rows`` from a name, a shape and a dtype."""


class KeptAttention:
    """Outputs of a layer's attention for whole rows, with the log-sum-exp of its scores if a kernel computes it.

    In a layer that has only mixers, their states instead.

    Args:
        make: Allocates the rows.
        length: Tokens of a row.
    """

    def __init__(self, make: Make, length: int) -> None:
        self._make, self._length = make, length
        self._parts: list[Rows | None] = []
        self._states: dict[str, Rows] = {}
        self._behind: list[list[tuple[nn.Module, int, tuple[str, int], str, torch.Size]]] = []

    def put(self, span: slice, output: Tensor, sums: Tensor | None) -> None:
        """Store the output and the log-sum-exp of one chunk, for ``read``. The first call allocates the rows.

        Args:
            span: Tokens of the chunk.
            output: Output of attention, [b, heads, tokens, d].
            sums: Log-sum-exp of the scores, [b, heads, tokens]; None without a kernel that computes it.
        """
        by_token = [None if tensor is None else tensor.transpose(1, 2) for tensor in (output, sums)]
        if not self._parts:
            for name, values in zip(("output", "sums"), by_token, strict=True):
                shape = None if values is None else (values.shape[0], self._length, *values.shape[2:])
                self._parts.append(self._make(name, shape, values.dtype) if values is not None and shape else None)
        for rows, values in zip(self._parts, by_token, strict=True):
            if rows is not None and values is not None:
                rows.write(span, values)

    def put_states(self, states: States, borders: int) -> None:
        """Store the states that mixers leave behind the next chunk, for ``states``. Call it chunk by chunk, in order.

        Args:
            states: The states, by mixer and row.
            borders: Number of borders between the chunks of a row.
        """
        border = len(self._behind)
        self._behind.append([])
        for number, (mixer, rows) in enumerate(states.items()):
            for row, key, state in ((row, *pair) for row, of_row in rows.items() for pair in of_row.items()):
                name = f"state {number} {row} {key}"
                if name not in self._states:
                    self._states[name] = self._make(name, (1, borders, state.numel()), state.dtype)
                self._states[name].write(slice(border, border + 1), state.reshape(1, 1, -1))
                self._behind[border].append((mixer, row, key, name, state.shape))

    def states(self, border: int) -> States:
        """Return copies of the states that ``put_states`` kept for the border with index ``border``."""
        states: States = {}
        for mixer, row, key, name, shape in self._behind[border]:
            for state in self._states[name].read([slice(border, border + 1)]):
                states.setdefault(mixer, {}).setdefault(row, {})[key] = state.reshape(shape).clone()
        return states

    def settle(self) -> None:
        """Complete the writes of all kept rows (see ``Rows.settle``).

        Call it after the last ``put``, before anything is read."""
        for rows in (*self._parts, *self._states.values()):
            if rows is not None:
                rows.settle()

    def read(self, spans: Sequence[slice]) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Yield for every span the output and the log-sum-exp (or None) that ``put`` kept."""
        if not self._parts:  # this rank has no token of the row
            return
        output, sums = self._parts
        assert output is not None
        for out, lse in zip(output.read(spans), repeat(None) if sums is None else sums.read(spans), strict=False):
            yield out.transpose(1, 2), None if lse is None else lse.transpose(1, 2)


@dataclass(frozen=True)
class LayerInChunks:
    """One layer on one micro-batch, computed in chunks of tokens.

    Args:
        chain: The model.
        block: Index of the layer's block.
        calls: Arguments of the layers, apart from their input.
        size: Tokens of a row in a chunk.
        draw: Runs a function with the random numbers of the chunk with a given index.
        deferred: Context in which the layer runs, so that weight gradients of its products are computed later; None to
            compute them at once.
        piece: Tokens of the rows, or of the only chunk, for the loss that balances experts; None without it.
    """

    chain: Chain
    block: int
    calls: tuple[LayerCall, ...]
    size: int
    draw: Draw
    deferred: DeferredProducts | None = field(default=None, kw_only=True)
    piece: RoutedTokens | None = field(default=None, kw_only=True)

    def outputs(self, hidden: Rows, kept: KeptAttention | None = None) -> Iterator[tuple[slice, Tensor]]:
        """Yield for every chunk its tokens and the layer's output [b, c, H], without a graph.

        Args:
            hidden: Input, [b, S, H].
            kept: Receives attention outputs, or the states of mixers; None to keep nothing.
        """
        chunks, states = self._chunks(hidden), States()
        for chunk, tokens in zip(chunks, hidden.read([chunk.tokens for chunk in chunks]), strict=True):
            chunk.keep, chunk.arrived = kept and kept.put, states
            output = self.push(chunk, tokens)
            states = chunk.left
            if kept and not self._attends and chunk is not chunks[-1]:
                kept.put_states(states, len(chunks) - 1)
            yield chunk.tokens, output
        if kept:
            kept.settle()

    def forward(self, hidden: Rows, output: Rows, kept: KeptAttention | None = None) -> None:
        """Compute the layer on ``hidden`` chunk by chunk, and write the result into ``output``."""
        for tokens, values in self.outputs(hidden, kept):
            output.write(tokens, values)
        output.settle()

    def backward(self, hidden: Rows, gradient: Tensor, *, wanted: bool, kept: KeptAttention | None = None) -> None:
        """Recompute the layer chunk by chunk and run its backward pass, which adds to the weight gradients.

        Args:
            hidden: Input, [b, S, H].
            gradient: Gradient of the output, [b, S, H]. If ``wanted``, it is replaced in place by the gradient of the
                input.
            wanted: Compute the gradient of the input.
            kept: Attention outputs or states kept by the forward pass; None to recompute them.
        """
        chunks, mixing = self._chunks(hidden), self._mixing
        with torch.no_grad():
            # the last chunk is recomputed first below, and stores its own keys then
            spans = [chunk.tokens for chunk in chunks[:-1]]
            spans = spans if self._attends or (mixing and mixing.mixers and not kept) else []
            for number, tokens in enumerate(hidden.read(spans) if spans else ()):
                chunk = chunks[number]
                # The first attention or mixer would leave the layer early. With several of them, the whole layer must
                # run.
                chunk.only_keys = mixing is None or len(mixing.mixers) + mixing.attention == 1
                with suppress(KeysReached):
                    self._run(chunk, tokens)
                chunk.only_keys, chunks[number + 1].arrived = False, chunk.left
        self._propagate(chunks, hidden, gradient, wanted=wanted, kept=kept)

    def _propagate(
        self, chunks: list[Chunk], hidden: Rows, gradient: Tensor, *, wanted: bool, kept: KeptAttention | None
    ) -> None:
        """Run the backward pass over the chunks, last chunk first, once the keys and values are in the store.

        Adds to the weight gradients and, if ``wanted``, replaces ``gradient`` in place, chunk by chunk."""
        chunks.reverse()
        spans = [chunk.tokens for chunk in chunks]
        results = kept.read(spans) if kept and self._attends else repeat(None, len(spans))
        behind: Sequence[Tensor] = ()
        borders = range(len(chunks) - 2, -2, -1)
        for border, chunk, tokens, result in zip(borders, chunks, hidden.read(spans), results, strict=True):
            chunk.kept = result
            if kept and not self._attends and border >= 0:
                chunk.arrived = kept.states(border)
            of_input, behind = self.pull(chunk, tokens, gradient[:, chunk.tokens], behind, wanted=wanted)
            if of_input is not None:
                gradient[:, chunk.tokens] = of_input

    def push(self, chunk: Chunk, hidden: Tensor) -> Tensor:
        """Return the layer's output for a chunk, without a graph.

        Keys and values are written to the chunk's store, states of mixers to ``chunk.left``.

        Raises:
            UserError: the layer has attention and does not call it, or calls attention although it seemed to have none.
        """
        with torch.no_grad():
            output = self._run(chunk, hidden)
        self._check(chunk)
        return output

    def pull(
        self, chunk: Chunk, hidden: Tensor, gradient: Tensor, behind: Sequence[Tensor], *, wanted: bool
    ) -> tuple[Tensor | None, list[Tensor]]:
        """Recompute a chunk and run its backward pass; return the gradients of its input and of the states before it.

        Adds to the weight gradients, and to the gradients of keys and values in the store. The chunk's states are
        dropped.

        Args:
            chunk: The chunk.
            hidden: Its input.
            gradient: Gradient of its output.
            behind: Gradients of the states that the chunk leaves; empty for the last chunk.
            wanted: Compute the gradient of ``hidden``.

        Returns:
            Gradient of ``hidden``, or None if it is not ``wanted``; and gradients of the states before the chunk, zeros
            for states without gradient.
        """
        leaf = hidden.contiguous().detach().requires_grad_(wanted)
        arrived = [state.requires_grad_() for state in tensors_of(chunk.arrived)]
        with torch.enable_grad():
            output = self._run(chunk, leaf)
        # A state that depends on nothing trained has no graph, so its gradient is ignored.
        left = tensors_of(chunk.left) if behind else []
        ends = [(state, of) for state, of in zip(left, behind, strict=True) if state.requires_grad]
        ends.insert(0, (output, gradient))
        torch.autograd.backward([end for end, _ in ends], [of for _, of in ends])
        chunk.kept, chunk.arrived, chunk.left = None, {}, {}
        return leaf.grad, [torch.zeros_like(state) if state.grad is None else state.grad for state in arrived]

    def _chunks(self, hidden: Rows) -> list[Chunk]:
        """Return the chunks of a row, with one new key store."""
        rows, length, *_ = hidden.shape
        store = KeyStore(rows, length)
        return [Chunk(store, span.start, span.stop) for span in spans_of(length, self.size)]

    @property
    def _mixing(self) -> Mixing | None:
        """Modules of the layer that mix tokens; None if that is attention alone."""
        return self.chain.mixing[self.block - 1] if self.chain.mixing else None

    @property
    def _attends(self) -> bool:
        """True if the layer has attention."""
        return self._mixing is None or self._mixing.attention

    def _run(self, chunk: Chunk, hidden: Tensor) -> Tensor:
        """Run the layer on a chunk, with the chunk's arguments and random numbers, and return its output.

        Attention and mixers set ``chunk.attended`` and ``chunk.left`` anew, and write the chunk's keys and values."""
        chunk.attended, chunk.left = False, {}
        index = self.block - 1
        call = self.calls[index].cut(self.chain.along_tokens[index], chunk)
        piece = self.piece and self.piece.cut(chunk.tokens)
        layer = partial(self.chain.layer, self.block, calls={index: call}, piece=piece)
        layer = self.deferred.around(layer) if self.deferred else layer
        return self.draw(chunk.begin // self.size, lambda: layer(hidden.contiguous()))

    def _check(self, chunk: Chunk) -> None:
        """Raise UserError if the layer called attention but must not, or did not call it although it has attention."""
        if chunk.attended and not self._attends:
            raise unsupported(
                f"{self.chain.block_name(self.block)} of {self.chain.name}",
                "it has attention that was not seen to hand on keys, so it cannot be cut along the sequence; "
                "--schedule.sequence-chunk 0 runs it whole",
            )
        if not chunk.attended and self._attends:
            raise unsupported(
                f"{self.chain.block_name(self.block)} of {self.chain.name}",
                "it calls no attention through transformers' interface, so it mixes tokens elsewhere and cannot be cut "
                "along the sequence; --schedule.sequence-chunk 0 with --schedule.sequence-ranks 1 runs it whole",
            )


def tensors_of(states: States) -> list[Tensor]:
    """Return the tensors of the states of mixers, in the order in which they were made."""
    return [state for rows in states.values() for states_of_row in rows.values() for state in states_of_row.values()]


def spans_of(length: int, size: int) -> list[slice]:
    """Return the token range of every chunk of a row."""
    return [slice(begin, min(begin + size, length)) for begin in range(0, length, size)]
