"""Gradients that travel in the compute dtype: only what travels is narrow, no sum within a micro-batch."""

from __future__ import annotations

import pytest
import torch


@pytest.mark.slow
def test_bf16_head_gradient_does_not_degrade_with_loss_chunks(pool):
    def gradient(dtype: str, chunk: int, reduce_dtype: str) -> torch.Tensor:
        options = {"dtype": dtype, "chunk": chunk, "reduce_dtype": reduce_dtype}
        return pool.run("borders:head_gradient", 2, 1, **options)[0].double()

    exact = gradient("float64", 512, "same")
    one, many, wide = (
        float((gradient("bfloat16", *how) - exact).norm() / exact.norm())
        for how in ((512, "same"), (2, "same"), (2, "float32"))
    )
    assert many < 1.2 * one, f"{many:.1e} in 256 chunks, {one:.1e} in one"
    assert many < 1.2 * wide, f"{many:.1e} in bf16, {wide:.1e} in fp32"
