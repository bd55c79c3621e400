"""Engines: of a folder, and of several processes with a stage each."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from family_configs import tiny_config
from selected import quick_ones
from served_families import (
    ALONE,
    LENGTHS,
    Joining,
    generated,
    plain_model,
    prompts,
    scored_by_folder,
    served,
    staying,
    wanted,
)
from tawpipe.errors import UserError
from tawpipe.model.chain import Chain
from tawpipe.serving.decode_steps import drawn_message, header_of, read_drawn, read_header
from tawpipe.serving.engine import Engine, load_engine
from tawpipe.serving.generate import Wanted
from tawpipe.serving.passes import Drawn, Pass, Row, Sampling, SlotLayout
from tawpipe.serving.stage import StayingStage

ROOM = SlotLayout(1, 3, 24, 4)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    plain_model(tie_word_embeddings=True).save_pretrained(tmp_path)
    return tmp_path


def texts_of(engine: Any, **sampling: Any) -> list[list[int]]:
    texts = Joining(wanted(**sampling), engine.slot_layout)
    engine.run(texts)
    return [list(each.ids) for each in texts.continuations]


@pytest.mark.parametrize("groups", [1, 2])
def test_engine_of_a_folder_equals_generate(folder: Path, groups: int) -> None:
    engine = load_engine(folder, replace(ROOM, groups=groups), ALONE, dtype="float64")
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    assert texts_of(engine) == generated(model, wanted())
    assert texts_of(engine) == generated(model, wanted()), "an engine may run again"


@pytest.mark.parametrize("vocabulary", [1, 2, 1031])
def test_engine_equals_generate_for_any_vocabulary_size(vocabulary: int) -> None:
    model = plain_model(vocab_size=vocabulary, tie_word_embeddings=True, pad_token_id=None)
    sampling = Sampling(temperature=0.0, logprobs=20)
    asked = Wanted([[0] * 5, [vocabulary - 1]], 4, sampling, frozenset())
    expected, texts = generated(model, asked), Joining(asked, ROOM, join=(0, 1))
    Engine(staying(Chain(model)), ROOM).run(texts)
    assert [list(each.ids) for each in texts.continuations] == expected


def test_unsupported_model_is_refused_before_loading_weights(tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(tiny_config("mamba")).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not even weights")
    with pytest.raises(UserError, match=r"carry a state.*transformers serve") as caught:
        load_engine(tmp_path, ROOM, ALONE)
    assert caught.value.setting == "model"


@pytest.mark.parametrize(
    ("words", "setting"),
    [({"weights": "w5"}, "weights"), ({"dtype": "int4"}, "dtype"), ({"room": SlotLayout(1, 1, 129, 4)}, "context")],
)
def test_impossible_engine_settings_are_refused(folder: Path, words: dict[str, Any], setting: str) -> None:
    with pytest.raises(UserError) as caught:
        load_engine(folder, words.pop("room", ROOM), ALONE, **words)
    assert caught.value.setting == setting


def test_model_with_nonfinite_logits_is_refused(tmp_path: Path) -> None:
    model = plain_model()
    model.lm_head.weight.data.fill_(float("inf"))
    model.save_pretrained(tmp_path)
    with pytest.raises(UserError, match="logits are numbers"):
        load_engine(tmp_path, ROOM, ALONE)


def test_seeded_request_is_equal_alone_and_among_others() -> None:
    model = plain_model()
    together = texts_of(Engine(staying(Chain(model)), ROOM), temperature=1.0, seed=5)
    asked = wanted(temperature=1.0, seed=5)
    for number, prompt in enumerate(asked.prompts):
        again = plain_model()
        alone = replace(asked, prompts=[prompt], sampling=asked.sampling_of(number))
        texts = Joining(alone, replace(ROOM, slots=1), join=(0,))
        Engine(staying(Chain(again)), replace(ROOM, slots=1)).run(texts)
        assert list(texts.continuations[0].ids) == together[number]


@pytest.mark.parametrize("family", quick_ones(("llama", "gemma3_text"), ["llama"]))
def test_stages_on_several_processes_equal_generate(pool: Any, family: str) -> None:
    outcome = served(family, pool)
    assert (outcome.kind, outcome.staged) == ("equal", "equal"), outcome


def test_folder_with_tied_embeddings_on_three_processes_equals_generate(pool: Any, folder: Path) -> None:
    """With embeddings that the first stage and the last have in common."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    assert pool.run("served_families:of_folder", 3, 1, folder=str(folder))[0] == generated(model, wanted())


