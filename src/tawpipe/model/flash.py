"""Torch's flash kernels on parts of the keys, whose outputs are merged by log-sum-exp in fp32 (fp64 for fp64).

The CUDA kernel hides keys by distance. So one part is enough for a chunk and all keys before it, with or without a
window. A sink is one more key whose value is 0: it changes the log-sum-exp, and scales the output by a factor.

Query heads that share keys are folded into the query dimension if no mask depends on the query's position. Then keys
need not be repeated, and their gradients need no sum over heads. Otherwise the heads read the same key memory. Values
narrower than keys are padded to the keys' size, for some heads at one time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

PADDED = 2**22
"""Largest number of elements of padded values that exist at one time. One head may exceed it."""
ops = torch.ops.aten


@dataclass(frozen=True)
class Part:
    """Some queries and some of the keys that they see.

    The last query is at the position of the last key.

    Args:
        queries: slice of the given queries.
        keys: slice of the row's keys.
        left: number of keys before its own position that a query sees, -1 for all. Every query sees at least one key.
        right: number of keys behind its own position that a query sees, -1 for all. Every query is in exactly one part
            with ``right`` 0, and this part comes before the query's other parts.
    """

    queries: slice
    keys: slice
    left: int = -1
    right: int = -1

    @property
    def folds(self) -> bool:
        """True if every query sees every key of the part, so that query heads can be folded."""
        return self.left < 0 and self.right < 0

    @property
    def is_square(self) -> bool:
        """True if query i sees the keys 0 to i."""
        same = self.keys.stop - self.keys.start == self.queries.stop - self.queries.start
        return same and self.left < 0 and self.right == 0

    def hidden(self, like: Tensor) -> Tensor | None:
        """Return the additive mask [queries, keys] of the scores for the CPU kernel, or None if it needs none.

        Args:
            like: tensor whose dtype and device the mask gets.
        """
        if self.folds or self.is_square:
            return None
        count, keys = self.queries.stop - self.queries.start, self.keys.stop - self.keys.start
        behind = torch.arange(keys, device=like.device) - torch.arange(keys - count, keys, device=like.device)[:, None]
        left, right = (keys + count if side < 0 else side for side in (self.left, self.right))
        return like.new_zeros(count, keys).masked_fill_((behind < -left) | (behind > right), float("-inf"))


def on_cuda(tensor: Tensor) -> bool:
    """Return True if the CUDA kernel computes, which hides keys by distance."""
    return tensor.is_cuda


def takes(query: Tensor, value: Tensor) -> bool:
    """Return True if this device's flash kernel can compute queries and values [..., d] of these shapes and dtype."""
    dim = query.shape[-1]
    if on_cuda(query):
        known = query.dtype in (torch.float16, torch.bfloat16) and dim % 8 == 0 and dim <= 256
        known = known and torch.cuda.get_device_capability(query.device)[0] >= 8
    else:
        known = query.device.type == "cpu"
    return known and value.shape[-1] <= dim


