"""The border to the user's model: code in it that a chain of blocks, whose weights come and go, would run wrongly gives
the numbers of a plain process, or is refused by name.
"""

from __future__ import annotations

import copy
import random
import threading
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import CTRLConfig, DbrxConfig

from borders import (
    ROWS,
    add_to_layers,
    assert_same,
    body,
    llama,
    own,
    packed,
    piped,
    piped_numbers,
    right_or_refused,
    rows_of,
    slope_error,
    token_sum,
    weights,
)
from model_families import VOCABULARY, family_config, keep_fp64, real_model
from tawpipe.errors import UserError
from tawpipe.model.attention import PackedMask, packed_attention
from tawpipe.model.kernels import Documents

WAYS = ["full", "selective", "none"]
RECOMPUTE = ["full", pytest.param("selective", marks=pytest.mark.slow), "none"]


@pytest.fixture(autouse=True)
def exact(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch):
    torch.set_num_threads(1)
    if "test_12" not in request.node.name:
        keep_fp64(monkeypatch)


# 4. Layers that share


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
def test_layers_that_share(share, recompute):
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
def test_layers_that_were_copied_or_left_out(change):
    right_or_refused(llama(prepare=change), rows_of(), refused="layers|attention|config")


@pytest.mark.parametrize("frozen", ["layers.0.", "layers.2.", ""])
def test_sharing_with_frozen_parameters(frozen):
    def prepare(model: Any) -> None:
        _same_layer(model)
        _same_parameter(model)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not name.startswith(f"model.{frozen}") or "norm" in name)

    right_or_refused(llama(prepare=prepare), rows_of(), refused="same|share|twice")


def test_parameters_that_overlap_are_refused():
    """Plain training changes both at once. The model is not converted to fp64 here, which would part them."""

    def make() -> Any:
        model = llama()()
        _part_of_the_embedding(model)
        return model

    right_or_refused(make, rows_of(), refused="storage|memory|overlap|share")


# 5. Changes in place


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
def test_embeddings_changed_in_place(before, recompute):
    right_or_refused(llama(body=body(before=before)), rows_of(), refused="in place", recompute=recompute)


def ctrl() -> Any:
    sizes = {"vocab_size": VOCABULARY, "n_positions": 64, "n_embd": 32, "dff": 40, "n_layer": 3, "n_head": 4}
    return real_model(CTRLConfig(**sizes, resid_pdrop=0.0, embd_pdrop=0.0))


def test_ctrl_scales_its_embeddings_in_place():
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
def test_ids_changed_in_place(embed):
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
    _adds_last,
    _scales_its_result,
    _rotary_first,
    _rotary_last,
]


@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize("layer", IN_PLACE)
def test_a_layer_changes_what_it_is_given(layer, recompute):
    right_or_refused(llama(layer), rows_of(), refused="in place", recompute=recompute)


@pytest.mark.parametrize("layer", [_adds_first, _rotary_first])
def test_a_layer_changes_what_it_is_given_while_inputs_are_offloaded(layer):
    right_or_refused(llama(layer), rows_of(), refused="in place", offloaded_layers=3, micro_batches_per_visit=3)


def _mask_in_place(layer: Any, hidden: Tensor, call: Any) -> Tensor:
    call["attention_mask"].masked_fill_(torch.ones(1, 1, 1, 1, dtype=torch.bool), 0.0)
    return own(layer, hidden, **call)


def _mask_read(layer: Any, hidden: Tensor, call: Any) -> Tensor:
    seen = (call["attention_mask"] > -1).to(hidden.dtype).sum(-1)
    return own(layer, hidden, **call) * (1 + 0.01 * seen[:, 0, :, None])


@pytest.mark.parametrize("layer", [_mask_in_place, _mask_read])
def test_a_layer_that_works_on_the_mask_is_refused(layer):
    """There is no mask of numbers, and the message says so."""
    with pytest.raises(UserError, match="mask"):
        piped_numbers(llama(layer), rows_of())


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
def test_a_layer_with_a_state(what, recompute):
    layer, prepare = STATEFUL[what]
    given = (lambda each, hidden, call: own(each, hidden, **call)) if layer is own else layer
    right_or_refused(
        llama(given, prepare=prepare), rows_of(), refused="in place|buffer|state|changes|parameter", recompute=recompute
    )


