"""Places for fused kernels: found by behaviour, changed in single modules only."""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.qwen3 import modeling_qwen3

from model_families import family_config, meta_model
from tawpipe.model.fused.operations import EAGER, STAND_IN
from tawpipe.model.fused.places import change_places, find_places, plain_again


def kinds(layers: Any) -> dict[str, int]:
    return dict(Counter(place.kind for _, place in find_places(layers)))


def test_places_are_found_by_what_modules_compute() -> None:
    expected = {
        "qwen3": {"norm": 12, "rotary": 3, "gate": 3},
        "gemma3": {"norm": 18, "rotary": 3, "gate": 3},
        "qwen3_moe": {"norm": 12, "rotary": 3, "gate": 2},  # stacked experts stay as they are
        "cohere": {"gate": 3},  # its norm subtracts the mean, and pairs of neighbours rotate
    }
    assert {name: kinds(meta_model(family_config(name)).model.layers) for name in expected} == expected
    assert not kinds(meta_model(family_config("gpt2")).transformer.h)
    layers = meta_model(family_config("gemma2")).model.layers
    assert {place.arguments for _, place in find_places(layers) if place.kind == "norm"} == {(1e-6, 1.0, "gemma")}


def test_modules_that_do_more_are_left_out() -> None:
    layers = meta_model(family_config("qwen3")).model.layers
    norm, mlp, attention = layers[0].input_layernorm, layers[0].mlp, layers[0].self_attn
    norm.variance_epsilon = 1  # no number that a norm adds
    mlp.act_fn = nn.ReLU()
    attention.q_norm.forward = lambda hidden: hidden  # a hook of the user
    assert kinds(layers[:1]) == {"norm": 2, "rotary": 1}


def test_only_the_modules_of_the_layers_change() -> None:
    model, other = (meta_model(family_config("qwen3")) for _ in range(2))
    names, function = list(dict(model.named_parameters())), modeling_qwen3.apply_rotary_pos_emb
    classes = [type(module) for module in model.modules()]
    change_places(model.model.layers, STAND_IN)
    changed = [type(module) is not before for module, before in zip(model.modules(), classes, strict=True)]
    assert sum(changed) == 18 and list(dict(model.named_parameters())) == names
    assert [type(module).__name__ for module in model.modules()] == [kind.__name__ for kind in classes]
    assert type(other.model.layers[0].mlp) is modeling_qwen3.Qwen3MLP
    assert modeling_qwen3.apply_rotary_pos_emb is function
    plain_again(model)
    assert [type(module) for module in model.modules()] == classes


def test_rotary_embeddings_of_other_shapes_use_the_models_code() -> None:
    attention = meta_model(family_config("qwen3")).model.layers[0].self_attn
    calls: list[int] = []

    def rotary(*inputs: Any) -> Any:
        calls.append(1)
        return EAGER.rotary(*inputs)

    change_places([attention], STAND_IN._replace(name="counting", rotary=rotary))
    rotate = vars(sys.modules["transformers.models.qwen3.modeling_qwen3_counting"])["apply_rotary_pos_emb"]
    query, key, angles = torch.randn(1, 4, 3, 8), torch.randn(1, 2, 3, 8), torch.randn(1, 3, 4).repeat(1, 1, 2)
    expected = modeling_qwen3.apply_rotary_pos_emb(query, key, angles.cos(), angles.sin())
    for given, count in (((), 1), ((1,), 1)):  # another dimension of heads is transformers' business
        got = rotate(query, key, angles.cos(), angles.sin(), *given)
        assert all(torch.equal(*pair) for pair in zip(got, expected, strict=True)) and len(calls) == count
    wide = rotate(query.double(), key.double(), angles.cos(), angles.sin())
    assert wide[0].dtype == torch.float64 and len(calls) == 1


@pytest.mark.parametrize("trained", [True, False])
def test_stand_ins_keep_only_their_inputs(trained: bool) -> None:
    hidden, weight = torch.randn(3, 8, requires_grad=True), torch.randn(8, requires_grad=trained)
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda kept: kept):
        output = STAND_IN.norm(hidden, weight, 1e-6, 1.0, "gemma")
    assert [tensor.data_ptr() for tensor in saved] == [hidden.data_ptr(), weight.data_ptr()]
    wanted = [hidden, weight] if trained else [hidden]
    gradients = torch.autograd.grad(output.sum(), wanted)
    expected = torch.autograd.grad(EAGER.norm(hidden, weight, 1e-6, 1.0, "gemma").sum(), wanted)
    assert all(torch.equal(*pair) for pair in zip(gradients, expected, strict=True))


def test_stand_in_destroys_what_liger_overwrites() -> None:
    query, key, angles = torch.randn(1, 4, 3, 8), torch.randn(1, 2, 3, 8), torch.randn(1, 3, 4).repeat(1, 1, 2)
    STAND_IN.rotary(query, key, angles.cos(), angles.sin())
    assert query.isnan().all() and key.isnan().all()
