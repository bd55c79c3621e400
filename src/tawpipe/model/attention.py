"""Attention inside documents that are packed into rows, without a mask of S x S. Imports torch, and transformers'
registries for attention and mask functions.

``register()`` puts both functions under the name ``tawpipe`` into transformers' own interfaces. The mask function builds
no mask: it returns a ``PackedMask``, which the model hands on to its layers where a mask would go, and so it survives
in the recorded arguments of a layer until the recomputation. Which documents it means is set by ``packing``.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tawpipe.errors import UserError

logger = logging.getLogger(__name__)

NAME = "tawpipe"
"""What ``config._attn_implementation`` says when the functions of this file are in use."""


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


@dataclass(frozen=True, eq=False)
class PackedMask:
    """Stands where the attention mask goes: causal inside each document, nothing across, perhaps within a window."""

    documents: Documents
    window: int | None
    """A token sees itself and the ``window - 1`` tokens before it; None for all before it."""


_packing: ContextVar[Documents | None] = ContextVar("tawpipe_packing", default=None)


@contextlib.contextmanager
def packing(documents: Documents) -> Iterator[None]:
    """Within it, the mask function answers for these documents."""
    token = _packing.set(documents)
    try:
        yield
    finally:
        _packing.reset(token)


def register() -> None:
    """Make ``attn_implementation="tawpipe"`` known to transformers. Doing it again changes nothing."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, packed_attention)
    AttentionMaskInterface.register(NAME, packed_mask)


def packed_mask(
    *,
    q_length: int,
    kv_length: int,
    mask_function: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor],
    local_size: int | None = None,
    **_: object,
) -> PackedMask:
    """The mask function: the packing in force, with the window of the layer type that asks."""
    documents = _packing.get()
    if documents is None:
        raise RuntimeError(
            f"attention implementation {NAME!r} needs the document lengths of a micro-batch and works inside a Chain "
            "only; call model.set_attn_implementation('sdpa') to use the model by itself"
        )
    assert q_length == kv_length, "a key-value cache has no place in training"
    if documents.verify:
        _check_mask_function(mask_function, local_size)
    return PackedMask(documents, local_size)


def _check_mask_function(mask_function: Callable[..., Tensor], window: int | None) -> None:
    """Compare the model's mask with a causal one (within a window) at the positions where they could differ.

    Raises:
        UserError: for chunked, bidirectional or otherwise special masks.
    """
    edge = window or 16
    positions = torch.tensor(sorted({p for near in (0, edge, 2 * edge) for p in range(max(0, near - 2), near + 3)}))
    query, key = positions[:, None], positions[None, :]
    expected = (key <= query) & (key > query - (window or 4 * edge))
    zero = torch.zeros((), dtype=torch.long)
    try:
        same = torch.equal(torch.as_tensor(mask_function(zero, zero, query, key)).expand_as(expected), expected)
    except (RuntimeError, NotImplementedError, TypeError):
        same = False  # it reads tensors of its own: not a function of the distance between two tokens
    if not same:
        raise UserError(
            "--model",
            getattr(mask_function, "__qualname__", "mask"),
            "the attention mask must be causal or a sliding causal window; chunked, prefix and bidirectional masks "
            "are not supported",
        )


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: PackedMask,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """The attention function of transformers' interface.

    Args:
        query: [b, heads, S, d].
        key, value: [b, key-value heads, S, d].
        attention_mask: what ``packed_mask`` returned for this layer's type. Its window counts, as it does in the eager
            and sdpa functions; a ``sliding_window`` among the other arguments is for functions that see no mask.
        dropout: probability of dropping an attention weight.
        scaling: factor of the scores, 1/sqrt(d) if None.
        softcap: scores become ``softcap * tanh(scores / softcap)``.
        s_aux: [heads] logits of attention sinks, one more column in each head's softmax.

    Returns:
        [b, S, heads, d], and None where other functions return the attention weights.
    """
    if kwargs.get("position_bias") is not None or kwargs.get("alibi") is not None:
        raise UserError("--model", type(module).__name__, "attention with a position bias (ALiBi, T5) is not supported")
    if kwargs.get("is_causal") is False:
        raise UserError("--model", type(module).__name__, "only causal attention is supported")
    assert isinstance(attention_mask, PackedMask), "the layer was called without the mask of its embedding side"

    documents, window = attention_mask.documents, attention_mask.window
    if window is not None and window >= documents.max_length:
        window = None
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16):
        reason = _why_not_varlen(query.shape[-1], value.shape[-1], dropout, softcap, s_aux, window)
        if reason is None:
            return _varlen(query, key, value, documents, window, scale), None
        _warn_once(f"{type(module).__name__}: slower attention, document by document, because {reason}")

    # The CPU's fused kernel has no dropout, and no kernel has caps or sinks: those compute their scores in slices.
    sliced = softcap is not None or s_aux is not None or (dropout > 0 and not query.is_cuda)

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if sliced:
            return _sliced_scores(query, key, value, window, scale, dropout, softcap, s_aux)
        return _fused(query, key, value, window, scale, dropout)

    if len(documents.spans) == documents.rows:
        return attend(query, key, value).transpose(1, 2).contiguous(), None
    parts = []
    for row, first, length in documents.spans:
        own = (slice(row, row + 1), slice(None), slice(first, first + length))
        parts.append(attend(query[own], key[own], value[own]).transpose(1, 2))
    return torch.cat(parts, dim=1).reshape(query.shape[0], query.shape[2], query.shape[1], value.shape[-1]), None


@cache
def _warn_once(message: str) -> None:
    logger.warning(message)


@cache
def _varlen_function() -> tuple[Callable[..., Tensor] | None, frozenset[str]]:
    """torch's kernel for packed documents and the names of its arguments, which differ between releases."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None, frozenset()
    return varlen_attn, frozenset(inspect.signature(varlen_attn).parameters)


def _why_not_varlen(
    head_dim: int, value_dim: int, dropout: float, softcap: float | None, sinks: Tensor | None, window: int | None
) -> str | None:
    """Why torch's varlen kernel cannot compute this, or None if it can."""
    function, arguments = _varlen_function()
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


def _varlen(
    query: Tensor, key: Tensor, value: Tensor, documents: Documents, window: int | None, scale: float
) -> Tensor:
    """All documents at once by torch's flash kernel; [b, heads, S, d] in, [b, S, heads, d] out."""
    function, arguments = _varlen_function()
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


def _fused(query: Tensor, key: Tensor, value: Tensor, window: int | None, scale: float, dropout: float) -> Tensor:
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


def _sliced_scores(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    window: int | None,
    scale: float,
    dropout: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attention with explicit scores, for one slice of queries at a time; the backward pass computes them again.

    [b, heads, L, d] in and out.
    """
    rows, heads, length, _ = query.shape
    budget = 2**26 if query.is_cuda else 2**23  # scores that may exist at once
    parts, first = [], 0
    while first < length:
        oldest = 0 if window is None else max(0, first - window + 1)
        size = max(1, min(length - first, budget // (rows * heads * (first - oldest + 128)), 128))
        last = first + size
        arguments = (query[:, :, first:last], key[:, :, oldest:last], value[:, :, oldest:last], sinks)
        options = {"offset": first - oldest, "window": window, "scale": scale, "dropout": dropout, "softcap": softcap}
        if torch.is_grad_enabled():
            part = checkpoint(
                _explicit_scores, *arguments, **options, use_reentrant=False, preserve_rng_state=dropout > 0
            )
        else:
            part = _explicit_scores(*arguments, **options)
        parts.append(part)
        first = last
    return torch.cat(parts, dim=2)


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
