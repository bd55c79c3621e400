"""``recompute: elementwise``: products and attention are kept, norms and gates are computed again."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig

import cases
from cases import llama
from fused_cases import put_into_pipelines
from model_families import family_config, meta_model, real_model
from pipelines import make_pipeline
from states import ALONE
from tawpipe.errors import UserError
from tawpipe.model.batch import MicroBatch
from tawpipe.model.chain import Chain
from tawpipe.model.fused.operations import EAGER, KEEPING_INPUTS, STAND_IN, Operations, again_of, noted
from tawpipe.prove.memory import by_itself
from tawpipe.runtime.compute.recompute import keep_graph, kept_per_token


@pytest.mark.parametrize(
    "knobs",
    [
        {"names": ["gemma3"], "recompute": "elementwise"},
        {"names": ["qwen3_moe"], "recompute": "elementwise:2,full", "offloaded_layers": 2},
        pytest.param(
            {"names": ["llama", "qwen3", "gemma2", "mistral"], "recompute": "elementwise"}, marks=pytest.mark.slow
        ),
    ],
    ids=str,
)
def test_packed_rows_match_the_plain_model(knobs: dict[str, Any]) -> None:
    worst = cases.families(ALONE, tied=True, **knobs)
    assert all(difference < 1e-10 for difference in worst.values())


def test_stand_ins_match_the_plain_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their rotary embedding destroys the results of the norms before it, which are computed again nevertheless."""
    counts = put_into_pipelines(monkeypatch)
    assert cases.families(ALONE, tied=True, names=["qwen3"], recompute="elementwise:1,none")["qwen3"] < 1e-10
    assert counts["norm"] == 12


@pytest.mark.parametrize(
    "knobs",
    [
        {"strategy": "zero-bubble", "recompute": "elementwise", "quantize": "nf4"},
        pytest.param({"strategy": "1f1b", "recompute": "elementwise:2,full"}, marks=pytest.mark.slow),
        pytest.param(
            {"strategy": "tawpipe-whole", "recompute": "elementwise", "offloaded_layers": 3}, marks=pytest.mark.slow
        ),
        pytest.param({"strategy": "hsdp", "recompute": "none:1,elementwise:2,selective"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_adapters_match_one_process(pool, knobs: dict[str, Any]) -> None:
    worst, changed, _ = pool.run("cases:lora", 2, 1, **knobs)[0]
    assert worst < 1e-10 and changed


def one_layer(chain: Chain, tokens: int, block: int = 1) -> tuple[Any, Tensor, Any]:
    """A layer with values, its input, and the arguments of all layers."""
    ids = torch.zeros(1, tokens, dtype=torch.long)
    with torch.no_grad():
        hidden, calls = chain.embed(MicroBatch.from_rows(ids, ids))
        layer = partial(chain.layer, block, calls=calls)
        layer(hidden)  # the first call of a layer is checked
    return layer, torch.randn_like(hidden, requires_grad=True), calls


def kept_of_layers(chain: Chain, tokens: int) -> int:
    """Bytes that the layer which keeps most does keep."""
    weights = {p.untyped_storage().data_ptr() for p in chain.model.parameters()}
    most = 0
    for block in range(1, len(chain.layers) + 1):
        layer, leaf, calls = one_layer(chain, tokens, block)
        saved: list[Tensor] = []
        output = keep_graph(layer, leaf, (), {}, saved, notes=True)
        kept = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in (*saved, leaf)}
        shared = weights | {t.untyped_storage().data_ptr() for t in (output, *calls[block - 1].tensors)}
        most = max(most, sum(size for place, size in kept.items() if place not in shared))
    return most


@pytest.mark.parametrize(("family", "less"), [("qwen3", 0.75), ("gemma2", 0.55)])
def test_kept_bytes_are_those_that_were_predicted(family: str, less: float) -> None:
    chain = Chain(real_model(family_config(family), torch.float32))
    assert chain.compute_by(KEEPING_INPUTS)
    sizes = []
    for operations in (KEEPING_INPUTS, EAGER):
        other = Chain(meta_model(family_config(family)))
        other.compute_by(operations)
        other.prepare("cpu", torch.float32)
        sizes.append(kept_per_token(other))
    assert sizes[0]["products"] * 96 == pytest.approx(kept_of_layers(chain, 96), rel=0.05)
    assert sizes[0]["products"] <= less * sizes[1]["graph"] == less * sizes[1]["products"]


def test_results_are_computed_again_once() -> None:
    """A norm before three projections is computed once forward, once for its note, once for its own gradient."""
    calls: list[str] = []

    def counting(name: str, run: Any, *inputs: Any) -> Tensor:
        calls.append(name)
        return run(*inputs)

    operations = Operations(
        "counting", partial(counting, "norm", EAGER.norm), EAGER.rotary, partial(counting, "gate", EAGER.gate)
    )
    chain = Chain(real_model(family_config("gemma2"), torch.float32))
    assert chain.compute_by(operations)
    layer, leaf, _ = one_layer(chain, 8)
    gradients = []
    for notes in (False, True):
        calls.clear()
        output = keep_graph(layer, leaf, (), {}, [], notes=notes)
        assert sorted(calls) == ["gate", *["norm"] * 4]
        gradients.append(torch.autograd.grad(output.sum(), leaf)[0])
    assert sorted(calls) == ["gate"] * 2 + ["norm"] * 6  # two norms are read by products, two by residuals only
    assert torch.equal(*gradients)


def test_views_of_results_are_recognised() -> None:
    hidden = torch.randn(2, 3, 8, requires_grad=True)
    output = noted(STAND_IN.norm, hidden, torch.ones(8), 1e-6, 0.0, "llama")
    assert again_of(output) is again_of(output.view(6, 8).transpose(0, 1)) is not None
    assert again_of(hidden) is None and again_of(output + 1) is None
    with torch.no_grad():
        assert again_of(noted(STAND_IN.norm, hidden, torch.ones(8), 1e-6, 0.0, "llama")) is None


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["elementwise", "elementwise:1,full", "elementwise:1,selective:1,full"])
def test_memory_of_a_step_is_predicted(recompute: str) -> None:
    config = LlamaConfig(
        hidden_size=128,
        intermediate_size=448,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=1000,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
    )
    row = by_itself(config, [2048], recompute, torch.float32, torch.device("cpu"))
    assert abs(row["error"]) < 0.05, row


def test_refusals() -> None:
    other = GPT2LMHeadModel(GPT2Config(vocab_size=61, n_positions=32, n_embd=16, n_layer=2, n_head=2))
    expected = "'elementwise'; full, selective or none: layers of GPT2LMHeadModel have no norms and gates that can be"
    with pytest.raises(UserError, match=f"schedule.recompute: got {expected} computed apart"):
        make_pipeline(other, world=ALONE, check="never", recompute="elementwise")
    knobs = {"dtype": torch.float32, "world": ALONE, "check": "never", "recompute": "elementwise"}
    with pytest.raises(UserError, match=r"compile_layers: got True; false with schedule.recompute elementwise"):
        make_pipeline(llama(torch.float32), compile_layers=True, **knobs)
    with pytest.raises(UserError, match="got 'elementwise'; full or selective with sequence_chunk"):
        make_pipeline(llama(torch.float32), sequence_chunk=4, **knobs)
