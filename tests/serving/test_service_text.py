"""Prompts from messages, text from tokens: characters of several tokens, stop strings over borders of tokens."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest

from served import tokenizer_of_bytes
from tawpipe.data.chats.messages import Malformed
from tawpipe.serving.service.text import AnswerText, Prompts, StopStrings, TextPieces

EMOJI = "a \U0001f469‍\U0001f680 naïve 🇨🇭 \U0001f44d\U0001f3fd, 語."
"""Of which most characters have several tokens, and some that look like one have several characters."""


@pytest.fixture(scope="module")
def tokenizer():
    return tokenizer_of_bytes()


def test_text_pieces_never_split_a_character_and_join_to_the_text(tokenizer) -> None:
    ids = tokenizer.encode(EMOJI, add_special_tokens=False)
    assert len(ids) > len(EMOJI)
    pieces = TextPieces(tokenizer)
    told = [pieces.add(token) for token in ids]
    assert "".join(told) == EMOJI and pieces.end() == ""
    assert {len(piece) for piece in told} == {0, 1}  # never half of one, never held until another comes


def test_incomplete_character_is_released_at_the_end(tokenizer) -> None:
    ids = tokenizer.encode("ok\U0001f44d", add_special_tokens=False)
    pieces = TextPieces(tokenizer)
    told = [pieces.add(token) for token in ids[:-1]]
    assert "".join(told) == "ok"
    assert set(pieces.end()) == {"\ufffd"} and pieces.end() == ""


def test_invalid_bytes_are_released_without_waiting_forever(tokenizer) -> None:
    broken = tokenizer.encode("\U0001f44d", add_special_tokens=False)[1]
    pieces = TextPieces(tokenizer)
    told = [pieces.add(broken) for _ in range(40)]
    assert len("".join(told)) >= 20
    assert pieces.add(tokenizer.encode("x", add_special_tokens=False)[0]).endswith("x")


def test_special_tokens_produce_no_text(tokenizer) -> None:
    ids = tokenizer.encode("one", add_special_tokens=False)
    pieces = TextPieces(tokenizer)
    told = [pieces.add(token) for token in [tokenizer.eos_token_id, *ids, *[tokenizer.eos_token_id] * 20, *ids]]
    assert "".join(told) == "oneone"


def until(text: str, stops: list[str]) -> tuple[str, bool]:
    """The text up to the stop that ends first, letter by letter."""
    for end in range(len(text) + 1):
        if starts := [end - len(stop) for stop in stops if text[:end].endswith(stop)]:
            return text[: min(starts)], True
    return text, False


@pytest.mark.parametrize("seed", range(50))
def test_stop_string_ends_the_text_however_pieces_are_cut(seed: int) -> None:
    draws = random.Random(seed)
    text = "".join(draws.choice("aab.") for _ in range(30))
    stops = ["".join(draws.choice("ab.") for _ in range(draws.randint(2, 5))) for _ in range(draws.randint(1, 4))]
    for size in (1, 2, 3, 7, 30):
        checked, said = StopStrings(stops), ""
        for piece in (text[at : at + size] for at in range(0, len(text), size)):
            said += checked.add(piece)
            assert until(text, stops)[0].startswith(said)  # nothing is let out that had to stay
            if checked.hit:
                break
        said += "" if checked.hit else checked.end()
        assert (said, checked.hit) == until(text, stops), (text, stops, size)


def test_only_beginnings_of_stop_strings_are_held_back() -> None:
    stops = StopStrings(["\n\n"])
    assert [stops.add("a"), stops.add("\n"), stops.add("b\n"), stops.add("\nc")] == ["a", "", "\nb", ""]
    assert stops.hit


def answer_of(tokenizer, text: str, stops: list[str]) -> tuple[str, list[int]]:
    """The text of an answer and the tokens that are told of, whose notes are themselves."""
    answer = AnswerText[int](TextPieces(tokenizer), StopStrings(stops))
    said, told = "", list[int]()
    for token in tokenizer.encode(text, add_special_tokens=False):
        piece, notes = answer.add(token, token)
        said, told = said + piece, told + notes
        if answer.stops.hit:
            return said, told
    piece, notes = answer.end()
    return said + piece, told + notes


def test_tokens_of_a_stop_string_are_never_returned(tokenizer) -> None:
    ids = tokenizer.encode("so \U0001f44d it ends", add_special_tokens=False)
    assert answer_of(tokenizer, "so \U0001f44d it ends", []) == ("so \U0001f44d it ends", ids)
    text, told = answer_of(tokenizer, "so \U0001f44d it ends", ["\U0001f44d it"])
    assert text == "so " and told == tokenizer.encode("so ", add_special_tokens=False)
    text, told = answer_of(tokenizer, "so \U0001f44d it end", ["ends"])
    assert text == "so \U0001f44d it end" and tokenizer.decode(told) == text


def test_prompt_is_rendered_by_the_chat_template(tokenizer) -> None:
    with pytest.raises(Malformed, match="no chat template"):
        Prompts(tokenizer).tokens([{"role": "user", "content": "x"}])
    ids = Prompts(tokenizer, "plain").tokens([{"role": "user", "content": "hi"}])
    assert tokenizer.decode(ids) == "<|user|>\nhi\n<|assistant|>\n"
    assert tokenizer.chat_template is None  # the other thread's is left as it was


def test_refusal_of_the_chat_template_is_passed_on_with_its_message(tokenizer, tmp_path) -> None:
    template = tmp_path / "strict.jinja"
    template.write_text(
        "{%- for message in messages -%}{%- if message['role'] == 'system' -%}"
        "{{ raise_exception('no system here') }}{%- endif -%}{{ message['content'] }}{%- endfor -%}"
    )
    prompts = Prompts(tokenizer, str(template))
    with pytest.raises(Malformed, match="refuses") as refused:
        prompts.tokens([{"role": "system", "content": "x"}, {"role": "user", "content": "y"}])
    assert "no system here" in refused.value.detail


def with_chat_template(tokenizer: Any, words: str) -> Prompts:
    changed = copy.deepcopy(tokenizer)
    changed.chat_template = "{%- for m in messages -%}{{ m.role }}:{{ m.name }}{{ m.content }};{%- endfor -%}" + words
    return Prompts(changed)


def test_developer_role_becomes_system_unless_the_template_knows_it(tokenizer) -> None:
    messages = [{"role": "developer", "content": "a"}, {"role": "user", "content": "b", "name": "bob "}]
    for words, role in (("", "system"), ("{# developer #}", "developer")):
        ids = with_chat_template(tokenizer, words).tokens(messages)
        assert tokenizer.decode(ids) == f"{role}:a;user:bob b;"
    assert messages[0]["role"] == "developer"


def test_reasoning_off_needs_support_of_the_chat_template(tokenizer) -> None:
    asked = [{"role": "user", "content": "b"}]
    plain = with_chat_template(tokenizer, "")
    assert plain.tokens(asked) == plain.tokens(asked, reasoning=False)
    able = with_chat_template(tokenizer, "{%- if enable_thinking is false -%}<think></think>{%- endif -%}")
    assert tokenizer.decode(able.tokens(asked, reasoning=False)).endswith("<think></think>")
    assert not tokenizer.decode(able.tokens(asked)).endswith("<think></think>")
    with pytest.raises(Malformed, match="reasoning_effort"):
        with_chat_template(tokenizer, "<think>").tokens(asked, reasoning=False)


def test_text_pieces_continue_behind_the_prompt(tokenizer) -> None:
    """As where a tokenizer leaves out the blank before the first word."""

    class Words:
        def decode(self, ids: list[int], **_: object) -> str:
            return " ".join(f"w{number}" for number in ids)

    pieces = TextPieces(Words(), [1, 2])
    assert [pieces.add(3), pieces.add(4), pieces.end()] == [" w3", " w4", ""]


def test_text_offsets_refer_to_the_text_as_requested(tokenizer) -> None:
    text = "é<|endoftext|>x"  # the tokenizer puts another special token in front
    prompt = Prompts(tokenizer).completed(text, echo=True)
    assert (prompt.text, list(prompt.offsets)) == (text, [0, 0, 0, 1, 14])
    by_ids = Prompts(tokenizer).completed(prompt.ids, echo=True)
    assert (by_ids.text, list(by_ids.offsets)) == ("<|endoftext|>" + text, [0, 13, 13, 14, 27])
