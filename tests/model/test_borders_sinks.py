"""Gradients of attention sinks in bf16 over many documents."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from borders import (
    packed,
    piped,
    token_sum,
)
from model_families import family_config, real_model
from selected import quick_ones
from tawpipe.model.attention.attention import PackedMask, packed_attention
from tawpipe.model.kernels import Documents


def _sink_error(lengths: tuple[int, ...]) -> float:
    """Of the gradient of sinks in bf16, relative to fp64 on the same numbers. All terms of the sum have one sign."""
    generator, total = torch.Generator().manual_seed(2), sum(lengths)
    query, key, value, arriving = (torch.rand(1, 4, total, 8, generator=generator).bfloat16() for _ in range(4))
    sinks = torch.linspace(-1, 1, 4).bfloat16()
    found = []
    for dtype in (torch.bfloat16, torch.float64):
        leaf = sinks.clone().to(dtype).requires_grad_()
        mask = PackedMask(Documents.of(lengths, (1, total), torch.device("cpu")), None)
        inputs = [tensor.to(dtype).requires_grad_() for tensor in (query, key, value)]
        output, _ = packed_attention(nn.Identity(), inputs[0], inputs[1], inputs[2], mask, s_aux=leaf)
        output.backward(arriving.to(dtype).transpose(1, 2))
        assert leaf.grad is not None
        found.append(leaf.grad.double())
    return float((found[0] - found[1]).norm() / found[1].norm())


@pytest.mark.parametrize("length", [8, 16])
def test_bf16_gradient_of_sinks_does_not_degrade_with_documents(length):
    one, many = _sink_error((64 * length,)), _sink_error((length,) * 64)
    assert one < 1e-2
    assert many < 1e-2
    assert many <= max(1.5 * one, 4e-3), f"{many:.1e} with 64 documents, {one:.1e} with one"


@pytest.mark.parametrize("documents", quick_ones((1, 4, 32), [4]))
def test_bf16_sinks_of_gpt_oss_are_as_accurate_as_in_a_plain_process(documents):
    def make(dtype: torch.dtype) -> Any:
        return real_model(family_config("gpt_oss"), torch.bfloat16).to(dtype)

    batch, spans = packed([0], [[128 // documents] * documents] * 2)
    found = []
    for dtype in (torch.bfloat16, torch.float64):
        pipeline = piped(make(torch.float32), dtype=dtype, loss_chunk_tokens=1024)
        pipeline.step(batch)
        pipeline.drain()
        names = [name for name in pipeline.parameter_names if name.endswith("sinks")]
        gradients = [pipeline.gradient(name) for name in names]
        found.append(torch.cat([gradient.double() for gradient in gradients if gradient is not None]))
        pipeline.close()
    plain = make(torch.bfloat16)
    plain.set_attn_implementation("eager")
    for row, first, last in spans:
        targets = F.pad(batch["labels"][row : row + 1, first + 1 : last], (0, 1), value=-100)
        logits = plain(input_ids=batch["input_ids"][row : row + 1, first:last], use_cache=False).logits
        token_sum(logits.float(), targets).backward()
    scaled = torch.cat([plain.get_parameter(name).grad.double() for name in names])
    found.append(scaled * (found[1].norm() / scaled.norm()))
    mine, theirs = (float((each - found[1]).norm() / found[1].norm()) for each in (found[0], found[2]))
    assert mine <= 2 * theirs + 1e-2, f"{mine:.1e}, {theirs:.1e} plain"
