"""Layers of the user's that share, change things in place, keep state or read parameters in another dtype: the numbers
of a plain process, or a refusal by name.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import CTRLConfig

from borders import (
    RECOMPUTE,
    ROWS,
    add_to_layers,
    assert_same,
    body,
    llama,
    own,
    packed,
    piped,
    piped_numbers,
    plain_numbers,
    right_or_refused,
    rows_of,
)
from model_families import VOCABULARY, keep_fp64, real_model
from tawpipe.errors import UserError
from tawpipe.runtime.world import World


@pytest.fixture(autouse=True)
def exact(monkeypatch: pytest.MonkeyPatch):
    torch.set_num_threads(1)
    keep_fp64(monkeypatch)


# Layers that share


def _same_layer(model: Any) -> None:
    model.model.layers[2] = model.model.layers[0]


def _one_layer(model: Any) -> None:
    for i in range(3):
        model.model.layers[i] = model.model.layers[1]


def _same_module(model: Any) -> None:
    model.model.layers[2].mlp = model.model.layers[0].mlp


def _same_module_next_door(model: Any) -> None:
    model.model.layers[1].self_attn = model.model.layers[0].self_attn


def _same_parameter(model: Any) -> None:
    model.model.layers[2].mlp.up_proj.weight = model.model.layers[1].mlp.up_proj.weight


def _same_parameter_twice_in_a_layer(model: Any) -> None:
    model.model.layers[1].mlp.up_proj.weight = model.model.layers[1].mlp.gate_proj.weight


def _norm_of_the_head(model: Any) -> None:
    model.model.layers[2].input_layernorm = model.model.norm


def _part_of_the_embedding(model: Any) -> None:
    """A view of another parameter's storage: two parameters, one memory."""
    square = model.model.layers[0].self_attn.q_proj
    square.weight = nn.Parameter(model.model.embed_tokens.weight.data[:32])


SHARING = [
    _same_layer,
    _one_layer,
    _same_module,
    _same_module_next_door,
    _same_parameter,
    _same_parameter_twice_in_a_layer,
    _norm_of_the_head,
]


@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize("share", SHARING)
def test_shared_layers_are_right_or_refused(share, recompute):
    right_or_refused(
        llama(prepare=share),
        rows_of(),
        refused="layer.*(same|share|twice|once)|(same|share|twice).*layer",
        recompute=recompute,
    )


def _copied_layers(model: Any) -> None:
    """As models are made deeper: each copy has a config of its own."""
    model.model.layers[2] = copy.deepcopy(model.model.layers[0])


def _longer(model: Any) -> None:
    model.model.layers.append(copy.deepcopy(model.model.layers[0]))
    model.config.num_hidden_layers = 4


def _longer_than_the_config_says(model: Any) -> None:
    model.model.layers.append(copy.deepcopy(model.model.layers[0]))


def _shorter(model: Any) -> None:
    del model.model.layers[1]
    model.config.num_hidden_layers = 2


@pytest.mark.parametrize("change", [_copied_layers, _longer, _longer_than_the_config_says, _shorter])
def test_copied_or_missing_layers_are_right_or_refused(change):
    right_or_refused(llama(prepare=change), rows_of(), refused="layers|attention|config")


@pytest.mark.parametrize("frozen", ["layers.0.", "layers.2.", ""])
def test_shared_layers_with_frozen_parameters_are_right_or_refused(frozen):
    def prepare(model: Any) -> None:
        _same_layer(model)
        _same_parameter(model)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not name.startswith(f"model.{frozen}") or "norm" in name)

    right_or_refused(llama(prepare=prepare), rows_of(), refused="same|share|twice")


def test_overlapping_parameters_are_right_or_refused():
    """Plain training changes both at once. The model is not converted to fp64 here, which would part them."""

    def make() -> Any:
        model = llama()()
        _part_of_the_embedding(model)
        return model

    right_or_refused(make, rows_of(), refused="storage|memory|overlap|share")


