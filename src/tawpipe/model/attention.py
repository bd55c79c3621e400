"""Attention inside documents that are packed into rows, without a mask of S x S. Imports torch, and transformers'
registries for attention and mask functions.

``register()`` puts both functions under the name ``tawpipe`` into transformers' own interfaces. The mask function
builds no mask: it returns a ``PackedMask``, which the model hands on to its layers where a mask would go, and so it
survives in the recorded arguments of a layer until the recomputation. Which documents it means is set by ``packing``.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, nn

from tawpipe.errors import UserError
from tawpipe.model import kernels
from tawpipe.model.kernels import Documents

logger = logging.getLogger(__name__)

NAME = "tawpipe"
"""What ``config._attn_implementation`` says when the functions of this file are in use."""


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

    # Which kernel runs depends on the documents of a micro-batch: compiled layers call it as it is.
    AttentionInterface.register(NAME, torch.compiler.disable(packed_attention))
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
        reason = kernels.why_not_varlen(query.shape[-1], value.shape[-1], dropout, softcap, s_aux, window)
        if reason is None:
            return kernels.varlen(query, key, value, documents, window, scale), None
        _warn_once(f"{type(module).__name__}: slower attention, document by document, because {reason}")

    # The CPU's fused kernel has no dropout, and no kernel has caps or sinks: those compute their scores in slices.
    sliced = softcap is not None or s_aux is not None or (dropout > 0 and not query.is_cuda)

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if sliced:
            return kernels.SlicedScores.apply(query, key, value, s_aux, window, scale, dropout, softcap)  # type: ignore[return-value]
        return kernels.fused(query, key, value, window, scale, dropout)

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
