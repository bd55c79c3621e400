"""Torch's flash kernels on parts of the keys, merged by their log-sum-exp in fp32 (fp64 for fp64).

CUDA's hides keys by their distance, so that one part is enough for a chunk and all keys before it, within a window or
not. Sinks are one more key whose value is 0: they change the log-sum-exp, and the output by a factor.

Query heads that share keys are folded into the queries where no mask tells these apart, so that keys are never repeated
and their gradients need no sum over heads; elsewhere the heads look at the same memory. Values narrower than the keys
are padded, as much as the kernel wants, for some heads at one time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

PADDED = 2**22
"""Elements of padded values that exist at one time, unless those of one head are more."""
ops = torch.ops.aten


@dataclass(frozen=True)
class Part:
    """Some queries and keys that they see. The last query stands at the last key.

    Args:
        queries: within those that are given.
        keys: in the row.
        left: how many keys before its own place a query sees, -1 for all. It sees one at least.
        right: the same behind its place. Every query is in one part where this is 0, which comes before its others.
    """

    queries: slice
    keys: slice
    left: int = -1
    right: int = -1

    @property
    def folds(self) -> bool:
        """True if no mask tells queries apart."""
        return self.left < 0 and self.right < 0

    @property
    def is_square(self) -> bool:
        """True if query i sees the keys 0 to i."""
        same = self.keys.stop - self.keys.start == self.queries.stop - self.queries.start
        return same and self.left < 0 and self.right == 0

    def hidden(self, like: Tensor) -> Tensor | None:
        """What is added to the scores, [queries, keys] in the type of ``like``. For the CPU."""
        if self.folds or self.is_square:
            return None
        count, keys = self.queries.stop - self.queries.start, self.keys.stop - self.keys.start
        behind = torch.arange(keys, device=like.device) - torch.arange(keys - count, keys, device=like.device)[:, None]
        left, right = (keys + count if side < 0 else side for side in (self.left, self.right))
        return like.new_zeros(count, keys).masked_fill_((behind < -left) | (behind > right), float("-inf"))


def on_cuda(tensor: Tensor) -> bool:
    """True where CUDA's kernel computes, which hides keys by their distance."""
    return tensor.is_cuda


def takes(query: Tensor, value: Tensor) -> bool:
    """True if the kernel of this device computes heads [..., d] of these."""
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
    """Output [b, heads, n, d_v] and log-sum-exp [b, heads, n] of queries [b, heads, n, d].

    Args:
        keys, values: [b, key-value heads, S, ...], of the whole row.
        parts: of the queries' keys, all of them.
        sinks: [heads] logits of one more key of each head, whose value is 0. The log-sum-exp has them in it.
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
    """[heads] of fp32 (fp64 for fp64), of what ``attention`` has given."""
    share = torch.exp(sinks.to(sums.dtype)[:, None] - sums)
    return -(share * (gradient.to(sums.dtype) * output).sum(-1)).sum((0, 2))


def _merge(output: Tensor, sums: Tensor, one: Tensor, lse: Tensor) -> None:
    """Add a part's [b, 1 or more, ..., d] output to what is there, by the share that it has in the softmax over all."""
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
    """The gradient of queries; those of the keys and values, of which ``seen`` has the rows', are added to ``targets``,
    which may be of a wider type.
    """
    folded = [_folded(tensor, seen[0]) for tensor in (query, gradient, output)]
    total = torch.empty_like(folded[0], dtype=targets[0].dtype)
    log_sums = sums.reshape(total.shape[:3])
    keys, values = (tensor.flatten(0, 1) for tensor in seen)
    totals = [tensor.view(keys.shape[0], *tensor.shape[2:]) for tensor in targets]  # of the same memory
    for some in _at_one_time(folded[0], values, parts):
        for part in parts:
            key, value = _part_of(keys, values, some, part.keys, folded[0])
            place = some, slice(None), part.queries
            queries, arriving, given, logs = (_for(part, tensor[place]) for tensor in (*folded, log_sums))
            arriving, given = _padded(arriving, queries), _padded(given, queries)
            of_query, *of_seen = _kernel_gradients(arriving, queries, key, value, given, logs, part, scale)
            if part.right == 0:
                total[place] = of_query
            else:
                total[place] += of_query.reshape(total[place].shape)
            for target, addend in zip(totals, of_seen, strict=True):
                addend = addend[..., : target.shape[-1]]
                target[some, part.keys] += addend[:, 0] if addend.shape[1] == 1 else addend.sum(1, dtype=target.dtype)
            del of_query, of_seen, addend  # or they would be there beside those of the next part
    return total.view(query.shape).to(query.dtype)