# Changes in place


def _scaled(self: Any, embedded: Tensor, ids: Tensor | None) -> Tensor:
    embedded *= 3.0
    return embedded


def _shifted(self: Any, embedded: Tensor, ids: Tensor | None) -> Tensor:
    return embedded.add_(0.25)


def _scaled_leaf(self: Any, embedded: Tensor, ids: Tensor | None) -> Tensor:
    embedded.data.mul_(3.0)
    return embedded


@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize("before", [_scaled, _shifted, _scaled_leaf])
def test_in_place_changes_of_embeddings_are_right_or_refused(before, recompute):
    right_or_refused(llama(body=body(before=before)), rows_of(), refused="in place", recompute=recompute)


def ctrl() -> Any:
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "n_positions": 64,
        "n_embd": 32,
        "dff": 40,
        "n_layer": 3,
        "n_head": 4,
    }
    return real_model(CTRLConfig(**sizes, resid_pdrop=0.0, embd_pdrop=0.0))


def test_ctrl_scales_its_embeddings_in_place_and_is_right_or_refused():
    right_or_refused(ctrl, rows_of(), refused="in place|mask|attention")
    batch, documents = packed([0], [[5, 9, 2], [16], [8, 8]])
    right_or_refused(ctrl, batch, documents=documents, refused="in place|mask|attention")


def _ids_first(self: Any, ids: Tensor) -> Tensor:
    ids[ids < 20] += 3
    return self.embed_tokens(ids)


def _ids_first_and_weights_in_backward(self: Any, ids: Tensor) -> Tensor:
    """What this block computes is computed again in its backward pass."""
    ids[ids < 20] += 3
    return self.embed_tokens(ids) * self.embed_tokens.weight[0]


@pytest.mark.parametrize("embed", [_ids_first, _ids_first_and_weights_in_backward])
def test_in_place_changes_of_input_ids_are_right_or_refused(embed):
    """The caller's batch stays as it is, and a second pass over the same micro-batch sees what the first one saw."""
    batch = rows_of()
    refused = "input_ids.*in place|in place.*input_ids"
    if right_or_refused(llama(body=body(embed=embed)), batch, refused=refused) == "right":
        assert torch.equal(batch["input_ids"], rows_of()["input_ids"])


def _adds_first(layer: Any, hidden: Tensor, call: Any) -> Tensor:
    hidden += 0.5
    return own(layer, hidden, **call)


def _scales_first(layer: Any, hidden: Tensor, call: Any) -> Tensor:
    return own(layer, hidden.mul_(1.5), **call)


def _scales_unseen(layer: Any, hidden: Tensor, call: Any) -> Tensor:
    """As kernels of one's own do: autograd's versions do not know about it."""
    hidden.data.mul_(1.5)
    return own(layer, hidden, **call)


def _adds_last(layer: Any, hidden: Tensor, call: Any) -> Tensor:
    found = own(layer, hidden.clone(), **call)
    hidden += found
    return hidden


def _scales_its_result(layer: Any, hidden: Tensor, call: Any) -> Tensor:
    return own(layer, hidden, **call).mul_(1.5)


def _apart(call: Any) -> dict[str, Any]:
    """The same call on copies, which the graph may keep."""
    return call | {"position_embeddings": tuple(tensor.clone() for tensor in call["position_embeddings"])}


def _rotary_first(layer: Any, hidden: Tensor, call: Any) -> Tensor:
    call["position_embeddings"][0].mul_(0.9)
    return own(layer, hidden, **_apart(call))


def _rotary_last(layer: Any, hidden: Tensor, call: Any) -> Tensor:
    found = own(layer, hidden, **_apart(call))
    call["position_embeddings"][1].neg_()
    return found


IN_PLACE = [
    _adds_first,
    _scales_first,
    _scales_unseen,
    _adds_last,
    _scales_its_result,
    _rotary_first,
    _rotary_last,
]


