"""A layer's passes over a row in chunks: one visit runs all chunks of a row through the layer.

Keys and values of one layer exist at a time, and what a layer needs besides exists for one chunk. Forward, chunks come
in order. Backward, every chunk first runs to its attention and leaves the layer there, which makes keys and values
again; then chunks come in reverse, each computed again against them, and the gradient that arrived is replaced by that
of the input, rows of a chunk at a time. Gradients of weights are added up over chunks by whoever collects them.

The numbers are those of the whole row but for rounding; dropout is drawn for every chunk, so that another size of
chunks is another draw.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from tawpipe.model.chain import Chain
from tawpipe.model.chunked import Chunk, KeysReached, KeyStore
from tawpipe.model.refuse import unsupported
from tawpipe.model.stubs import LayerCall

T = TypeVar("T")
Draw = Callable[[int, Callable[[], Tensor]], Tensor]
"""Runs a function with the random numbers of a chunk, by its number."""


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

    def forward(self, hidden: Tensor) -> Tensor:
        """The output [b, S, H] for an input of that shape; without a graph."""
        output = torch.empty_like(hidden)
        with torch.no_grad():
            for number, chunk in self._chunks(hidden):
                output[:, chunk.begin : chunk.end] = self._run(number, chunk, hidden[:, chunk.begin : chunk.end])
                self._check(chunk)
        return output

    def backward(self, hidden: Tensor, gradient: Tensor, *, wanted: bool) -> None:
        """Propagate ``gradient`` of the output, [b, S, H], which becomes that of the input if it is ``wanted``."""
        chunks = list(self._chunks(hidden))
        with torch.no_grad():
            for number, chunk in chunks:
                chunk.only_keys = True
                with suppress(KeysReached):
                    self._run(number, chunk, hidden[:, chunk.begin : chunk.end])
                chunk.only_keys = False
        chunks[0][1].store.begin_backward()
        for number, chunk in reversed(chunks):
            rows = slice(None), slice(chunk.begin, chunk.end)
            leaf = hidden[rows].contiguous().detach().requires_grad_(wanted)
            with torch.enable_grad():
                output = self._run(number, chunk, leaf)
            torch.autograd.backward(output, gradient[rows])
            if wanted:
                assert leaf.grad is not None
                gradient[rows] = leaf.grad

    def _chunks(self, hidden: Tensor) -> Iterator[tuple[int, Chunk]]:
        rows, length, _ = hidden.shape
        store = KeyStore(rows, length)
        for number, begin in enumerate(range(0, length, self.size)):
            yield number, Chunk(store, begin, min(begin + self.size, length))

    def _run(self, number: int, chunk: Chunk, hidden: Tensor) -> Tensor:
        chunk.attended = False
        index = self.block - 1
        call = self.calls[index].cut(self.chain.along_tokens[index], chunk)
        return self.draw(number, lambda: self.chain.layer(self.block, hidden.contiguous(), {index: call}))

    def _check(self, chunk: Chunk) -> None:
        if not chunk.attended:
            raise unsupported(
                f"{self.chain.block_name(self.block)} of {self.chain.name}",
                "it calls no attention through transformers' interface, so it mixes tokens elsewhere and cannot be cut "
                "along the sequence; --schedule.sequence-chunk 0 with --schedule.sequence-ranks 1 runs it whole",
            )
