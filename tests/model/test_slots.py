"""Requests that share a pass get what they would get alone, in every family that may share one."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor

import every_family
from family_configs import families, tiny_config
from selected import quick_ones
from served_families import CHUNK, Joining, generated, plain_model, served, staying, wanted
from tawpipe.errors import UserError
from tawpipe.model.attention.slots import SlotCache, SlotTokens, attend
from tawpipe.model.chain import Chain
from tawpipe.model.kernels import AttentionOptions
from tawpipe.serving.engine import Engine
from tawpipe.serving.held import longest_context, refuse_serving
from tawpipe.serving.passes import Pass, Row, Sampling, SlotLayout

QUICK = ("llama", "gpt2", "gemma3_text", "gpt_oss", "deepseek_v3", "roberta", "mamba", "bloom", "llama4_text")
"""Windows, sinks, latent keys, positions of its own; and three that are refused."""
SLOW = (
    *("qwen3", "granite", "gemma2", "mistral", "mixtral", "qwen3_moe", "glm4", "phi3", "olmo2", "cohere2", "opt"),
    *("starcoder2", "minimax_m2", "qwen2", "gpt_neox", "gemma", "stablelm", "phi", "olmo", "cohere", "smollm3"),
    *("exaone4", "helium", "nemotron", "ministral", "glm4_moe", "olmoe", "granitemoe", "diffllama", "ernie4_5"),
)


@pytest.mark.parametrize("family", quick_ones((*QUICK, *SLOW), QUICK))
def test_serving_every_family_equals_generate_or_is_refused(family: str) -> None:
    assert family in families()
    outcome = served(family)
    assert outcome.kind == ("refused" if family in ("mamba", "bloom", "llama4_text") else "equal"), outcome


def test_serving_chunked_attention_equals_generate(monkeypatch: pytest.MonkeyPatch) -> None:
    config: Any = tiny_config("llama4_text")
    config.attn_temperature_tuning = False
    monkeypatch.setattr(every_family, "tiny_config", lambda _: deepcopy(config))
    outcome = served("llama4_text")
    assert outcome.kind == "equal", outcome


def engine_of(model: Any, *, groups: int = 1, slots: int = 3, context: int = 24, chunk: int = CHUNK) -> Engine:
    return Engine(staying(Chain(model)), SlotLayout(groups, slots, context, chunk))


def test_prompts_of_one_token_and_of_the_whole_context_are_served() -> None:
    model, asked = plain_model(), wanted(1)
    prompts = [[7], list(range(3, 27))]
    expected = [generated(model, type(asked)([ids], 1, asked.sampling, frozenset()))[0] for ids in prompts]
    texts = Joining(type(asked)(prompts, 1, asked.sampling, frozenset()), SlotLayout(1, 2, 24, CHUNK), join=(0, 0))
    engine_of(model, slots=2).run(texts)
    assert [list(each.ids) for each in texts.continuations] == expected


def test_reused_cache_slot_ignores_the_former_request() -> None:
    """Not even what is no number, which attention would find behind its mask."""
    engine = engine_of(plain_model())
    greedy = Sampling(temperature=0.0)
    whole = Row(0, 0, (5, 6, 7, 8), greedy)
    (alone,) = engine.compute(Pass(0, (whole,)))
    for keys, values in engine.stage.cache._layers.values():
        keys[0], values[0] = float("nan"), float("nan")
    engine.stage.cache._used[0] = 24
    beside = Row(1, 0, tuple(range(3, 23)), greedy)
    engine.compute(Pass(0, (beside,)))
    rows = Row(0, 0, (5,)), Row(1, 20, (9,), greedy)
    assert engine.compute(Pass(0, rows))[0].logprob < 0
    again = [engine.compute(Pass(0, (Row(0, at, (5 + at,), greedy),)))[0] for at in (1, 2, 3)][-1]
    assert again.token == alone.token and again.logprob == pytest.approx(alone.logprob, rel=1e-12)


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ([SlotTokens(3, 0, (1,))], "slot"),
        ([SlotTokens(0, 0, (1,)), SlotTokens(0, 1, (1,))], "slot"),
        ([SlotTokens(0, 2, (1,))], "first"),
        ([SlotTokens(0, 0, ())], "tokens"),
        ([SlotTokens(0, 0, (1,) * 9)], "tokens"),
    ],
)
def test_invalid_slot_batches_are_refused(parts: list[SlotTokens], expected: str) -> None:
    with pytest.raises(UserError) as caught:
        SlotCache(3, 8).batch(parts)
    assert caught.value.setting == expected


def test_tokens_beyond_the_vocabulary_are_refused() -> None:
    with pytest.raises(UserError, match="vocabulary"):
        engine_of(plain_model()).compute(Pass(0, (Row(0, 0, (61,)),)))


def test_serving_context_longer_than_model_positions_is_refused() -> None:
    chain = Chain(plain_model())
    assert longest_context(chain) == 128
    refuse_serving(chain, 128)
    with pytest.raises(UserError, match=r"context: got 129; at most 128"):
        refuse_serving(chain, 129)


def test_serving_longrope_beyond_its_original_length_is_refused() -> None:
    rope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0] * 4,
        "long_factor": [2.0] * 4,
        "original_max_position_embeddings": 32,
        "factor": 4.0,
    }
    chain = Chain(plain_model(rope_parameters=rope))
    refuse_serving(chain, 32)
    with pytest.raises(UserError, match="at most 32"):
        refuse_serving(chain, 33)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("piece", [0, 4])
@pytest.mark.parametrize(("softcap", "sinks", "values"), [(None, False, 8), (2.0, True, 8), (None, False, 6)])
def test_attention_over_slots_equals_each_request_alone(
    window: int | None, piece: int, softcap: float | None, sinks: bool, values: int
) -> None:
    """Beside all scores of each request by itself; slots in any order, some with a token and one with several."""
    torch.manual_seed(0)
    lengths = {4: 9, 1: 7, 2: 8, 0: 6}
    keys, cache = 2, SlotCache(5, 12)
    rows = {
        slot: tuple(torch.randn(n, h, d).double() for h, d in ((4, 8), (keys, 8), (keys, values)))
        for slot, n in lengths.items()
    }
    sink = torch.randn(4).double() if sinks else None
    options = AttentionOptions(window, 0.3, 0.0, softcap)

    def run(parts: list[SlotTokens]) -> Tensor:
        documents = cache.batch(parts).documents(torch.device("cpu"))
        documents = documents.cut(piece) if piece else documents
        cache.begin(1)
        query, key, value = (
            torch.cat([rows[part.slot][which][part.first : part.end] for part in parts]).transpose(0, 1)[None]
            for which in range(3)
        )
        return attend(query, key, value, sink, documents, options)[0]

    expected = {slot: _whole(*row, sinks=sink, options=options, piece=piece) for slot, row in rows.items()}
    for slot in lengths:
        run([SlotTokens(slot, 0, (0,) * 4)])
    parts = [SlotTokens(slot, 4, (0,) * (1 if slot != 2 else 3)) for slot in lengths]
    output = run(parts)
    assert torch.allclose(output, torch.cat([expected[part.slot][part.first : part.end] for part in parts]), atol=1e-12)


def _whole(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, options: Any, piece: int) -> Tensor:
    key, value = (tensor.repeat_interleave(2, dim=1) for tensor in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) * options.scale
    if options.softcap is not None:
        scores = torch.tanh(scores / options.softcap) * options.softcap
    queries, keys = torch.arange(len(query))[:, None], torch.arange(len(key))[None]
    seen = keys <= queries
    if options.window is not None:
        seen &= keys > queries - options.window
    if piece:
        seen &= keys // piece == queries // piece
    scores = scores.masked_fill(~seen, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.view(-1, 1, 1).expand(-1, len(query), 1)], dim=2)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., : len(key)], value)