@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize("layer", IN_PLACE)
def test_in_place_changes_of_layer_inputs_are_right_or_refused(layer, recompute):
    right_or_refused(llama(layer), rows_of(), refused="in place", recompute=recompute)


@pytest.mark.parametrize("layer", [_adds_first, _scales_unseen, _rotary_first])
def test_in_place_changes_of_offloaded_inputs_are_right_or_refused(layer):
    right_or_refused(llama(layer), rows_of(), refused="in place", offloaded_layers=3, micro_batches_per_visit=3)


def _mask_in_place(layer: Any, hidden: Tensor, call: Any) -> Tensor:
    call["attention_mask"].masked_fill_(torch.ones(1, 1, 1, 1, dtype=torch.bool), 0.0)
    return own(layer, hidden, **call)


def _mask_read(layer: Any, hidden: Tensor, call: Any) -> Tensor:
    seen = (call["attention_mask"] > -1).to(hidden.dtype).sum(-1)
    return own(layer, hidden, **call) * (1 + 0.01 * seen[:, 0, :, None])


def test_layer_may_read_the_mask_but_not_change_it_in_place():
    """Then it is given the model's own mask, of numbers; of several documents it takes each in turn."""
    assert right_or_refused(llama(_mask_read), rows_of()) == "right"
    rows, documents = packed([0, 0, 0], [(4, 12)] * 3)
    assert right_or_refused(llama(_mask_read), rows, documents=documents) == "right"
    with pytest.raises(UserError, match="changes a tensor in place that other layers are given"):
        piped_numbers(llama(_mask_in_place), rows_of())


def _counts(layer: Any, hidden: Tensor, call: Any) -> Tensor:
    layer.calls += 1.0
    return own(layer, hidden * (1 + 0.1 * layer.calls), **call)


def _running_mean(layer: Any, hidden: Tensor, call: Any) -> Tensor:
    with torch.no_grad():
        layer.mean.lerp_(hidden.mean((0, 1)), 0.1)
    return own(layer, hidden - layer.mean, **call)


def _batch_norm(layer: Any, hidden: Tensor, call: Any) -> Tensor:
    return own(layer, layer.norm(hidden.flatten(0, 1)).view_as(hidden), **call)


def _renormalises(layer: Any, hidden: Tensor, call: Any) -> Tensor:
    with torch.no_grad():
        weight = layer.mlp.up_proj.weight
        weight /= weight.norm(dim=1, keepdim=True)
    return own(layer, hidden, **call)


def _clamps_data(layer: Any, hidden: Tensor, call: Any) -> Tensor:
    layer.mlp.up_proj.weight.data.clamp_(-0.1, 0.1)
    return own(layer, hidden, **call)


def _python_counter(layer: Any, hidden: Tensor, call: Any) -> Tensor:
    layer.calls += 1
    return own(layer, hidden * (1 + 0.1 * layer.calls), **call)


def _cached(layer: Any, hidden: Tensor, call: Any) -> Tensor:
    """A value of the first call is kept for all later ones."""
    if layer.calls is None:
        layer.calls = hidden.detach().mean()
    return own(layer, hidden * (1 + layer.calls), **call)


STATEFUL = {
    "counter": (_counts, add_to_layers("calls", lambda: torch.zeros(()), buffer=True)),
    "running mean": (_running_mean, add_to_layers("mean", lambda: torch.zeros(32), buffer=True)),
    "renormalised": (_renormalises, lambda model: None),
    "clamped": (_clamps_data, lambda model: None),
    "python counter": (_python_counter, add_to_layers("calls", lambda: 0)),
    "cached": (_cached, add_to_layers("calls", lambda: None)),
    "spectral norm": (
        own,
        lambda model: [nn.utils.parametrizations.spectral_norm(x.mlp.up_proj) for x in model.model.layers],
    ),
}


