"""The choice of a kernel for attention, on devices and software that are stood in for."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.nn.attention as library
from torch import nn
from transformers import Gemma2Config, GPT2Config, GptOssConfig, LlamaConfig, MistralConfig

from tawpipe.model import kernels
from tawpipe.model.attention import attention_kernel, slots
from tawpipe.model.attention.attention import PackedMask, packed_attention
from tawpipe.model.attention.attention_kernel import Offer, activate_flash, choose_kernel
from tawpipe.model.attention.attention_kernel import attention_kernel as named
from tawpipe.model.kernels import AttentionOptions, Documents

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
AMPERE, HOPPER, TURING = Offer((8, 0)), Offer((9, 0), cudnn=True), Offer((7, 5))
HOPPER_3 = Offer((9, 0), "FA3", cudnn=True)
BF16, FP32 = torch.bfloat16, torch.float32


@pytest.mark.parametrize(
    ("offer", "dtype", "problem", "whole_rows", "expected"),
    [
        (AMPERE, BF16, None, True, "varlen"),
        (HOPPER, BF16, None, False, "varlen"),
        (HOPPER, BF16, None, True, "cudnn"),
        (HOPPER_3, BF16, None, True, "varlen"),
        (HOPPER_3, BF16, "it has no dropout", True, "documents"),
        (HOPPER, FP32, None, True, "documents"),
        (TURING, torch.float16, None, True, "documents"),
        (Offer(), BF16, None, True, "documents"),
    ],
)
def test_fastest_attention_kernel_of_the_device_is_chosen(offer, dtype, problem, whole_rows, expected):
    kernel, why = choose_kernel(offer, dtype, problem, whole_rows=whole_rows)
    assert kernel == expected and bool(why) == (kernel == "documents")


@pytest.mark.parametrize(
    ("offer", "dtype", "options", "words"),
    [
        (HOPPER_3, BF16, {}, "flash attention 3 (varlen)"),
        (HOPPER, BF16, {}, "flash attention 2 (varlen); flash attention 3 would be faster but is not installed or "
         "activated; cuDNN for rows of one document and a multiple of 1,024 tokens"),
        (AMPERE, BF16, {}, "flash attention 2 (varlen)"),
        (AMPERE, FP32, {}, "one document at a time: no kernel for packed documents computes in float32"),
        (AMPERE, BF16, {"dropout": 0.1}, "one document at a time: torch's varlen attention has no dropout"),
        (AMPERE, BF16, {"softcap": 50.0}, "scores computed in parts, because no fused kernel has soft caps"),
        (AMPERE, BF16, {"sinks": True}, "flash attention 2, one document at a time, sinks from its log-sum-exp"),
        (AMPERE, FP32, {"sinks": True}, "scores computed in parts, because no fused kernel has sinks"),
        (Offer(), FP32, {}, "one document at a time: on the CPU"),
        (Offer(), FP32, {"dropout": 0.1}, "no fused kernel has dropout on the CPU"),
    ],
)  # fmt: skip
def test_attention_kernel_is_named_before_it_runs(offer, dtype, options, words):
    assert named(offer, dtype, 128, **options).endswith(words)


@pytest.mark.parametrize(
    ("config", "names", "words"),
    [
        (LlamaConfig(), (), "one document at a time: on the CPU"),
        (GPT2Config(), (), "no fused kernel has dropout on the CPU"),  # its usual 0.1
        (Gemma2Config(), (), "soft caps"),
        (GptOssConfig(), ("model.layers.0.self_attn.sinks",), "sinks"),
    ],
)
def test_kernel_needs_of_a_model_are_read_from_its_config(config, names, words):
    assert words in attention_kernel.kernel_of_model(config, names, CPU, FP32)


def on(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], activate: Any, current: Any = lambda: None
) -> list[str]:
    """What was tried, and what was taken back."""
    said: list[str] = []
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(library, "activate_flash_attention_impl", activate, raising=False)
    monkeypatch.setattr(library, "current_flash_attention_impl", current, raising=False)
    monkeypatch.setattr(library, "restore_flash_attention_impl", lambda: said.append("restored"), raising=False)
    monkeypatch.setattr(attention_kernel, "try_kernels", lambda *given: said.append(f"tried {given[2:]}"))
    return said


def test_flash_attention_3_is_activated_only_on_hopper(monkeypatch):
    asked: list[str] = []
    for capability in ((8, 0), (10, 0), (12, 0), (9, 0)):
        said = on(monkeypatch, capability, asked.append)
        activate_flash(GPU, BF16, LlamaConfig)
    activate_flash(GPU, FP32, LlamaConfig)  # no flash attention computes in it
    activate_flash(CPU, BF16, LlamaConfig)
    assert said == ["tried (128, None)"]
    on(monkeypatch, (9, 0), asked.append, current=lambda: "FA4")  # the user's own choice stays
    activate_flash(GPU, BF16, LlamaConfig)
    assert asked == ["FA3"]
    assert kernels.flash_in_use() == "FA4"


@pytest.mark.parametrize(
    "problem", [ImportError("flash_attn_interface"), RuntimeError("no kernels"), ValueError("FA3")]
)
def test_flash_attention_2_is_used_if_package_3_fails(monkeypatch, problem):
    def fail(name: str) -> None:
        raise problem

    said = on(monkeypatch, (9, 0), fail)
    activate_flash(GPU, BF16, LlamaConfig)
    assert kernels.flash_in_use() == "FA2" and not said


def test_flash_attention_3_that_fails_on_the_heads_of_a_model_is_not_used(monkeypatch, caplog):
    """Or without windows, or a backward pass: the first layer would end the run. What is taken instead is said."""

    def broken(device: Any, dtype: Any, head_dim: int, window: int | None) -> None:
        if window is not None:
            raise RuntimeError("This flash attention build does not support local attention.\nTraceback ...")

    said = on(monkeypatch, (9, 0), lambda name: None)
    monkeypatch.setattr(attention_kernel, "try_kernels", broken)
    activate_flash(GPU, BF16, lambda: MistralConfig(sliding_window=4096))
    assert said == ["restored"]
    assert "flash attention 2 is used: the package of 3 fails on heads of size 128 and a window of 4096" in caplog.text
    assert "does not support local attention.)" in caplog.text
    activate_flash(GPU, BF16, LlamaConfig)
    assert said == ["restored"], "without a window nothing is missing"


@pytest.mark.parametrize("window", [None, 4096])
def test_try_kernels_runs_forward_and_backward(monkeypatch, window):
    """On two documents of the model's heads."""
    tried: list[str] = []

    class Varlen(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, query: Any, *given: Any) -> Any:
            documents, seen, _ = given[2:]
            tried.append(f"forward {query.shape[-1]} {len(documents.spans)} {seen}")
            return query.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            tried.append("backward")
            raise RuntimeError("no backward pass")

    monkeypatch.setattr(kernels, "varlen", Varlen.apply)
    with pytest.raises(RuntimeError, match="no backward pass"), torch.no_grad():
        attention_kernel.try_kernels(CPU, BF16, 96, window)
    assert tried == [f"forward 96 2 {window and 64}", "backward"]


