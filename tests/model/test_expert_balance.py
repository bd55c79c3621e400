"""The loss that balances experts: transformers' own for one layer and row, and the formula in all ways of a step."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import pytest
import torch
from transformers import MixtralConfig, MixtralForCausalLM

import every_family
from balanced_experts import COEFFICIENT, chunks, compared, mixture, of_ranks
from borders import sgd
from cases import relative
from model_families import keep_fp64
from pipelines import make_pipeline
from tawpipe import adamw
from tawpipe.errors import UserError
from tawpipe.model.chain import Chain
from tawpipe.model.experts.balance import balance_of

SHAPE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


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


@pytest.mark.parametrize(
    "knobs",
    [
        {"recompute": "none:1,full", "steps": 2},
        {"sequence_chunk": 5, "cut": partial(chunks, size=5)},
        {"adapter": True},
        *(
            pytest.param(knobs, marks=pytest.mark.slow)
            for knobs in (
                {"recompute": "none", "family": "jamba", "layers": 4},
                {"recompute": "selective", "sequence_chunk": 7, "cut": partial(chunks, size=7)},
                {"recompute": "none", "adapter": True},
                {"recompute": "none", "compile_layers": True},
            )
        ),
    ],
)
def test_steps_equal_a_plain_loop(knobs: dict[str, Any]) -> None:
    assert compared(None, **knobs) < 1e-11


@pytest.mark.parametrize(
    ("local", "knobs"),
    [
        (1, {"strategy": "1f1b"}),
        (2, {"sequence_ranks": 2, "cut": partial(of_ranks, ranks=2)}),
        *(
            pytest.param(local, knobs, marks=pytest.mark.slow)
            for local, knobs in (
                (1, {"strategy": "zero-bubble", "layers": 4, "recompute": "none", "delays": 0.003}),
                (1, {"strategy": "tawpipe-spread", "layers": 3, "early_updates": True, "delays": 0.003}),
                (2, {"strategy": "hsdp", "micro_batches_per_visit": 2, "recompute": "selective"}),
            )
        ),
    ],
)
def test_steps_of_several_processes_equal_a_plain_loop(pool: Any, local: int, knobs: dict[str, Any]) -> None:
    nodes = 2 if local == 1 else 1
    assert max(pool.run("balanced_experts:compared", nodes, local, **knobs)) < 1e-11


@pytest.mark.parametrize("cut", [pytest.param(True, marks=pytest.mark.slow), False])
def test_documents_and_their_slices_equal_a_plain_loop(pool: Any, cut: bool) -> None:
    knobs = {"strategy": "1f1b", "check": "auto"} if cut else {"strategy": "tawpipe-spread"}
    assert max(pool.run("balanced_experts:documents_differ", 2, 1, cut=cut, **knobs)) < 1e-11


def test_padding_is_left_out() -> None:
    ids = torch.randint(3, 40, (1, 12), generator=torch.Generator().manual_seed(2))
    padded = torch.nn.functional.pad(ids, (0, 5))
    mask = torch.nn.functional.pad(torch.ones_like(ids), (0, 5))
    results = []
    for batch in ({"input_ids": ids}, {"input_ids": padded, "attention_mask": mask}):
        pipeline = make_pipeline(mixture(), dtype=torch.float64, check="never", balance=0.0)
        result = pipeline.step(batch | {"labels": batch["input_ids"]})
        results.append((result.balance_loss, result.busiest_expert, result.grad_norm))
        pipeline.close()
    assert results[0] == pytest.approx(results[1], rel=1e-6)  # norms are in fp32


@pytest.mark.slow
def test_experts_of_skewed_data_become_balanced(capsys: Any) -> None:
    """Some tokens are frequent, most follow from the one before."""

    def busiest(coefficient: float) -> float:
        config = MixtralConfig(**SHAPE, num_local_experts=8, num_experts_per_tok=2)
        torch.manual_seed(0)
        settings: dict[str, Any] = {"micro_batch": 16, "recompute": "none", "check": "never", "balance": coefficient}
        pipeline = make_pipeline(MixtralForCausalLM(config), dtype=torch.float32, optimizer=adamw(3e-3), **settings)
        generator, uses = torch.Generator().manual_seed(1), []
        after, frequencies = torch.randperm(64, generator=generator), 1 / torch.arange(1, 65)
        for _ in range(300):
            ids = torch.multinomial(frequencies, 16 * 32, replacement=True, generator=generator).view(16, 32)
            for at in range(1, 32):
                follows = torch.rand(16, generator=generator) < 0.8
                ids[:, at] = torch.where(follows, after[ids[:, at - 1]], ids[:, at])
            uses.append(pipeline.step({"input_ids": ids, "labels": ids}).busiest_expert)
        pipeline.close()
        return sum(uses[-20:]) / 20

    with_loss, without = busiest(0.01), busiest(0.0)
    with capsys.disabled():
        print(f"\nbusiest expert over an even share: {with_loss:.2f} with the loss, {without:.2f} without")
    assert with_loss < 1.5 < 3 < without


SAID = [
    (None, False, {"router_aux_loss_coef": 0.02}, r"not trained \(router_aux_loss_coef 0.02 .*--experts.balance auto"),
    ("none", True, {"router_aux_loss_coef": 0.02}, r"not trained \(router_aux_loss_coef 0.02"),
    ("auto", False, {"router_aux_loss_coef": 0.02}, r"coefficient 0.02 \(router_aux_loss_coef in config.json; .* none"),
    (None, True, {"router_aux_loss_coef": 0.02}, r"coefficient 0.02 \(output_router_logits is true and router_aux"),
    (0.5, False, {"router_aux_loss_coef": 0.02}, r"coefficient 0.5 \(--experts.balance\)"),
    ("auto", False, {"router_aux_loss_coef": 0.0}, r"no coefficient of transformers' loss"),
    ("auto", False, {"router_aux_loss_coef": 0.0, "aux_loss_alpha": 0.1}, r"no coefficient of transformers' loss"),
    (None, False, {"router_aux_loss_coef": 0.0, "aux_loss_alpha": 0.1}, r"not trained \(aux_loss_alpha 0.1 .*takes a"),
    (None, False, {"router_aux_loss_coef": 0.0}, "^$"),
]


@pytest.mark.parametrize(("value", "asked", "config", "said"), SAID)
def test_loss_that_is_trained_or_not_is_reported(value: Any, asked: bool, config: dict[str, Any], said: str) -> None:
    model = mixture(layers=1, **config)
    balance, words = balance_of(model, list(model.model.layers), value, asked=asked)
    assert re.search(said, words), words
    assert (balance is not None) == words.startswith("experts are balanced")


@pytest.mark.parametrize(
    ("family", "value", "message"),
    [
        ("mixtral", "on", r"experts.balance: got 'on'; none, auto or a number of at least 0"),
        ("mixtral", -1.0, "number of at least 0"),
        ("mixtral", float("nan"), "number of at least 0"),
        ("mixtral", True, "number of at least 0"),
        ("llama", 0.1, r"experts.balance: got 0.1; none: LlamaForCausalLM has no layer with a router"),
        ("dbrx", 0.1, "DbrxRouter does not tell how many experts"),
        ("deepseek_v3", 0.1, ""),
    ],
)
def test_values_that_cannot_work_are_refused(family: str, value: Any, message: str) -> None:
    """DeepSeek's routers, which choose by other scores, are balanced by the softmax of their logits."""
    chain = Chain(every_family.random_model(family))
    if not message:
        assert "coefficient 0.1" in chain.balance_experts(value)
        return
    with pytest.raises(UserError, match=message):
        chain.balance_experts(value)
