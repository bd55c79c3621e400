"""Attention of one chunk of a row: its queries against all keys of its documents so far, which are in one buffer.

A layer that is called chunk by chunk is exact if every query meets the keys before it. So the attention function of a
chunk puts its keys and values into the row's buffers (``KeyStore``) and takes those of earlier chunks from there.
In the backward pass chunks come in reverse: each adds to the gradients of the keys that it has seen, in fp32, and
finds those of its own complete, because only chunks behind it have seen them, and these are done. Where several ranks
compute a row together, its keys and values are gathered before, and their gradients propagated after that
(runtime/sets.py): a chunk then neither puts its own there nor gives their gradients.

Plain causal attention is torch's flash kernel twice: the chunk's own square, and its past, merged by their log-sum-exp
in fp32. The backward kernel takes the merged output and log-sum-exp, one part of the keys after another. Everything
else (windows, soft caps, sinks, dropout) goes through explicit scores in slices of queries.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from tawpipe.model.kernels import Documents, Place, explicit_gradients, explicit_scores, slices_of

PAST_KEYS = 4096
"""Keys of the past that are looked at at one time: repeated for every query head, they exist for no more."""
ops = torch.ops.aten


class KeysReached(Exception):
    """Raised by the attention function of a chunk of which nothing but keys and values is wanted."""


class KeyStore:
    """The keys and values of one layer for whole rows, and in the backward pass the sums of their gradients."""

    def __init__(self, rows: int, length: int) -> None:
        self._shape = rows, length
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

    def begin_backward(self) -> None:
        """Make room for the sums."""
        assert self.keys is not None and self.values is not None
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

    @property
    def tokens(self) -> slice:
        """Its place in a row."""
        return slice(self.begin, self.end)

    def __post_init__(self) -> None:
        self.ranges = self.ranges or ((self.begin, self.end),)


@dataclass(frozen=True)
class Options:
    """What a model wants of attention besides causality."""

    window: int | None
    scale: float
    dropout: float
    softcap: float | None

    def is_plain(self, sinks: Tensor | None, query: Tensor, value: Tensor) -> bool:
        """True if the flash kernel computes it."""
        ordinary = self.window is None and self.dropout == 0 and self.softcap is None and sinks is None
        known = query.device.type == "cpu" or (query.is_cuda and query.dtype in (torch.float16, torch.bfloat16))
        return ordinary and known and query.shape[-1] == value.shape[-1]


@dataclass(frozen=True)
class Piece:
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


def pieces(documents: Documents, chunk: Chunk, window: int | None) -> Iterator[Piece]:
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
            yield Piece(rows, slice(first + offset, last + offset), oldest, first, last)


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
        options: Options,
    ) -> Tensor:
        if not chunk.gathered:
            chunk.store.put(chunk.begin, key, value)
        if chunk.only_keys:
            raise KeysReached
        ctx.chunk, ctx.documents, ctx.options = chunk, documents, options
        ctx.seed = int(torch.randint(2**62, ())) if options.dropout > 0 else 0
        if chunk.kept is not None:
            output, sums = chunk.kept
            ctx.save_for_backward(query, sinks, output, sums)
            return output.clone()  # not what was saved, which would then be an output without a graph
        output = query.new_empty(*query.shape[:3], value.shape[-1])
        plain = options.is_plain(sinks, query, value)
        wide = torch.promote_types(query.dtype, torch.float32)
        sums = query.new_empty(query.shape[:3], dtype=wide) if plain else None
        generator = torch.Generator(query.device).manual_seed(ctx.seed)
        for piece in pieces(documents, chunk, options.window):
            if sums is not None:
                own = query[piece.rows, :, piece.queries]
                output[piece.rows, :, piece.queries], sums[piece.rows, :, piece.queries] = _flash(
                    own, chunk.store, piece, options.scale
                )
                continue
            for queries, _, seen, offset in _slices(query, chunk, piece, options.window):
                given = {"offset": offset, "generator": generator, **vars(options)}
                output[queries] = explicit_scores(query[queries], *seen, sinks, **given)
        if chunk.keep is not None:
            chunk.keep(chunk.tokens, output, sums)
        ctx.save_for_backward(query, sinks, output, sums)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        query, sinks, output, sums = ctx.saved_tensors
        chunk, options, (gradient,) = ctx.chunk, ctx.options, gradients
        store = chunk.store
        assert store.key_sums is not None and store.value_sums is not None
        query_gradient = torch.zeros_like(query)
        sink_sum = None if sinks is None else torch.zeros_like(sinks, dtype=store.key_sums.dtype)
        generator = torch.Generator(query.device).manual_seed(ctx.seed)
        for piece in pieces(ctx.documents, chunk, options.window):
            if sums is not None:
                at = piece.rows, slice(None), piece.queries
                own = [tensor[at].contiguous() for tensor in (gradient, query, output, sums)]
                query_gradient[at] = _flash_gradients(own[0], own[1], own[2], own[3], store, piece, options.scale)
                continue
            for queries, keys, seen, offset in _slices(query, chunk, piece, options.window):
                given = {"offset": offset, "generator": generator, **vars(options)}
                of_query, of_key, of_value, of_sinks = explicit_gradients(
                    query[queries], *seen, sinks, gradient[queries], **given
                )
                query_gradient[queries] = of_query
                store.key_sums[keys] += of_key
                store.value_sums[keys] += of_value
                if sink_sum is not None and of_sinks is not None:
                    sink_sum += of_sinks
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
    options: Options,
) -> Tensor:
    """Attention of a chunk, [b, c, heads, d], after its keys and values have been put into the row's."""
    assert query.shape[2] == chunk.end - chunk.begin
    chunk.attended = True
    if chunk.take is not None:
        chunk.take(key, value)
        raise KeysReached
    output: Any = ChunkAttention.apply(query, key, value, sinks, chunk, documents, options)
    return output.transpose(1, 2).contiguous()