def attention(
    query: Tensor, keys: Tensor, values: Tensor, parts: Sequence[Part], scale: float, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute attention of queries over parts of the keys, and merge the parts.

    Args:
        query: [b, heads, n, d].
        keys, values: [b, key-value heads, S, ...], of the whole row.
        parts: parts that together cover all keys that the queries see.
        scale: factor on the scores.
        sinks: [heads] logits of one more key per head, whose value is 0. The log-sum-exp includes them.

    Returns:
        The output [b, heads, n, d of values] and the log-sum-exp [b, heads, n].
    """
    rows, heads, length, _ = query.shape
    queries, keys, values = _folded(query, keys), keys.flatten(0, 1), values.flatten(0, 1)
    wide = torch.promote_types(query.dtype, torch.float32)
    if len(parts) == 1 and values.shape[-1] == queries.shape[-1]:
        output, sums = _kernel(queries, *_part_of(keys, values, slice(None), parts[0].keys, queries), parts[0], scale)
    else:
        output = queries.new_empty(*queries.shape[:3], values.shape[-1], dtype=wide)
        sums = queries.new_empty(queries.shape[:3], dtype=wide)
        for some in _at_one_time(queries, values, parts):
            for part in parts:
                seen = _part_of(keys, values, some, part.keys, queries)
                place = some, slice(None), part.queries
                of_part, lse = _kernel(_for(part, queries[place]), *seen, part, scale)
                of_part, lse = of_part[..., : values.shape[-1]], lse.to(wide)
                if part.right == 0:
                    output[place], sums[place] = of_part, lse
                else:
                    _merge(output[place], sums[place], of_part, lse)
    output, sums = output.reshape(rows, heads, length, -1), sums.reshape(rows, heads, length).to(wide)
    if sinks is not None:
        alone, sums = sums, torch.logaddexp(sums, sinks.to(wide)[:, None])
        output = output * torch.exp(alone - sums).unsqueeze(-1)
    return output.to(query.dtype), sums


def sink_gradient(gradient: Tensor, output: Tensor, sums: Tensor, sinks: Tensor) -> Tensor:
    """Return the gradient of ``sinks``, [heads] in fp32 (fp64 for fp64).

    Args:
        gradient: gradient of the output.
        output, sums: output and log-sum-exp, as ``attention`` returned them.
        sinks: [heads] logits.
    """
    share = torch.exp(sinks.to(sums.dtype)[:, None] - sums)
    return -(share * (gradient.to(sums.dtype) * output).sum(-1)).sum((0, 2))


def _merge(output: Tensor, sums: Tensor, one: Tensor, lse: Tensor) -> None:
    """Merge a part's output and log-sum-exp into ``output`` and ``sums`` in place, weighted by their softmax shares."""
    lse = lse.reshape(sums.shape)
    output.lerp_(one.reshape(output.shape).to(output.dtype), torch.sigmoid(lse - sums).unsqueeze(-1))
    sums.copy_(torch.logaddexp(sums, lse))


def gradients(
    gradient: Tensor,
    query: Tensor,
    output: Tensor,
    sums: Tensor,
    seen: tuple[Tensor, Tensor],
    targets: tuple[Tensor, Tensor],
    parts: Sequence[Part],
    scale: float,
) -> Tensor:
    """Return the gradient of ``query``, and add the gradients of keys and values to ``targets``.

    Args:
        gradient: gradient of the output [b, heads, n, d of values].
        query, output, sums: the queries, and what ``attention`` returned for them.
        seen: keys and values of the rows.
        targets: sums of the gradients of keys and values, possibly of a wider dtype.
        parts, scale: as passed to ``attention``.
    """
    folded = [_folded(tensor, seen[0]) for tensor in (query, gradient, output)]
    total = torch.empty_like(folded[0], dtype=targets[0].dtype)
    log_sums = sums.reshape(total.shape[:3])
    keys, values = (tensor.flatten(0, 1) for tensor in seen)
    totals = [tensor.view(keys.shape[0], *tensor.shape[2:]) for tensor in targets]  # views of ``targets``
    for some in _at_one_time(folded[0], values, parts):
        for part in parts:
            key, value = _part_of(keys, values, some, part.keys, folded[0])
            place = some, slice(None), part.queries
            queries, arriving, outputs, logs = (_for(part, tensor[place]) for tensor in (*folded, log_sums))
            arriving, outputs = _padded(arriving, queries), _padded(outputs, queries)
            of_query, *of_seen = _kernel_gradients(arriving, queries, key, value, outputs, logs, part, scale)
            if part.right == 0:
                total[place] = of_query
            else:
                total[place] += of_query.reshape(total[place].shape)
            for target, addend in zip(totals, of_seen, strict=True):
                addend = addend[..., : target.shape[-1]]
                target[some, part.keys] += addend[:, 0] if addend.shape[1] == 1 else addend.sum(1, dtype=target.dtype)
            del of_query, of_seen, addend  # frees their memory before the next part
    return total.view(query.shape).to(query.dtype)


def _folded(tensor: Tensor, keys: Tensor) -> Tensor:
    """Group query heads by the key head that they share; the result is contiguous.

    [b, heads, n, d] -> [b x key-value heads, heads that share keys, n, d]."""
    rows, heads, length, dim = tensor.shape
    groups = keys.shape[1]
    return tensor.contiguous().view(rows * groups, heads // groups, length, dim)


def _for(part: Part, tensor: Tensor) -> Tensor:
    """Fold query heads into the query dimension if ``part.folds``; otherwise return ``tensor`` unchanged.

    [b, heads that share keys, n, ...] becomes [b, heads left, folded heads x n, ...]. On CUDA one head is left. The CPU
    kernel's backward pass runs one thread per head, so that there enough heads are left to use all threads."""
    if not part.folds:
        return tensor
    groups, heads = tensor.shape[:2]
    wanted = 1 if on_cuda(tensor) else -(-torch.get_num_threads() // groups)
    left = next(
        number for number in range(1, heads + 1) if heads % number == 0 and (number >= wanted or number == heads)
    )
    return tensor.reshape(groups, left, -1, *tensor.shape[3:])


def _at_one_time(query: Tensor, values: Tensor, parts: Sequence[Part]) -> Iterator[slice]:
    """Yield slices of the key-value heads of all rows, each small enough to be padded at one time."""
    count, dim = values.shape[0], query.shape[-1]
    longest = max(part.keys.stop - part.keys.start for part in parts)
    size = count if values.shape[-1] == dim else max(1, PADDED // (longest * dim))
    for first in range(0, count, size):
        yield slice(first, first + size)


def _part_of(keys: Tensor, values: Tensor, some: slice, at: slice, query: Tensor) -> tuple[Tensor, Tensor]:
    """Return keys and padded values [b, 1, ..., d] of heads ``some`` at key positions ``at``."""
    return keys[some, None, at], _padded(values[some, None, at], query)


def _padded(tensor: Tensor, like: Tensor) -> Tensor:
    """Pad the last dimension of ``tensor`` with zeros to the size that ``like`` has."""
    missing = like.shape[-1] - tensor.shape[-1]
    return F.pad(tensor, (0, missing)) if missing else tensor


def _kernel(query: Tensor, key: Tensor, value: Tensor, part: Part, scale: float) -> tuple[Tensor, Tensor]:
    """Call this device's flash kernel for one part; return the output and the log-sum-exp."""
    if on_cuda(query):  # the CUDA kernel takes fewer key heads than query heads
        operands = [tensor.transpose(1, 2) for tensor in (query, key, value)]
        output, sums, *_ = ops._flash_attention_forward(
            *operands, *_of_cuda(part, query, key), False, **_seen(part, scale)
        )
        return output.transpose(1, 2), sums
    key, value = (tensor.expand(-1, query.shape[1], -1, -1) for tensor in (key, value))
    function: Callable[..., Any] = ops._scaled_dot_product_flash_attention_for_cpu
    return function(query, key, value, 0.0, part.is_square, attn_mask=part.hidden(query), scale=scale)


def _kernel_gradients(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, sums: Tensor, part: Part, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Call the backward pass of this device's flash kernel; return the gradients of query, key and value."""
    sums = sums.contiguous()  # CUDA's kernel ignores strides: it reads consecutive elements
    if not on_cuda(query):
        key, value = (tensor.expand(-1, query.shape[1], -1, -1) for tensor in (key, value))
        backward: Callable[..., Any] = ops._scaled_dot_product_flash_attention_for_cpu_backward
        # The kernel returns sums in fp32 for half precision, and in fp64 for fp64.
        options = {"attn_mask": part.hidden(query), "scale": scale}
        return backward(gradient, query, key, value, output, sums, 0.0, part.is_square, **options)
    operands = [tensor.transpose(1, 2) for tensor in (gradient, query, key, value, output)]
    state = torch.empty(2, dtype=torch.uint64, device=query.device)  # random state of dropout, which is unused
    more = *_of_cuda(part, query, key), state, torch.empty_like(state)
    of_query, of_key, of_value = ops._flash_attention_backward(*operands, sums, *more, **_seen(part, scale))
    return of_query.transpose(1, 2), of_key.transpose(1, 2), of_value.transpose(1, 2)


def _of_cuda(part: Part, query: Tensor, key: Tensor) -> tuple[object, ...]:
    """Return positional arguments of the CUDA kernel: no packed documents, lengths, no dropout, and if it is causal."""
    return None, None, query.shape[2], key.shape[2], 0.0, part.left < 0 and part.right == 0


def _seen(part: Part, scale: float) -> dict[str, float]:
    """Return keyword arguments of the CUDA kernel: the scale, and the window if the part has one."""
    window = {"window_size_left": part.left, "window_size_right": part.right} if part.left >= 0 else {}
    return {"scale": scale, **window}