@pytest.mark.parametrize("recompute", RECOMPUTE)
def test_running_statistics_count_every_micro_batch_once(recompute):
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
def test_options_of_an_embedding(option):
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
"""Made for other tests in the same words: what two processes do with them."""


@pytest.mark.parametrize("what", PLACES)
def test_on_two_processes(pool, what):
    """Where weights are not at home when they are used, a change to them is lost or hits a copy."""
    outcome = pool.run("borders:like_plain", 2, 1, what=what)[0]
    assert outcome == "right" or (
        outcome.startswith("refused") and any(w in outcome for w in ("in place", "same", "share", "parameter", what))
    )


# 6. What stands between the blocks


def _skip(self: Any, hidden: Tensor, embedded: Tensor, positions: Tensor) -> Tensor:
    return hidden + embedded


def _skip_by_attribute(self: Any, embedded: Tensor, ids: Tensor | None) -> Tensor:
    self.embedded = embedded
    return embedded


def _skipped_attribute(self: Any, hidden: Tensor, embedded: Tensor, positions: Tensor) -> Tensor:
    return hidden + 0.5 * self.embedded


def _cumulative(self: Any, hidden: Tensor, embedded: Tensor, positions: Tensor) -> Tensor:
    return hidden.cumsum(1) / torch.arange(1, hidden.shape[1] + 1)[None, :, None]


def _convolved(self: Any, hidden: Tensor, embedded: Tensor, positions: Tensor) -> Tensor:
    return hidden + 0.5 * F.pad(hidden, (0, 0, 1, 0))[:, :-1]


def _pooled(self: Any, hidden: Tensor, embedded: Tensor, positions: Tensor) -> Tensor:
    return hidden - hidden.mean(1, keepdim=True)


def _first_token(self: Any, hidden: Tensor, embedded: Tensor, positions: Tensor) -> Tensor:
    return hidden + hidden[:, :1]


def _positions_read(self: Any, hidden: Tensor, embedded: Tensor, positions: Tensor) -> Tensor:
    return hidden * (1 + 0.05 * positions[..., None])


def _length_read(self: Any, hidden: Tensor, embedded: Tensor, positions: Tensor) -> Tensor:
    return hidden / hidden.shape[1] ** 0.5


HEADS = {
    "skip": {"after": _skip},
    "skip by attribute": {"before": _skip_by_attribute, "after": _skipped_attribute},
    "cumulative mean": {"after": _cumulative},
    "convolution": {"after": _convolved},
    "mean of all": {"after": _pooled},
    "first token": {"after": _first_token},
    "positions": {"after": _positions_read},
    "length": {"after": _length_read},
}


@pytest.mark.parametrize("chunk", [6, 1024])
@pytest.mark.parametrize("what", HEADS)
def test_a_head_that_needs_more_than_one_token(what, chunk):
    right_or_refused(
        llama(body=body(**HEADS[what])),
        rows_of(),
        refused="head|after the (last )?layer|logits|embedding",
        chunk_tokens=chunk,
    )
    batch, documents = packed([0], [[5, 9, 2], [16], [8, 8]])
    right_or_refused(
        llama(body=body(**HEADS[what])),
        batch,
        documents=documents,
        refused="head|after the (last )?layer|logits|embedding",
        chunk_tokens=chunk,
    )


def test_a_head_that_scales_by_a_constant_is_right():
    """What looks at one token at a time is no fault."""
    assert (
        right_or_refused(llama(body=body(after=lambda s, hidden, e, p: torch.tanh(hidden) * 2)), rows_of()) == "right"
    )


def _scaled_between(self: Any, hidden: Tensor, index: int) -> Tensor:
    return hidden * 1.1


def _scaled_between_in_place(self: Any, hidden: Tensor, index: int) -> Tensor:
    return hidden.mul_(1.1)


