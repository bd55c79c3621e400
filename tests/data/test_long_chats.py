"""Chats that are longer than a row, and which answers are learned."""

import json
import re
from typing import Any

import pytest

from chat_families import byte_level
from tawpipe.data.chats.turns import TOO_LONG
from tawpipe.data.prepare import prepare_data
from tawpipe.data.settings import DataSettings
from tawpipe.errors import UserError

KEEPS = (
    "{% for m in messages %}{{ '<' + m.role + '>' + m.content + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
FORGETS = (
    "{% for m in messages %}{{ '<' + m.role + '>' }}{% if m.role == 'assistant' %}"
    "{% if loop.last %}{{ '<think>' + (m.reasoning_content or '') + '</think>' }}{% endif %}{% endif %}"
    "{{ m.content + '<|end|>' }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""Shows the thought of the last turn alone."""
SYSTEM = {"role": "system", "content": "Be brief."}


def turns(*lengths: int) -> list[dict[str, Any]]:
    """Questions with answers of so many letters, each with a thought."""
    return [
        turn
        for number, length in enumerate(lengths)
        for turn in (
            {"role": "user", "content": f"ask {number}"},
            {"role": "assistant", "content": f"say {number} {'x' * length}", "reasoning_content": f"hm {number}"},
        )
    ]


def read(tmp_path, template: str, *chats: list[dict[str, Any]], length: int = 160, **settings: Any):
    """Text and learned text of every sample, and the report."""
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    tokenizer = byte_level(template, ["<|end|>"], eos_token="<|end|>")
    given = {"validation_fraction": 0.0, "packing": "none", "cache_dir": str(tmp_path / "cache")} | settings
    data = prepare_data(
        DataSettings(data=[str(tmp_path / "a.jsonl")], **given), sequence_length=length, seed=0, tokenizer=tokenizer
    )
    rows = [data.train.sample(number) for number in range(data.samples_per_epoch or 9)]
    begin = "<|endoftext|>"  # which the tokenizer places
    text = lambda ids: str(tokenizer.decode([i for i in ids[0].tolist() if i >= 0])).removeprefix(begin)  # noqa: E731
    pairs = [(text(row.input_ids), text(row.labels)) for row in rows]
    pairs = set(pairs) if data.samples_per_epoch is None else pairs
    return sorted(pairs), data.report


@pytest.mark.parametrize("packing", ["none", "balanced", "fit", "streamed"])
def test_long_chats_are_cut_before_user_turns_and_keep_the_system_turn(tmp_path, packing):
    settings = {"packing": "none", "streaming": True} if packing == "streamed" else {"packing": packing}
    pairs, report = read(tmp_path, KEEPS, [SYSTEM, *turns(40, 40, 40)], **settings)
    wholes = [whole.rstrip("\n") for whole, _ in pairs]
    parts = [whole.split("<system>Be brief.<|end|>") for whole in wholes]
    assert all(before == "" for before, *_ in parts)
    documents = [document for _, *some in parts for document in some]
    assert all(text.startswith("<user>ask") for text in documents)
    assert sorted(text.count("<user>") for text in documents) == [1, 2]
    learned = "".join(some for _, some in pairs)
    assert all(learned.count(f"say {number} {'x' * 40}<|end|>") == 1 for number in range(3))
    assert any("cut at turns" in line and "1 row " in line for line in report.lines())
    assert report.train.torn == report.train.truncated == 0


def test_question_that_is_too_long_alone_is_left_out_and_others_are_kept(tmp_path):
    pairs, report = read(tmp_path, KEEPS, [SYSTEM, *turns(10, 400, 10)])
    learned = "".join(some for _, some in pairs)
    assert "say 0" in learned and "say 2" in learned and "say 1" not in learned
    assert any(
        "1 answer left out, too long:" in line and "160 tokens" in line and "question 2" in line
        for line in report.lines()
    )


def test_long_chats_drop_leaves_out_chats_and_anywhere_cuts_tokens(tmp_path):
    chats = turns(40, 40, 40), turns(5)
    dropped, report = read(tmp_path, KEEPS, *chats, long_chats="drop")
    assert [some for _, some in dropped] == ["say 0 xxxxx<|end|>"]
    assert any("1 row left out, longer than 160 tokens (--sequence-length)" in line for line in report.lines())
    torn, report = read(tmp_path, KEEPS, *chats, long_chats="anywhere")
    assert len(torn) == 3 and report.train.torn == 1
    assert any("1 part of documents lacks the beginning" in line for line in report.lines())


def test_data_set_of_only_long_questions_is_refused_with_ways_out(tmp_path):
    with pytest.raises(
        UserError, match=r"2 rows left out, too long: .* exceed 160 tokens .--sequence-length. .--long-chats anywhere"
    ):
        read(tmp_path, KEEPS, turns(400), turns(300))
    (tmp_path / "b.jsonl").write_text(json.dumps({"prompt": "a", "completion": "b" * 400}))
    settings = DataSettings(data=[str(tmp_path / "b.jsonl")], validation_fraction=0.0, cache_dir=str(tmp_path))
    with pytest.raises(UserError, match=re.escape(TOO_LONG.format(longest="64 tokens (--sequence-length)"))):
        prepare_data(
            settings, sequence_length=64, seed=0, tokenizer=byte_level(KEEPS, ["<|end|>"], eos_token="<|end|>")
        )


def test_answer_of_a_chat_is_learned_once_however_the_chat_is_cut(tmp_path):
    """Under a template that forgets, each question has a document; those that are too long lose their oldest turns."""
    chat = [SYSTEM, *turns(*[20] * 6)]
    for length in (110, 160, 300, 1000):
        pairs, report = read(tmp_path, FORGETS, chat, length=length)
        assert len(pairs) == 6 and report.train.cut == report.train.torn == 0  # none is longer than a row
        learned = "".join(some for _, some in pairs)
        assert all(learned.count(f"<think>hm {n}</think>say {n} {'x' * 20}<|end|>") == 1 for n in range(6))
        assert all(whole.startswith("<system>Be brief.") for whole, _ in pairs)


def test_answers_setting_selects_the_learned_answers(tmp_path):
    chat = [SYSTEM, *turns(3, 3, 3)]
    each, _ = read(tmp_path, FORGETS, chat, length=1000)
    assert len(each) == 3
    last, _ = read(tmp_path, FORGETS, chat, length=1000, answers="last")
    assert [some for _, some in last] == ["<think>hm 2</think>say 2 xxx<|end|>"]
    shown, report = read(tmp_path, FORGETS, chat, length=1000, answers="shown")
    assert [some for _, some in shown] == ["say 0 xxx<|end|>say 1 xxx<|end|><think>hm 2</think>say 2 xxx<|end|>"]
    assert any("answers whose thought the chat template leaves out" in line for line in report.lines())
    assert (
        read(tmp_path, FORGETS, [SYSTEM, *turns(3)], length=1000, answers="shown")[0]
        == read(tmp_path, FORGETS, [SYSTEM, *turns(3)], length=1000)[0]
    )


def test_answers_of_weight_0_stay_in_the_history_but_are_not_learned(tmp_path):
    chat = turns(3, 3, 3)
    chat[3]["train"] = False
    pairs, _ = read(tmp_path, KEEPS, chat, length=1000)
    assert pairs == [(KEEPS_WHOLE, "say 0 xxx<|end|>say 2 xxx<|end|>")]


@pytest.mark.parametrize("answers", ["each", "last"])
def test_the_last_answer_keeps_as_much_history_as_fits(tmp_path, answers):
    chat = turns(*[20] * 6)
    _, report = read(tmp_path, KEEPS, chat, length=1000, answers="last")
    pairs, _ = read(tmp_path, KEEPS, chat, length=report.longest[0] - 1, answers=answers)
    (document,) = [whole for whole, _ in pairs if "ask 5" in whole]
    assert document.startswith("<user>ask 1") and document.count("<user>") == 5
    marked = [turn if number > 9 else {**turn, "weight": 0} for number, turn in enumerate(chat)]
    assert [each for each, _ in read(tmp_path, KEEPS, marked, length=200)[0]] == [
        each for each, _ in read(tmp_path, KEEPS, chat, length=200, answers="last")[0]
    ]


@pytest.mark.parametrize("packing", ["fit", "balanced", "none"])
def test_instruction_that_just_fits_keeps_its_end_token(tmp_path, packing):
    (tmp_path / "b.jsonl").write_text(json.dumps({"prompt": "a" * 20, "completion": "b" * 20}))
    tokenizer = byte_level(KEEPS, ["<|end|>"], eos_token="<|end|>")
    end = tokenizer.eos_token_id
    settings = DataSettings(
        data=[str(tmp_path / "b.jsonl")], validation_fraction=0.0, cache_dir=str(tmp_path), as_chat="off",
        packing=packing,
    )  # fmt: skip
    prepare = lambda length: prepare_data(settings, sequence_length=length, seed=0, tokenizer=tokenizer)  # noqa: E731
    size = len(tokenizer("a" * 20 + "b" * 20)["input_ids"]) + 1
    assert end in prepare(size).train.sample(0).labels and prepare(size).report.train.truncated == 0
    with pytest.raises(UserError, match=f"exceed {size - 1} tokens"):
        prepare(size - 1)


KEEPS_WHOLE = "".join(f"<user>ask {n}<|end|><assistant>say {n} xxx<|end|>" for n in range(3))
