"""Indexers of sparse attention: frozen, and without scores where they choose all keys; and kernels that are missing."""

from __future__ import annotations

from contextlib import closing
from copy import deepcopy
from itertools import count

import pytest
import torch

from every_family import differences, micro_batches, our_step, plain_step, random_model
from family_configs import tiny_config
from model_families import keep_fp64, meta_model, real_model
from selected import quick_ones
from tawpipe import CheckSettings, Pipeline
from tawpipe.errors import UserError
from tawpipe.model.attention.indexers import Indexer, freeze_indexers
from tawpipe.model.chain import Chain
from tawpipe.model.files.build import build_model
from tawpipe.model.files.missing import fallen_back, kernel_packages, mixer_words
from tawpipe.plan.cost import memory
from tawpipe.plan.cost.memory import LEAST_CHUNK, estimate_memory
from tawpipe.plan.cost.profile import measure
from tawpipe.schedule.settings import ScheduleSettings

SPARSE = "deepseek_v32", "axk2", "dots3_note_text", "deepseek_v4", "qwen4_exp_text", "minimax_m3_vl_text"
ROWS = ((4, 3, 1, 4), (9, 3))
"""Documents no longer than what the tiny indexers choose, and one that is."""


@pytest.mark.parametrize("family", quick_ones(SPARSE, ["deepseek_v32"]))
def test_sparse_attention_has_the_gradients_of_plain_training(family: str, monkeypatch):
    keep_fp64(monkeypatch)
    model = random_model(family)
    assert differences(our_step(deepcopy(model), ROWS), plain_step(model, micro_batches(ROWS))) == []


def test_indexer_computes_scores_only_for_long_documents(monkeypatch):
    model = meta_model(tiny_config("deepseek_v32"))
    indexer = model.model.layers[0].self_attn.indexer
    kind = type(indexer)
    Chain(model)
    assert isinstance(indexer, Indexer) and isinstance(indexer, kind)
    scored: list[int] = []
    every = torch.arange(4).flip(0).expand(2, 4, 4)
    monkeypatch.setattr(kind, "forward", lambda self, hidden, *_, **__: scored.append(hidden.shape[1]) or every)
    for _ in range(2):
        assert indexer(torch.zeros(2, 4, 32)).tolist() == [[[0, 1, 2, 3]] * 4] * 2
    assert scored == [4], "compared once"
    indexer(torch.zeros(2, 5, 32))
    assert scored == [4, 5]
    monkeypatch.setattr(kind, "forward", lambda *_, **__: every[..., :3])
    with pytest.raises(UserError, match="leaves out keys of documents that are not longer than its index_topk"):
        model.model.layers[1].self_attn.indexer(torch.zeros(2, 4, 32))
    v4 = meta_model(tiny_config("deepseek_v4"))  # whose numbers are those of windows
    Chain(v4)
    assert not any(isinstance(module, Indexer) for module in v4.modules())


def test_build_model_freezes_indexers_and_reports_it(tmp_path):
    tiny_config("deepseek_v32").save_pretrained(tmp_path)
    built = build_model(str(tmp_path), max_positions=64, longest=1)
    frozen = {name for name, parameter in built.model.named_parameters() if not parameter.requires_grad}
    assert frozen and all(".indexer." in name for name in frozen)
    assert built.frozen_words.startswith(
        f"{built.indexers:,} parameters of indexers of sparse attention: the loss gives"
    )
    assert freeze_indexers(built.model) == 0
    tiny_config("lfm2").save_pretrained(tmp_path / "other")
    assert build_model(str(tmp_path / "other"), max_positions=64, longest=1).frozen_words == ""


def test_pipeline_freezes_indexers_and_reports_it(caplog):
    model = real_model(tiny_config("deepseek_v32"), torch.float32)
    with closing(Pipeline(model, checks=CheckSettings(check="never"))) as pipeline:
        assert "indexers of sparse attention: the loss gives them no gradient" in caplog.text
        assert not any(unit.trainable for unit in pipeline.chain.units if "indexer" in unit.slots[0].name)
    assert not model.model.layers[0].self_attn.indexer.wk.weight.requires_grad


def test_mixer_fallbacks_are_named_with_package_and_time_share():
    chain = Chain(meta_model(tiny_config("qwen3_next")))
    words = mixer_words(chain, torch.device("cuda"), 0.7)
    packages = dict(kernel_packages())
    if all(version.startswith("not installed") for version in packages.values()):
        assert "chunk_gated_delta_rule of flash-linear-attention" in words and "causal_conv1d_fn of" in words
        assert "update" not in words
    assert words.endswith("; 70% of the time of their layers, measured")
    assert mixer_words(chain, torch.device("cpu"), 0.0) == "torch code, as on every CPU"
    assert mixer_words(Chain(meta_model(tiny_config("llama"))), torch.device("cuda"), 0.0) == ""
    assert set(packages) == {"flash-linear-attention", "causal-conv1d", "mamba-ssm"}
    assert fallen_back(torch.nn.Linear(1, 1)) == {}


@pytest.mark.slow
def test_profile_of_mixers_measures_their_share_and_no_context_parallelism(monkeypatch):
    monkeypatch.setattr(memory, "PAST_KEYS", 64)
    chain = Chain(meta_model(tiny_config("lfm2")))
    usual = {"dtype": torch.float32, "device": torch.device("cpu"), "now": count(1.0).__next__}
    profile = measure(chain, tokens=64, chunks=lambda _: (8,), **usual)
    assert 0 < profile.mixers < 1 and profile.why_not_shares.startswith("its layers carry a state")
    assert profile.in_chunks and not profile.why_whole and not profile.cuts and not profile.shares


def test_memory_estimate_counts_one_layer_state_at_every_chunk_border(monkeypatch):
    chain = Chain(meta_model(tiny_config("qwen3_next")))
    most = max(mixing.state_bytes for mixing in chain.mixing)
    assert most == 4 * (64 * 3 + 4 * 8 * 8)  # of the convolution and of linear attention, fp32
    assert chain.state_bytes == most
    counted = estimate_memory(chain, dtype=torch.bfloat16, chunk_tokens=64).in_chunks["backward full"]
    chain.mixing = ()
    without = estimate_memory(chain, dtype=torch.bfloat16, chunk_tokens=64).in_chunks["backward full"]
    assert counted[2] - without[2] == pytest.approx(most / LEAST_CHUNK)
    chain = Chain(real_model(tiny_config("qwen3_next"), torch.float32))
    monkeypatch.setattr(memory, "LEAST_CHUNK", 2)
    assert estimate_memory(chain, dtype=torch.float32, chunk_tokens=64).in_chunks["kept"] == (0, 0, most / 2)
    in_chunks = ScheduleSettings(sequence_chunk=2, recompute="selective")
    with closing(
        Pipeline(chain, dtype=torch.float32, checks=CheckSettings(check="never"), schedule=in_chunks)
    ) as pipeline:
        assert pipeline._steps._wiring.kept_per_token["kept"] == most / 2
