"""Attention of one chunk of a row: its queries against all keys of its documents so far, which are in one buffer.

A layer that is called chunk by chunk is exact if every query meets the keys before it. So the attention function of a
chunk puts its keys and values into the row's buffers (``KeyStore``) and takes those of earlier chunks from there.
In the backward pass chunks come in reverse: each adds to the gradients of the keys that it has seen, in fp32, and
finds those of its own complete, because only chunks behind it have seen them, and these are done. Where several ranks
compute a row together, its keys and values are gathered before, and their gradients propagated after that
(runtime/compute/sets.py): a chunk then neither puts its own there nor gives their gradients.

Causal attention, within a window or not, with sinks or not, is torch's flash kernel: CUDA's once, that of the CPU for
the chunk's own square and for its past, merged by their log-sum-exp in fp32. The backward kernel takes the merged
output and log-sum-exp, one part of the keys after another. Everything else (soft caps, dropout) goes through explicit
scores in slices of queries.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from tawpipe.model import flash
from tawpipe.model.flash import Part
from tawpipe.model.kernels import (
    AttentionOptions,
    Documents,
    Place,
    explicit_gradients,
    explicit_scores,
    generator_for,
    slices_of,
)

PAST_KEYS = 4096
"""Keys of the past that a backward pass looks at at one time: the kernel's gradients of keys exist for no more."""
WINDOW_QUERIES = 1024
"""Queries in a window that are looked at at one time."""


State = dict[tuple[str, int], Tensor]
"""What a mixer hands on behind a document's tokens, by kind and number: [1, ...] each."""


class KeysReached(Exception):
    """Raised by the attention function of a chunk of which nothing but keys and values is wanted."""


