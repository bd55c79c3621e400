"""Odd templates: every answer is learned as it will be asked for, or left out with the reason."""

import json
from typing import Any

import pytest

from chat_families import byte_level
from tawpipe.data.chats.columns import Columns, RawRow
from tawpipe.data.chats.forms import lacking, thought_and_words
from tawpipe.data.chats.render import Document, Renderer
from tawpipe.data.report import Skipped
from tawpipe.data.settings import Answers

SPECIAL = ["<s>", "<u>", "<a>", "<|end|>", "<|stop|>", "<|user|>", "<|bot|>", "<|tool|>"]
CHATML = (
    "{% for m in messages %}{{ '<' + m.role[:1] + '>' + (m.content or '') }}"
    "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}{{ '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)
THINKS = (  # as Nemotron: the thought stands right behind its tag, and the prompt begins one
    "{% for m in messages %}{{ '<' + m.role[:1] + '>' + m.content + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}<a><think>\n{% endif %}"
)
DROPS = (  # as R1: no thoughts, and the prompt begins one
    "{% for m in messages %}{{ '<' + m.role[:1] + '>' + m.content.split('</think>')[-1] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}<a><think>\n{% endif %}"
)
MERGES = (  # as Gemma 4: two answers in a row are one turn
    "{% for m in messages %}{% if not (loop.previtem is defined and loop.previtem.role == m.role) %}"
    "{{ '<' + m.role[:1] + '>' }}{% endif %}{{ m.content }}"
    "{% if loop.last or loop.nextitem.role != m.role %}{{ '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)
MARKERS = (  # as GLM: the next speaker's marker ends a turn
    "{% for m in messages %}{{ {'tool': '<|tool|>', 'assistant': '<|bot|>', 'user': '<|user|>'}[m.role] }}"
    "{{ m.content or '' }}{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}<|bot|>{% endif %}"
)
MARKED = (  # without a generation prompt, two marks in a turn
    "{% for m in messages %}{% if m.role == 'assistant' %}<a>{% generation %}{{ m.reasoning_content or '' }}"
    "{% endgeneration %}:{% generation %}{{ m.content }}{% endgeneration %}<|end|>"
    "{% else %}<u>{{ m.content }}{% endif %}{% endfor %}"
)
ASK, SAID = {"role": "user", "content": "q"}, {"role": "assistant", "content": "nine"}
CALL = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "look", "arguments": {"a": "fen"}}}]}


def rendered(template: str | dict[str, str], *messages: dict, answers: Answers = "each", **columns: Any) -> list[Any]:
    tokenizer = byte_level("", SPECIAL, eos_token="<|stop|>")
    tokenizer.chat_template = template  # pyright: ignore[reportAttributeAccessIssue]
    row = Columns().row("here", {"messages": list(messages), **columns})
    assert isinstance(row, RawRow)
    return Renderer(tokenizer, as_chat=bool(tokenizer.chat_template), answers=answers).render(row)


def learned(template: str, *messages: dict, **settings: Any) -> list[str]:
    """Every learned piece, in the order of the chat; it stands behind the prompt of an assistant."""
    documents = [each for each in rendered(template, *messages, **settings) if isinstance(each, Document)]
    return [piece.text for document in documents[::-1] for piece in document.pieces if piece.counts]


def said(template: str | dict[str, str], *messages: dict, **settings: Any) -> str:
    left = [each for each in rendered(template, *messages, **settings) if isinstance(each, Skipped)]
    return "\n".join(f"{each.kind}: {each}" for each in left)


@pytest.mark.parametrize(
    ("template", "answer", "expected"),
    [
        (THINKS, {"content": "<think>Sum.</think>4"}, "Sum.</think>4<|end|>"),
        (THINKS, {"content": "<think>\nSum.\n</think>\n\n4"}, "Sum.\n</think>\n\n4<|end|>"),
        (DROPS, {"content": "<think>Sum.</think>4"}, "Sum.</think>4<|end|>"),
        (DROPS, {"content": "<think></think>4"}, "</think>4<|end|>"),
        (DROPS, {"content": "Sum.\n</think>\n\n4"}, "Sum.\n</think>\n\n4<|end|>"),
        (DROPS, {"content": "4", "reasoning": "Sum."}, "Sum.\n</think>\n\n4<|end|>"),
    ],
)
def test_thought_is_learned_once_behind_a_prompt_that_begins_it(template, answer, expected):
    (document,) = rendered(template, ASK, {"role": "assistant", **answer})
    assert [piece.text for piece in document.pieces] == ["<u>q<|end|><a><think>\n", expected]


def test_answer_without_the_thought_begun_by_the_prompt_is_left_out():
    assert "lacks a thought, although the prompt begins one (<think>)" in said(DROPS, ASK, SAID)
    assert learned(DROPS, ASK, SAID, answers="shown") == ["nine<|end|>"]
    words = {"role": "assistant", "content": "write `</think>` last", "reasoning_content": "Hm."}
    assert "leaves out or changes" in said(DROPS, ASK, words)


def test_two_answers_in_a_row_are_learned_at_most_once_each():
    assert learned(CHATML, ASK, SAID, {**SAID, "content": "ten"}) == ["nine<|end|>", "ten<|end|>"]
    outcome = said(MERGES, ASK, SAID, {**SAID, "content": "ten"})
    assert "behind no prompt" in outcome and "message 3" in outcome


