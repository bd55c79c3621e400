"""Attention of one chunk of a row: its queries see all keys of their documents so far, which are kept in one buffer.

A layer that is called chunk by chunk is exact if every query sees the keys before it. So the attention function of a
chunk writes its keys and values into the row's buffers (``KeyStore``), and reads keys of earlier chunks from there. In
the backward pass chunks run in reverse order. Each adds to the gradients of the keys that it has seen, in fp32. The
gradients of its own keys are complete, because only later chunks have seen these keys, and they have already run. In a
context-parallel group, keys and values of the row are gathered before, and their gradients propagated afterwards
(runtime/compute/cp_groups.py). A chunk then neither writes its own keys nor returns their gradients.

Causal attention, with or without a window or sinks, uses torch's flash kernel. CUDA's kernel runs once. The CPU's
kernel runs for the chunk's own square and for its past, merged by log-sum-exp in fp32. The backward kernel takes the
merged output and log-sum-exp, for one part of the keys after another. All other attention (soft caps, dropout) uses
explicit scores for slices of queries."""

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
    tiles_of,
)

PAST_KEYS = 4096
"""Number of past keys that a backward pass processes at one time. The kernel's gradients of keys exist for no more."""
WINDOW_QUERIES = 1024
"""Number of queries of windowed attention that are processed at one time."""


State = dict[tuple[str, int], Tensor]
"""State of a mixer behind a document's tokens: (kind, number) -> a tensor [1, ...]."""


class KeysReached(Exception):
    """Raised by the attention function of a chunk if only its keys and values are needed, to leave the layer."""