def _folded(tensor: Tensor, keys: Tensor) -> Tensor:
    """[b, heads, n, d] -> [b x key-value heads, heads that share keys, n, d], contiguous."""
    rows, heads, length, dim = tensor.shape
    groups = keys.shape[1]
    return tensor.contiguous().view(rows * groups, heads // groups, length, dim)


def _for(part: Part, tensor: Tensor) -> Tensor:
    """[b, heads that share keys, n, ...] -> [b, some, the others x n, ...] where no mask tells queries apart.

    The CPU's kernel runs on as many threads as there are heads in its backward pass, so that some may be left.
    """
    if not part.folds:
        return tensor
    groups, heads = tensor.shape[:2]
    wanted = 1 if on_cuda(tensor) else -(-torch.get_num_threads() // groups)
    left = next(
        number for number in range(1, heads + 1) if heads % number == 0 and (number >= wanted or number == heads)
    )
    return tensor.reshape(groups, left, -1, *tensor.shape[3:])


def _at_one_time(query: Tensor, values: Tensor, parts: Sequence[Part]) -> Iterator[slice]:
    """Key-value heads of all rows, as many as may be padded at one time."""
    count, dim = values.shape[0], query.shape[-1]
    longest = max(part.keys.stop - part.keys.start for part in parts)
    size = count if values.shape[-1] == dim else max(1, PADDED // (longest * dim))
    for first in range(0, count, size):
        yield slice(first, first + size)


def _part_of(keys: Tensor, values: Tensor, some: slice, at: slice, query: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values [b, 1, ..., d] as the kernel takes them."""
    return keys[some, None, at], _padded(values[some, None, at], query)


def _padded(tensor: Tensor, like: Tensor) -> Tensor:
    missing = like.shape[-1] - tensor.shape[-1]
    return F.pad(tensor, (0, missing)) if missing else tensor


def _kernel(query: Tensor, key: Tensor, value: Tensor, part: Part, scale: float) -> tuple[Tensor, Tensor]:
    if on_cuda(query):  # it takes fewer heads of keys
        given = [tensor.transpose(1, 2) for tensor in (query, key, value)]
        output, sums, *_ = ops._flash_attention_forward(
            *given, *_of_cuda(part, query, key), False, **_seen(part, scale)
        )
        return output.transpose(1, 2), sums
    key, value = (tensor.expand(-1, query.shape[1], -1, -1) for tensor in (key, value))
    function: Callable[..., Any] = ops._scaled_dot_product_flash_attention_for_cpu
    return function(query, key, value, 0.0, part.is_square, attn_mask=part.hidden(query), scale=scale)


def _kernel_gradients(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, sums: Tensor, part: Part, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    sums = sums.contiguous()  # CUDA's kernel asks for no strides: it reads on from the first element
    if not on_cuda(query):
        key, value = (tensor.expand(-1, query.shape[1], -1, -1) for tensor in (key, value))
        backward: Callable[..., Any] = ops._scaled_dot_product_flash_attention_for_cpu_backward
        # The kernel keeps sums of half precision in fp32, and of fp64 in fp64.
        options = {"attn_mask": part.hidden(query), "scale": scale}
        return backward(gradient, query, key, value, output, sums, 0.0, part.is_square, **options)
    given = [tensor.transpose(1, 2) for tensor in (gradient, query, key, value, output)]
    state = torch.empty(2, dtype=torch.uint64, device=query.device)  # of dropout, which there is none of
    more = *_of_cuda(part, query, key), state, torch.empty_like(state)
    of_query, of_key, of_value = ops._flash_attention_backward(*given, sums, *more, **_seen(part, scale))
    return of_query.transpose(1, 2), of_key.transpose(1, 2), of_value.transpose(1, 2)


def _of_cuda(part: Part, query: Tensor, key: Tensor) -> tuple[object, ...]:
    """No documents, lengths, no dropout, and whether no more than what is behind a query is hidden."""
    return None, None, query.shape[2], key.shape[2], 0.0, part.left < 0 and part.right == 0


def _seen(part: Part, scale: float) -> dict[str, float]:
    window = {"window_size_left": part.left, "window_size_right": part.right} if part.left >= 0 else {}
    return {"scale": scale, **window}