class KeyStore:
    """The keys and values of one layer for whole rows, and in the backward pass the sums of their gradients."""

    def __init__(self, rows: int, length: int) -> None:
        self.length, self._shape = length, (rows, length)
        self.keys: Tensor | None = None
        self.values: Tensor | None = None
        self.key_sums: Tensor | None = None
        self.value_sums: Tensor | None = None

    def put(self, begin: int, key: Tensor, value: Tensor) -> None:
        """Set those of a chunk, [b, heads, tokens, d] each."""
        if self.keys is None:
            self.keys, self.values = self._like(key, key.dtype), self._like(value, value.dtype)
        assert self.keys is not None and self.values is not None
        end = begin + key.shape[2]
        self.keys[:, :, begin:end], self.values[:, :, begin:end] = key.detach(), value.detach()

    def of(self, rows: slice) -> tuple[Tensor, Tensor]:
        """Those of some rows."""
        assert self.keys is not None and self.values is not None
        return self.keys[rows], self.values[rows]

    def make_sums(self) -> None:
        """Make room for the sums, once."""
        assert self.keys is not None and self.values is not None
        if self.key_sums is not None:
            return
        wide = torch.promote_types(self.keys.dtype, torch.float32)
        self.key_sums = torch.zeros_like(self.keys, dtype=wide)
        self.value_sums = torch.zeros_like(self.values, dtype=wide)

    def _like(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        rows, length = self._shape
        return torch.empty(rows, tensor.shape[1], length, tensor.shape[3], dtype=dtype, device=tensor.device)


@dataclass(eq=False)
class Chunk:
    """Tokens ``begin`` to ``end`` of every row of a micro-batch, for which a layer is called; of those that this rank
    computes, where several compute a row together.

    Args:
        ranges: where in the row these tokens are, ascending; from ``begin`` to ``end`` unless given.
        only_keys: leave the layer when keys and values are there.
        take: is given keys and values, with their graph; then the layer is left.
        gathered: the store has keys and values of all tokens, and who gathered them propagates their gradients.
        attended: whether the layer has called its attention.
        keep: is given the chunk's tokens, attention's output and the log-sum-exp of its scores, None without a kernel.
        kept: these two from before; they are not computed then.
        arrived, left: states before and behind the chunk, by mixer and row, of documents that go on across its borders.
    """

    store: KeyStore
    begin: int
    end: int
    ranges: tuple[tuple[int, int], ...] = ()
    only_keys: bool = False
    take: Callable[[Tensor, Tensor], object] | None = None
    gathered: bool = False
    attended: bool = False
    keep: Callable[[slice, Tensor, Tensor | None], None] | None = None
    kept: tuple[Tensor, Tensor | None] | None = None
    arrived: dict[nn.Module, dict[int, State]] = field(default_factory=dict)
    left: dict[nn.Module, dict[int, State]] = field(default_factory=dict)

    @property
    def tokens(self) -> slice:
        """Its place in a row."""
        return slice(self.begin, self.end)

    def __post_init__(self) -> None:
        self.ranges = self.ranges or ((self.begin, self.end),)


@dataclass(frozen=True)
class ChunkQueries:
    """Queries of one document, or of all rows, in a chunk.

    Args:
        queries: within the chunk.
        oldest, first, last: in the row: the oldest key that is seen, the first query, the end of the queries.
    """

    rows: slice
    queries: slice
    oldest: int
    first: int
    last: int


def pieces(documents: Documents, chunk: Chunk, window: int | None) -> Iterator[ChunkQueries]:
    """The documents of a chunk, cut where its tokens end."""
    ends = [end for _, end in chunk.ranges]
    before = list(accumulate((end - begin for begin, end in chunk.ranges), initial=0))
    for rows, tokens in documents.regions():
        for at in range(bisect_right(ends, tokens.start), len(ends)):
            begin, end = chunk.ranges[at]
            first, last = max(tokens.start, begin), min(tokens.stop, end)
            if first >= last:
                break
            oldest = tokens.start if window is None else max(tokens.start, first - window + 1)
            offset = before[at] - begin
            yield ChunkQueries(rows, slice(first + offset, last + offset), oldest, first, last)


class ChunkAttention(torch.autograd.Function):
    """[b, heads, c, d] of queries, [b, key-value heads, c, d] of keys and values, in; [b, heads, c, d] out."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        chunk: Chunk,
        documents: Documents,
        options: AttentionOptions,
    ) -> Tensor:
        if not chunk.gathered:
            chunk.store.put(chunk.begin, key, value)
        if chunk.only_keys:
            raise KeysReached
        ctx.chunk, ctx.documents, ctx.options = chunk, documents, options
        ctx.seed = int(torch.randint(2**62, ())) if options.dropout > 0 else 0
        if chunk.kept is not None:
            output, sums = chunk.kept
            ctx.save_for_backward(query, sinks, output, sums, *_only_here(chunk))
            return output.clone()  # not what was saved, which would then be an output without a graph
        rows, heads, length, _ = query.shape
        output = query.new_empty(rows, length, heads, value.shape[-1]).transpose(1, 2)  # as it is wanted in the end
        plain = options.is_plain(query, value)
        wide = torch.promote_types(query.dtype, torch.float32)
        sums = query.new_empty(query.shape[:3], dtype=wide) if plain else None
        generator = generator_for(query, ctx.seed, options.dropout)
        for piece in pieces(documents, chunk, options.window):
            if sums is not None:
                at = piece.rows, slice(None), piece.queries
                seen = chunk.store.of(piece.rows)
                # Values that must be padded are padded for few keys; else all of the past is one part.
                past = piece.last if query.shape[-1] == value.shape[-1] else PAST_KEYS
                parts = _parts(piece, options.window, past, flash.on_cuda(query))
                output[at], sums[at] = flash.attention(query[at], *seen, parts, options.scale, sinks)
                continue
            for queries, _, seen, offset in _slices(query, chunk, piece, options.window):
                given = {"offset": offset, "generator": generator}
                output[queries] = explicit_scores(query[queries], *seen, sinks, options, **given)
        if chunk.keep is not None:
            chunk.keep(chunk.tokens, output, sums)
        ctx.save_for_backward(query, sinks, output, sums, *_only_here(chunk))
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        query, sinks, output, sums, *row = ctx.saved_tensors
        chunk, options, (gradient,) = ctx.chunk, ctx.options, gradients
        store = chunk.store
        if row:
            store.keys, store.values = row
        store.make_sums()
        assert store.key_sums is not None and store.value_sums is not None
        query_gradient = torch.empty_like(query)
        sink_sum = None if sinks is None else torch.zeros_like(sinks, dtype=store.key_sums.dtype)
        generator = generator_for(query, ctx.seed, options.dropout)
        for piece in pieces(ctx.documents, chunk, options.window):
            if sums is not None:
                at = piece.rows, slice(None), piece.queries
                seen, targets = store.of(piece.rows), (store.key_sums[piece.rows], store.value_sums[piece.rows])
                parts = _parts(piece, options.window, PAST_KEYS, flash.on_cuda(query))
                query_gradient[at] = flash.gradients(
                    gradient[at], query[at], output[at], sums[at], seen, targets, parts, options.scale
                )
                continue
            for queries, keys, seen, offset in _slices(query, chunk, piece, options.window):
                given = {"offset": offset, "generator": generator}
                of_query, of_key, of_value, of_sinks = explicit_gradients(
                    gradient[queries], query[queries], *seen, sinks, options, **given
                )
                query_gradient[queries] = of_query
                store.key_sums[keys] += of_key
                store.value_sums[keys] += of_value
                if sink_sum is not None and of_sinks is not None:
                    sink_sum += of_sinks
        if sinks is not None and sums is not None:
            sink_sum = flash.sink_gradient(gradient, output, sums, sinks)
        of_sinks = None if sinks is None or sink_sum is None else sink_sum.to(sinks.dtype)
        if chunk.gathered:
            return query_gradient, None, None, of_sinks, None, None, None
        assert store.keys is not None and store.values is not None
        own_keys = store.key_sums[:, :, chunk.begin : chunk.end].to(store.keys.dtype)
        own_values = store.value_sums[:, :, chunk.begin : chunk.end].to(store.values.dtype)
        return query_gradient, own_keys, own_values, of_sinks, None, None, None


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    chunk: Chunk,
    documents: Documents,
    options: AttentionOptions,
) -> Tensor:
    """Attention of a chunk, [b, c, heads, d], after its keys and values have been put into the row's."""
    assert query.shape[2] == chunk.end - chunk.begin
    chunk.attended = True
    if chunk.take is not None:
        chunk.take(key, value)
        raise KeysReached
    output: Any = ChunkAttention.apply(query, key, value, sinks, chunk, documents, options)
    return output.transpose(1, 2).contiguous()


def _only_here(chunk: Chunk) -> tuple[Tensor | None, ...]:
    """Keys and values of a row that is one chunk, out of its store: autograd keeps them, or makes them again."""
    store = chunk.store
    if chunk.gathered or chunk.end - chunk.begin < store.length:
        return ()
    row, store.keys, store.values = (store.keys, store.values), None, None
    return row


def _parts(piece: ChunkQueries, window: int | None, past: int, whole: bool) -> list[Part]:
    """The queries and keys of a piece part by part, the own square of queries first.

    A window is cut into the own square, what all of some queries see, and what they leave one key after another.

    Args:
        past: keys of the past that are looked at at one time.
        whole: the kernel hides keys by their distance: one part, if it has no more keys of the past.
    """
    queries = slice(0, piece.last - piece.first)
    if window is None or piece.last - piece.oldest <= window:
        window = None
    if whole and piece.first - piece.oldest <= past:
        return [Part(queries, slice(piece.oldest, piece.last), -1 if window is None else window - 1, 0)]
    if window is None:
        return [
            Part(queries, slice(piece.first, piece.last), right=0),
            *_past(queries, piece.oldest, piece.first, past),
        ]
    size = min(window // 2, queries.stop, WINDOW_QUERIES)
    parts = []
    for first in range(piece.first, piece.last, size):
        count = min(size, piece.last - first)
        queries, left = slice(first - piece.first, first - piece.first + count), first - window + 1
        oldest, seen_by_all = max(piece.oldest, left), max(piece.oldest, left + count)
        parts.append(Part(queries, slice(first, first + count), right=0))
        parts += _past(queries, seen_by_all, first, past)
        if oldest < seen_by_all:
            parts.append(Part(queries, slice(oldest, seen_by_all), left=0))
    return parts


def _past(queries: slice, oldest: int, first: int, most: int) -> list[Part]:
    return [Part(queries, slice(begin, min(begin + most, first))) for begin in range(oldest, first, most)]


def _slices(
    query: Tensor, chunk: Chunk, piece: ChunkQueries, window: int | None
) -> Iterator[tuple[Place, Place, tuple[Tensor, Tensor], int]]:
    """Slices of queries whose scores fit a budget: the queries in the chunk, the keys that they see in the row, these
    keys and values, and at which of them the first query stands.
    """
    every, store = slice(None), chunk.store
    assert store.keys is not None and store.values is not None
    for first, last, oldest in slices_of(query, piece.rows, range(piece.first, piece.last), piece.oldest, window):
        offset = piece.queries.start - piece.first
        queries = piece.rows, every, slice(first + offset, last + offset)
        keys = piece.rows, every, slice(oldest, last)
        yield queries, keys, (store.keys[keys], store.values[keys]), first - oldest
