"""A layer's passes over a row in chunks: one visit runs all chunks of a row through the layer.

Keys and values of one layer exist at a time, and what a layer needs besides exists for one chunk. Forward, chunks come
in order. Backward, every chunk first runs to its attention and leaves the layer there, which makes keys and values
again; then chunks come in reverse, each computed again against them, and the gradient that arrived is replaced by that
of the input, rows of a chunk at a time. Gradients of weights are added up over chunks by whoever collects them. What a
chunk's attention gave may be kept (``KeptAttention``), and is then not computed again.

A mixer's state goes from chunk to chunk the same way: detached through the first pass, and in reverse its gradient. A
layer's states are kept where its attention would be, or made again for its backward pass; then those of one layer exist
at a time, a border of chunks each. Where a layer has both, its states are made again with keys and values.

Inputs and outputs are ``Rows``: on the device, or outside of it, from where they come and whither they go by chunk.

The numbers are those of the whole row but for rounding; dropout is drawn for every chunk, so that another size of
chunks is another draw.
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
from tawpipe.model.mixers.find_mixers import Mixing
from tawpipe.model.refuse import unsupported
from tawpipe.model.stubs import LayerCall
from tawpipe.runtime.compute.rows import Rows
from tawpipe.runtime.compute.split import DeferredProducts

T = TypeVar("T")
States = dict[nn.Module, dict[int, State]]
Draw = Callable[[int, Callable[[], Tensor]], Tensor]
"""Runs a function with the random numbers of a chunk, by its number."""


Make = Callable[[str, Sequence[int], torch.dtype], Rows]
"""Makes rows for a named part of something, of a shape and type."""


class KeptAttention:
    """The output of a layer's attention for whole rows, and where a kernel computes it the log-sum-exp of its scores;
    or the states of mixers, in a layer that has these alone.

    Args:
        length: tokens of a row.
    """

    def __init__(self, make: Make, length: int) -> None:
        self._make, self._length = make, length
        self._parts: list[Rows | None] = []
        self._states: dict[str, Rows] = {}
        self._behind: list[list[tuple[nn.Module, int, tuple[str, int], str, torch.Size]]] = []

    def put(self, span: slice, output: Tensor, sums: Tensor | None) -> None:
        """Keep those of a chunk, [b, heads, tokens, d] and [b, heads, tokens]."""
        by_token = [None if tensor is None else tensor.transpose(1, 2) for tensor in (output, sums)]
        if not self._parts:
            for name, values in zip(("output", "sums"), by_token, strict=True):
                shape = None if values is None else (values.shape[0], self._length, *values.shape[2:])
                self._parts.append(self._make(name, shape, values.dtype) if values is not None and shape else None)
        for rows, values in zip(self._parts, by_token, strict=True):
            if rows is not None and values is not None:
                rows.write(span, values)

    def put_states(self, states: States, borders: int) -> None:
        """Keep those behind the next chunk, of so many."""
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
        """What ``put_states`` was given for a border."""
        states: States = {}
        for mixer, row, key, name, shape in self._behind[border]:
            for state in self._states[name].read([slice(border, border + 1)]):
                states.setdefault(mixer, {}).setdefault(row, {})[key] = state.reshape(shape).clone()
        return states

    def settle(self) -> None:
        """Call after the last ``put``, before anything is read."""
        for rows in (*self._parts, *self._states.values()):
            if rows is not None:
                rows.settle()

    def read(self, spans: Sequence[slice]) -> Iterator[tuple[Tensor, Tensor | None]]:
        """What ``put`` was given, for every span."""
        if not self._parts:  # a rank of a set has no token of the row
            return
        output, sums = self._parts
        assert output is not None
        for out, lse in zip(output.read(spans), repeat(None) if sums is None else sums.read(spans), strict=False):
            yield out.transpose(1, 2), None if lse is None else lse.transpose(1, 2)


@dataclass(frozen=True)
class LayerInChunks:
    """One layer on one micro-batch.

    Args:
        size: tokens of a row in a chunk.
        draw: is given the number of a chunk and what runs.
        deferred: where the layer runs, so that gradients of products are left out; None where they are not.
    """

    chain: Chain
    block: int
    calls: tuple[LayerCall, ...]
    size: int
    draw: Draw
    deferred: DeferredProducts | None = field(default=None, kw_only=True)

    def outputs(self, hidden: Rows, kept: KeptAttention | None = None) -> Iterator[tuple[slice, Tensor]]:
        """The output of every chunk, [b, c, H], for an input of [b, S, H]; without a graph.

        Args:
            kept: is given what attention gives, or the states of mixers.
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
        """Write the output."""
        for tokens, values in self.outputs(hidden, kept):
            output.write(tokens, values)
        output.settle()

    def backward(self, hidden: Rows, gradient: Tensor, *, wanted: bool, kept: KeptAttention | None = None) -> None:
        """Propagate ``gradient`` of the output, [b, S, H], which becomes that of the input if it is ``wanted``."""
        chunks, mixing = self._chunks(hidden), self._mixing
        with torch.no_grad():
            spans = [chunk.tokens for chunk in chunks[:-1]]  # the last puts its own when it is computed again, first
            spans = spans if self._attends or (mixing and mixing.mixers and not kept) else []
            for number, tokens in enumerate(hidden.read(spans) if spans else ()):
                chunk = chunks[number]
                # Whatever comes first, attention or a mixer, leaves the layer: where there are several, all must run.
                chunk.only_keys = mixing is None or len(mixing.mixers) + mixing.attention == 1
                with suppress(KeysReached):
                    self._run(chunk, tokens)
                chunk.only_keys, chunks[number + 1].arrived = False, chunk.left
        self._propagate(chunks, hidden, gradient, wanted=wanted, kept=kept)

    def _propagate(
        self, chunks: list[Chunk], hidden: Rows, gradient: Tensor, *, wanted: bool, kept: KeptAttention | None
    ) -> None:
        """``backward`` once keys and values are there."""
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
        """The output of a chunk, without a graph."""
        with torch.no_grad():
            output = self._run(chunk, hidden)
        self._check(chunk)
        return output

    def pull(
        self, chunk: Chunk, hidden: Tensor, gradient: Tensor, behind: Sequence[Tensor], *, wanted: bool
    ) -> tuple[Tensor | None, list[Tensor]]:
        """The gradient of a chunk's input, if it is ``wanted``, from that of its output, and those of the states before
        it; it is computed again.

        Args:
            behind: gradients of the states that it leaves; none for the last one.
        """
        leaf = hidden.contiguous().detach().requires_grad_(wanted)
        arrived = [state.requires_grad_() for state in tensors_of(chunk.arrived)]
        with torch.enable_grad():
            output = self._run(chunk, leaf)
        # A state of nothing that is trained has no graph, and what comes back to it goes nowhere.
        left = tensors_of(chunk.left) if behind else []
        ends = [(state, of) for state, of in zip(left, behind, strict=True) if state.requires_grad]
        ends.insert(0, (output, gradient))
        torch.autograd.backward([end for end, _ in ends], [of for _, of in ends])
        chunk.kept, chunk.arrived, chunk.left = None, {}, {}
        return leaf.grad, [torch.zeros_like(state) if state.grad is None else state.grad for state in arrived]

    def _chunks(self, hidden: Rows) -> list[Chunk]:
        rows, length, *_ = hidden.shape
        store = KeyStore(rows, length)
        return [Chunk(store, span.start, span.stop) for span in spans_of(length, self.size)]

    @property
    def _mixing(self) -> Mixing | None:
        """What mixes tokens in the layer; None where that is attention alone."""
        return self.chain.mixing[self.block - 1] if self.chain.mixing else None

    @property
    def _attends(self) -> bool:
        return self._mixing is None or self._mixing.attention

    def _run(self, chunk: Chunk, hidden: Tensor) -> Tensor:
        chunk.attended, chunk.left = False, {}
        index = self.block - 1
        call = self.calls[index].cut(self.chain.along_tokens[index], chunk)
        layer = partial(self.chain.layer, self.block, calls={index: call})
        layer = self.deferred.around(layer) if self.deferred else layer
        return self.draw(chunk.begin // self.size, lambda: layer(hidden.contiguous()))

    def _check(self, chunk: Chunk) -> None:
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
    """The tensors of the states of mixers, in the order in which they were left."""
    return [state for rows in states.values() for states_of_row in rows.values() for state in states_of_row.values()]


def spans_of(length: int, size: int) -> list[slice]:
    """The tokens of every chunk of a row."""
    return [slice(begin, min(begin + size, length)) for begin in range(0, length, size)]
