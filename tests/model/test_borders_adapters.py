"""The border to peft and to models with parts that come and go: adapters whose training a chain runs are as in a plain
process, all others are refused by name.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from borders import (
    Make,
    assert_same,
    llama,
    opt,
    packed,
    piped,
    piped_numbers,
    plain_numbers,
    right_or_refused,
    rows_of,
)
from cases import from_bits
from family_configs import tiny_config
from model_families import keep_fp64, real_model
from selected import quick_ones
from tawpipe.errors import UserError
from tawpipe.model.bits.quantized import matrices_of
from tawpipe.model.chain import Chain
from tawpipe.model.experts import adapted as adapted_experts
from tawpipe.model.experts.adapted import SortedPairs

peft = pytest.importorskip("peft")
RECOMPUTE = ["full", pytest.param("selective", marks=pytest.mark.slow)]
PROJECTIONS = ["q_proj", "v_proj", "down_proj"]


@pytest.fixture(autouse=True)
def exact(monkeypatch: pytest.MonkeyPatch):
    torch.set_num_threads(1)
    keep_fp64(monkeypatch)


def shaken(model: Any) -> Any:
    """With adapters that do something: some start at 0."""
    torch.manual_seed(9)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += torch.randn_like(parameter) * 0.05
    return model.double()


def adapted(config: Any, base: Make | None = None) -> Make:
    def make() -> Any:
        torch.manual_seed(8)
        return shaken(peft.get_peft_model((base or llama())(), config))

    return make


def _lora(**given: Any) -> Any:
    return peft.LoraConfig(r=3, target_modules=PROJECTIONS, task_type="CAUSAL_LM", **given)


# Adapters that must be right

RIGHT = {
    "lora": lambda: _lora(),
    "lora of all linear": lambda: peft.LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM"),
    "rslora": lambda: _lora(use_rslora=True, lora_alpha=7),
    "lora with biases": lambda: _lora(lora_bias=True),
    "dora": lambda: _lora(use_dora=True),
    "ia3": lambda: peft.IA3Config(
        target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"], task_type="CAUSAL_LM"
    ),
    "head saved": lambda: _lora(modules_to_save=["lm_head"]),
    "embedding saved": lambda: _lora(modules_to_save=["embed_tokens"]),
    "both saved": lambda: _lora(modules_to_save=["embed_tokens", "lm_head"]),
    "norm saved": lambda: _lora(modules_to_save=["norm"]),
    "lora of some layers": lambda: _lora(layers_to_transform=[0, 2]),
    "lora of the head": lambda: peft.LoraConfig(r=3, target_modules=["lm_head", "q_proj"], task_type="CAUSAL_LM"),
    "lora of the embedding": lambda: peft.LoraConfig(r=3, target_modules=["embed_tokens"], task_type="CAUSAL_LM"),
}


@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize("what", quick_ones(RIGHT, [*RIGHT][::3]))
def test_adapters_train_as_in_a_plain_process(what, recompute):
    assert right_or_refused(adapted(RIGHT[what]()), rows_of(), recompute=recompute) == "right"


@pytest.mark.parametrize("what", ["lora", "dora", "both saved"])
def test_adapters_of_a_tied_model_are_right_or_refused(what):
    base = llama(tied=True)
    refused = "tied|modules_to_save"
    assert right_or_refused(adapted(RIGHT[what](), base), rows_of(), refused=refused) in ("right", "refused")


# Adapters that may be right or refused

OTHERS = {
    "loha": (lambda: peft.LoHaConfig(r=2, target_modules=PROJECTIONS), "loha"),
    "lokr": (lambda: peft.LoKrConfig(r=2, target_modules=PROJECTIONS), "lokr"),
    "oft": (lambda: peft.OFTConfig(oft_block_size=4, target_modules=["q_proj"]), "oft"),
    "boft": (lambda: peft.BOFTConfig(boft_block_size=4, target_modules=["q_proj"]), "boft"),
    "vera": (lambda: peft.VeraConfig(r=4, target_modules=["q_proj"]), "vera"),
    "layer norms": (lambda: peft.LNTuningConfig(target_modules=["input_layernorm"]), "ln.?tuning"),
    "vblora": (
        lambda: peft.VBLoRAConfig(r=2, num_vectors=8, vector_length=8, topk=2, target_modules=["q_proj"]),
        "vb.?lora",
    ),
    "hra": (lambda: peft.HRAConfig(r=2, target_modules=["q_proj"]), "hra"),
    "shira": (lambda: peft.ShiraConfig(r=2, target_modules=["q_proj"]), "shira"),
    "randlora": (lambda: peft.RandLoraConfig(r=4, target_modules=["q_proj"]), "randlora"),
    "trainable tokens": (
        lambda: peft.TrainableTokensConfig(token_indices=[4, 7, 9], target_modules=["embed_tokens"]),
        "trainable.?tokens",
    ),
    "lora with tokens": (lambda: _lora(trainable_token_indices=[4, 7, 9]), "trainable.?token"),
    "adaption prompt": (
        lambda: peft.AdaptionPromptConfig(adapter_len=4, adapter_layers=2, task_type="CAUSAL_LM"),
        "adaption.?prompt",
    ),
    "lora of layers twice": (lambda: _lora(layer_replication=[(0, 2), (1, 3)]), "layer_replication|layers"),
}


@pytest.mark.parametrize("what", quick_ones(OTHERS, [*OTHERS][::3]))
def test_other_adapter_types_are_right_or_refused_by_name(what):
    config, refused = OTHERS[what]
    limit = 1e-6 if what == "adaption prompt" else 1e-9  # peft computes its softmax in fp32
    right_or_refused(adapted(config()), rows_of(), refused=refused, limit=limit)


@pytest.mark.parametrize("active", ["default", "other", ["default", "other"]], ids=str)
def test_partly_active_adapters_are_right_or_refused(active):
    """Those that are not are neither used nor trained."""

    def make() -> Any:
        model = adapted(_lora())()
        model.add_adapter("other", peft.LoraConfig(r=2, target_modules=["k_proj", "q_proj"]))
        model.base_model.set_adapter(active)
        return shaken(model)

    right_or_refused(make, rows_of(), refused="adapter")


def test_disabled_adapters_are_refused():
    def make() -> Any:
        model = adapted(_lora())()
        model.base_model.disable_adapter_layers()
        return model

    with pytest.raises(UserError, match=r"adapter|trainable|train"):
        piped_numbers(make, rows_of())


def test_merged_adapters_are_refused():
    """Nothing that is trained takes part in the forward pass."""

    def make() -> Any:
        model = adapted(_lora())()
        model.merge_adapter()
        return model

    with pytest.raises(UserError, match=r"merge|adapter|train"):
        piped_numbers(make, rows_of())


def test_lora_dropout_repeats_under_every_recomputation():
    losses = [
        piped_numbers(adapted(_lora(lora_dropout=0.3)), rows_of(), recompute=recompute, seed=2)
        for recompute in ("full", "none", "selective")
    ]
    for each in losses[1:]:
        assert_same(each, losses[0], 1e-12)


# What must be refused: a loss of its own, or parameters that are not those of layers

REFUSED = {
    "adalora": (
        lambda: peft.AdaLoraConfig(
            init_r=4, target_r=2, total_step=100, target_modules=PROJECTIONS, task_type="CAUSAL_LM"
        ),
        "adalora",
    ),
    "prompt tuning": (lambda: peft.PromptTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM"), "prompt.?tuning"),
    "prefix tuning": (lambda: peft.PrefixTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM"), "prefix.?tuning"),
    "p-tuning": (
        lambda: peft.PromptEncoderConfig(num_virtual_tokens=4, encoder_hidden_size=8, task_type="CAUSAL_LM"),
        "p.?tuning|prompt.?encoder",
    ),
    "multitask prompt tuning": (
        lambda: peft.MultitaskPromptTuningConfig(num_virtual_tokens=4, num_tasks=2, task_type="CAUSAL_LM"),
        "prompt.?tuning",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_adapters_with_extra_loss_or_inputs_are_refused_by_name(what):
    config, refused = REFUSED[what]
    model = peft.get_peft_model(llama()(), config()).double()
    with pytest.raises(UserError, match=f"(?i){refused}"):
        piped(model).close()


# Without a model of peft's around


def test_adapters_by_transformers_add_adapter_are_right_or_refused():
    def make() -> Any:
        model = llama()()
        torch.manual_seed(8)
        model.add_adapter(_lora())
        return shaken(model)

    right_or_refused(make, rows_of(), refused="add_adapter|get_peft_model")


def test_injected_adapters_are_right_or_refused():
    def make() -> Any:
        torch.manual_seed(8)
        return shaken(peft.inject_adapter_in_model(_lora(), llama()()))

    right_or_refused(make, rows_of(), refused="inject_adapter|get_peft_model")


EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def with_experts(family: str, experts: list[str] = EXPERTS, form: str = "none") -> Make:
    """A mixture with adapters on its experts and its queries; with ``form``, a base rounded to these bits."""
    queries = "q_a_proj" if family == "deepseek_v3" else "q_proj"
    config = peft.LoraConfig(r=3, lora_alpha=5, target_modules=[queries], target_parameters=experts)

    def base() -> Any:
        model = real_model(tiny_config(family), torch.float32).double()  # packed units hold other parameters in fp32
        for name in matrices_of(model) if form != "none" else ():
            if ".layers." in name:
                model.get_parameter(name).data = from_bits(form, model.get_parameter(name))
        return model

    return adapted(config, base)


MIXTURES = ["qwen3_moe", "gpt_oss", "glm4_moe", "deepseek_v3", "mixtral"]


@pytest.mark.parametrize("family", MIXTURES)
@pytest.mark.parametrize("recompute", ["full", "none"])
def test_adapters_on_experts_train_as_in_peft(family, recompute):
    assert right_or_refused(with_experts(family), rows_of(), recompute=recompute) == "right"


EXPERT_WAYS: dict[str, dict[str, Any]] = {
    "first layer alone": {"experts": EXPERTS[:1]},
    "second layer alone": {"experts": EXPERTS[1:], "recompute": "none"},
    "chunks": {"sequence_chunk": 5},
    "sets": {"micro_batches_per_visit": 3, "offloaded_layers": 2},
    "selective": {"recompute": "selective"},
    "nf4": {"form": "nf4", "recompute": "none"},
    "int8 in chunks": {"form": "int8", "sequence_chunk": 7},
}


@pytest.mark.parametrize("what", EXPERT_WAYS)
@pytest.mark.parametrize("family", quick_ones(MIXTURES, MIXTURES[:1]))
def test_adapters_on_experts_train_as_in_peft_however_layers_run(family, what):
    if (family, what) == ("gpt_oss", "selective"):
        pytest.skip("its tiny attention is computed by no kernel whose result could be kept")
    knobs = dict(EXPERT_WAYS[what])
    experts, form = knobs.pop("experts", EXPERTS), knobs.pop("form", "none")
    plain = plain_numbers(with_experts(family, experts, form), rows_of())
    assert_same(piped_numbers(with_experts(family, experts), rows_of(), quantize=form, **knobs), plain)


@pytest.mark.parametrize("recompute", ["full", "none"])
@pytest.mark.parametrize("family", quick_ones(MIXTURES, ["gpt_oss"]))
def test_adapters_on_experts_train_packed_documents_as_in_peft(family, recompute):
    batch, documents = packed([0], [[5, 9, 2], [16], [8, 8]])
    make = with_experts(family)
    assert right_or_refused(make, batch, documents=documents, recompute=recompute) == "right"


def test_experts_keep_neither_gathered_inputs_nor_activations():
    """The graph keeps the first layer's outputs, and no other result of the chosen experts."""
    chain = Chain(with_experts("mixtral")())
    experts: Any = chain.layers[0].get_submodule("mlp.experts")
    hidden = torch.randn(64, chain.width, requires_grad=True, dtype=torch.float64)
    index, chances = torch.rand(64, 8).topk(2).indices, torch.rand(64, 2, dtype=torch.float64, requires_grad=True)
    kept: dict[int, int] = {}

    def note(saved: Tensor) -> Tensor:
        kept[saved.untyped_storage().data_ptr()] = saved.untyped_storage().nbytes()
        return saved

    with torch.autograd.graph.saved_tensors_hooks(note, lambda saved: saved):
        _ = experts(hidden, index, chances)
    for tensor in (*experts.parameters(), hidden, index, chances):
        kept.pop(tensor.untyped_storage().data_ptr(), None)
    assert sum(kept.values()) == 64 * 2 * experts.get_base_layer().gate_up_proj.shape[1] * 8


