"""What a model does between its layers and after them: the numbers of a plain process, or a refusal by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from borders import (
    RECOMPUTE,
    body,
    llama,
    own,
    packed,
    right_or_refused,
    rows_of,
)
from model_families import keep_fp64


@pytest.fixture(autouse=True)
def exact(monkeypatch: pytest.MonkeyPatch):
    torch.set_num_threads(1)
    keep_fp64(monkeypatch)


# What stands between the blocks


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
def test_head_that_needs_several_tokens_is_right_or_refused(what, chunk):
    right_or_refused(
        llama(body=body(**HEADS[what])),
        rows_of(),
        refused="head|after the (last )?layer|logits|embedding",
        loss_chunk_tokens=chunk,
    )
    batch, documents = packed([0], [[5, 9, 2], [16], [8, 8]])
    right_or_refused(
        llama(body=body(**HEADS[what])),
        batch,
        documents=documents,
        refused="head|after the (last )?layer|logits|embedding",
        loss_chunk_tokens=chunk,
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
def test_computation_between_layers_is_right_or_refused(what):
    right_or_refused(llama(body=body(**BETWEEN[what])), rows_of(), refused="between (two )?layers|hidden states|head")


def test_scaling_after_the_last_layer_counts_as_part_of_the_head():
    assert right_or_refused(llama(body=body(between=_scaled_after_last)), rows_of()) == "right"


def test_hidden_states_passed_to_all_layers_are_right_or_refused():
    make = llama(_uses_what_is_handed_on, body=body(besides=_handed_on))
    right_or_refused(make, rows_of(), refused="besides the hidden states|between|hidden states")


@pytest.mark.parametrize("per_visit", [1, 3])
@pytest.mark.parametrize("recompute", RECOMPUTE)
def test_state_passed_between_layers_is_right_or_refused(recompute, per_visit):
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
def test_hooks_are_right_or_refused(hook, recompute):
    right_or_refused(llama(prepare=hook), rows_of(), refused="hook|checkpointing", recompute=recompute)


def test_replaced_forward_of_a_module_is_right_or_refused():
    """As ``accelerate`` and others put it there."""

    def prepare(model: Any) -> None:
        inner = model.model.forward
        model.model.forward = lambda *args, **kwargs: inner(*args, **kwargs)

    right_or_refused(llama(prepare=prepare), rows_of(), refused="forward|layers")