@pytest.mark.parametrize("window", [None, 4096])
def test_try_kernels_runs_the_kernel_of_sequence_chunks(monkeypatch, cuda_kernels, window):
    """As chunks call it: fewer queries than keys, of which the heads of queries share some."""
    monkeypatch.setattr(kernels, "varlen", lambda query, *given: query.clone())
    attention_kernel.try_kernels(CPU, BF16, 96, window)
    assert cuda_kernels.called == [(what, 100, 256, 2, 1) for what in ("forward", "backward")]


@pytest.mark.parametrize(("tokens", "kernel"), [(2048, "whole_rows"), (2047, "varlen")])
def test_cudnn_plan_is_made_only_for_recurring_lengths(tokens, kernel, monkeypatch):
    """Rows of one document that are filled have another length each time: a plan for each takes up to a second."""
    assert _called(monkeypatch, HOPPER, (tokens,), None, {}) == [kernel]
    monkeypatch.setenv("TORCH_CUDNN_SDPA_AVOID_RECOMPILE", "1")
    assert _called(monkeypatch, HOPPER, (tokens,), None, {}) == ["whole_rows"]


class Whole(torch.autograd.Function):
    """A kernel of cuDNN that has a plan for the forward pass alone."""

    @staticmethod
    def forward(ctx: Any, query: Any, *given: Any) -> Any:
        return query.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise RuntimeError("No valid execution plans built.\nTraceback ...")