def _scaled_after_one(self: Any, hidden: Tensor, index: int) -> Tensor:
    return hidden * 1.1 if index == 1 else hidden


def _scaled_after_last(self: Any, hidden: Tensor, index: int) -> Tensor:
    return hidden * 1.1 if index == 2 else hidden


def _stored_between(self: Any, hidden: Tensor, index: int) -> Tensor:
    if index == 0:
        self.early = hidden
    return hidden


def _mixed_at_the_end(self: Any, hidden: Tensor, embedded: Tensor, positions: Tensor) -> Tensor:
    return hidden + self.early


def _handed_on(self: Any, hidden: Tensor, index: int) -> dict[str, Any]:
    if index == 0:
        self.early = hidden
    return {"early": self.early}


def _uses_what_is_handed_on(layer: Any, hidden: Tensor, call: Any) -> Tensor:
    call = dict(call)
    return own(layer, hidden + 0.3 * call.pop("early"), **call)


BETWEEN = {
    "scaled": {"between": _scaled_between},
    "scaled in place": {"between": _scaled_between_in_place},
    "scaled once": {"between": _scaled_after_one},
    "stored for the head": {"between": _stored_between, "after": _mixed_at_the_end},
}


@pytest.mark.parametrize("what", BETWEEN)
def test_something_between_layers(what):
    right_or_refused(llama(body=body(**BETWEEN[what])), rows_of(), refused="between (two )?layers|hidden states|head")


def test_something_behind_the_last_layer_is_the_heads():
    assert right_or_refused(llama(body=body(between=_scaled_after_last)), rows_of()) == "right"


def test_hidden_states_of_one_layer_handed_to_all():
    make = llama(_uses_what_is_handed_on, body=body(besides=_handed_on))
    right_or_refused(make, rows_of(), refused="besides the hidden states|between|hidden states")


@pytest.mark.parametrize("per_visit", [1, 3])
@pytest.mark.parametrize("recompute", RECOMPUTE)
def test_state_that_layers_hand_on_through_the_model(recompute, per_visit):
    """A layer leaves something where the next one looks for it."""
    shared: dict[str, Tensor] = {}

    def layer(each: Any, hidden: Tensor, call: Any) -> Tensor:
        if each.self_attn.layer_idx == 0:
            shared["first"] = hidden
        return own(each, hidden + 0.3 * shared["first"], **call)

    right_or_refused(
        llama(layer),
        rows_of(),
        refused="hidden states|state|between|layer|check",
        recompute=recompute,
        micro_batches_per_visit=per_visit,
    )


def _hooked(model: Any) -> None:
    model.model.layers[1].register_forward_hook(lambda module, args, output: output * 1.2)


def _pre_hooked(model: Any) -> None:
    model.model.layers[1].mlp.register_forward_pre_hook(lambda module, args: (args[0] * 1.2,))


def _gradient_hooked(model: Any) -> None:
    model.model.layers[1].mlp.up_proj.weight.register_hook(lambda gradient: gradient * 0.5)


def _backward_hooked(model: Any) -> None:
    model.model.layers[1].mlp.register_full_backward_hook(lambda module, given, wanted: (given[0] * 0.5,))


def _hooked_body(model: Any) -> None:
    model.model.register_forward_hook(
        lambda module, args, output: type(output)(last_hidden_state=output.last_hidden_state * 1.2)
    )


def _hooked_embedding(model: Any) -> None:
    model.model.embed_tokens.register_forward_hook(lambda module, args, output: output * 1.2)


def _weight_norm(model: Any) -> None:
    nn.utils.parametrizations.weight_norm(model.model.layers[1].mlp.up_proj)


def _checkpointed(model: Any) -> None:
    model.gradient_checkpointing_enable()


HOOKS = [
    _hooked,
    _pre_hooked,
    _gradient_hooked,
    _backward_hooked,
    _hooked_body,
    _hooked_embedding,
    _weight_norm,
    _checkpointed,
]


@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize("hook", HOOKS)
def test_hooks_and_the_like(hook, recompute):
    right_or_refused(llama(prepare=hook), rows_of(), refused="hook|checkpointing", recompute=recompute)


