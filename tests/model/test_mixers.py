"""Mixers on rows of several documents and in chunks of rows, against every document by itself, in fp64."""

from __future__ import annotations

import inspect
import math
import sys
from contextlib import closing
from copy import deepcopy
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers.models.falcon_h1.modeling_falcon_h1 as falcon
import transformers.models.kimi_linear.modeling_kimi_linear as kimi
from torch import Tensor, nn
from transformers.integrations.hub_kernels import use_kernel_func_from_hub_with_fallback

import every_family
from every_family import micro_batches, our_step, plain_step, random_model
from family_configs import tiny_config
from model_families import keep_fp64, meta_model, real_model
from selected import quick_ones
from tawpipe import CheckSettings, Pipeline
from tawpipe.errors import UserError
from tawpipe.model.attention.chunked import Chunk, KeyStore
from tawpipe.model.chain import Chain
from tawpipe.model.kernels import Documents
from tawpipe.model.mixers.mixers import Mixer, RowCall, check_apart, make_mixer
from tawpipe.pipeline.batch import LocalBatch
from tawpipe.pipeline.setup import refuse_cut_rows
from tawpipe.schedule.settings import ScheduleSettings

differences = partial(every_family.differences, tolerance=1e-10)
FAMILIES = (
    *("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "kimi_linear", "bailing_hybrid", "olmo_hybrid", "mamba2"),
    *("bamba", "falcon_h1", "nemotron_h", "granitemoehybrid", "lfm2", "lfm2_moe", "lfm3"),
)
QUICK = "qwen3_next", "falcon_h1", "lfm2"
ROWS = ((23, 17), (7, 1, 6, 14, 12), (14, 13, 13), (1, 39), (40,), (2,) * 20)
"""Documents that cross borders of chunks, end on one, begin on one or a token before or behind it, have one token."""
FEW_ROWS = ((7, 1, 5, 2, 7), (22,))
"""The same in fewer and shorter rows, for mixers whose reference code takes long however short a document is."""


@cache
def model_of(family: str, rows: tuple[tuple[int, ...], ...] = ROWS) -> tuple[Any, Any]:
    model = random_model(family)
    return model, plain_step(deepcopy(model), micro_batches(rows))


@pytest.fixture(autouse=True)
def in_fp64(monkeypatch):
    keep_fp64(monkeypatch)


@pytest.mark.parametrize("family", quick_ones(FAMILIES, QUICK))
def test_mixers_in_packed_rows_and_chunks_match_plain_training(family: str):
    rows = ROWS if family in ("falcon_h1", "lfm2") else FEW_ROWS
    model, plain = model_of(family, rows)
    assert differences(our_step(deepcopy(model), rows, sequence_chunk=7), plain) == []


@pytest.mark.parametrize(
    ("family", "trained"), [("falcon_h1", "feed_forward"), pytest.param("qwen3_next", "mlp", marks=pytest.mark.slow)]
)
def test_frozen_mixer_layers_match_plain_training(family: str, trained: str):
    """In the first layer that is trained no state has a graph: neither its input is trained nor the mixer's weights."""
    model = random_model(family)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(f".{trained}." in name)
    plain = plain_step(deepcopy(model), micro_batches(FEW_ROWS))
    assert differences(our_step(model, FEW_ROWS, sequence_chunk=7), plain) == []


@pytest.mark.parametrize("settings", [{"recompute": "selective"}, {"recompute": "none"}, {"keep_mib": 1}])
def test_recomputation_settings_of_mixers_match_plain_training(settings: dict[str, Any]):
    model, plain = model_of("lfm2")
    assert differences(our_step(deepcopy(model), ROWS, **settings), plain) == []


@pytest.mark.parametrize(
    ("family", "mixer", "rows", "together"),
    [
        ("lfm2", "Lfm2ShortConv", ROWS, 3),
        pytest.param("qwen3_next", "Qwen3NextGatedDeltaNet", FEW_ROWS, 2, marks=pytest.mark.slow),
    ],
    ids=["lfm2", "qwen3_next"],
)
def test_kept_mixer_states_save_one_forward_per_chunk_border(family, mixer, rows, together, monkeypatch, tmp_path):
    model, plain = model_of(family, rows)
    calls, forward = list[int](), Mixer.forward
    monkeypatch.setattr(Mixer, "forward", lambda *args, **kwargs: calls.append(1) or forward(*args, **kwargs))
    for recompute in ("full", "selective"):
        settings = {"recompute": recompute, "offloaded_layers": 2, "offload_dir": str(tmp_path)}
        ours = our_step(deepcopy(model), rows, sequence_chunk=7, together=together, **settings)
        assert differences(ours, plain) == []
        calls.append(0)
    full, selective = calls.index(0), len(calls) - 2 - calls.index(0)
    mixers = sum(type(module).__name__ == mixer for module in model.modules())
    borders = len(rows) // together * (math.ceil(sum(rows[0]) / 7) - 1)
    assert full - selective == mixers * borders, "once for each border of a micro-batch"


def test_mixers_match_plain_training_with_offloaded_mixed_rows(tmp_path):
    model, plain = model_of("falcon_h1")
    waiting: dict[str, Any] = {"recompute": "selective", "offloaded_layers": 2, "offload_dir": str(tmp_path)}
    assert differences(our_step(deepcopy(model), ROWS, together=3, sequence_chunk=7, **waiting), plain) == []


@pytest.mark.parametrize(
    ("family", "why"),
    [
        ("jamba", "JambaMambaMixer does not continue from the state"),
        ("mamba", "MambaMixer does not continue from the state"),
        ("minimax", "MiniMaxLightningAttention has its state in a form"),
        ("xlstm", "its layers carry a state in a way that is not known"),
    ],
)
def test_mixers_that_cannot_continue_from_a_state_refuse_sequence_chunks(family: str, why: str):
    chain = Chain(meta_model(tiny_config(family)))
    refuse_cut_rows(chain, ScheduleSettings())
    with pytest.raises(UserError, match=f"rows of .* cannot be cut, because .*{why}"):
        refuse_cut_rows(chain, ScheduleSettings(sequence_chunk=64))


def test_mixers_refuse_context_parallelism_and_chunks_of_one_token():
    chain = Chain(meta_model(tiny_config("lfm2")))
    refuse_cut_rows(chain, ScheduleSettings(sequence_chunk=2))
    with pytest.raises(UserError, match="its layers carry a state along a row; chunks instead"):
        refuse_cut_rows(chain, ScheduleSettings(sequence_ranks=2))
    with pytest.raises(UserError, match="at least 2: a state goes from chunk to chunk"):
        refuse_cut_rows(chain, ScheduleSettings(sequence_chunk=1))


def test_chain_replaces_mixer_classes_only_in_its_own_model():
    model = meta_model(tiny_config("lfm2"))
    mixers = [module for module in model.modules() if type(module).__name__ == "Lfm2ShortConv"]
    kind = type(mixers[0])
    chain = Chain(model)
    assert all(isinstance(module, kind) and isinstance(module, Mixer) for module in mixers)
    assert type(meta_model(tiny_config("lfm2")).model.layers[0].conv) is kind
    assert Chain(model).mixing == chain.mixing  # a second time


def test_mixers_are_found_although_installed_kernels_fail_on_meta(monkeypatch):
    """In a layer of Falcon-H1 attention comes after the mixer, whose kernels would raise."""
    plain = Chain(meta_model(tiny_config("falcon_h1"))).mixing

    def causal_conv1d_fn(*_: object, **__: object) -> Tensor:
        raise RuntimeError("Expected x.is_cuda() to be true")

    monkeypatch.setitem(sys.modules, "causal_conv1d", SimpleNamespace(causal_conv1d_fn=causal_conv1d_fn))
    with_kernel = use_kernel_func_from_hub_with_fallback("causal_conv1d_fn", "causal_conv1d")
    monkeypatch.setattr(falcon, "causal_conv1d_fn", with_kernel(inspect.unwrap(falcon.causal_conv1d_fn)))
    with pytest.raises(RuntimeError, match="is_cuda"):
        falcon.causal_conv1d_fn()
    assert Chain(meta_model(tiny_config("falcon_h1"))).mixing == plain


class Mean(nn.Module):
    """Mixes all that it is given."""

    def forward(self, hidden_states: Tensor, cache_params: Any = None) -> Tensor:
        return hidden_states + 1e-4 * hidden_states.mean((0, 1))


class Forgetful(nn.Module):
    """Adds up tokens, and does not go on from a sum."""

    def forward(self, hidden_states: Tensor, cache_params: Any = None) -> Tensor:
        if cache_params is not None:
            cache_params.get_recurrent_state(0)
            cache_params.update_recurrent_state(hidden_states.sum(1), 0)
        return hidden_states.cumsum(1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mixer_that_mixes_documents_is_refused_at_its_first_run(dtype: torch.dtype):
    mean, call = Mean(), RowCall((None,), {}, Documents.of((5, 6, 7), (1, 18), torch.device("cpu")))
    make_mixer(mean)
    hidden = 100 * torch.randn(1, 18, 4, dtype=dtype)
    if dtype is torch.bfloat16:
        call(mean, hidden)  # below its rounding
    else:
        with pytest.raises(UserError, match="Mean'; documents of one row influence each other; --packing none"):
            call(mean, hidden)
    torch.testing.assert_close(mean(hidden), Mean()(hidden))


def test_mixer_that_ignores_its_state_is_refused_at_the_first_chunk():
    forgetful, documents = Forgetful(), Documents.of((18,), (1, 18), torch.device("cpu"))
    make_mixer(forgetful)
    chunk = Chunk(KeyStore(1, 18), 0, 9)
    with pytest.raises(UserError, match=r"Forgetful'; it does not continue from the state .*sequence-chunk 0 runs"):
        RowCall((None,), {}, documents, chunk=chunk)(forgetful, torch.randn(1, 9, 4))


def test_document_borders_lost_before_a_kernel_are_detected(monkeypatch):
    """Kimi's mixer hands the borders of documents on under a name that its kernel does not know, and the wrapper of
    kernels drops unknown names: documents mix, although the kernel could keep them apart.
    """
    compute, keeps = kimi.chunk_kimi_delta_attention, []

    def kernel(query: Tensor, key: Tensor, value: Tensor, *, cu_seqlens: Tensor | None = None, **rest: Any) -> Any:
        rest.pop("cu_seq_lens_q", None)
        keeps.append(cu_seqlens is not None)
        return compute(query, key, value, **rest)

    def convolution(states: Tensor, weight: Tensor, bias: Any = None, activation: Any = None, **rest: Any) -> Tensor:
        documents = states.split(rest["cu_seq_lens_q"].diff().tolist(), dim=-1)
        return torch.cat([convolve(document, weight, bias, activation=activation) for document in documents], dim=-1)

    convolve = kimi.causal_conv1d_fn
    monkeypatch.setattr(kimi, "chunk_kimi_delta_attention", kernel)
    monkeypatch.setattr(kimi, "causal_conv1d_fn", convolution)
    model = real_model(tiny_config("kimi_linear"), torch.float32)
    mixer = next(module for module in model.modules() if hasattr(module, "forget_gate"))
    borders = torch.tensor([0, 8, 20])

    def with_borders(hidden: Tensor, _: float = 0.0) -> Tensor:
        return mixer(hidden, cu_seq_lens_q=borders)

    hidden = torch.randn(1, 20, model.config.hidden_size)
    with torch.no_grad(), pytest.raises(UserError, match="influence each other"):
        check_apart("KimiDeltaAttention", with_borders, hidden, with_borders(hidden), 8)
    assert not any(keeps)


@pytest.mark.parametrize(
    ("family", "chunk"),
    [("qwen3_next", 7), ("falcon_h1", 0), pytest.param("falcon_h1", 7, marks=pytest.mark.slow)],
)
def test_bf16_mixers_pass_their_checks_with_finite_loss(family: str, chunk: int):
    model = real_model(tiny_config(family), torch.float32)
    with closing(
        Pipeline(
            model,
            dtype=torch.bfloat16,
            checks=CheckSettings(check="never"),
            schedule=ScheduleSettings(sequence_chunk=chunk),
        )
    ) as pipeline:
        parts = micro_batches(ROWS[:2])
        assert math.isfinite(pipeline.step(LocalBatch(2, 40, parts)).loss)