def test_cudnn_is_tried_forward_and_backward_before_it_is_taken(monkeypatch, caplog):
    """torch takes no other kernel if cuDNN has no plan for a shape: the first layer would end the run."""
    fixed = attention_kernel._fixed.__wrapped__
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 92000)
    found = []
    for capability in ((10, 3), (9, 0), (8, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, capability=capability: capability)
        found.append(fixed(CPU))
    assert found == [((10, 3), True), ((9, 0), True), ((8, 0), False)] and not caplog.text
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 3))
    monkeypatch.setattr(kernels, "whole_rows", Whole.apply)
    with torch.no_grad():
        assert fixed(CPU) == ((10, 3), False)
    assert "cuDNN's attention is not used: it fails here (No valid execution plans built.)" in caplog.text


@pytest.mark.parametrize(("capability", "masked"), [((10, 0), True), ((9, 0), False)])
def test_decoding_with_a_mask_does_not_use_cudnn_on_capability_10(monkeypatch, capability, masked):
    """It is wrong there with few heads of keys, and torch takes it by itself."""
    allowed: list[Any] = []

    @contextmanager
    def only(backends: Any):
        allowed.append(backends)
        yield

    monkeypatch.setattr(kernels, "sdpa_kernel", only)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    real, on_gpu = kernels.with_mask, cast(Any, SimpleNamespace(device=GPU))
    monkeypatch.setattr(slots, "with_mask", lambda mask: real(None if mask is None else on_gpu))
    options = AttentionOptions(None, 1.0, 0.0, None)
    for rows, queries in ((3, 1), (1, 4)):
        query, key = torch.randn(rows, 2, 2, queries, 8), torch.randn(rows, 2, 6, 8)
        mask = torch.ones(rows, 1, queries, 6, dtype=torch.bool)
        slots._attention(query, key, key, mask, None, options)
    assert len(allowed) == 2 * masked and not any(library.SDPBackend.CUDNN_ATTENTION in each for each in allowed)
    slots._attention(query[:, :, :, :1], key, key, None, None, options)
    assert len(allowed) == 2 * masked, "without a mask nothing is wrong"


def test_windows_with_a_mask_are_trained_without_cudnn(monkeypatch):
    """cuDNN's gradients with a mask can be NaN."""
    allowed: list[Any] = []

    @contextmanager
    def only(backends: Any):
        allowed.append(backends)
        yield

    real, on_gpu = kernels.with_mask, cast(Any, SimpleNamespace(device=GPU))
    monkeypatch.setattr(kernels, "sdpa_kernel", only)
    monkeypatch.setattr(kernels, "with_mask", lambda mask, **how: real(on_gpu, **how))
    query = torch.randn(1, 2, 200, 8)
    kernels.fused(query, query, query, 64, 1.0, 0.0)
    assert allowed and not any(library.SDPBackend.CUDNN_ATTENTION in each for each in allowed)


