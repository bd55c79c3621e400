"""A layer's passes over a row in chunks: one visit runs all chunks of a row through the layer.

Keys and values of one layer exist at a time, and what a layer needs besides exists for one chunk. Forward, chunks come
in order. Backward, every chunk first runs to its attention and leaves the layer there, which makes keys and values
again; then chunks come in reverse, each computed again against them, and the gradient that arrived is replaced by that
of the input, rows of a chunk at a time. Gradients of weights are added up over chunks by whoever collects them. What a
chunk's attention gave may be kept (``KeptAttention``), and is then not computed again.

Inputs and outputs are ``Rows``: on the device, or outside of it, from where they come and whither they go by chunk.

The numbers are those of the whole row but for rounding; dropout is drawn for every chunk, so that another size of
chunks is another draw.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import repeat
from typing import TypeVar

import torch
from torch import Tensor

from tawpipe.model.chain import Chain
from tawpipe.model.chunked import Chunk, KeysReached, KeyStore
from tawpipe.model.refuse import unsupported
from tawpipe.model.stubs import LayerCall
from tawpipe.runtime.rows import Rows

T = TypeVar("T")
Draw = Callable[[int, Callable[[], Tensor]], Tensor]
"""Runs a function with the random numbers of a chunk, by its number."""


Make = Callable[[str, Sequence[int], torch.dtype], Rows]
"""Makes rows for a named part of something, of a shape and type."""


class KeptAttention:
    """The output of a layer's attention for whole rows, and where a kernel computes it the log-sum-exp of its scores.

    Args:
        length: tokens of a row.
    """

    def __init__(self, make: Make, length: int) -> None:
        self._make, self._length = make, length
        self._parts: list[Rows | None] = []

    def put(self, span: slice, output: Tensor, sums: Tensor | None) -> None:
        """Keep those of a chunk, [b, heads, tokens, d] and [b, heads, tokens]."""
        found = [None if one is None else one.transpose(1, 2) for one in (output, sums)]
        if not self._parts:
            for name, one in zip(("output", "sums"), found, strict=True):
                shape = None if one is None else (one.shape[0], self._length, *one.shape[2:])
                self._parts.append(self._make(name, shape, one.dtype) if one is not None and shape else None)
        for rows, one in zip(self._parts, found, strict=True):
            if rows is not None and one is not None:
                rows.write(span, one)

    def settle(self) -> None:
        """Call after the last ``put``, before anything is read."""
        for rows in self._parts:
            if rows is not None:
                rows.settle()

    def read(self, spans: Sequence[slice]) -> Iterator[tuple[Tensor, Tensor | None]]:
        """What ``put`` was given, for every span."""
        output, sums = self._parts
        assert output is not None
        for one, two in zip(output.read(spans), repeat(None) if sums is None else sums.read(spans), strict=False):
            yield one.transpose(1, 2), None if two is None else two.transpose(1, 2)


@dataclass(frozen=True)
class LayerInChunks:
    """One layer on one micro-batch.

    Args:
        size: tokens of a row in a chunk.
        draw: is given the number of a chunk and what runs.
    """

    chain: Chain
    block: int
    calls: tuple[LayerCall, ...]
    size: int
    draw: Draw

    def outputs(self, hidden: Rows, kept: KeptAttention | None = None) -> Iterator[tuple[slice, Tensor]]:
        """The output of every chunk, [b, c, H], for an input of [b, S, H]; without a graph.

        Args:
            kept: is given what attention gives.
        """
        chunks = self._chunks(hidden)
        for chunk, tokens in zip(chunks, hidden.read([chunk.tokens for chunk in chunks]), strict=True):
            chunk.keep = kept and kept.put
            with torch.no_grad():
                output = self._run(chunk, tokens)
            self._check(chunk)
            yield chunk.tokens, output
        if kept:
            kept.settle()

    def forward(self, hidden: Rows, output: Rows, kept: KeptAttention | None = None) -> None:
        """Write the output."""
        for tokens, one in self.outputs(hidden, kept):
            output.write(tokens, one)
        output.settle()

    def backward(self, hidden: Rows, gradient: Tensor, *, wanted: bool, kept: KeptAttention | None = None) -> None:
        """Propagate ``gradient`` of the output, [b, S, H], which becomes that of the input if it is ``wanted``."""
        chunks = self._chunks(hidden)
        with torch.no_grad():
            spans = [chunk.tokens for chunk in chunks[:-1]]  # the last puts its own when it is computed again, first
            for chunk, tokens in zip(chunks, hidden.read(spans) if spans else (), strict=False):
                chunk.only_keys = True
                with suppress(KeysReached):
                    self._run(chunk, tokens)
                chunk.only_keys = False
        self._propagate(chunks, hidden, gradient, wanted=wanted, kept=kept)

    def _propagate(
        self, chunks: list[Chunk], hidden: Rows, gradient: Tensor, *, wanted: bool, kept: KeptAttention | None
    ) -> None:
        """``backward`` once keys and values are there."""
        chunks.reverse()
        spans = [chunk.tokens for chunk in chunks]
        results = kept.read(spans) if kept else repeat(None, len(spans))
        for chunk, tokens, result in zip(chunks, hidden.read(spans), results, strict=True):
            chunk.kept = result
            leaf = tokens.contiguous().detach().requires_grad_(wanted)
            with torch.enable_grad():
                output = self._run(chunk, leaf)
            torch.autograd.backward(output, gradient[:, chunk.tokens])
            chunk.kept = None
            if wanted:
                assert leaf.grad is not None
                gradient[:, chunk.tokens] = leaf.grad

    def _chunks(self, hidden: Rows) -> list[Chunk]:
        rows, length, *_ = hidden.shape
        store = KeyStore(rows, length)
        return [Chunk(store, span.start, span.stop) for span in spans_of(length, self.size)]

    def _run(self, chunk: Chunk, hidden: Tensor) -> Tensor:
        chunk.attended = False
        index = self.block - 1
        call = self.calls[index].cut(self.chain.along_tokens[index], chunk)
        return self.draw(
            chunk.begin // self.size, lambda: self.chain.layer(self.block, hidden.contiguous(), {index: call})
        )

    def _check(self, chunk: Chunk) -> None:
        if not chunk.attended:
            raise unsupported(
                f"{self.chain.block_name(self.block)} of {self.chain.name}",
                "it calls no attention through transformers' interface, so it mixes tokens elsewhere and cannot be cut "
                "along the sequence; --schedule.sequence-chunk 0 with --schedule.sequence-ranks 1 runs it whole",
            )


def spans_of(length: int, size: int) -> list[slice]:
    """The tokens of every chunk of a row."""
    return [slice(begin, min(begin + size, length)) for begin in range(0, length, size)]
