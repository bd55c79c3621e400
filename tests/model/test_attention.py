"""Attention inside packed documents: the formula's values, and memory that grows with S and not with S x S."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tawpipe.model import kernels
from tawpipe.model.attention.attention import PackedMask, packed_attention
from tawpipe.model.kernels import Documents
from tawpipe.runtime.peak import peaks


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


SHAPE = (2, 60)


def inputs(value_dim: int = 6, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    shapes = (2, 4, 60, 6), (2, 2, 60, 6), (2, 2, 60, value_dim)
    query, key, value = (torch.randn(shape, dtype=dtype).requires_grad_() for shape in shapes)
    return query, key, value


LENGTHS = (1, 30, 29, 40, 3, 17)


def reference(query: Tensor, key: Tensor, value: Tensor, window: int | None, **options: Any) -> Tensor:
    """Dense scores with a mask that is written out."""
    document = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS)).view(SHAPE)
    position = torch.arange(60)
    seen = (document[:, :, None] == document[:, None, :]) & (position[:, None] >= position)
    if window is not None:
        seen &= position > position[:, None] - window
    key, value = key.repeat_interleave(2, 1), value.repeat_interleave(2, 1)
    scores = query @ key.transpose(2, 3) * options.get("scaling", 6**-0.5)
    if "softcap" in options:
        scores = options["softcap"] * torch.tanh(scores / options["softcap"])
    scores = scores.masked_fill(~seen[:, None], float("-inf"))
    if "s_aux" in options:
        scores = torch.cat([scores, options["s_aux"].view(1, 4, 1, 1).expand(2, 4, 60, 1)], dim=-1)
    return (scores.softmax(-1)[..., :60] @ value).transpose(1, 2)


@pytest.mark.parametrize("window", [None, 1, 7, 39, 1000])
@pytest.mark.parametrize("option", ["plain", "scaling", "softcap", "sinks", "value_dim"])
def test_every_attention_path_has_values_and_gradients_of_the_formula(window: int | None, option: str):
    sinks = torch.linspace(-1, 2, 4, dtype=torch.float64).requires_grad_()
    options = {"scaling": {"scaling": 0.7}, "softcap": {"softcap": 1.5}, "sinks": {"s_aux": sinks}}.get(option, {})
    tensors = inputs(10 if option == "value_dim" else 6)
    leaves = [*tensors, sinks] if option == "sinks" else tensors
    mask = PackedMask(Documents.of(LENGTHS, SHAPE, torch.device("cpu")), window)
    output, _ = packed_attention(nn.Identity(), *tensors, mask, **options)
    expected = reference(*tensors, window, **options)
    torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)
    direction = torch.randn_like(expected)
    for own, plain in zip(
        torch.autograd.grad(output, leaves, direction), torch.autograd.grad(expected, leaves, direction), strict=True
    ):
        torch.testing.assert_close(own, plain, rtol=1e-11, atol=1e-12)


def test_attention_dropout_is_repeated_in_the_backward_pass(monkeypatch: pytest.MonkeyPatch):
    """With an identity as values the output shows the weights; the gradient must be taken of those very weights."""
    length = 48
    query = torch.randn(1, 2, length, 8, dtype=torch.float64)
    value = torch.eye(length, dtype=torch.float64).expand(1, 2, -1, -1).clone().requires_grad_()
    mask = PackedMask(Documents.of((length,), (1, length), torch.device("cpu")), None)
    torch.manual_seed(4)
    weights, _ = packed_attention(nn.Identity(), query, query, value, mask, dropout=0.5)
    seen = weights.transpose(1, 2)[0, :, torch.ones(length, length).tril().bool()]
    assert 0.4 < (seen == 0).double().mean() < 0.6
    (gradient,) = torch.autograd.grad(weights.sum(), value)
    torch.testing.assert_close(gradient[0, :, :, 0], weights[0].sum(0))


def test_varlen_kernel_receives_documents_windows_and_grouped_heads(monkeypatch: pytest.MonkeyPatch):
    """What would run on CUDA, with a kernel written out in its place, as torch 2.13 has it and with fewer arguments."""

    def kernel(
        q: Tensor, k: Tensor, v: Tensor, at: Tensor, at_k: Tensor, longest: int, _: int, **options: Any
    ) -> Tensor:
        assert at is at_k and at.dtype == torch.int32 and longest == max(LENGTHS)
        left, right = options["window_size"]
        assert right == 0 and (k.shape[1] == q.shape[1] or options.get("enable_gqa"))
        k, v = k.repeat_interleave(4 // k.shape[1], 1), v.repeat_interleave(4 // v.shape[1], 1)
        parts = []
        for start, end in zip(at[:-1].tolist(), at[1:].tolist(), strict=True):
            scores = torch.einsum("ihd,jhd->hij", q[start:end], k[start:end]) * options["scale"]
            i, j = torch.arange(end - start)[:, None], torch.arange(end - start)
            hidden = (j > i) | ((left >= 0) & (i - j > left))
            parts.append(
                torch.einsum("hij,jhd->ihd", scores.masked_fill(hidden, float("-inf")).softmax(-1), v[start:end])
            )
        return torch.cat(parts)

    tensors = inputs()
    cumulative = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0).tolist()], dtype=torch.int32)
    documents = Documents(2, Documents.of(LENGTHS, SHAPE, torch.device("cpu")).spans, max(LENGTHS), cumulative)
    for arguments in ({"scale", "window_size", "enable_gqa"}, {"scale", "window_size"}):
        monkeypatch.setattr(kernels, "varlen_function", lambda arguments=arguments: (kernel, frozenset(arguments)))
        for window in (None, 7):
            output = kernels.varlen(*tensors, documents, window, 6**-0.5)
            torch.testing.assert_close(output, reference(*tensors, window), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ((64, 64, 0.0, None, None, None), None),
        ((64, 64, 0.0, None, None, 128), None),
        ((64, 64, 0.1, None, None, None), "no dropout"),
        ((64, 64, 0.0, 30.0, None, None), "soft caps"),
        ((192, 128, 0.0, None, None, None), "heads of size 192"),
        ((512, 512, 0.0, None, None, None), "heads of size 512"),
    ],
)
def test_reasons_against_the_varlen_kernel_are_reported(arguments: tuple, reason: str | None):
    found = kernels.why_not_varlen(*arguments)
    assert found is None if reason is None else found is not None and reason in found


def test_document_that_crosses_a_row_is_refused():
    with pytest.raises(AssertionError, match="crosses a row"):
        Documents.of((4, 4, 2), (2, 5), torch.device("cpu"))


def test_packed_attention_outside_a_chain_names_the_fix():
    from model_families import family_config, real_model
    from tawpipe.model.chain import Chain

    model = real_model(family_config("llama"))
    Chain(model)
    with pytest.raises(RuntimeError, match="set_attn_implementation"):
        model(torch.tensor([[1, 2]]))
    model.set_attn_implementation("sdpa")
    assert model(torch.tensor([[1, 2]])).logits.shape == (1, 2, 61)


MEMORY = """
import torch
from torch import nn
from tawpipe.model.attention.attention import PackedMask, packed_attention
from tawpipe.model.kernels import Documents
torch.set_num_threads(1)

