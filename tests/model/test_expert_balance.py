"""The loss that balances experts: transformers' own for one layer and row, and the formula in all ways of a step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from balanced_experts import COEFFICIENT, mixture
from borders import sgd
from cases import relative
from model_families import keep_fp64
from pipelines import make_pipeline


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss", "olmoe", "granitemoe", "minimax_m2"])
def test_one_layer_and_one_row_equal_transformers(monkeypatch: Any, family: str) -> None:
    """transformers counts tokens in fp32, which is exact for 16."""
    keep_fp64(monkeypatch)
    config: Any = {"layer_types": ["full_attention"]} if family == "gpt_oss" else {"decoder_sparse_step": 1}
    plain = mixture(family, 1, router_aux_loss_coef=COEFFICIENT, **config)
    ids = torch.randint(3, 40, (1, 16), generator=torch.Generator().manual_seed(2))
    pipeline = make_pipeline(
        mixture(family, 1, output_router_logits=True, router_aux_loss_coef=COEFFICIENT, **config),
        dtype=torch.float64,
        clip_norm=None,
        optimizer=sgd,
        check="never",
    )
    result = pipeline.step({"input_ids": ids, "labels": ids})
    output = plain(input_ids=ids, labels=ids, output_router_logits=True)
    output.loss.backward()
    assert result.balance_loss == pytest.approx(output.aux_loss.item(), rel=1e-12)
    assert result.loss == pytest.approx((output.loss - COEFFICIENT * output.aux_loss).item(), rel=1e-12)
    pipeline.drain()
    for name, parameter in plain.named_parameters():
        if parameter.grad is not None:
            found = pipeline.gradient(name)
            assert found is not None
            assert relative(found, parameter.grad) < 1e-12, name
    assert not pipeline.chain.config.output_router_logits
    pipeline.close()