# plain causal attention


def _flash(query: Tensor, store: KeyStore, piece: Piece, scale: float) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of a piece's queries."""
    output: Tensor | None = None
    sums: Tensor | None = None
    for keys, is_own in _parts(piece):
        one, lse, *_ = _kernel(query, *_seen(query, store, piece, keys), is_own, scale)
        lse = lse.to(torch.promote_types(query.dtype, torch.float32))
        if output is None or sums is None:
            output, sums = one.to(lse.dtype), lse
            continue
        # The shares that both have in the softmax over all keys.
        share = torch.sigmoid(lse - sums).unsqueeze(-1)
        output = output + share * (one.to(lse.dtype) - output)
        sums = torch.logaddexp(sums, lse)
    assert output is not None and sums is not None
    return output.to(query.dtype), sums


def _flash_gradients(
    gradient: Tensor, query: Tensor, output: Tensor, sums: Tensor, store: KeyStore, piece: Piece, scale: float
) -> Tensor:
    """The gradient of a piece's queries; those of the keys and values that they see are added to the store's sums."""
    assert store.key_sums is not None and store.value_sums is not None
    total = torch.zeros_like(query, dtype=store.key_sums.dtype)
    for keys, is_own in _parts(piece):
        seen = _seen(query, store, piece, keys)
        of_query, of_key, of_value = _kernel_gradients(gradient, query, *seen, output, sums, is_own, scale)
        total += of_query
        groups = store.key_sums.shape[1]
        for target, own in ((store.key_sums, of_key), (store.value_sums, of_value)):
            rows, heads, length, dim = own.shape
            wide = own.to(target.dtype).view(rows, groups, heads // groups, length, dim)
            target[piece.rows, :, keys] += wide.sum(2)
    return total.to(query.dtype)


def _parts(piece: Piece) -> Iterator[tuple[slice, bool]]:
    """The keys of a piece part by part, its own square first, and whether they are that."""
    yield slice(piece.first, piece.last), True
    for begin in range(piece.oldest, piece.first, PAST_KEYS):
        yield slice(begin, min(begin + PAST_KEYS, piece.first)), False


def _seen(query: Tensor, store: KeyStore, piece: Piece, keys: slice) -> tuple[Tensor, Tensor]:
    """Keys and values, repeated for the query heads."""
    assert store.keys is not None and store.values is not None
    times = query.shape[1] // store.keys.shape[1]
    own = (tensor[piece.rows, :, keys] for tensor in (store.keys, store.values))
    keys_seen, values_seen = (one.repeat_interleave(times, dim=1) if times > 1 else one.contiguous() for one in own)
    return keys_seen, values_seen


def _kernel(query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float) -> tuple[Any, ...]:
    if query.device.type == "cpu":
        return ops._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, causal, scale=scale)
    return ops._scaled_dot_product_flash_attention(query, key, value, 0.0, causal, False, scale=scale)


def _kernel_gradients(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    sums: Tensor,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    if query.device.type == "cpu":
        backward: Callable[..., Any] = ops._scaled_dot_product_flash_attention_for_cpu_backward
        # The kernel keeps sums of half precision in fp32, and of fp64 in fp64.
        return backward(gradient, query, key, value, output, sums, 0.0, causal, scale=scale)
    backward = ops._scaled_dot_product_flash_attention_backward
    none, number = None, query.shape[2]
    state = torch.empty(2, dtype=torch.uint64, device=query.device)  # of dropout, which there is none of
    more = (none, none, number, key.shape[2], 0.0, causal, state, torch.empty_like(state))
    return backward(gradient, query, key, value, output, sums.float(), *more, scale=scale)


# everything else


def _slices(
    query: Tensor, chunk: Chunk, piece: Piece, window: int | None
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
