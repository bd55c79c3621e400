"""Attention whose results are kept: plain gradients, no second run of its kernel, no mode over every operator."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from borders import llama, packed, piped, right_or_refused, rows_of
from tawpipe.model import kernels
from tawpipe.model.attention.attention import PackedMask, packed_attention
from tawpipe.model.chain import Chain
from tawpipe.model.kernels import Documents
from tawpipe.runtime.compute.attention_results import AttentionResults

ROWS, HEADS, TOKENS, DIM = 2, 4, 150, 8
RESULT_BYTES = ROWS * HEADS * TOKENS * (DIM + 1) * 8
"""Output and log-sum-exp of whole rows in fp64."""
FUSED = "aten::_scaled_dot_product_flash_attention_for_cpu"


class Counting(TorchDispatchMode):
    """Counts operators by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.name()] += 1
        return func(*args, **(kwargs or {}))


def layer(attention: Callable[[Tensor, Tensor, Tensor], Tensor], hidden: Tensor) -> Tensor:
    """Attention between operators that are computed again; keys have half as many heads."""
    return attention(hidden.tanh(), hidden[:, ::2].sin(), hidden[:, ::2].cos()).exp()


def compared(attention: Callable[[Tensor, Tensor, Tensor], Tensor], **options: Any) -> tuple[int, list[Counter[str]]]:
    """Assert that kept attention has plain gradients; return kept bytes, and the operators of both passes."""
    torch.manual_seed(3)
    hidden = torch.randn(ROWS, HEADS, TOKENS, DIM, dtype=torch.float64, requires_grad=True)
    results, gradients, counted = AttentionResults(**options), list[Tensor](), list[Counter[str]]()
    torch.manual_seed(4)
    first = results.keep(lambda: layer(attention, hidden))
    size = results.bytes
    assert not first.requires_grad
    for run in (lambda: layer(attention, hidden), lambda: results.reuse(lambda: layer(attention, hidden))):
        torch.manual_seed(4)
        with Counting() as counting:
            output = run()
        assert torch.equal(output, first)
        (gradient,) = torch.autograd.grad(output.square().sum(), hidden)
        gradients.append(gradient)
        counted.append(counting.counts)
    assert torch.equal(*gradients)
    return size, counted


def ours(lengths: tuple[int, ...] = (TOKENS,) * ROWS, window: int | None = None, **options: Any) -> Any:
    """Our attention of packed documents."""
    mask = PackedMask(Documents.of(lengths, (ROWS, TOKENS), torch.device("cpu")), window)
    return lambda q, k, v: packed_attention(nn.Identity(), q, k, v, mask, **options)[0]


def torchs(**options: Any) -> Any:
    """Attention as a model's own code calls it."""
    return lambda q, k, v: F.scaled_dot_product_attention(q, k[:, [0, 0, 1, 1]], v[:, [0, 0, 1, 1]], **options)


CAUSAL = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
KEPT: dict[str, tuple[Any, int, dict[str, Any]]] = {
    "whole rows": (ours(), 1, {}),
    "documents": (ours((60, 90, 150)), 3, {}),
    "window": (ours(window=5), 3, {}),
    "narrow values": (lambda q, k, v: F.pad(ours()(q, k, v[..., :3]), (0, 5)), 1, {}),
    "own code": (torchs(is_causal=True), 1, {"catches": True}),
    "own mask": (torchs(attn_mask=CAUSAL), 1, {"catches": True}),
    "own numbers": (torchs(attn_mask=CAUSAL.double().log()), 1, {"catches": True}),
}


@pytest.mark.parametrize("what", KEPT)
def test_kept_attention_is_not_computed_again(what):
    attention, calls, options = KEPT[what]
    size, (plain, again) = compared(attention, **options)
    assert plain[FUSED] == calls and not again[FUSED]
    assert size == RESULT_BYTES