def peak_mib():  # of this process since it started; getrusage would count its parent's
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) / 2**10

length, window, softcap = 16384, {window}, {softcap}
query, key, value = (torch.randn(1, heads, length, 8).requires_grad_() for heads in ({heads}, 1, 1))
base = peak_mib()
mask = PackedMask(Documents.of({lengths}, (1, length), torch.device("cpu")), window)
output, _ = packed_attention(nn.Identity(), query, key, value, mask, softcap=softcap)
output.sum().backward()
assert query.grad.isfinite().all()
print(peak_mib() - base)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize(
    ("lengths", "heads", "window", "softcap"),
    [
        pytest.param("(16384,)", 1, "None", "None", marks=pytest.mark.slow),
        pytest.param("(16384,)", 2, "512", "None", marks=pytest.mark.slow),
        pytest.param("(100, 10000, 6284)", 2, "512", "30.0", marks=pytest.mark.slow),
    ],
    ids=["whole", "window", "window and soft cap"],
)
def test_attention_memory_at_16k_tokens_is_far_below_a_mask(lengths: str, heads: int, window: str, softcap: str):
    """Forward and backward in a process of its own. One S x S mask of bytes would be 256 MiB."""
    code = MEMORY.format(lengths=lengths, heads=heads, window=window, softcap=softcap)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 64, f"{done.stdout.strip()} MiB"


