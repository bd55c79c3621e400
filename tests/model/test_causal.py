"""A model in which a token sees those after it is refused by name, and no other is."""

from __future__ import annotations

from contextlib import closing
from copy import deepcopy
from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaDecoderLayer, LlamaForCausalLM, LlamaMLP

import every_family
from every_family import logits_of, micro_batches, random_model
from family_configs import families, tiny_config
from model_families import family_config, real_model
from selected import quick_ones
from tawpipe.errors import UserError
from tawpipe.model.chain import Chain
from tawpipe.model.refuse import refuse_not_causal
from tawpipe.model.tested import TESTED_FAMILIES
from tawpipe.pipeline.check import change_by_future
from tawpipe.pipeline.pipeline import Pipeline
from tawpipe.pipeline.setup import CheckSettings

BOTH_WAYS: dict[str, Any] = {"is_decoder": False, "use_bidirectional_attention": True, "is_causal": False}
"""Values of fields of configs by which some models look ahead."""


def with_field() -> list[tuple[str, str]]:
    """Families and the fields that their config's class has; ``is_causal`` is read from any config."""
    tested = [family for family in families() if family in TESTED_FAMILIES]
    names = {family: {field.name for field in fields(CONFIG_MAPPING[family])} for family in tested}  # type: ignore[arg-type]
    pairs = [(family, name) for family in tested for name in BOTH_WAYS if name in names[family]]
    return [*pairs, ("llama", "is_causal"), ("qwen3_next", "is_causal")]


def looks_ahead(model: Any) -> bool:
    """True if another last token changes logits before it, in the plain model by one of its implementations."""
    ids = micro_batches(((9,),))[0].input_ids
    other = torch.cat([ids[:, :-1], ids[:, :1]], dim=1)
    model.eval()
    for implementation in ("eager", "sdpa") if model._can_set_attn_implementation() else ("",):
        if implementation == "eager" or (implementation and model._supports_sdpa):
            model.set_attn_implementation(implementation)
        with torch.no_grad():
            before, after = (logits_of(model, row)[0, :-1] for row in (ids, other))
        if not torch.allclose(before, after, rtol=1e-9, atol=1e-9):
            return True
    return False


QUICK = (("roberta", "is_decoder"), ("rembert", "is_decoder"), ("bart", "is_decoder"), ("gpt_neox", "is_decoder"))
QUICK += (("gemma", "use_bidirectional_attention"), ("llama", "is_causal"))


@pytest.mark.parametrize("case", quick_ones(with_field(), QUICK), ids=" ".join)
def test_config_field_that_makes_attention_bidirectional_is_refused(case, monkeypatch):
    family, field = case
    config = tiny_config(family)
    value = "all" if family.startswith("gemma4") and field == "use_bidirectional_attention" else BOTH_WAYS[field]
    setattr(config.get_text_config(), field, value)
    monkeypatch.setattr(every_family, "tiny_config", lambda _: config)
    model = random_model(family)
    ahead, problem = looks_ahead(deepcopy(model)), ""
    model.requires_grad_(False)
    try:
        Chain(model.train())
    except UserError as error:
        problem = str(error)
    ahead |= family == "gemma2"  # by flash kernels alone, which are not here
    assert ("a causal language model" in problem) == ahead, problem
    assert not problem or type(model).__name__ in problem


class AheadAttention(LlamaAttention):
    """Adds to every token a share of what attention gives the one behind it."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output, weights = super().forward(*args, **kwargs)
        return output + 0.1 * output.roll(-1, 1), weights


class GatedLayer(LlamaDecoderLayer):
    """Adds the mean of the row, by a gate that is closed at first."""

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        output = super().forward(hidden_states, **kwargs)
        gate: Any = self.mlp.gate
        return output + gate * hidden_states.mean(1, keepdim=True)


class Convolved(LlamaMLP):
    """A convolution that is as wide on either side."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + nn.functional.avg_pool1d(x.mT, 3, 1, 1).mT


class OwnAttention(LlamaForCausalLM):
    """Does not let its attention be exchanged, as older code: its documents are computed one after the other."""

    def _can_set_attn_implementation(self) -> bool:  # type: ignore[override]
        return False


@pytest.mark.parametrize(
    ("kind", "base"), [(AheadAttention, LlamaAttention), (GatedLayer, LlamaDecoderLayer), (Convolved, LlamaMLP)]
)
def test_custom_model_that_looks_ahead_is_refused(kind, base):
    """Although each of its documents by itself has the numbers of its own forward pass."""
    model = real_model(family_config("llama"))
    model.__class__ = OwnAttention
    model.config._attn_implementation = "eager"
    for module in list(model.modules()):
        if type(module) is base:
            module.__class__ = kind
    if kind is GatedLayer:
        for layer in model.model.layers:
            layer.mlp.gate = nn.Parameter(torch.zeros(1, dtype=torch.float64))
        assert change_by_future(deepcopy(model), micro_batches(((9, 14),))[0]) == 0.0  # the check opens it
    with pytest.raises(UserError, match=r"got 'OwnAttention, where later tokens .* a causal language model"):
        Pipeline(model, checks=CheckSettings(check="always"))
    Pipeline(model, checks=CheckSettings(check="never")).close()


@pytest.mark.parametrize(
    "family",
    quick_ones(
        (
            "falcon_h1",
            "mixtral",
            "jamba",
            "mamba2",
            "lfm2",
            "minimax",
            "xlstm",
            "qwen3_next",
            "deepseek_v4",
            "llama4_text",
            "doge",
        ),
        ("falcon_h1",),
    ),
)
def test_hybrid_families_pass_all_model_checks(family):
    pipeline = Pipeline(random_model(family), checks=CheckSettings(check="always"))
    assert "layers checked" in pipeline.checked
    pipeline.close()


def test_is_decoder_false_is_refused_only_if_no_layer_is_causal():
    model = real_model(family_config("llama"))
    model.config.is_decoder = False
    refuse_not_causal(model, [*model.model.layers])
    for layer in model.model.layers:
        layer.is_decoder = False
    refuse_not_causal(model, [*model.model.layers])  # its attention says is_causal
    for layer in model.model.layers:
        layer.self_attn.is_causal = False
    with pytest.raises(UserError, match="LlamaForCausalLM with is_decoder=False"):
        refuse_not_causal(model, [*model.model.layers])


class LabelsOnly(LlamaForCausalLM):
    """Gives no logits without labels in evaluation mode."""

    def forward(self, *args: Any, labels: Any = None, **kwargs: Any) -> Any:
        output = super().forward(*args, labels=labels, **kwargs)
        if labels is None and not self.training:
            raise ValueError("labels are wanted")
        return output


def test_model_that_gives_no_logits_is_checked_layer_by_layer():
    model = real_model(family_config("llama"))
    model.__class__ = LabelsOnly
    with closing(Pipeline(model, checks=CheckSettings(check="always"))) as pipeline:
        assert "2 of 3 layers checked" in pipeline.checked
        assert "whether later tokens change logits was not checked: ValueError (labels are wanted)" in pipeline.checked
