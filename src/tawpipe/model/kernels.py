"""Attention kernels for packed documents. None of them ever holds an S x S matrix.

There are three: torch's varlen kernel for all documents, torch's fused kernels document by document, and explicit
scores for slices of queries."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, partial
from itertools import accumulate
from typing import Any, Protocol

import torch
import torch.nn.attention as library
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from tawpipe.model import flash

FLASH_WINDOW = 128
"""Window, in tokens, below which the CPU uses explicit scores: its flash kernel would be called for few queries at a
time."""
Place = tuple[slice, slice, slice]
"""Slices of rows, heads and tokens in a tensor [b, heads, S, d]."""
Kernel = Callable[..., Tensor]


class Results(Protocol):
    """Interface of the results of attention that a layer keeps (runtime/compute/attention_results.py)."""

    def attended(self, kernel: Kernel, operands: tuple[Tensor, ...], others: tuple[Any, ...]) -> Tensor: ...

    def of_row(self, chunk: Any) -> None: ...


results: ContextVar[Results | None] = ContextVar("tawpipe_attention_results", default=None)
"""Results of the layer that runs, if it keeps them or reuses them; else None."""


@dataclass(frozen=True, eq=False)
class Documents:
    """Borders of the documents among the b x S tokens of a micro-batch, on the host and, for CUDA, on the device."""

    rows: int
    spans: tuple[tuple[int, int, int], ...]
    """(row, first token in the row, length) of every document, in the order of the flattened tokens."""
    max_length: int
    cumulative: Tensor | None = None
    """[documents + 1] int32 on the device: start of each document in the flattened tokens, and the end. None on the
    CPU."""

    @classmethod
    def of(cls, lengths: tuple[int, ...], shape: tuple[int, int], device: torch.device) -> Documents:
        """Build the borders from the documents' lengths.

        Args:
            lengths: tokens of each document, in the order of the flattened tokens. They add up to all tokens, and no
                document crosses a row.
            shape: rows and tokens per row.
            device: device on which attention computes. A CUDA device gets a copy of the borders.
        """
        rows, row_length = shape
        starts = (0, *accumulate(lengths))
        assert starts[-1] == rows * row_length, "document lengths must add up to the tokens of the rows"
        spans = tuple((start // row_length, start % row_length, n) for start, n in zip(starts, lengths, strict=False))
        assert all(first + n <= row_length for _, first, n in spans), "a document crosses a row"
        return cls._of(rows, spans, device if device.type == "cuda" else None)

    @classmethod
    def _of(cls, rows: int, spans: Sequence[tuple[int, int, int]], device: torch.device | None) -> Documents:
        """Build the borders from ``spans``, with ``cumulative`` on ``device`` unless that is None."""
        lengths, cumulative = [length for _, _, length in spans], None
        if device is not None:
            starts = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device="cpu")
            cumulative = starts.pin_memory().to(device, non_blocking=True)
        return cls(rows, tuple(spans), max(lengths), cumulative)

    def cut(self, length: int) -> Documents:
        """Return these documents cut into documents of at most ``length`` tokens, counted from each beginning."""
        if self.max_length <= length:
            return self
        pieces = [
            (row, first + at, min(length, total - at))
            for row, first, total in self.spans
            for at in range(0, total, length)
        ]
        return Documents._of(self.rows, pieces, None if self.cumulative is None else self.cumulative.device)

    def regions(self) -> Iterator[tuple[slice, slice]]:
        """Yield regions (rows, tokens) that one kernel call computes.

        A region is one document, or all rows if each row is one document."""
        if len(self.spans) == self.rows:
            yield slice(0, self.rows), slice(0, self.max_length)
        else:
            for row, first, length in self.spans:
                yield slice(row, row + 1), slice(first, first + length)


@cache
def varlen_function() -> tuple[Callable[..., Any] | None, frozenset[str]]:
    """Return torch's kernel for packed documents and the names of its arguments, or (None, empty) if torch has none.

    The arguments differ between releases of torch."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None, frozenset()
    return varlen_attn, frozenset(inspect.signature(varlen_attn).parameters)


