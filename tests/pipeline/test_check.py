"""The check of the user's own model before the first step finds what discovery cannot see, and nothing else."""

from __future__ import annotations

import pytest
import torch
import transformers
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaForCausalLM

from borders import llama, rows_of
from model_families import family_config, meta_model, real_model
from tawpipe.errors import UserError
from tawpipe.model import cut
from tawpipe.pipeline import check
from tawpipe.pipeline.pipeline import Pipeline
from tawpipe.pipeline.setup import CheckSettings


class LayerWithPast(LlamaDecoderLayer):
    """Adds to its input what the layer before it was given: a path for gradients that no chain has."""

    def forward(self, hidden_states, **kwargs):
        earlier = hidden_states if self.self_attn.layer_idx == 0 else PAST["hidden"]
        PAST["hidden"] = hidden_states
        return super().forward(hidden_states + 0.1 * earlier, **kwargs)


PAST: dict[str, torch.Tensor] = {}


def with_past():
    model = real_model(family_config("llama"))
    for layer in model.model.layers:
        layer.__class__ = LayerWithPast
    return model


class WithPenalty(LlamaForCausalLM):
    """A model whose loss is more than the cross-entropy."""

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        if output.loss is not None:
            output.loss = output.loss + 0.01 * output.logits.square().mean()  # type: ignore[union-attr]
        return output


@pytest.mark.parametrize(
    ("family", "on_meta"),
    [(family, number % 2 == 1) for number, family in enumerate(("llama", "gpt2", "gemma2", "deepseek_v3", "gpt_oss"))],
)
def test_correct_models_pass_the_check(family, on_meta):
    config = family_config(family)
    pipeline = Pipeline(meta_model(config) if on_meta else real_model(config), checks=CheckSettings(check="always"))
    assert "layers checked" in pipeline.checked
    pipeline.close()


def test_model_that_differs_from_its_blocks_is_refused_with_the_layer():
    with pytest.raises(UserError, match=r"layer \d of LlamaForCausalLM|gradient"):
        Pipeline(with_past())
    Pipeline(with_past(), checks=CheckSettings(check="never")).close()


def test_loss_of_a_custom_model_class_is_refused():
    model = real_model(family_config("llama"))
    model.__class__ = WithPenalty
    with pytest.raises(UserError, match="head and its loss"):
        Pipeline(model)


def test_check_auto_skips_unmodified_tested_models(monkeypatch):
    monkeypatch.setattr(check, "TESTED_TRANSFORMERS", transformers.__version__.rpartition(".")[0])
    model = real_model(family_config("llama"))
    assert check.is_tested(model, None)
    assert not check.is_tested(model, lambda logits, labels: logits.sum())
    assert not check.is_tested(with_past(), None)
    hooked = real_model(family_config("llama"))
    hooked.model.layers[1].register_forward_hook(lambda *_: None)
    assert not check.is_tested(hooked, None)
    pipeline = Pipeline(model)
    assert not pipeline.checked
    pipeline.close()


def test_check_auto_checks_under_an_untested_transformers_version(monkeypatch):
    monkeypatch.setattr(check, "TESTED_TRANSFORMERS", "4.0")
    pipeline = Pipeline(real_model(family_config("llama")))
    assert "layers checked" in pipeline.checked
    pipeline.close()


def test_check_with_a_cut_vocabulary_leaves_the_model_unchanged(monkeypatch):
    """Neither the model that is trained nor its result notices."""
    monkeypatch.setattr(cut, "SMALL_VOCABULARY", 16)
    monkeypatch.setattr(cut, "LARGE_TABLE", 1000)
    losses = []
    for choice in ("always", "never"):
        pipeline = Pipeline(llama()(), checks=CheckSettings(check=choice), dtype=torch.float64)
        losses.append(pipeline.step(rows_of()).loss)
        pipeline.close()
    assert losses[0] == losses[1]


def test_zero_initialized_adapters_are_checked():
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(
        real_model(family_config("llama")), peft.LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM")
    )
    pipeline = Pipeline(model)
    assert "layers checked" in pipeline.checked
    pipeline.close()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"lora_alpha": 0}, "no trained parameter has a gradient, .*0.self_attn.q_proj.lora_A"),
        ({"alora_invocation_tokens": [5, 6]}, "alora_invocation_tokens"),
    ],
)
def test_adapters_without_a_gradient_are_refused(given, said):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM", **given)
    with pytest.raises(UserError, match=said):
        Pipeline(peft.get_peft_model(real_model(family_config("llama")), config))


def test_trained_tokens_anywhere_in_the_vocabulary_pass_the_check():
    peft = pytest.importorskip("peft")
    for token in (3, 17):
        config = peft.TrainableTokensConfig(token_indices=[token], task_type="CAUSAL_LM")
        pipeline = Pipeline(peft.get_peft_model(real_model(family_config("llama")), config))
        assert "layers checked" in pipeline.checked
        pipeline.close()


def test_model_whose_own_forward_fails_is_reported_as_not_checked():
    model = real_model(family_config("llama"))
    model.loss_function = len  # its own forward pass with labels ends with an error
    pipeline = Pipeline(model, checks=CheckSettings(check="always"))
    assert "was not checked" in pipeline.checked
    pipeline.close()


def test_a_method_replaced_on_the_object_is_refused():
    model = real_model(family_config("llama"))
    model.model.forward = model.model.forward
    with pytest.raises(UserError, match="make a subclass"):
        Pipeline(model)


def test_unknown_check_setting_is_refused():
    with pytest.raises(UserError, match="auto, always, never"):
        Pipeline(real_model(family_config("llama")), checks=CheckSettings(check="sometimes"))


@pytest.mark.parametrize("nodes", [2])
def test_check_fails_with_one_message_on_all_processes(pool, nodes):
    messages = pool.run("test_check:refused_everywhere", nodes, 1)
    assert len(set(messages)) == 1
    assert messages[0].startswith("model: got 'layer 1 of LlamaForCausalLM'")


def refused_everywhere(world) -> str:
    try:
        Pipeline(with_past(), world=world)
    except UserError as error:
        return str(error)
    return "not refused"