def test_a_forward_of_one_object_is_refused_or_right():
    """As ``accelerate`` and others put it there."""

    def prepare(model: Any) -> None:
        inner = model.model.forward
        model.model.forward = lambda *args, **kwargs: inner(*args, **kwargs)

    right_or_refused(llama(prepare=prepare), rows_of(), refused="forward|layers")


# 7. Random numbers that nothing announces


def _noise(layer: Any, hidden: Tensor, call: Any) -> Tensor:
    return own(layer, hidden + 0.1 * torch.randn_like(hidden), **call)


def _uniform(layer: Any, hidden: Tensor, call: Any) -> Tensor:
    return own(layer, hidden, **call) * (0.9 + 0.2 * torch.rand(hidden.shape[:2])[..., None])


def _jitter(layer: Any, hidden: Tensor, call: Any) -> Tensor:
    return own(layer, hidden * torch.empty_like(hidden).uniform_(0.9, 1.1), **call)


def _functional_dropout(layer: Any, hidden: Tensor, call: Any) -> Tensor:
    return own(layer, F.dropout(hidden, 0.3, training=True), **call)


def _bernoulli(layer: Any, hidden: Tensor, call: Any) -> Tensor:
    keep = torch.bernoulli(torch.full((hidden.shape[0], 1, 1), 0.5))
    return hidden + keep.to(hidden.dtype) * (own(layer, hidden, **call) - hidden)


def _skips_by_python(layer: Any, hidden: Tensor, call: Any) -> Tensor:
    return hidden * 1.5 if random.random() < 0.5 else own(layer, hidden, **call)


def _skips_by_numpy(layer: Any, hidden: Tensor, call: Any) -> Tensor:
    return hidden * 1.5 if np.random.rand() < 0.5 else own(layer, hidden, **call)


