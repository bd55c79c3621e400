"""Attention inside documents packed into rows, without an S x S mask, which would not fit into memory for long rows.

``register()`` adds two functions under the name ``tawpipe`` to transformers' own interfaces. The mask function builds
no mask. It returns a ``PackedMask``, which the model passes to its layers in place of a mask, so that it is kept in the
recorded arguments of a layer until the recomputation. ``packing`` sets the documents that it refers to."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from inspect import getclosurevars
from typing import Any

import torch
from torch import Tensor, nn

from tawpipe.errors import UserError
from tawpipe.model import kernels
from tawpipe.model.attention import slots
from tawpipe.model.attention.attention_kernel import Offer, choose_kernel, cudnn_takes, recurs
from tawpipe.model.attention.chunked import Chunk, KeyStore, attend
from tawpipe.model.attention.slots import SlotDocuments
from tawpipe.model.kernels import AttentionOptions, Documents
from tawpipe.model.refuse import ApartError, unsupported

logger = logging.getLogger(__name__)

NAME = "tawpipe"
"""Value of ``config._attn_implementation`` if the functions of this file are used."""


UNUSED = "position_ids", "cache_position"
"""Tensors that a model may pass to attention although it does not compute with them."""
MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Mask description of transformers: (batch, head, query, key positions) -> True if the query sees the key."""


