"""Time attention of a layer of 8 B (32 heads of 128, 8 of keys) on a GPU, by every kernel that is there.

    python -m gpu.attention

Whole rows, and a chunk of 4,096 queries behind its past. Prints TFLOP/s (causal rows count half), and whether cuDNN's
log-sum-exp is that of flash attention, so that parts of a row could be merged with it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gpu.common import in_words, say, seconds_of
from tawpipe.model import flash, kernels
from tawpipe.model.flash import Part
from tawpipe.model.kernels import Documents

DIM, HEADS, GROUPS, QUERIES = 128, 32, 8, 4096
SCALE = DIM**-0.5
ROWS, PASTS = (4096, 8192, 32768), (28672, 126976)
BACKWARD = 2.5
"""Times the work of a forward pass."""


def heads(count: int, tokens: int, device: torch.device) -> Tensor:
    """Return random heads in bf16."""
    return torch.randn(1, count, tokens, DIM, device=device, dtype=torch.bfloat16)


def attempt(name: str, run: Callable[[], object], flops: float, device: torch.device) -> None:
    """Print the time of a call and its rate, or its error."""
    try:
        seconds, _ = seconds_of(run, device)
        say(what=name, ms=round(seconds * 1e3, 2), tflops=round(flops / seconds / 1e12))
    except Exception as error:
        say(what=name, error=in_words(error))


def whole_rows(tokens: int, device: torch.device) -> None:
    """Time a row of one document, forward and backward."""
    values = [heads(count, tokens, device) for count in (HEADS, GROUPS, GROUPS)]
    documents, forward = Documents.of((tokens,), (1, tokens), device), 2 * HEADS * DIM * tokens**2
    ways: dict[str, Callable[..., Tensor]] = {
        "cuDNN": lambda q, k, v: kernels.whole_rows(q, k, v, SCALE),
        "flash 2": lambda q, k, v: kernels.varlen(q, k, v, documents, None, SCALE),
    }
    for name, run in ways.items():
        with torch.no_grad():
            attempt(f"{name}, a row of {tokens}, forward", lambda run=run: run(*values), forward, device)
        leaves = [value.clone().requires_grad_() for value in values]
        try:
            output = run(*leaves)
        except Exception:  # was said
            continue
        given = torch.randn_like(output)

        def backward(output: Tensor = output, leaves: Any = leaves, given: Tensor = given) -> Any:
            return torch.autograd.grad(output, leaves, given, retain_graph=True)

        attempt(f"{name}, a row of {tokens}, backward", backward, BACKWARD * forward, device)


def chunk(past: int, device: torch.device) -> None:
    """Time a chunk behind its past, by flash attention as it runs in training, and the past alone by cuDNN."""
    length = past + QUERIES
    q, k, v = heads(HEADS, QUERIES, device), heads(GROUPS, length, device), heads(GROUPS, length, device)
    forward = 4 * HEADS * DIM * QUERIES * (past + QUERIES / 2)
    whole = [Part(slice(0, QUERIES), slice(0, length), -1, 0)]
    tiles = [Part(slice(0, QUERIES), slice(past, length), -1, 0)]
    tiles += [Part(slice(0, QUERIES), slice(at, min(at + QUERIES, past))) for at in range(0, past, QUERIES)]
    output, sums = flash.attention(q, k, v, whole, SCALE)
    attempt(f"flash 2, a chunk behind {past}, forward", lambda: flash.attention(q, k, v, whole, SCALE), forward, device)
    targets = torch.zeros_like(k, dtype=torch.float32), torch.zeros_like(v, dtype=torch.float32)
    given = torch.randn_like(q)
    for name, parts in ((f"in tiles of {QUERIES:,} keys (as it runs)", tiles), ("in one part", whole)):

        def backward(parts: list[Part] = parts) -> object:
            return flash.gradients(given, q, output, sums, (k, v), targets, parts, SCALE)

        attempt(f"flash 2, a chunk behind {past}, backward {name}", backward, BACKWARD * forward, device)
    try:
        _past_by_cudnn(q, k, v, past)
    except Exception as error:
        say(what=f"cuDNN, the past of {past}", error=in_words(error))


def _past_by_cudnn(q: Tensor, k: Tensor, v: Tensor, past: int) -> None:
    """The past has no mask, so heads that share keys are queries of the same keys, as ``flash.py`` folds them."""
    ops, flops = torch.ops.aten, 4 * HEADS * DIM * QUERIES * past
    folded = q.reshape(GROUPS, 1, HEADS // GROUPS * QUERIES, DIM)
    seen = [value[0].unsqueeze(1)[:, :, :past].contiguous() for value in (k, v)]
    given = torch.randn_like(folded)

    def forward() -> Any:
        return ops._scaled_dot_product_cudnn_attention(folded, *seen, None, True, 0.0, False, False, scale=SCALE)

    attempt(f"cuDNN, the past of {past}, forward", forward, flops, q.device)
    out, lse, cum_q, cum_k, max_q, max_k, seed, offset, _ = forward()

    def backward() -> Any:
        return ops._scaled_dot_product_cudnn_attention_backward(
            given, folded, *seen, out, lse, seed, offset, None, cum_q, cum_k, max_q, max_k, 0.0, False, scale=SCALE
        )

    attempt(f"cuDNN, the past of {past}, backward", backward, BACKWARD * flops, q.device)
    own, sums = flash.attention(q, k, v, [Part(slice(0, QUERIES), slice(0, past))], SCALE)
    apart = (lse.reshape(GROUPS, -1) - sums.reshape(GROUPS, -1)).abs().max()
    output_apart = (out.reshape(own.shape) - own).float().norm() / own.float().norm()
    say(what=f"cuDNN beside flash 2, past of {past}", lse_apart=float(apart), output_apart=float(output_apart))


def main() -> None:
    """Time all rows and chunks on GPU 0."""
    device = torch.device("cuda", 0)
    for tokens in ROWS:
        whole_rows(tokens, device)
    for past in PASTS:
        chunk(past, device)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