class Hidden(nn.Module):
    """Dropout that is no module called so, whose rate is a plain attribute."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.rate = inner, 0.3

    def forward(self, hidden: Tensor) -> Tensor:
        return F.dropout(self.inner(hidden), self.rate, training=self.training)


def _hidden_dropout(model: Any) -> None:
    for layer in model.model.layers:
        layer.mlp = Hidden(layer.mlp)


def dbrx() -> Any:
    config = DbrxConfig(
        vocab_size=VOCABULARY,
        d_model=32,
        n_heads=4,
        n_layers=3,
        max_seq_len=64,
        attn_config={"kv_n_heads": 2, "clip_qkv": 8, "attn_pdrop": 0.0, "rope_theta": 1e4},
        ffn_config={
            "ffn_hidden_size": 40,
            "moe_num_experts": 4,
            "moe_top_k": 2,
            "moe_jitter_eps": 0.3,
            "moe_loss_weight": 0.0,
        },
        resid_pdrop=0.0,
        emb_pdrop=0.0,
    )
    return real_model(config)


RANDOM = {
    "config": llama(attention_dropout=0.3),
    "randn_like": llama(_noise),
    "rand": llama(_uniform),
    "uniform_": llama(_jitter),
    "F.dropout": llama(_functional_dropout),
    "bernoulli": llama(_bernoulli),
    "attribute": llama(prepare=_hidden_dropout),
    "python": llama(_skips_by_python),
    "numpy": llama(_skips_by_numpy),
    "embedding": llama(body=body(before=lambda s, embedded, ids: F.dropout(embedded, 0.3, training=True))),
    "head": llama(body=body(after=lambda s, hidden, e, p: F.dropout(hidden, 0.3, training=True))),
    "dbrx": dbrx,
}
REFUSED_RANDOM = "random|dropout|jitter|noise|numpy|router"


def _or_refused(check: Any) -> None:
    try:
        check()
    except UserError as error:
        assert any(word in str(error) for word in REFUSED_RANDOM.split("|")), error


@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize("what", RANDOM)
def test_gradients_belong_to_a_forward_pass(what, recompute):
    """The slope of the loss of the same step, drawn with the same seed, is the gradient."""
    if what == "config" and recompute == "selective":
        pytest.skip("attention with dropout is no kernel on the CPU")

    def check() -> None:
        random.seed(1)
        np.random.seed(1)
        assert slope_error(RANDOM[what], rows_of(), recompute=recompute) < 1e-6

    _or_refused(check)


@pytest.mark.parametrize("what", RANDOM)
def test_random_numbers_depend_on_the_seed_alone(what):
    """Not on what is recomputed, nor on what else has been drawn; another seed gives others."""

    def check() -> None:
        torch.manual_seed(1)
        first = piped_numbers(RANDOM[what], rows_of(), seed=3)
        torch.manual_seed(2)
        assert_same(piped_numbers(RANDOM[what], rows_of(), seed=3), first, 0.0)
        ways = [way for way in WAYS if (what, way) != ("config", "selective")]
        for recompute in ways:
            assert_same(piped_numbers(RANDOM[what], rows_of(), seed=3, recompute=recompute), first, 1e-12)
        if what != "dbrx":
            assert piped_numbers(RANDOM[what], rows_of(), seed=4).loss != first.loss

    _or_refused(check)


@pytest.mark.parametrize("dropout", [0.3, 0.0])
def test_the_scripts_own_random_numbers_are_left_alone(dropout):
    """Those of torch, numpy and python, by the making of a pipeline, by steps, evaluation and ``drain``."""

    def draw(disturb: Any) -> list[Any]:
        torch.manual_seed(5)
        random.seed(5)
        np.random.seed(5)
        disturb()
        return [torch.rand(3).tolist(), random.random(), np.random.rand()]

    expected, made = draw(lambda: None), []
    model = llama(attention_dropout=dropout)()
    assert draw(lambda: made.append(piped(model))) == expected
    pipeline = made[0]
    assert draw(lambda: (pipeline.step(rows_of()).loss, pipeline.drain())) == expected
    assert draw(lambda: pipeline.evaluate(rows_of()).loss) == expected
    pipeline.close()


def _three_steps(model: Any = None, **knobs: Any) -> tuple[list[float], dict[str, Tensor]]:
    pipeline = piped(model or llama(attention_dropout=0.3), **knobs)
    losses = [result.loss for result in [pipeline.step(rows_of(step)) for step in range(3)]]
    found = weights(pipeline)
    pipeline.close()
    return losses, found


def test_a_thread_that_draws_all_the_time_changes_nothing():
    expected, end = _three_steps(), threading.Event()
    model = llama(attention_dropout=0.3)()  # its first values are drawn from the generator that all share

    def draw() -> None:
        while not end.is_set():
            torch.rand(3)

    thread = threading.Thread(target=draw)
    thread.start()
    try:
        losses, found = _three_steps(model)
    finally:
        end.set()
        thread.join()
    assert losses == expected[0]
    assert all(torch.equal(found[name], value) for name, value in expected[1].items())


def test_two_pipelines_at_once_are_as_each_alone():
    expected = [_three_steps(seed=seed) for seed in (1, 2)]
    both = [piped(llama(attention_dropout=0.3), seed=seed) for seed in (1, 2)]
    results = [[pipeline.step(rows_of(step)) for pipeline in both] for step in range(3)]
    for index, pipeline in enumerate(both):
        assert [result[index].loss for result in results] == expected[index][0]
        found = weights(pipeline)
        assert all(torch.equal(found[name], value) for name, value in expected[index][1].items())
        pipeline.close()


def test_a_seed_that_the_model_sets_itself_is_right_or_refused():
    """A layer that seeds torch in its forward pass draws what it would draw by itself."""

    def layer(each: Any, hidden: Tensor, call: Any) -> Tensor:
        torch.manual_seed(each.self_attn.layer_idx)
        return own(each, hidden + 0.1 * torch.randn_like(hidden), **call)

    for recompute in WAYS:
        right_or_refused(llama(layer), rows_of(), refused=REFUSED_RANDOM, recompute=recompute)


def test_a_generator_of_the_models_own_is_right_or_refused():
    """Its state goes on from call to call, and recomputation must not draw again from it."""
    generators: dict[int, torch.Generator] = {}

    def prepare(model: Any) -> None:
        for layer in model.model.layers:
            layer.generator = torch.Generator().manual_seed(4)

    def layer(each: Any, hidden: Tensor, call: Any) -> Tensor:
        return own(each, hidden + 0.1 * torch.randn(hidden.shape, generator=each.generator, dtype=hidden.dtype), **call)

    assert not generators
    for recompute in WAYS:
        right_or_refused(llama(layer, prepare=prepare), rows_of(), refused="[Gg]enerator", recompute=recompute)


# 8. Parameters that are read in another dtype


@pytest.mark.parametrize("how", ["float", "to"])
def test_an_embedding_norm_in_fp32_of_a_bf16_checkpoint(pool, how):
    """Whether its backward pass reads weights is seen in the dtype that computes, not in that of the checkpoint."""
    errors = pool.run("borders:wide_norm", 2, 1, how=how)[0]
    assert max(errors.values()) < 1e-4, {name: f"{error:.0e}" for name, error in errors.items() if error >= 1e-4}


# 12. Attention sinks


def _sink_error(lengths: tuple[int, ...]) -> float:
    """Of the gradient of sinks in bf16, relative to fp64 on the same numbers. All terms of the sum have one sign."""
    generator, total = torch.Generator().manual_seed(2), sum(lengths)
    query, key, value, arriving = (torch.rand(1, 4, total, 8, generator=generator).bfloat16() for _ in range(4))
    sinks = torch.linspace(-1, 1, 4).bfloat16()
    found = []
    for dtype in (torch.bfloat16, torch.float64):
        leaf = sinks.clone().to(dtype).requires_grad_()
        mask = PackedMask(Documents.of(lengths, (1, total), torch.device("cpu")), None)
        inputs = [tensor.to(dtype).requires_grad_() for tensor in (query, key, value)]
        output, _ = packed_attention(nn.Identity(), *inputs, mask, s_aux=leaf)
        output.backward(arriving.to(dtype).transpose(1, 2))
        assert leaf.grad is not None
        found.append(leaf.grad.double())
    return float((found[0] - found[1]).norm() / found[1].norm())


@pytest.mark.parametrize("length", [8, 16])
def test_the_gradient_of_sinks_does_not_get_worse_with_documents(length):
    one, many = _sink_error((64 * length,)), _sink_error((length,) * 64)
    assert one < 1e-2
    assert many < 1e-2
    assert many <= max(1.5 * one, 4e-3), f"{many:.1e} with 64 documents, {one:.1e} with one"


@pytest.mark.parametrize("documents", [1, 4, 32])
def test_the_sinks_of_gpt_oss_in_bf16_are_as_good_as_those_of_a_plain_process(documents):
    def make(dtype: torch.dtype) -> Any:
        return real_model(family_config("gpt_oss"), torch.bfloat16).to(dtype)

    batch, spans = packed([0], [[128 // documents] * documents] * 2)
    found = []
    for dtype in (torch.bfloat16, torch.float64):
        pipeline = piped(make(torch.float32), dtype=dtype, chunk_tokens=1024)
        pipeline.step(batch)
        pipeline.drain()
        names = [name for name in pipeline.parameter_names if name.endswith("sinks")]
        found.append(torch.cat([pipeline.gradient(name).double() for name in names]))
        pipeline.close()
    plain = make(torch.bfloat16)
    plain.set_attn_implementation("eager")
    for row, first, last in spans:
        targets = F.pad(batch["labels"][row : row + 1, first + 1 : last], (0, 1), value=-100)
        logits = plain(input_ids=batch["input_ids"][row : row + 1, first:last], use_cache=False).logits
        token_sum(logits.float(), targets).backward()
    scaled = torch.cat([plain.get_parameter(name).grad.double() for name in names])
    found.append(scaled * (found[1].norm() / scaled.norm()))
    mine, theirs = (float((each - found[1]).norm() / found[1].norm()) for each in (found[0], found[2]))
    assert mine <= 2 * theirs + 1e-2, f"{mine:.1e}, {theirs:.1e} plain"