class KeyStore:
    """Keys and values of one layer for whole rows, and the sums of their gradients in the backward pass.

    Args:
        rows: number of rows.
        length: tokens per row.
    """

    def __init__(self, rows: int, length: int) -> None:
        self.length, self._shape = length, (rows, length)
        self.keys: Tensor | None = None
        self.values: Tensor | None = None
        self.key_sums: Tensor | None = None
        self.value_sums: Tensor | None = None

    def put(self, begin: int, key: Tensor, value: Tensor) -> None:
        """Copy keys and values of a chunk, [b, heads, tokens, d] each, to position ``begin`` of the rows.

        Their graph is not kept. The first call allocates the buffers."""
        if self.keys is None:
            self.keys, self.values = self._like(key, key.dtype), self._like(value, value.dtype)
        assert self.keys is not None and self.values is not None
        end = begin + key.shape[2]
        self.keys[:, :, begin:end], self.values[:, :, begin:end] = key.detach(), value.detach()

    def of(self, rows: slice) -> tuple[Tensor, Tensor]:
        """Return keys and values of ``rows``, as views."""
        assert self.keys is not None and self.values is not None
        return self.keys[rows], self.values[rows]

    def make_sums(self) -> None:
        """Allocate ``key_sums`` and ``value_sums``, the sums of gradients of keys and values, as zeros.

        Their dtype is fp32 (fp64 for fp64). Does nothing if they exist."""
        assert self.keys is not None and self.values is not None
        if self.key_sums is not None:
            return
        wide = torch.promote_types(self.keys.dtype, torch.float32)
        self.key_sums = torch.zeros_like(self.keys, dtype=wide)
        self.value_sums = torch.zeros_like(self.values, dtype=wide)

    def _like(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """Return an empty buffer for whole rows with the heads and the head size of ``tensor``."""
        rows, length = self._shape
        return torch.empty(rows, tensor.shape[1], length, tensor.shape[3], dtype=dtype, device=tensor.device)


@dataclass(eq=False)
class Chunk:
    """Tokens ``begin`` to ``end`` of every row of a micro-batch, for which a layer is called.

    In a context-parallel group they count the tokens that this rank computes.

    Args:
        store: keys and values of the layer.
        begin, end: range of the tokens.
        ranges: positions of these tokens in the row, ascending; (``begin``, ``end``) by default.
        only_keys: leave the layer as soon as keys and values are written.
        take: function that receives keys and values with their graph; the layer is left after it.
        gathered: True if the store already has keys and values of all tokens. The code that gathered them propagates
            their gradients.
        attended: True once the layer has called its attention.
        keep: function that receives the chunk's tokens, attention's output and the log-sum-exp of its scores (None
            without a kernel).
        kept: output and log-sum-exp from an earlier call, which are then not computed.
        arrived, left: states before and behind the chunk, by mixer and row, for documents that cross its borders.
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
        """The chunk's tokens as a slice."""
        return slice(self.begin, self.end)

    def __post_init__(self) -> None:
        self.ranges = self.ranges or ((self.begin, self.end),)


@dataclass(frozen=True)
class ChunkQueries:
    """Queries of one document, or of all rows, in a chunk.

    Args:
        rows: the rows.
        queries: slice of the queries within the chunk.
        oldest: position in the row of the oldest key that is seen.
        first: position in the row of the first query.
        last: position in the row behind the last query.
    """

    rows: slice
    queries: slice
    oldest: int
    first: int
    last: int


def pieces(documents: Documents, chunk: Chunk, window: int | None) -> Iterator[ChunkQueries]:
    """Yield the queries of every document in a chunk, one item for each contiguous range of tokens.

    Args:
        documents: documents of the rows.
        chunk: the chunk.
        window: tokens that a query sees, itself included, or None.
    """
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
    """Attention of a chunk, whose keys are written to and read from the chunk's store.

    Queries [b, heads, c, d], keys and values [b, key-value heads, c, d] in, [b, heads, c, d] out."""

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
            return output.clone()  # a clone: the saved tensor itself must not become the output
        rows, heads, length, _ = query.shape
        output = query.new_empty(rows, length, heads, value.shape[-1]).transpose(1, 2)  # layout of ``attend``'s result
        plain = options.is_plain(query, value)
        wide = torch.promote_types(query.dtype, torch.float32)
        sums = query.new_empty(query.shape[:3], dtype=wide) if plain else None
        generator = generator_for(query, ctx.seed, options.dropout)
        for piece in pieces(documents, chunk, options.window):
            if sums is not None:
                at = piece.rows, slice(None), piece.queries
                seen = chunk.store.of(piece.rows)
                # Values that need padding are padded for few keys at one time. Otherwise all of the past is one part.
                past = piece.last if query.shape[-1] == value.shape[-1] else PAST_KEYS
                parts = _parts(piece, options.window, past, flash.on_cuda(query))
                output[at], sums[at] = flash.attention(query[at], *seen, parts, options.scale, sinks)
                continue
            for queries, _, seen, offset in _tiles(query, chunk, piece, options.window):
                score_kwargs = {"offset": offset, "generator": generator}
                output[queries] = explicit_scores(query[queries], *seen, sinks, options, **score_kwargs)
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
            for queries, keys, seen, offset in _tiles(query, chunk, piece, options.window):
                score_kwargs = {"offset": offset, "generator": generator}
                of_query, of_key, of_value, of_sinks = explicit_gradients(
                    gradient[queries], query[queries], *seen, sinks, options, **score_kwargs
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
    """Write the keys and values of a chunk into the store of its row, and compute its attention, [b, c, heads, d].

    Args:
        query: [b, heads, c, d].
        key, value: [b, key-value heads, c, d].
        sinks: [heads] logits of attention sinks, or None.
        chunk: the chunk, with its store.
        documents: documents of the rows.
        options: window, scale, dropout and cap.

    Raises:
        KeysReached: only keys and values are needed (``chunk.take`` or ``chunk.only_keys``).
    """
    assert query.shape[2] == chunk.end - chunk.begin
    chunk.attended = True
    if chunk.take is not None:
        chunk.take(key, value)
        raise KeysReached
    output: Any = ChunkAttention.apply(query, key, value, sinks, chunk, documents, options)
    return output.transpose(1, 2).contiguous()


def _only_here(chunk: Chunk) -> tuple[Tensor | None, ...]:
    """Remove keys and values from the store and return them, if the row is one chunk, so that autograd owns them.

    Returns:
        Keys and values, or an empty tuple if other chunks or ranks need them in the store.
    """
    store = chunk.store
    if chunk.gathered or chunk.end - chunk.begin < store.length:
        return ()
    row, store.keys, store.values = (store.keys, store.values), None, None
    return row


def _parts(piece: ChunkQueries, window: int | None, past: int, whole: bool) -> list[Part]:
    """Return the parts of queries and keys that the flash kernel computes, the queries' own square first.

    With a window, queries are cut into portions. Each has its own square, the keys that all its queries see, and the
    keys that its queries stop seeing one after another.

    Args:
        piece: the queries.
        window: tokens that a query sees, itself included, or None.
        past: number of past keys that are processed at one time.
        whole: True if the kernel hides keys by distance: then there is one part, if it has at most ``past`` past keys.
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
    """Return parts of at most ``most`` keys from ``oldest`` to ``first``, all of which the queries see."""
    return [Part(queries, slice(begin, min(begin + most, first))) for begin in range(oldest, first, most)]


def _tiles(
    query: Tensor, chunk: Chunk, piece: ChunkQueries, window: int | None
) -> Iterator[tuple[Place, Place, tuple[Tensor, Tensor], int]]:
    """Yield slices of queries whose scores fit a memory budget.

    Each item is (queries in the chunk, keys that they see in the row, tensors of these keys and values, index of the
    first query among these keys)."""
    every, store = slice(None), chunk.store
    assert store.keys is not None and store.values is not None
    for first, last, oldest in tiles_of(query, piece.rows, range(piece.first, piece.last), piece.oldest, window):
        offset = piece.queries.start - piece.first
        queries = piece.rows, every, slice(first + offset, last + offset)
        keys = piece.rows, every, slice(oldest, last)
        yield queries, keys, (store.keys[keys], store.values[keys]), first - oldest
