"""A stand-in for CUDA's flash attention on the CPU: the same interface, and it reads memory as the kernels do."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import cases
from tawpipe.model import flash


class FlashKernels:
    """``aten._flash_attention_forward`` and its backward pass for rows without documents, by explicit scores.

    What the kernels demand is asserted. Of the log-sum-exp they know the address alone: it is read on from there,
    whatever its strides. All else has strides, except of its last dimension. Sums of half precision are in fp32, of
    fp64 in fp64.

    Args:
        called: "forward" or "backward" and how many queries, keys and heads of both, of every call.
    """

    def __init__(self) -> None:
        self.called: list[tuple[str, int, int, int, int]] = []

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        starts: None,
        key_starts: None,
        queries: int,
        keys: int,
        dropout: float,
        is_causal: bool,
        return_mask: bool,
        *,
        scale: float,
        window_size_left: int = -1,
        window_size_right: int = -1,
    ) -> tuple[Any, ...]:
        """Output as queries [b, n, heads, d], and log-sum-exp [b, heads, n]; [b, L, key-value heads, d] of keys."""
        self._check("forward", (query, key, value), queries, keys, dropout)
        assert not return_mask and starts is None and key_starts is None
        scores = _scores(query, key, scale, is_causal, window_size_left, window_size_right)
        sums = scores.logsumexp(-1)
        weights = torch.exp(scores - sums.unsqueeze(-1)).nan_to_num(0)  # of a query that sees nothing
        seen = weights @ _wide(value, query.shape[2])
        return seen.transpose(1, 2).to(query.dtype), sums.contiguous(), None, None, None

    def backward(
        self,
        gradient: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        output: Tensor,
        sums: Tensor,
        starts: None,
        key_starts: None,
        queries: int,
        keys: int,
        dropout: float,
        is_causal: bool,
        state: Tensor,
        unused: Tensor,
        *,
        scale: float,
        window_size_left: int = -1,
        window_size_right: int = -1,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of queries, keys and values, by a log-sum-exp and an output that may be of more keys than these."""
        self._check("backward", (query, key, value, gradient, output), queries, keys, dropout)
        assert sums.dtype == torch.promote_types(query.dtype, torch.float32)
        rows, _, heads, _ = query.shape
        assert sums.shape == (rows, heads, queries)
        read = sums.as_strided(sums.shape, (heads * queries, queries, 1))
        scores = _scores(query, key, scale, is_causal, window_size_left, window_size_right)
        weights = torch.exp(scores - read.unsqueeze(-1))
        arriving, given = _wide(gradient, heads), _wide(output, heads)
        of_weights = arriving @ _wide(value, heads).transpose(2, 3)
        of_scores = weights * (of_weights - (arriving * given).sum(-1, keepdim=True)) * scale
        of_query = of_scores @ _wide(key, heads)
        of_key, of_value = of_scores.transpose(2, 3) @ _wide(query, heads), weights.transpose(2, 3) @ arriving
        narrow = [one.unflatten(1, (key.shape[2], -1)).sum(2) for one in (of_key, of_value)]
        all_three = of_query, *narrow
        return tuple(one.transpose(1, 2).to(query.dtype) for one in all_three)  # type: ignore[return-value]

    def _check(self, what: str, given: tuple[Tensor, ...], queries: int, keys: int, dropout: float) -> None:
        query, key, value = given[:3]
        assert dropout == 0 and (query.shape[1], key.shape[1]) == (queries, keys) and min(queries, keys) > 0
        assert all(one.stride(-1) == 1 for one in given), "the last dimension is not contiguous"
        assert len({one.dtype for one in given}) == 1
        assert query.shape[-1] == key.shape[-1] == value.shape[-1] and key.shape == value.shape
        assert query.shape[0] == key.shape[0] and query.shape[2] % key.shape[2] == 0
        self.called.append((what, queries, keys, query.shape[2], key.shape[2]))


def _wide(tensor: Tensor, heads: int) -> Tensor:
    """[b, L, some heads, d] -> [b, heads, L, d] in fp32 (fp64 for fp64)."""
    wide = tensor.transpose(1, 2).to(torch.promote_types(tensor.dtype, torch.float32))
    return wide.repeat_interleave(heads // wide.shape[1], 1)


def _scores(query: Tensor, key: Tensor, scale: float, is_causal: bool, left: int, right: int) -> Tensor:
    """[b, heads, n, L], -inf where a key is hidden; the last query stands at the last key."""
    heads, count, keys = query.shape[2], query.shape[1], key.shape[1]
    scores = _wide(query, heads) @ _wide(key, heads).transpose(2, 3) * scale
    place = torch.arange(count)[:, None] + keys - count
    distance = torch.arange(keys)[None, :] - place
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    if left >= 0:
        hidden |= distance < -left
    if right >= 0 or is_causal:
        hidden |= distance > (0 if is_causal else right)
    return scores.masked_fill(hidden, float("-inf"))


def read_by_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the CPU's backward kernel read the log-sum-exp as CUDA's does: on from its first element."""
    name = "_scaled_dot_product_flash_attention_for_cpu"
    backward = getattr(flash.ops, f"{name}_backward")

    def reading(*given: Any, **options: Any) -> Any:
        *before, sums = given[:6]
        in_a_row = torch.empty(sums.shape, device="meta").stride()
        return backward(*before, sums.as_strided(sums.shape, in_a_row), *given[6:], **options)

    both = {name: getattr(flash.ops, name), f"{name}_backward": reading}
    monkeypatch.setattr(flash, "ops", SimpleNamespace(**both))


def as_on_cuda(monkeypatch: pytest.MonkeyPatch) -> FlashKernels:
    """Let attention in chunks compute as on CUDA, by a stand-in for its kernels."""
    kernels = FlashKernels()
    ops = SimpleNamespace(_flash_attention_forward=kernels.forward, _flash_attention_backward=kernels.backward)
    monkeypatch.setattr(flash, "ops", ops)
    monkeypatch.setattr(flash, "on_cuda", lambda tensor: True)
    monkeypatch.setattr(flash, "takes", lambda query, value: value.shape[-1] <= query.shape[-1])
    return kernels


def families(*args: Any, **kwargs: Any) -> Any:
    """``cases.families`` with them, in a process of its own."""
    with pytest.MonkeyPatch.context() as patch:
        kernels = as_on_cuda(patch)
        found = cases.families(*args, **kwargs)
        assert {what for what, *_ in kernels.called} == {"forward", "backward"}
        return found