@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize("what", STATEFUL)
def test_stateful_layers_are_right_or_refused(what, recompute):
    layer, prepare = STATEFUL[what]
    given = (lambda each, hidden, call: own(each, hidden, **call)) if layer is own else layer
    right_or_refused(
        llama(given, prepare=prepare),
        rows_of(),
        refused="in place|buffer|state|changes|parameter|attribute",
        recompute=recompute,
    )


@pytest.mark.parametrize("recompute", RECOMPUTE)
def test_batch_norm_counts_every_micro_batch_once(recompute):
    """BatchNorm in training: the gradients do not depend on the statistics, what is exported does."""
    make = llama(_batch_norm, prepare=add_to_layers("norm", lambda: nn.BatchNorm1d(32)))
    if right_or_refused(make, rows_of(), refused="in place|buffer|statistics", recompute=recompute) == "right":
        pipeline = piped(model := make(), recompute=recompute)
        pipeline.step(rows_of())
        pipeline.drain()
        assert [int(layer.norm.num_batches_tracked) for layer in model.model.layers] == [ROWS] * 3
        pipeline.close()


def _largest_rows(model: Any) -> None:
    model.model.embed_tokens.max_norm = 0.5


def _sparse(model: Any) -> None:
    model.model.embed_tokens.sparse = True


def _by_frequency(model: Any) -> None:
    model.model.embed_tokens.scale_grad_by_freq = True


@pytest.mark.parametrize("option", [_largest_rows, _sparse, _by_frequency])
def test_embedding_options_are_right_or_refused(option):
    """One renormalises its weight in place, one has sparse gradients, one looks at all ids of a call."""
    batch, documents = packed([0], [[16]] * ROWS)
    refused = "max_norm|in place|parameter|sparse|scale_grad_by_freq"
    right_or_refused(llama(prepare=option), batch, documents=documents, refused=refused)
    batch, documents = packed([0], [[5, 9, 2], [16], [8, 8]])
    right_or_refused(llama(prepare=option), batch, documents=documents, refused=refused)


PLACES = {
    "same layer": lambda: llama(prepare=_same_layer),
    "same module": lambda: llama(prepare=_same_module),
    "embedding scaled in place": lambda: llama(body=body(before=_shifted)),
    "renormalised": lambda: llama(_renormalises),
    "clamped": lambda: llama(_clamps_data),
    "max_norm": lambda: llama(prepare=_largest_rows),
}
"""What two processes are given, too."""


def like_plain(world: World, *, what: str) -> str:
    """What comes of one of the models of ``test_borders_layers``: right, refused, or wrong, and how (rank 0)."""
    batch = rows_of(rows=2 * world.size)
    with pytest.MonkeyPatch.context() as patch:
        keep_fp64(patch)
        try:
            mine = piped_numbers(PLACES[what](), batch, world=world)
            if world.rank == 0:
                assert_same(mine, plain_numbers(PLACES[what](), batch))
        except UserError as error:
            return f"refused: {error}"
        except AssertionError as error:
            return f"wrong: {error}"
    return "right"


@pytest.mark.parametrize("what", PLACES)
def test_in_place_changes_on_two_processes_are_right_or_refused(pool, what):
    """Where weights are not at home when they are used, a change to them is lost or hits a copy."""
    outcome = pool.run("test_borders_layers:like_plain", 2, 1, what=what)[0]
    assert outcome == "right" or (
        outcome.startswith("refused") and any(w in outcome for w in ("in place", "same", "share", "parameter", what))
    )


# Parameters that are read in another dtype


@pytest.mark.parametrize("how", ["float", "to"])
def test_fp32_embedding_norm_of_a_bf16_checkpoint_has_right_gradients(pool, how):
    """Whether its backward pass reads weights is seen in the dtype that computes, not in that of the checkpoint."""
    errors = pool.run("borders:wide_norm", 2, 1, how=how)[0]
    assert max(errors.values()) < 1e-4, {name: f"{error:.0e}" for name, error in errors.items() if error >= 1e-4}
