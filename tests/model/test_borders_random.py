"""Random numbers that nothing announces: a gradient belongs to a forward pass, a seed repeats it, and the script's own
generators are left alone.
"""

from __future__ import annotations

import random
import threading
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DbrxConfig

from borders import (
    WAYS,
    assert_same,
    body,
    llama,
    own,
    piped,
    piped_numbers,
    right_or_refused,
    rows_of,
    slope_error,
    weights,
)
from model_families import VOCABULARY, keep_fp64, real_model
from selected import quick_ones
from tawpipe.errors import UserError


@pytest.fixture(autouse=True)
def exact(monkeypatch: pytest.MonkeyPatch):
    torch.set_num_threads(1)
    keep_fp64(monkeypatch)


# Random numbers that nothing announces


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


@pytest.mark.parametrize("recompute", ["full", pytest.param("selective", marks=pytest.mark.slow)])
@pytest.mark.parametrize("what", quick_ones(RANDOM, [*RANDOM][::2]))
def test_gradients_match_the_slope_of_the_randomly_drawn_loss(what, recompute):
    """The slope of the loss of the same step, drawn with the same seed, is the gradient."""
    if what == "config" and recompute == "selective":
        pytest.skip("attention with dropout is no kernel on the CPU")

    def check() -> None:
        random.seed(1)
        np.random.seed(1)
        assert slope_error(RANDOM[what], rows_of(), recompute=recompute) < 1e-6

    _or_refused(check)


@pytest.mark.parametrize("what", quick_ones(RANDOM, ["config", "numpy", "dbrx"]))
def test_random_numbers_depend_only_on_the_seed(what):
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
def test_random_state_of_the_script_is_left_alone(dropout):
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


def test_thread_that_draws_random_numbers_changes_no_loss():
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


def test_two_pipelines_at_once_match_each_alone():
    expected = [_three_steps(seed=seed) for seed in (1, 2)]
    both = [piped(llama(attention_dropout=0.3), seed=seed) for seed in (1, 2)]
    results = [[pipeline.step(rows_of(step)) for pipeline in both] for step in range(3)]
    for index, pipeline in enumerate(both):
        assert [result[index].loss for result in results] == expected[index][0]
        found = weights(pipeline)
        assert all(torch.equal(found[name], value) for name, value in expected[index][1].items())
        pipeline.close()


def test_layer_that_seeds_torch_is_right_or_refused():
    """A layer that seeds torch in its forward pass draws what it would draw by itself."""

    def layer(each: Any, hidden: Tensor, call: Any) -> Tensor:
        torch.manual_seed(each.self_attn.layer_idx)
        return own(each, hidden + 0.1 * torch.randn_like(hidden), **call)

    for recompute in WAYS:
        right_or_refused(llama(layer), rows_of(), refused=REFUSED_RANDOM, recompute=recompute)


def test_layer_with_its_own_generator_is_right_or_refused():
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


@pytest.mark.parametrize("recompute", ["full", "none"])
def test_gradient_checkpointing_of_the_model_does_not_change_dropout(recompute):
    """It is switched off: a layer is computed again anyway, with the numbers that it drew."""

    def make(checkpointed: bool):
        model = llama(attention_dropout=0.3)()
        if checkpointed:
            model.gradient_checkpointing_enable()
        return model

    assert_same(
        piped_numbers(lambda: make(True), rows_of(), recompute=recompute),
        piped_numbers(lambda: make(False), rows_of(), recompute=recompute),
    )
