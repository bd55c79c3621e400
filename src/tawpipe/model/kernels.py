"""How attention inside packed documents is computed: torch's varlen kernel, its fused kernels document by document, or
slices of explicit scores. None of them ever holds a matrix of S x S. Imports torch only.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Documents:
    """How the b x S tokens of a micro-batch are cut into documents, on the host and, for CUDA, on the device."""

    rows: int
    spans: tuple[tuple[int, int, int], ...]
    """(row, first token in the row, length) of every document, in the order of the flattened tokens."""
    max_length: int
    cumulative: Tensor | None = None
    """[documents + 1] int32 on the device: where each document starts in the flattened tokens. None on the CPU."""
    verify: bool = False
    """Ask the model's mask functions whether they are what this file computes; see ``_check_mask_function``."""

    @classmethod
    def of(
        cls, lengths: tuple[int, ...], shape: tuple[int, int], device: torch.device, *, verify: bool = False
    ) -> Documents:
        """Args: document lengths over the flattened tokens, [b, S], where the attention will run."""
        rows, row_length = shape
        starts = (0, *accumulate(lengths))
        assert starts[-1] == rows * row_length, "document lengths must add up to the tokens of the rows"
        spans = tuple((start // row_length, start % row_length, n) for start, n in zip(starts, lengths, strict=False))
        assert all(first + n <= row_length for _, first, n in spans), "a document crosses a row"
        cumulative = None
        if device.type == "cuda":
            cumulative = torch.tensor(starts, dtype=torch.int32).pin_memory().to(device, non_blocking=True)
        return cls(rows, spans, max(lengths), cumulative, verify)


@cache
def varlen_function() -> tuple[Callable[..., Any] | None, frozenset[str]]:
    """torch's kernel for packed documents and the names of its arguments, which differ between releases."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None, frozenset()
    return varlen_attn, frozenset(inspect.signature(varlen_attn).parameters)


def why_not_varlen(
    head_dim: int, value_dim: int, dropout: float, softcap: float | None, sinks: Tensor | None, window: int | None
) -> str | None:
    """Why torch's varlen kernel cannot compute this, or None if it can."""
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


def varlen(query: Tensor, key: Tensor, value: Tensor, documents: Documents, window: int | None, scale: float) -> Tensor:
    """All documents at once by torch's flash kernel; [b, heads, S, d] in, [b, S, heads, d] out."""
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
    flat = [tensor.transpose(1, 2).reshape(rows * length, -1, head_dim) for tensor in (query, key, value)]
    at, longest = documents.cumulative, documents.max_length
    return function(*flat, at, at, longest, longest, **options).view(rows, length, heads, head_dim)


def _repeat(tensor: Tensor, heads: int) -> Tensor:
    """[b, key-value heads, L, d] -> [b, heads, L, d]."""
    rows, own, length, dim = tensor.shape
    if own == heads:
        return tensor
    return tensor[:, :, None].expand(rows, own, heads // own, length, dim).reshape(rows, heads, length, dim)


def fused(query: Tensor, key: Tensor, value: Tensor, window: int | None, scale: float, dropout: float) -> Tensor:
    """One document per row by torch's fused kernels; with a window in slices of queries, each against the keys it sees.

    [b, heads, L, d] in and out.
    """
    key, value = _repeat(key, query.shape[1]), _repeat(value, query.shape[1])
    length = query.shape[2]
    if window is None or length <= window:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, dropout_p=dropout, scale=scale)

    size = min(max(window // 2, 64), 1024)
    # One additive mask for all slices: row i is query `first + i`, column j is key `first - (window - 1) + j`.
    i = torch.arange(size, device=query.device)[:, None]
    j = torch.arange(size + window - 1, device=query.device)[None, :]
    mask = torch.zeros(size, size + window - 1, dtype=query.dtype, device=query.device)
    mask.masked_fill_((j < i) | (j > i + window - 1), float("-inf"))
    parts = []
    for first in range(0, length, size):
        last, oldest = min(first + size, length), max(0, first - window + 1)
        skipped = window - 1 - (first - oldest)
        parts.append(
            F.scaled_dot_product_attention(
                query[:, :, first:last],
                key[:, :, oldest:last],
                value[:, :, oldest:last],
                attn_mask=mask[: last - first, skipped : skipped + last - oldest],
                dropout_p=dropout,
                scale=scale,
            )
        )
    return torch.cat(parts, dim=2)


class SlicedScores(torch.autograd.Function):
    """Attention with explicit scores, for one slice of queries at a time; the backward pass computes them again.

    [b, heads, L, d] in and out. One function for all slices, instead of a checkpoint per slice, because what
    checkpoints keep between the slices fragments the heap, until it holds as much as the scores would.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        window: int | None,
        scale: float,
        dropout: float,
        softcap: float | None,
    ) -> Tensor:
        ctx.save_for_backward(query, key, value, sinks)
        ctx.window, ctx.options = window, {"scale": scale, "dropout": dropout, "softcap": softcap}
        ctx.random_state = _random_state(query.device) if dropout > 0 else None
        output = query.new_empty(*query.shape[:3], value.shape[-1])
        for first, last, oldest in _slices(query, window):
            output[:, :, first:last] = _explicit_scores(
                query[:, :, first:last],
                key[:, :, oldest:last],
                value[:, :, oldest:last],
                sinks,
                offset=first - oldest,
                window=window,
                **ctx.options,
            )
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks = ctx.saved_tensors
        sums = [torch.zeros_like(tensor) for tensor in (query, key, value)]
        sink_sum = None if sinks is None else torch.zeros_like(sinks)
        devices = [query.device] if query.is_cuda else []
        with torch.random.fork_rng(devices=devices, enabled=ctx.random_state is not None), torch.enable_grad():
            if ctx.random_state is not None:
                _set_random_state(query.device, ctx.random_state)
            for first, last, oldest in _slices(query, ctx.window):
                ranges = (slice(first, last), slice(oldest, last), slice(oldest, last))
                parts = [
                    tensor[:, :, own].detach().requires_grad_()
                    for tensor, own in zip((query, key, value), ranges, strict=True)
                ]
                sink = None if sinks is None else sinks.detach().requires_grad_()
                output = _explicit_scores(
                    parts[0], parts[1], parts[2], sink, offset=first - oldest, window=ctx.window, **ctx.options
                )
                wanted = parts if sink is None else [*parts, sink]
                found = torch.autograd.grad(output, wanted, gradients[0][:, :, first:last])
                for total, own, part in zip(sums, ranges, found[:3], strict=True):
                    total[:, :, own] += part
                if sink_sum is not None:
                    sink_sum += found[3]
        return (*sums, sink_sum, None, None, None, None)


def _slices(query: Tensor, window: int | None) -> Iterator[tuple[int, int, int]]:
    """(first query, last query + 1, oldest key) of slices whose scores fit a budget."""
    rows, heads, length, _ = query.shape
    budget, first = 2**26 if query.is_cuda else 2**22, 0
    while first < length:
        oldest = 0 if window is None else max(0, first - window + 1)
        last = min(length, first + max(1, min(budget // (rows * heads * (first - oldest + 128)), 128)))
        yield first, last, oldest
        first = last


def _random_state(device: torch.device) -> Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def _set_random_state(device: torch.device, state: Tensor) -> None:
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)


def _explicit_scores(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    *,
    offset: int,
    window: int | None,
    scale: float,
    dropout: float,
    softcap: float | None,
) -> Tensor:
    """Scores, cap, causal window, sinks and softmax of some queries; query i stands at key ``offset + i``."""
    rows, heads, queries, dim = query.shape
    groups, keys = key.shape[1], key.shape[2]
    wide = torch.promote_types(query.dtype, torch.float32)
    folded = query.reshape(rows, groups, heads // groups * queries, dim)
    scores = (folded @ key.transpose(2, 3)).to(wide).view(rows, groups, heads // groups, queries, keys) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    i = torch.arange(queries, device=query.device)[:, None] + offset
    j = torch.arange(keys, device=query.device)[None, :]
    hidden = j > i if window is None else (j > i) | (j <= i - window)
    scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        column = sinks.to(wide).view(1, groups, heads // groups, 1, 1).expand(rows, -1, -1, queries, 1)
        scores = torch.cat([scores, column], dim=-1)
    weights = F.dropout(scores.softmax(dim=-1)[..., :keys].to(value.dtype), dropout, training=dropout > 0)
    return (weights.flatten(2, 3) @ value).view(rows, heads, queries, value.shape[-1])