def test_grouped_products_equal_products_expert_by_expert(monkeypatch):
    """On GPUs torch multiplies all experts at once, in bf16; the CPU can, too."""
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(shape, generator=generator).bfloat16()  # noqa: E731
    index = torch.randint(0, 3, (10, 2), generator=generator)
    pairs = SortedPairs.of(index + (index == 2), 4)  # nothing for one expert of four
    rows, weights, arriving = draw(20, 16), draw(4, 24, 16), draw(20, 24)
    alone = pairs.product(rows, weights.mT), pairs.product(arriving, weights), pairs.outer(rows, arriving)
    monkeypatch.setattr(adapted_experts, "_aligned", lambda *operands: True)
    grouped = pairs.product(rows, weights.mT), pairs.product(arriving, weights), pairs.outer(rows, arriving)
    assert all(map(torch.equal, alone, grouped)) and not grouped[2][2].any()


def test_experts_without_tokens_get_zero_gradients():
    def make() -> Any:
        model = with_experts("mixtral")()
        for layer in model.get_base_model().model.layers:
            layer.mlp.gate.weight.data[3:] = -50 * layer.mlp.gate.weight.data[0]
        return model

    assert right_or_refused(make, rows_of(rows=1)) == "right"


def test_switches_of_peft_work_on_experts_of_a_chain():
    model = with_experts("qwen3_moe")()
    ids = rows_of()["input_ids"]
    with torch.no_grad():
        adapted_logits = model(ids).logits
        with model.disable_adapter():
            plain = model(ids).logits
    chain = Chain(model)
    chain.model.set_attn_implementation("dense")
    with torch.no_grad():
        assert torch.allclose(model(ids).logits, adapted_logits, rtol=1e-9)
        with model.disable_adapter():
            assert torch.allclose(model(ids).logits, plain, rtol=1e-9)
        model.merge_adapter()
        assert torch.allclose(model(ids).logits, adapted_logits, rtol=1e-9)