def _by_scores(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """By torch's kernel of several operators, which saves all scores."""
    with sdpa_kernel(SDPBackend.MATH):
        return torchs(is_causal=True)(query, key, value)


@pytest.mark.parametrize(
    ("attention", "options"),
    [
        (ours(dropout=0.3), {}),
        (ours(softcap=2.0), {}),
        (torchs(is_causal=True, dropout_p=0.5), {"catches": True}),
        (_by_scores, {"catches": True}),
    ],
    ids=["dropout", "cap", "own dropout", "own scores"],
)
def test_attention_that_draws_or_saves_scores_is_computed_again(attention, options):
    assert compared(attention, **options)[0] == 0


def test_gradient_of_a_trained_mask_is_that_of_the_kernel():
    bias = torch.randn(TOKENS, TOKENS, dtype=torch.float64, requires_grad=True)
    results, queries = AttentionResults(catches=True), torch.randn(ROWS, HEADS, TOKENS, DIM, dtype=torch.float64)
    gradients = []
    run = lambda: torchs(attn_mask=bias * 2)(queries, queries[:, ::2], queries[:, ::2])  # noqa: E731
    results.keep(run)
    for output in (run(), results.reuse(run)):
        gradients += torch.autograd.grad(output.square().sum(), bias)
    assert torch.equal(*gradients) and gradients[0].any()


def test_output_that_a_layer_changes_in_place_is_not_kept():
    """Torch itself refuses its backward pass, with and without kept results."""
    results, queries = AttentionResults(), torch.randn(ROWS, TOKENS, HEADS, DIM, requires_grad=True).transpose(1, 2)
    run = lambda: ours()(queries.exp(), queries, queries).mul_(2)  # noqa: E731
    results.keep(run)
    assert results.bytes == 0
    for output in (run(), results.reuse(run)):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            output.sum().backward()


def test_results_are_freed_without_a_backward_pass():
    """And arguments at once: only the output and the log-sum-exp stay."""
    arguments: list[StorageWeakRef] = []

    def attention(*tensors: Tensor) -> Tensor:
        arguments.extend(StorageWeakRef(tensor.untyped_storage()) for tensor in tensors)
        return ours()(*tensors)

    results = AttentionResults()
    results.keep(lambda: layer(attention, torch.randn(ROWS, HEADS, TOKENS, DIM)))
    kept = [StorageWeakRef(tensor.untyped_storage()) for tensor in results.tensors]
    assert len(arguments) == 3 and all(storage.expired() for storage in arguments)
    assert len({storage.cdata for storage in kept}) == 2 and not any(storage.expired() for storage in kept)
    results.forget()
    gc.collect()
    assert all(storage.expired() for storage in kept)


class Varlen(torch.autograd.Function):
    """Stand-in for torch's kernel of packed documents: it saves what that saves, in its layout."""

    runs = 0

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, starts: Tensor, scale: float) -> Tensor:
        Varlen.runs += 1
        sums = query.new_empty(query.shape[1], len(query))
        output = Varlen.attend(query, key, value, starts, scale)
        ctx.save_for_backward(query, key, value, starts, starts, output, sums, query.new_empty(2))
        ctx.scale = scale
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        *tensors, starts, _, output, _, _ = ctx.saved_tensors
        with torch.enable_grad():
            query, key, value = leaves = [tensor.detach().requires_grad_() for tensor in tensors]
            again = Varlen.attend(query, key, value, starts, ctx.scale)
        assert torch.equal(again, output)
        return *torch.autograd.grad(again, leaves, gradient), None, None

    @staticmethod
    def attend(query: Tensor, key: Tensor, value: Tensor, starts: Tensor, scale: float) -> Tensor:
        outputs = []
        for first, last in pairwise(starts):
            q, k, v = (tensor[first:last].transpose(0, 1)[None] for tensor in (query, key, value))
            outputs.append(F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True))
        return torch.cat(outputs, dim=2)[0].transpose(0, 1)


def test_kernel_for_packed_documents_runs_once(monkeypatch):
    def varlen(q: Tensor, k: Tensor, v: Tensor, *at: Any, scale: float, enable_gqa: bool = False, **_: Any) -> Any:
        assert at[0] is at[1] and at[2:] == (90, 90)
        return Varlen.apply(q, k, v, at[0], scale)

    arguments = frozenset(("scale", "window_size", "enable_gqa"))
    monkeypatch.setattr(kernels, "varlen_function", lambda: (varlen, arguments))
    lengths = (60, 90, 70, 80)
    starts = torch.tensor([0, 60, 150, 220, 300], dtype=torch.int32)
    spans = Documents.of(lengths, (ROWS, TOKENS), torch.device("cpu")).spans
    documents = Documents(ROWS, spans, 90, starts)
    Varlen.runs = 0
    size, _ = compared(lambda q, k, v: kernels.varlen(q, k, v, documents, None, 0.3).transpose(1, 2))
    assert Varlen.runs == 2, "by the pass that keeps, and by the plain one"
    assert size == RESULT_BYTES + 2 * 8


# In a pipeline


def _mask_read(inner: Any, hidden: Tensor, call: Any) -> Tensor:
    """A layer that computes with its mask is given the model's own, and calls torch's attention."""
    mask = call["attention_mask"]
    factor = 1.0 if mask is None else (mask > -1).to(hidden.dtype).mean()
    return LlamaDecoderLayer.forward(inner, hidden, **call) * factor


OWN = llama(_mask_read, prepare=lambda model: model.set_attn_implementation("sdpa"))


@pytest.mark.parametrize("own", [False, True])
def test_layer_that_keeps_attention_runs_under_no_dispatch_mode(own, monkeypatch):
    """torch's selective checkpointing calls Python for every operator by such a mode, 10,000 times for a layer."""
    modes, run = list[Any](), Chain.layer

    def noting(chain: Chain, *args: Any, **kwargs: Any) -> Tensor:
        modes.append(_get_current_dispatch_mode_stack())
        return run(chain, *args, **kwargs)

    pipeline = piped(OWN if own else llama(), recompute="selective")
    pipeline.step(rows_of())
    pipeline.drain()  # blocks that run for the first time are watched for random numbers
    monkeypatch.setattr(Chain, "layer", noting)
    pipeline.step(rows_of())
    pipeline.close()
    assert modes and not any(modes)


@pytest.mark.parametrize("documents", [None, [(4, 12)] * 3])
def test_attention_of_own_code_is_kept_with_plain_gradients(documents):
    batch, spans = packed([0, 0, 0], documents) if documents else (rows_of(), None)
    assert right_or_refused(OWN, batch, documents=spans, recompute="selective") == "right"