def why_not_varlen(
    head_dim: int, value_dim: int, dropout: float, softcap: float | None, sinks: Tensor | None, window: int | None
) -> str | None:
    """Return the reason why torch's varlen kernel cannot compute this attention, or None if it can.

    Args:
        head_dim: elements of a query head.
        value_dim: elements of a value head.
        dropout: dropout probability.
        softcap: cap of the scores, or None.
        sinks: attention sinks, or None.
        window: tokens in the sliding window, or None.
    """
    function, arguments = varlen_function()
    if function is None or "scale" not in arguments:
        return f"torch {torch.__version__} has no varlen attention with a scale"
    if window is not None and "window_size" not in arguments:
        return f"torch {torch.__version__} has no varlen attention with a sliding window"
    if softcap is not None or sinks is not None:
        return "torch's varlen attention has neither soft caps nor sinks"
    if dropout > 0:
        return "torch's varlen attention has no dropout"
    if head_dim != value_dim or head_dim > 256 or head_dim % 8:
        return f"torch's varlen attention takes no heads of size {head_dim} with values of size {value_dim}"
    return None


def attended(kernel: Kernel, operands: tuple[Tensor, ...], *others: Any) -> Tensor:
    """Return ``kernel(*operands, *others)``, which the layer that runs may keep or have kept.

    Args:
        kernel: attention that draws no random numbers.
        operands: queries, keys and values.
        others: further arguments. Tensors in closures of ``kernel`` would stay in memory.
    """
    kept = results.get()
    return kernel(*operands, *others) if kept is None else kept.attended(kernel, operands, others)


def dot_product(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> Tensor:
    """Call torch's ``scaled_dot_product_attention``, whose result a layer may keep unless dropout is drawn."""
    if dropout_p > 0 or results.get() is None:
        return F.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, **options)
    if attn_mask is not None and attn_mask.dtype is torch.bool:  # else the kernel makes this copy and saves it
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(~attn_mask, float("-inf"))
    kernel = partial(F.scaled_dot_product_attention, is_causal=is_causal, **options)
    return attended(kernel, (query, key, value), attn_mask)


def varlen(query: Tensor, key: Tensor, value: Tensor, documents: Documents, window: int | None, scale: float) -> Tensor:
    """Compute causal attention of all documents with one call of torch's varlen flash kernel.

    Args:
        query, key, value: [b, heads, S, d] on CUDA. Keys and values may have fewer heads.
        documents: borders of the documents.
        window: tokens that a query sees, itself included, or None for all before it.
        scale: factor on the scores.

    Returns:
        The output [b, S, heads, d].
    """
    function, arguments = varlen_function()
    assert function is not None and documents.cumulative is not None
    options: dict[str, object] = {"scale": scale}
    if "window_size" in arguments:
        options["window_size"] = (-1 if window is None else window - 1, 0)
    else:
        options["is_causal"] = True
    if key.shape[1] != query.shape[1]:
        if "enable_gqa" in arguments:
            options["enable_gqa"] = True
        else:
            key, value = _repeat(key, query.shape[1]), _repeat(value, query.shape[1])
    rows, heads, length, head_dim = query.shape
    flat = tuple(tensor.transpose(1, 2).reshape(rows * length, -1, head_dim) for tensor in (query, key, value))
    longest = documents.max_length
    kernel = partial(function, **options)
    output = attended(lambda q, k, v, at: kernel(q, k, v, at, at, longest, longest), flat, documents.cumulative)
    return output.view(rows, length, heads, head_dim)


def _repeat(tensor: Tensor, heads: int) -> Tensor:
    """Repeat key or value heads for all query heads that share them: [b, key-value heads, L, d] -> [b, heads, L, d]."""
    rows, kv_heads, length, dim = tensor.shape
    if kv_heads == heads:
        return tensor
    return tensor[:, :, None].expand(rows, kv_heads, heads // kv_heads, length, dim).reshape(rows, heads, length, dim)


def flash_in_use() -> str:
    """Return the name of the flash attention that torch calls: ``FA2`` unless another implementation was activated."""
    current = getattr(library, "current_flash_attention_impl", None)
    return (current and current()) or "FA2"


def _kernels_with(dropout: float, head_dim: int) -> AbstractContextManager[object]:
    """Return a context without SDPA kernels that fail with dropout or would draw another mask in a recomputation.

    Replacements of flash attention 2 fail if dropout is not 0. For heads of more than 128 elements, some devices choose
    a kernel only if no gradients are needed, so that a layer's recomputation would draw another mask."""
    if dropout > 0 and head_dim > 128:
        return sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])
    if dropout == 0 or flash_in_use() == "FA2":
        return nullcontext()
    return sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])