@dataclass(frozen=True, eq=False)
class PackedMask:
    """Stand-in for the attention mask: causal inside each document, optionally within a window.

    A token sees no token of another document. The mask has no values: a layer that reads its mask, instead of passing
    it to the attention function, is refused."""

    documents: Documents
    window: int | None
    """A token sees itself and the ``window - 1`` tokens before it; None for all before it."""
    function: MaskFunction | None = None
    """Mask that the model asked for, which ``check`` compares with this one."""
    chunk: Chunk | None = None
    """Part of every row that the layer is called for; None for whole rows."""

    def check(self) -> None:
        """Compare the model's mask with a causal one (within the window) at the positions where they could differ.

        Raises:
            ApartError: the mask is bidirectional, or special in another way.
        """
        if self.function is None:
            return
        query, key, seen = self._seen(self.function)
        expected = key <= query
        if self.window is not None:
            expected &= key > query - self.window
        if not seen or any(not torch.equal(head, expected) for head in seen) or not expected.any(dim=1).all():
            raise ApartError(
                getattr(self.function, "__qualname__", "mask"),
                "an attention mask is neither causal nor that of a sliding window or of chunks",
            )

    @property
    def sees_future(self) -> bool:
        """True if the mask that the model asked for lets some token see a later one.

        It is evaluated at sample positions. False if there is no such mask, or if it is not a function of positions."""
        if self.function is None:
            return False
        query, key, seen = self._seen(self.function)
        return any(bool((head & (key > query)).any()) for head in seen)

    def _seen(self, function: Callable[..., Any]) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Evaluate the model's mask at sample positions.

        Returns:
            Positions of queries and of keys, and for two heads a tensor that is True where the query sees the key. The
            list of heads is empty if the mask is not a function of positions.
        """
        edge = 16 if self.window is None else max(self.window, 1)
        # Positions at which blocks or spans of usual sizes would show.
        nears = (0, edge, 2 * edge, 100, 1000, *(2**power for power in range(5, 18)))
        places = sorted({place for near in nears for place in range(max(0, near - 2), near + 3)})
        positions = torch.tensor(places, device="cpu")
        query, key = positions[:, None], positions[None, :]
        zero = torch.zeros((), dtype=torch.long, device="cpu")
        shape = len(places), len(places)
        try:
            with torch.device("cpu"):  # the default device may be another one, such as meta
                heads = [torch.as_tensor(function(zero, zero + head, query, key)).expand(shape) for head in (0, 1)]
        except Exception:
            heads = []  # it reads its own tensors: not a function of positions alone
        return query, key, heads

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise _looked_at(f".{name}")

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise _looked_at(getattr(function, "__name__", "a function of torch"))


def _looked_at(how: str) -> UserError:
    """Return the ApartError for a layer that reads its attention mask by the operation ``how``."""
    return ApartError(
        how, "a layer computes with its attention mask instead of handing it to transformers' attention interface"
    )


def _refuse_operator(name: str) -> Callable[..., Any]:
    """Return a method for the operator ``name`` of ``PackedMask``, which raises ApartError."""

    def refuse(*_: object) -> Any:
        raise _looked_at(name)

    return refuse


_OPERATORS = "getitem add radd sub rsub mul rmul and rand or ror invert bool lt le gt ge neg len iter"
for _name in _OPERATORS.split():
    setattr(PackedMask, f"__{_name}__", _refuse_operator(f"__{_name}__"))


_packing: ContextVar[Documents | None] = ContextVar("tawpipe_packing", default=None)


@contextlib.contextmanager
def packing(documents: Documents) -> Iterator[None]:
    """Return a context in which the mask function uses ``documents``."""
    token = _packing.set(documents)
    try:
        yield
    finally:
        _packing.reset(token)


def register() -> None:
    """Make ``attn_implementation="tawpipe"`` known to transformers.

    A second call changes nothing."""
    from transformers import AttentionInterface, AttentionMaskInterface

    # The kernel depends on the documents of a micro-batch, so attention is not compiled.
    AttentionInterface.register(NAME, torch.compiler.disable(packed_attention))
    AttentionMaskInterface.register(NAME, packed_mask)


def packed_mask(
    *, q_length: int, kv_length: int, mask_function: MaskFunction, local_size: int | None = None, **_: object
) -> PackedMask:
    """Return the mask for the documents set by ``packing``; the mask function in transformers' interface.

    Args:
        q_length, kv_length: tokens of queries and of keys; they must be equal.
        mask_function: mask that the model asks for.
        local_size: window or chunk size of the layer's type, or None.

    Raises:
        RuntimeError: no documents are set, because the model runs outside a ``Chain``.
    """
    documents = _packing.get()
    if documents is None:
        raise RuntimeError(
            f"attention implementation {NAME!r} needs the document lengths of a micro-batch and works inside a Chain "
            "only; call model.set_attn_implementation('sdpa') to use the model by itself"
        )
    assert q_length == kv_length, "a key-value cache has no place in training"
    if local_size is not None and _is_chunked(mask_function, local_size):
        return PackedMask(documents.cut(local_size), None)
    return PackedMask(documents, local_size, mask_function)


def _is_chunked(function: MaskFunction, size: int) -> bool:
    """Return True for transformers' mask of causal attention in chunks of ``size`` tokens.

    This mask reads a tensor on the device (left padding), so it is recognised by the functions that it consists of."""
    parts = getclosurevars(function).nonlocals.get("mask_functions", ())
    names = [part.__qualname__.partition(".")[0] for part in parts]
    return (
        names == ["chunked_overlay", "causal_mask_function"]
        and getclosurevars(parts[0]).nonlocals["chunk_size"] == size
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
    """Compute attention inside packed documents; the attention function in transformers' interface.

    Args:
        module: the attention module, for messages.
        query: [b, heads, S, d].
        key, value: [b, key-value heads, S, d].
        attention_mask: result of ``packed_mask`` for this layer's type. Its window is used, as in the eager and sdpa
            functions. A ``sliding_window`` among the other arguments is for functions without a mask.
        dropout: probability of dropping an attention weight.
        scaling: factor on the scores, 1/sqrt(d) if None.
        softcap: scores become ``softcap * tanh(scores / softcap)``.
        s_aux: [heads] logits of attention sinks, one more column in each head's softmax.
        kwargs: other arguments. Unknown tensors among them are refused.

    Returns:
        The output [b, S, heads, d], and None in place of attention weights.

    Raises:
        ApartError, UserError: the model's attention has features that are not supported.
    """
    if kwargs.get("position_bias") is not None or kwargs.get("alibi") is not None:
        raise ApartError(type(module).__name__, "its attention has a position bias (ALiBi, T5)")
    if kwargs.get("is_causal") is False:
        raise unsupported(type(module).__name__, "only causal attention is supported")
    if not isinstance(attention_mask, PackedMask):
        raise ApartError(
            type(module).__name__,
            f"its attention is given {type(attention_mask).__name__} instead of the mask that transformers' mask "
            "interface made",
        )

    if unknown := sorted(
        name for name, argument in kwargs.items() if isinstance(argument, Tensor) and name not in UNUSED
    ):
        raise ApartError(type(module).__name__, f"its attention is given {', '.join(unknown)}, which is not known here")
    if key.shape[2] != query.shape[2]:
        raise ApartError(type(module).__name__, "its attention has keys that are not those of the row's tokens")

    documents, window = attention_mask.documents, attention_mask.window
    if window is not None and window >= documents.max_length:
        window = None
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    options = AttentionOptions(window, scale, dropout, softcap)
    if isinstance(documents, SlotDocuments):
        return slots.attend(query, key, value, s_aux, documents, options), None
    if (chunk := attention_mask.chunk) is not None:
        if chunk.attended:
            raise unsupported(
                type(module).__name__, "its layer calls attention twice, and cannot be cut along the sequence"
            )
        return attend(query, key, value, s_aux, chunk, documents, options), None
    offer = Offer.of(query.device)
    if s_aux is not None and offer.capability is not None and options.is_plain(query, value):
        whole_row = Chunk(KeyStore(query.shape[0], query.shape[2]), 0, query.shape[2])
        if (results := kernels.results.get()) is not None:
            results.of_row(whole_row)
        return attend(query, key, value, s_aux, whole_row, documents, options), None
    if offer.capability is not None:
        problem = kernels.why_not_varlen(query.shape[-1], value.shape[-1], dropout, softcap, s_aux, window)
        whole = window is None and len(documents.spans) == documents.rows and recurs(documents.max_length)
        whole = whole and cudnn_takes(query.shape[-1])
        kernel, why = choose_kernel(offer, query.dtype, problem, whole_rows=whole)
        if kernel == "varlen":
            return kernels.varlen(query, key, value, documents, window, scale), None
        if kernel == "cudnn":
            return kernels.whole_rows(query, key, value, scale).transpose(1, 2).contiguous(), None
        _warn_once(f"{type(module).__name__}: slower attention, one document at a time, because {why}")

    # The CPU's fused kernel has no dropout, and no fused kernel has caps or sinks. These compute scores in slices.
    if softcap is not None or s_aux is not None or (dropout > 0 and offer.capability is None):
        output: Tensor = kernels.TiledScores.apply(  # type: ignore[assignment]
            query, key, value, s_aux, documents, options
        )
        return output.transpose(1, 2).contiguous(), None

    regions = [(rows, slice(None), tokens) for rows, tokens in documents.regions()]
    if len(regions) == 1:
        return kernels.fused(query, key, value, window, scale, dropout).transpose(1, 2).contiguous(), None
    queries, keys, values = (kernels.parts(tensor, regions) for tensor in (query, key, value))
    outputs = [
        kernels.fused(*of_region, window=window, scale=scale, dropout=dropout).transpose(1, 2)
        for of_region in zip(queries, keys, values, strict=True)
    ]
    return torch.cat(outputs, dim=1).reshape(query.shape[0], query.shape[2], query.shape[1], value.shape[-1]), None


@cache
def _warn_once(message: str) -> None:
    """Log a warning, once for each message."""
    logger.warning(message)