def test_turn_ends_with_the_marker_of_the_next_speaker():
    chat = [ASK, SAID, ASK, CALL, {"role": "tool", "content": "wet"}, {**SAID, "content": "ten"}]
    expected = ["nine<|user|>", '{"name": "look", "arguments": {"a": "fen"}}<|tool|>', "ten<|user|>"]
    assert learned(MARKERS, *chat) == learned(MARKERS, *chat, answers="shown") == expected


def test_turn_ends_with_the_end_of_text_if_the_template_has_no_end_token():
    plain = "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
    plain += "{% if add_generation_prompt %}assistant: {% endif %}"
    assert learned(plain, ASK, SAID, ASK, {**SAID, "content": "ten"}) == ["nine\n<|stop|>", "ten\n<|stop|>"]


def test_generation_marks_select_learned_text_without_a_generation_prompt():
    both = {**SAID, "reasoning_content": "hm"}
    assert learned(MARKED, ASK, SAID, ASK, both) == [":nine", "hm:nine"]


def test_turns_that_the_template_does_not_show_are_reported():
    sees_users = (
        "{% for m in messages %}{% if m.role in ('user', 'assistant') %}{{ '<' + m.role[:1] + '>' + m.content }}"
        "{{ '<|end|>' }}{% endif %}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
    )
    answer = {**SAID, "content": "It is 42."}
    assert "leaves out (of the role tool)" in said(sees_users, ASK, {"role": "tool", "content": "42"}, answer)
    assert "words or calls before the last answer" in said(sees_users, ASK, {**CALL, "weight": 0}, ASK, SAID)
    assert "with tools of a message" in said(CHATML, ASK, {**ASK, "tools": [{"name": "look"}]}, SAID)
    assert "with an empty answer" in said(CHATML, ASK, {**SAID, "content": " "})
    assert "with turns at the end that no answer follows" in said(CHATML, ASK, SAID, ASK)
    assert not said(CHATML, ASK, SAID, {**SAID, "weight": 0})


def test_field_counts_as_read_only_if_the_template_shows_it():
    named = CHATML.replace("(m.content or '')", "(m.name or '') + m.content")
    assert not said(named, {**ASK, "name": "Ann"}, SAID)
    prose = CHATML + "{# the name of the user #}"
    assert "neither learned nor shown" in said(prose, {**ASK, "name": "Ann"}, SAID)


def test_special_token_within_an_answer_is_reported():
    assert "with a special token in the text" in said(CHATML, ASK, {**SAID, "content": "one<|end|>two"})
    assert not said(CHATML, ASK, {**SAID, "content": "one<end>two"})


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ({"content": "<think>hm</think>\n\nyes"}, ("hm", "yes")),
        ({"content": "hm</think>yes"}, ("hm", "yes")),
        ({"content": "write </think> last", "reasoning_content": "hm"}, ("hm", "write </think> last")),
        ({"content": "a <think> b </think> c"}, ("", "a <think> b </think> c")),
        ({"content": None, "thinking": "hm"}, ("hm", "")),
    ],
)
def test_thought_is_separated_from_the_answer(message, expected):
    assert thought_and_words(message) == expected


def test_lacking_finds_missing_parts_of_a_rendered_tool_call():
    call = {"function": {"name": "f", "arguments": '{"a": ["x\\ny", 7], "b": {"c": "\u00e9"}}'}}
    whole = json.dumps({"name": "f", "arguments": {"a": ["x\ny", 7], "b": {"c": "\u00e9"}}})
    assert not lacking(call, whole)
    for part in ("f", "x", "7", "c"):
        assert lacking(call, whole.replace(part, "_"))


def test_failing_templates_are_reported():
    assert "division" in said("{{ 1 / 0 }}" + CHATML, ASK, SAID)
    assert "refuses" in said({"tool_use": CHATML}, ASK, SAID)


def test_answers_last_learns_only_the_last_answer():
    ten = {**SAID, "content": "ten"}
    assert learned(CHATML, ASK, SAID, ASK, ten, answers="last") == ["ten<|end|>"]
    assert learned(CHATML, ASK, SAID, ASK, {**ten, "weight": 0}, answers="last") == ["nine<|end|>"]


@pytest.mark.parametrize("text", ["it's", 'it\'s "so"', "a\\b's"])
def test_tool_call_that_the_template_writes_as_python_is_learned(text):
    escaped = r"""replace("\\", "\\\\") | replace("'", "\\'")"""
    python = CHATML.replace("c.function | tojson", f"""'look(a=\\'' + c.function.arguments.a | {escaped} + '\\')'""")
    call = {**CALL, "tool_calls": [{"function": {"name": "look", "arguments": {"a": text}}}]}
    written = text.replace("\\", "\\\\").replace("'", "\\'")
    assert learned(python, ASK, call) == [f"look(a='{written}')<|end|>"]


def test_answers_shown_ends_at_the_next_turn_if_markers_are_plain_text():
    plain = "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
    plain += "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    chat = [ASK, SAID, {**ASK, "content": "and?"}, {**SAID, "content": "ten"}]
    assert learned(plain, *chat, answers="shown") == ["nine", "ten\n<|stop|>"]
    assert "without a token to stop at (message 2)" in said(plain, *chat, answers="shown")