def with_mask(mask: Tensor | None, *, backward: bool = False) -> AbstractContextManager[object]:
    """Return a context for attention with ``mask`` without cuDNN, if its results would be wrong.

    They are on devices of capability 10, with fewer than eight heads of keys (pytorch 193893). With ``backward``,
    gradients can be NaN on Hopper (pytorch 196678)."""
    device = None if mask is None else mask.device
    if device is None or device.type != "cuda":
        return nullcontext()
    if not backward and torch.cuda.get_device_capability(device)[0] != 10:
        return nullcontext()
    return sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])


def whole_rows(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Compute causal attention of one document per row by cuDNN or flash attention.

    torch chooses cuDNN where it is faster. Tensors are [b, heads, S, d], input and output. Keys and values with fewer
    heads are not copied."""
    grouped = key.shape[1] != query.shape[1]
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]):
        return dot_product(query, key, value, is_causal=True, scale=scale, enable_gqa=grouped)


def fused(query: Tensor, key: Tensor, value: Tensor, window: int | None, scale: float, dropout: float) -> Tensor:
    """Compute causal attention of one document per row by torch's fused kernels.

    Args:
        query, key, value: [b, heads, L, d]. Keys and values may have fewer heads.
        window: tokens that a query sees, itself included, or None. With a window, slices of queries are computed one
            after another, each with the keys that it sees.
        scale: factor on the scores.
        dropout: dropout probability.

    Returns:
        The output [b, heads, L, d].
    """
    if query.device.type == "cpu" and value.shape[-1] < query.shape[-1]:  # else its kernel holds S x S scores
        padded = F.pad(value, (0, query.shape[-1] - value.shape[-1]))
        return fused(query, key, padded, window, scale, dropout)[..., : value.shape[-1]]
    key, value = _repeat(key, query.shape[1]), _repeat(value, query.shape[1])
    length = query.shape[2]
    if window is None or length <= window:
        with _kernels_with(dropout, query.shape[-1]):
            return dot_product(query, key, value, None, dropout, True, scale=scale)

    size = min(max(window // 2, 64), 1024)
    # One additive mask for all slices: row i is query `first + i`, column j is key `first - (window - 1) + j`.
    i = torch.arange(size, device=query.device)[:, None]
    j = torch.arange(size + window - 1, device=query.device)[None, :]
    mask = torch.zeros(size, size + window - 1, dtype=query.dtype, device=query.device)
    mask.masked_fill_((j < i) | (j > i + window - 1), float("-inf"))
    every, starts = slice(None), range(0, length, size)
    tokens = [(max(0, first - window + 1), first, min(first + size, length)) for first in starts]
    queries = parts(query, [(every, every, slice(first, last)) for _, first, last in tokens])
    seen = [(every, every, slice(oldest, last)) for oldest, _, last in tokens]
    tiles = []
    for (oldest, first, last), query_tile, keys, values in zip(
        tokens, queries, parts(key, seen), parts(value, seen), strict=True
    ):
        skipped = window - 1 - (first - oldest)
        hidden = mask[: last - first, skipped : skipped + last - oldest]
        with _kernels_with(dropout, query.shape[-1]), with_mask(hidden, backward=True):
            tiles.append(dot_product(query_tile, keys, values, hidden, dropout, scale=scale))
    return torch.cat(tiles, dim=2)


class Parts(torch.autograd.Function):
    """Parts of a tensor [b, heads, S, d] whose gradients are added up in fp32 (fp64 for fp64) where parts overlap.

    Plain slicing would make a gradient of the whole tensor's size for every part, and add them in the tensor's own
    dtype."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, places: tuple[Place, ...]) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.like, ctx.places = (tensor.shape, tensor.dtype, tensor.device), places
        return tuple(tensor[place] for place in places)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        shape, dtype, device = ctx.like
        total = torch.zeros(shape, dtype=torch.promote_types(dtype, torch.float32), device=device)
        for place, gradient in zip(ctx.places, gradients, strict=True):
            if gradient is not None:
                total[place] += gradient
        return total.to(dtype), None


def parts(tensor: Tensor, places: Sequence[Place]) -> tuple[Tensor, ...]:
    """Return the parts of ``tensor`` [b, heads, S, d] at ``places``.

    Gradients are summed in fp32 where parts overlap; see ``Parts``."""
    return Parts.apply(tensor, tuple(places))  # type: ignore[return-value]


@dataclass(frozen=True)
class AttentionOptions:
    """Options of a model's causal attention.

    Args:
        window: tokens that a query sees, itself included, or None for all before it.
        scale: factor on the scores.
        dropout: dropout probability.
        softcap: cap of the scores, or None.
    """

    window: int | None
    scale: float
    dropout: float
    softcap: float | None

    def is_plain(self, query: Tensor, value: Tensor) -> bool:
        """Return True if the flash kernel can compute this attention for queries and values of these shapes."""
        wide = self.window is None or self.window >= FLASH_WINDOW or flash.on_cuda(query)
        return wide and self.dropout == 0 and self.softcap is None and flash.takes(query, value)


class TiledScores(torch.autograd.Function):
    """Attention with explicit scores, one slice of queries at a time.

    The backward pass computes the scores again. Tensors are [b, heads, S, d], input and output. One autograd function
    handles all slices of all documents. A checkpoint per slice would fragment the heap, until it holds as many bytes as
    all scores would. Gradients of keys, values and sinks are sums over slices, added up in fp32 (fp64 for fp64)."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        documents: Documents,
        options: AttentionOptions,
    ) -> Tensor:
        ctx.save_for_backward(query, key, value, sinks)
        ctx.documents, ctx.options = documents, options
        ctx.seed = int(torch.randint(2**62, ())) if options.dropout > 0 else 0
        generator = generator_for(query, ctx.seed, options.dropout)
        output = query.new_empty(*query.shape[:3], value.shape[-1])
        for queries, keys, offset in _tiles(query, documents, options.window):
            score_kwargs = {"offset": offset, "generator": generator}
            output[queries] = explicit_scores(query[queries], key[keys], value[keys], sinks, options, **score_kwargs)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        query, key, value, sinks = ctx.saved_tensors
        wide = torch.promote_types(query.dtype, torch.float32)
        query_gradient = torch.empty_like(query)
        sums = [torch.zeros_like(tensor, dtype=wide) for tensor in (key, value)]
        sink_sum = None if sinks is None else torch.zeros_like(sinks, dtype=wide)
        generator = generator_for(query, ctx.seed, ctx.options.dropout)
        for queries, keys, offset in _tiles(query, ctx.documents, ctx.options.window):
            inputs, score_kwargs = (query[queries], key[keys], value[keys]), {"offset": offset, "generator": generator}
            tile_gradients = explicit_gradients(gradients[0][queries], *inputs, sinks, ctx.options, **score_kwargs)
            query_gradient[queries] = tile_gradients[0]
            for total, part in zip(sums, tile_gradients[1:3], strict=True):
                total[keys] += part
            if sink_sum is not None and tile_gradients[3] is not None:
                sink_sum += tile_gradients[3]
        key_gradient, value_gradient = (total.to(query.dtype) for total in sums)
        sink_gradient = None if sinks is None or sink_sum is None else sink_sum.to(sinks.dtype)
        return query_gradient, key_gradient, value_gradient, sink_gradient, None, None


def _tiles(query: Tensor, documents: Documents, window: int | None) -> Iterator[tuple[Place, Place, int]]:
    """Yield slices of queries whose scores fit a memory budget, for all documents.

    Each item is (queries, keys that they see, index of the first query among these keys)."""
    every = slice(None)
    for rows, tokens in documents.regions():
        for first, last, oldest in tiles_of(query, rows, range(tokens.start, tokens.stop), tokens.start, window):
            yield (rows, every, slice(first, last)), (rows, every, slice(oldest, last)), first - oldest


def tiles_of(
    query: Tensor, rows: slice, tokens: range, begin: int, window: int | None
) -> Iterator[tuple[int, int, int]]:
    """Yield (first query, end of the queries, oldest key) of slices whose scores fit a memory budget.

    Args:
        query: all queries [b, heads, S, d], for its device and number of heads.
        rows: rows that are computed together.
        tokens: positions of the queries in their row, within one document.
        begin: position of the document's oldest key that counts.
        window: tokens that a query sees, itself included, or None.
    """
    budget = 2**26 if query.is_cuda else 2**22
    first = tokens.start
    while first < tokens.stop:
        oldest = begin if window is None else max(begin, first - window + 1)
        size = budget // ((rows.stop - rows.start) * query.shape[1] * (first - oldest + 128))
        last = min(tokens.stop, first + max(1, min(size, 128)))
        yield first, last, oldest
        first = last


def generator_for(query: Tensor, seed: int, dropout: float) -> torch.Generator | None:
    """Return a random generator with this ``seed`` on the device of ``query``, or None if ``dropout`` is 0.

    Creating a generator costs time on CUDA."""
    device = "cpu" if query.is_meta else query.device
    return torch.Generator(device).manual_seed(seed) if dropout > 0 else None


def explicit_gradients(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    options: AttentionOptions,
    **kwargs: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return the gradients of query, key, value and sinks (None without sinks) of ``explicit_scores``.

    The forward pass is computed again for this. Nothing is added to ``grad`` of the given tensors.

    Args:
        gradient: gradient of the output.
        query, key, value, sinks, options: as passed to ``explicit_scores``.
        kwargs: further arguments of ``explicit_scores``.
    """
    with torch.enable_grad():
        inputs = [tensor.detach().requires_grad_() for tensor in (query, key, value)]
        sink = None if sinks is None else sinks.detach().requires_grad_()
        output = explicit_scores(inputs[0], inputs[1], inputs[2], sink, options, **kwargs)
    wanted = inputs if sink is None else [*inputs, sink]
    gradients = torch.autograd.grad(output, wanted, gradient)
    return gradients[0], gradients[1], gradients[2], None if sink is None else gradients[3]


def explicit_scores(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    options: AttentionOptions,
    *,
    offset: int,
    generator: torch.Generator | None,
    hidden: Tensor | None = None,
) -> Tensor:
    """Compute attention of some queries with explicit scores: cap, causal window, sinks, softmax and dropout.

    Args:
        query: [rows, heads, queries, d].
        key, value: [rows, key-value heads, keys, d].
        sinks: [heads] logits of one more key per head, whose value is 0, or None.
        options: window, scale, dropout and cap.
        offset: index of the key at the position of the first query.
        generator: random numbers for dropout.
        hidden: True where a query does not see a key, [rows, groups, heads of a group, queries, keys] or broadcastable.
            By default it follows from ``offset`` and the window.

    Returns:
        The output [rows, heads, queries, d of values].
    """
    window, dropout, softcap = options.window, options.dropout, options.softcap
    rows, heads, queries, dim = query.shape
    groups, keys = key.shape[1], key.shape[2]
    wide = torch.promote_types(query.dtype, torch.float32)
    folded = query.reshape(rows, groups, heads // groups * queries, dim)
    scores = (folded @ key.transpose(2, 3)).to(wide).view(rows, groups, heads // groups, queries, keys) * options.scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if hidden is None:
        i = torch.arange(queries, device=query.device)[:, None] + offset
        j = torch.arange(keys, device=query.device)[None, :]
        hidden = j > i if window is None else (j > i) | (j <= i - window)
    scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        column = sinks.to(wide).view(1, groups, heads // groups, 1, 1).expand(rows, -1, -1, queries, 1)
        scores = torch.cat([scores, column], dim=-1)
    weights = scores.softmax(dim=-1)[..., :keys].to(value.dtype)
    if dropout > 0:
        weights = weights * torch.empty_like(weights).bernoulli_(1 - dropout, generator=generator).div_(1 - dropout)
    return (weights.flatten(2, 3) @ value).view(rows, heads, queries, value.shape[-1])