def test_key_gradients_of_many_slices_are_summed_in_fp32():
    """Of a sliding window in bf16: what the slices give is added in fp32 and rounded once, not once for every slice."""
    window, length = 256, 1024
    generator = torch.Generator().manual_seed(0)
    query, key, value, arriving = (torch.randn(1, 2, length, 8, generator=generator).bfloat16() for _ in range(4))
    leaves = [tensor.clone().requires_grad_() for tensor in (query, key, value)]
    kernels.fused(leaves[0], leaves[1], leaves[2], window, 8**-0.5, 0.0).backward(arriving)

    sums = [torch.zeros(1, 2, length, 8) for _ in "kv"]
    for first in range(0, length, window // 2):
        last, oldest = first + window // 2, max(0, first - window + 1)
        i, j = torch.arange(first, last)[:, None], torch.arange(oldest, last)
        hidden = torch.zeros(last - first, last - oldest, dtype=torch.bfloat16)
        hidden.masked_fill_((j > i) | (j <= i - window), float("-inf"))
        own = [t[:, :, cut].detach().requires_grad_() for t, cut in
               ((query, slice(first, last)), (key, slice(oldest, last)), (value, slice(oldest, last)))]  # fmt: skip
        output = nn.functional.scaled_dot_product_attention(*own, attn_mask=hidden, scale=8**-0.5)
        output.backward(arriving[:, :, first:last])
        for total, leaf in zip(sums, own[1:], strict=True):
            assert leaf.grad is not None
            total[:, :, oldest:last] += leaf.grad
    for leaf, total in zip(leaves[1:], sums, strict=True):
        assert leaf.grad is not None and torch.equal(leaf.grad, total.bfloat16())


def test_overlapping_parts_sum_their_gradients_in_fp32():
    tensor = torch.zeros(1, 1, 6, 1, dtype=torch.bfloat16, requires_grad=True)
    cuts = [slice(0, 4), slice(2, 6), slice(0, 6), *[slice(0, 4)] * 8]
    parts = kernels.parts(tensor, [(slice(None), slice(None), cut) for cut in cuts])
    # In bf16 1 + 2**-9 is 1, however often it is added.
    sum([parts[0].sum(), *(part.sum() * 2**-9 for part in parts[3:])], parts[1].sum()).backward()
    assert tensor.grad is not None
    assert tensor.grad.flatten().tolist() == [1 + 2**-6, 1 + 2**-6, 2 + 2**-6, 2 + 2**-6, 1, 1]


def test_narrower_values_need_no_score_matrix_in_memory():
    """The CPU's fused kernel wants one width; without it torch keeps S x S scores of every head, here 256 MiB."""
    query, key = torch.randn(2, 1, 4, 4096, 24, requires_grad=True)
    value = torch.randn(1, 4, 4096, 16, requires_grad=True)
    attention = lambda: kernels.fused(query, key, value, None, 0.2, 0.0).sum().backward()  # noqa: E731
    assert peaks([attention], torch.device("cpu"))[0].most < 32 << 20
    assert value.grad is not None and value.grad.shape == value.shape