def test_torch_without_flash_selection_uses_flash_attention_2(monkeypatch):
    monkeypatch.delattr(library, "activate_flash_attention_impl", raising=False)
    monkeypatch.delattr(library, "current_flash_attention_impl", raising=False)
    activate_flash(GPU, BF16, LlamaConfig)
    assert kernels.flash_in_use() == "FA2"


def test_kernels_without_dropout_are_excluded_if_dropout_is_set(monkeypatch):
    """The stand-ins for flash attention 2 in torch raise where they are given dropout."""
    allowed: list[Any] = []

    @contextmanager
    def only(backends: Any):
        allowed.append(backends)
        yield

    monkeypatch.setattr(kernels, "sdpa_kernel", only)
    query = torch.randn(1, 2, 4, 8)
    for flash, dropout in (("FA2", 0.5), ("FA3", 0.0), ("FA3", 0.5)):
        monkeypatch.setattr(kernels, "flash_in_use", lambda flash=flash: flash)
        kernels.fused(query, query, query, None, 1.0, dropout)
    assert len(allowed) == 1 and library.SDPBackend.FLASH_ATTENTION not in allowed[0]
    allowed.clear()
    monkeypatch.setattr(kernels, "flash_in_use", lambda: "FA2")
    query = torch.randn(1, 1, 4, 136)  # for which some devices take others where a gradient is wanted
    for window in (None, 2):
        kernels.fused(query, query, query, window, 1.0, 0.5)
    assert allowed == [[library.SDPBackend.EFFICIENT_ATTENTION, library.SDPBackend.MATH]] * 2


@pytest.mark.parametrize(
    ("offer", "lengths", "window", "options", "expected"),
    [
        (HOPPER, (1024, 1024), None, {}, "whole_rows"),
        (HOPPER, (400, 624, 1024), None, {}, "varlen"),
        (HOPPER, (1024, 1024), 4, {}, "varlen"),
        (HOPPER_3, (1024, 1024), None, {}, "varlen"),
        (AMPERE, (1024, 1024), None, {}, "varlen"),
        (AMPERE, (1024, 1024), None, {"dropout": 0.5}, "fused"),
        (TURING, (1024, 1024), None, {}, "fused"),
        (HOPPER, (9, 9), None, {"softcap": 30.0}, None),
    ],
)
def test_chosen_attention_kernel_is_the_called_kernel(monkeypatch, offer, lengths, window, options, expected):
    assert _called(monkeypatch, offer, lengths, window, options) == ([] if expected is None else [expected])


def _called(
    monkeypatch: pytest.MonkeyPatch, offer: Offer, lengths: tuple[int, ...], window: int | None, options: dict[str, Any]
) -> list[str]:
    """The kernels of documents in rows as long as the longest."""
    called: list[str] = []
    rows = sum(lengths) // max(lengths)
    query = torch.randn(rows, 2, max(lengths), 8, dtype=BF16)
    monkeypatch.setattr(Offer, "of", lambda device: offer)
    for name in ("varlen", "whole_rows", "fused"):
        monkeypatch.setattr(kernels, name, lambda *_, name=name, **__: called.append(name) or query)
    assert kernels.why_not_varlen(8, 8, 0.0, None, None, window) is None, "this torch has the kernel"
    mask = PackedMask(Documents.of(lengths, (rows, max(lengths)), CPU), window)
    packed_attention(nn.Identity(), query, query, query, mask, **options)
    return called


@pytest.mark.parametrize("heads", [1, 2, 4])
def test_whole_row_kernel_equals_document_by_document_attention(heads):
    query, key, value = (torch.randn(2, n, 9, 8, dtype=torch.float64) for n in (4, heads, heads))
    leaves = [tensor.requires_grad_() for tensor in (query, key, value)]
    outputs = [kernels.whole_rows(query, key, value, 0.3), kernels.fused(query, key, value, None, 0.3, 0.0)]
    torch.testing.assert_close(*outputs)
    gradients = [torch.autograd.grad(output.square().sum(), leaves) for output in outputs]
    torch.testing.assert_close(*gradients)
