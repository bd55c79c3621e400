"""Roles of parameters: transformers' Trainer judges what decays, but for a list; Muon takes matrices of layers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, Trainer

import tawpipe
from every_family import families
from family_configs import tiny_config
from model_families import family_config, meta_model
from selected import quick_ones
from tawpipe.model.chain import Chain
from tawpipe.model.roles import MATRIX, TABLE, VECTOR, roles_of
from tawpipe.runtime.homes.optimizer import whole_matrices
from tawpipe.runtime.homes.unit_optimizers import options_of

LISTED: dict[str, dict[str, list[str]]] = yaml.safe_load(Path(__file__).with_name("decay_differences.yaml").read_text())
QUICK = ("gpt_oss", "cohere", "mamba", "zamba", "recurrent_gemma", "ernie4_5_moe", "xlnet", "deepseek_v4", "dbrx")
"""Families with biases or norms in tables, with parameters of a state space, and with odd names; others are slow."""


def made(family: str) -> Any:
    """The family's tiny model on the meta device."""
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(tiny_config(family))
    except Exception as error:
        pytest.skip(f"transformers does not build it here: {error}")


def judged(model: nn.Module) -> set[str]:
    """Names of the parameters that transformers' own Trainer decays."""
    trainer: Any = None  # the method asks it nothing
    return set(Trainer.get_decay_parameter_names(trainer, model))  # type: ignore[arg-type]


@pytest.mark.parametrize("family", quick_ones(families(), QUICK))
def test_weight_decay_follows_the_transformers_trainer_except_for_a_list(family):
    model = made(family)
    roles = roles_of(model)
    decayed = judged(model)
    found = {re.split(r"\.\d+\.", name)[-1] for name in roles if (roles[name] != VECTOR) != (name in decayed)}
    assert found == {end for ends in LISTED.values() for end, of in ends.items() if family in of}


@pytest.mark.slow
def test_weight_decay_exception_list_names_existing_families():
    assert {family for ends in LISTED.values() for of in ends.values() for family in of} <= set(families())


class Gated(nn.Module):
    """A layer of nobody's, with tables of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(4, 6)
        self.router = nn.Bilinear(2, 2, 3)
        self.place = nn.Embedding(5, 4)
        self.relative_bias = nn.Embedding(5, 4)
        self.conv = nn.Conv1d(4, 4, 3)
        self.q_norm = nn.Parameter(torch.ones(2, 4))
        self.experts_bias = nn.Parameter(torch.ones(3, 4))
        self.experts = nn.Parameter(torch.ones(3, 4, 4))
        self.decay = nn.Parameter(torch.ones(4, 4))
        self.decay._no_weight_decay = True  # type: ignore[attr-defined]
        self.raw = nn.Parameter(torch.ones(4, 4))
        self.gate_norm = nn.Sequential(nn.Linear(4, 4))


def test_parameter_roles_follow_from_modules_and_names_not_shapes():
    assert roles_of(Gated()) == {
        "proj.weight": MATRIX,
        "proj.bias": VECTOR,
        "router.weight": TABLE,
        "router.bias": VECTOR,
        "place.weight": TABLE,
        "relative_bias.weight": VECTOR,
        "conv.weight": TABLE,
        "conv.bias": VECTOR,
        "q_norm": VECTOR,
        "experts_bias": VECTOR,
        "experts": TABLE,
        "decay": VECTOR,
        "raw": TABLE,
        "gate_norm.0.weight": MATRIX,
        "gate_norm.0.bias": VECTOR,
    }


MATRICES = {
    "cohere": {*(f"self_attn.{one}_proj" for one in "qkvo"), *(f"mlp.{one}_proj" for one in ("gate", "up", "down"))},
    "gpt_oss": {*(f"self_attn.{one}_proj" for one in "qkvo"), "mlp.router"},
    "gpt2": {"attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"},
}


@pytest.mark.parametrize("family", MATRICES)
def test_muon_takes_only_matrices_of_layers(family):
    units = Chain(meta_model(family_config(family))).units
    options = options_of(tawpipe.muon(), units)
    taken = {name for name, said in options.items() if said[0] is torch.optim.Muon}
    assert {re.split(r"\.\d+\.", name.removesuffix(".weight"))[-1] for name in taken} == MATRICES[family]
    by_shapes = options_of(tawpipe.muon(groups="shapes"), units)
    assert {name for name, said in by_shapes.items() if said[0] is torch.optim.Muon} >= taken


def test_muon_takes_lora_matrices_but_no_magnitudes_or_tables():
    config = LoraConfig(r=2, target_modules=["q_proj", "embed_tokens"], use_dora=True)
    with torch.device("meta"):
        model = get_peft_model(meta_model(family_config("llama")), config)
    options = options_of(whole_matrices(tawpipe.muon(weight_decay=0.5)), Chain(model).units)
    ends = {re.split(r"\.\d+\.", name)[-1]: said for name, said in options.items()}
    matrices = {f"self_attn.q_proj.lora_{one}.default.weight" for one in "AB"}
    assert {name for name, said in ends.items() if said[0] is torch.optim.Muon} == matrices
    magnitude = ends["self_attn.q_proj.lora_magnitude_vector.default.weight"]
    assert magnitude[0] is torch.optim.AdamW and magnitude[1]["weight_decay"] == 0
    assert any("lora_embedding_A" in name and said[1]["weight_decay"] == 0.5 for name, said in ends.items())


def test_muon_takes_no_adapters_of_stacked_experts():
    experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    with torch.device("meta"):
        model = get_peft_model(
            meta_model(family_config("gpt_oss")), LoraConfig(r=2, target_modules=["q_proj"], target_parameters=experts)
        )
    roles = roles_of(model)
    assert {roles[name] for name in roles if ".experts." in name and "lora_" in name} == {TABLE}
    assert {roles[name] for name in roles if "q_proj.lora_" in name} == {MATRIX}