def check_scores(told: list[list[Any]], model: Any) -> None:
    """Every token of a prompt but the first, then those of the answer, with the logprobs of transformers."""
    for tokens, (prompt, entries) in enumerate(zip(prompts(), told, strict=True)):
        drawn = [entry for entry, _ in entries if entry]
        ids = [*prompt, *(token for position, token, *_ in drawn if position >= len(prompt))]
        logprobs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        likeliest = logprobs.topk(2)
        assert [(position, token) for position, token, *_ in drawn] == list(enumerate(ids))[1:]
        assert len(ids) == len(prompt) + tokens
        for position, token, logprob, top in drawn:
            assert logprob == pytest.approx(float(logprobs[position - 1, token]), abs=1e-9)
            assert [other for other, _ in top] == likeliest.indices[position - 1].tolist()
            assert [number for _, number in top] == pytest.approx(likeliest.values[position - 1].tolist(), abs=1e-9)
        ends = [end for _, end in entries]
        assert ends == [""] * (len(ends) - 1) + ["length"] and (entries[-1][0] is None) is (not tokens)


@torch.no_grad()
def test_prompt_scores_equal_transformers_in_chunks_of_logits(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    monkeypatch.setattr("tawpipe.serving.stage.LOGITS", 3 * model.config.vocab_size)
    logits, sizes = Chain.logits, list[int]()
    monkeypatch.setattr(Chain, "logits", lambda self, hidden: sizes.append(hidden.shape[1]) or logits(self, hidden))
    check_scores(scored_by_folder(ALONE, str(folder)), model)
    assert max(sizes) == 3 and sum(sizes) >= sum(LENGTHS) - len(LENGTHS)


@torch.no_grad()
def test_prompt_scores_on_stages_equal_transformers(pool: Any, folder: Path) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    check_scores(pool.run("served_families:scored_by_folder", 3, 1, folder=str(folder))[0], model)


@torch.no_grad()
@pytest.mark.parametrize("beginning", [0, 16])
def test_both_sides_know_the_size_of_every_message(pool: Any, folder: Path, beginning: int) -> None:
    """As NCCL needs it; and where a header does not fit into the beginning of its message."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    found = pool.run("served_families:scored_as_on_nccl", 3, 1, folder=str(folder), beginning=beginning)
    check_scores(found[0][0], model)
    for rank, (_, sizes) in enumerate(found):
        way, after = f"({rank}, {(rank + 1) % 3})", found[(rank + 1) % 3][1]
        assert sizes[f"{way} True"] == after[f"{way} False"] and len(set(sizes[f"{way} True"])) > 2


def test_int8_hidden_states_keep_most_tokens(pool: Any) -> None:
    ours, expected = (
        pool.run("served_families:on_stages", 2, 1, family="llama", groups=3, compression=compression)[0]
        for compression in ("int8", "")
    )
    assert [len(ids) for ids in ours] == [len(ids) for ids in expected]
    pairs = [pair for both in zip(ours, expected, strict=True) for pair in zip(*both, strict=True)]
    assert sum(a == b for a, b in pairs) > len(ours)


def test_stage_draws_only_for_rows_that_request_a_token() -> None:
    stage = StayingStage(staying(Chain(plain_model())), ROOM)
    given = Pass(0, (Row(0, 0, (5, 6)), Row(1, 0, (7,), Sampling(temperature=0))))
    hidden, calls = stage.embed(given)
    assert hidden.shape == (1, 3, 32) and len(calls) == 3
    for block in (1, 2, 3):
        hidden = stage.layer(block, hidden, calls)
    (drawn,) = stage.head(hidden, given)
    assert (drawn.slot, drawn.position) == (1, 1)
    # Keys and values of 3 slots x 24 positions, 2 heads of 8, in 3 layers.
    assert stage.cache.nbytes == 2 * 3 * 24 * 2 * 8 * 3 * 8


def test_pass_headers_and_drawn_tokens_read_back_from_messages() -> None:
    sampling = Sampling(0.7, 40, 0.9, 2**62 + 1, 3)
    scored = Row(1, 3, (0, 0), None, (7, 2**31 - 1), 5)
    given = Pass(2, (Row(4, 0, (1, 2, 3)), replace(scored, tokens=(1, 2)), Row(0, 17, (5,), sampling)), last=True)
    rows = (Row(4, 0, (0, 0, 0)), scored, Row(0, 17, (0,), sampling))
    assert read_header(header_of(given), 2) == Pass(2, rows, last=True)
    assert read_header(header_of(Pass(1, ())), 1) == Pass(1, ())
    drawn = [Drawn(3, 7, 61, -0.25, ((61, -0.25), (4, -2.5))), Drawn(0, 1, 0, -math.inf)]
    assert read_drawn(drawn_message(drawn)) == drawn and read_drawn(drawn_message([])) == []