def test_adapters_on_dense_parameters_are_refused():
    config = peft.LoraConfig(r=2, target_modules=[], target_parameters=["mlp.up_proj.weight"])
    with pytest.raises(UserError, match=r"up_proj.weight.*target_parameters are for stacked experts"):
        piped(adapted(config))


def test_two_active_adapters_on_experts_are_refused():
    def make() -> Any:
        model = with_experts("mixtral")()
        model.add_adapter("other", peft.LoraConfig(r=2, target_modules=[], target_parameters=EXPERTS))
        model.base_model.set_adapter(["default", "other"])
        return model

    with pytest.raises(UserError, match="one active adapter"):
        piped(make)


def test_export_after_transformers_add_adapter_is_an_adapter_or_refused(tmp_path):
    model = llama()()
    model.add_adapter(_lora())
    try:
        pipeline = piped(model.double())
        pipeline.export(tmp_path / "out")
    except UserError as error:
        assert "adapter" in str(error)
        return
    opened = peft.PeftModel.from_pretrained(llama()(), tmp_path / "out")
    assert any("lora_A" in name for name, _ in opened.named_parameters())
    pipeline.close()


# Layers that are left out now and then


def test_opt_with_layerdrop_is_repeatable_or_refused():
    """A layer that is left out in the forward pass must be left out in the backward pass."""
    make = lambda: opt(layerdrop=0.5)  # noqa: E731
    for seed in range(4):
        found: list[Any] = []
        torch.manual_seed(seed)
        try:
            found = [piped_numbers(make, rows_of(), recompute=r, seed=seed) for r in ("full", "none", "full")]
        except UserError as error:
            assert "layerdrop" in str(error)
        for each in found[1:]:
            assert_same(each, found[0], 1e-12)


def test_opt_without_layerdrop_is_right():
    assert right_or_refused(lambda: opt(layerdrop=0.0), rows_of()) == "right"


def test_adapters_under_test_change_the_loss_and_are_trained():
    """Otherwise a model whose adapters are never called would pass."""
    plain: dict[str, Tensor] = plain_numbers(adapted(_lora()), rows_of()).change
    assert all(value.any() for name, value in plain.items() if "lora_" in name)
    assert plain_numbers(adapted(_lora()), rows_of()).loss != plain_numbers(llama(), rows_of()).loss
