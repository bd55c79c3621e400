"""Messages out of the forms in which data sets have them, and what is none of them with its reason."""

from __future__ import annotations

import json

import pytest

from tawpipe.data.chats.messages import KNOWN_ROLES, ROLES, Malformed, read_messages, read_tools

PLAIN = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
CALL = {"name": "add", "arguments": {"a": 2, "b": 2}}


@pytest.mark.parametrize(
    ("value", "names"),
    [
        (PLAIN, {}),
        (json.dumps(PLAIN), {}),
        ([{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}], {}),
        ([{"by": "user", "words": "2+2?"}, {"by": "model", "words": "4"}], {"role": "by", "content": "words"}),
        ([{"role": "user", "content": [{"text": "2+"}, {"text": "2?"}]}, {**PLAIN[1], "weight": None}], {}),
    ],
)
def test_all_forms_of_a_chat_are_read_alike(value: object, names: dict[str, str]) -> None:
    assert read_messages(value, names) == PLAIN


def test_role_aliases_map_to_known_roles_and_other_fields_are_kept() -> None:
    assert set(ROLES.values()) <= set(KNOWN_ROLES)
    (message,) = read_messages(
        [{"role": "critic", "content": "no", "weight": 0, "name": "x", "tool_call_id": None}], {}
    )
    assert message == {"role": "critic", "content": "no", "name": "x", "tool_call_id": None}
    assert read_messages(None, {}) == []


ARGUMENTS = CALL["arguments"]
TEXT = json.dumps(ARGUMENTS)
NULL = {**CALL["arguments"], "c": None}


@pytest.mark.parametrize(
    ("message", "content", "arguments"),
    [
        ({"from": "function_call", "value": json.dumps(CALL)}, "", ARGUMENTS),
        ({"role": "tool_call", "content": json.dumps([CALL])}, "", ARGUMENTS),
        ({"role": "assistant", "content": None, "tool_calls": [CALL]}, None, ARGUMENTS),
        ({"role": "assistant", "content": "I add.", "function_call": {**CALL, "arguments": TEXT}}, "I add.", TEXT),
        ({"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": CALL}]}, "", ARGUMENTS),
        ({"role": "assistant", "tool_calls": [{"function": {**CALL, "arguments": TEXT}}]}, None, TEXT),
        ({"role": "assistant", "content": "", "tool_calls": [{**CALL, "arguments": NULL}]}, "", NULL),
        ({"role": "assistant", "content": "", "tool_calls": [{"name": "add", "parameters": NULL}]}, "", NULL),
        ({"role": "assistant", "tool_calls": [CALL], "function_call": {**CALL, "arguments": TEXT}}, None, ARGUMENTS),
        ({"role": "assistant", "content": [{"type": "tool_call", "value": json.dumps(CALL)}]}, "", ARGUMENTS),
    ],
)  # fmt: skip
def test_tool_calls_keep_their_arguments_as_given(message: dict, content: str, arguments) -> None:
    assert read_messages([message], {}) == [
        {
            "role": "assistant",
            "content": content,
            "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": arguments}}],
        }
    ]


@pytest.mark.parametrize(
    ("value", "why", "detail"),
    [
        ("hello", "without a list of messages", "str instead"),
        ([*PLAIN, "hello"], "without messages", "message 3 is of type str"),
        ([{"content": "x"}], "without messages", "message 1 has ['content']"),
        ([{"role": 1, "content": "x"}], "without messages", "message 1"),
        ([{"role": "user", "content": None}], "whose content is neither a text nor a list of parts", "message 1: null"),
        (
            [{"role": "user", "content": [{"image": "x"}]}],
            "chats with text only; --ignore-columns image",
            "message 1: 'image'",
        ),
        (
            [{"role": "user", "content": [{"type": "tool_use"}]}],
            "type is none of reasoning, thin",
            "message 1: 'tool_use'",
        ),
        ([{"role": "user", "content": [{"type": "text"}]}], "holds no text in 'text' or 'value'", "message 1: {'type'"),
        ([{"role": "user", "content": ["x"]}], "holds no text in 'text' or 'value'", "message 1: 'x'"),
        ([{"role": "user", "content": 3}], "whose content is neither a text nor a list of parts", "message 1: int"),
        ([{"role": "assistant", "tool_calls": [{"arguments": {}}]}], "that has no name and arguments", "message 1"),
    ],
)
def test_malformed_messages_are_named(value: object, why: str, detail: str) -> None:
    with pytest.raises(Malformed) as found:
        read_messages(value, {})
    assert why in found.value.why and detail in found.value.detail


def test_tools_are_read_into_one_schema_form() -> None:
    bare = {"name": "add", "parameters": {"type": "object"}}
    known = {"type": "function", "function": bare}
    assert read_tools([known]) == read_tools(json.dumps([known])) == [known]
    assert read_tools([{**bare, "strict": None}]) == [{**known, "function": {**bare, "strict": None}}]
    assert read_tools([{"type": "web_search", "limit": None}]) == [{"type": "web_search", "limit": None}]  # no function
    assert read_tools(None) is None and read_tools([]) is None and read_tools("") is None
    schema = {"type": "object", "properties": {"a": {"type": "number"}}}
    assert read_tools([{"name": "add", "input_schema": schema}]) == read_tools([{"name": "add", "parameters": schema}])
    for wrong in ("add", {"name": "add"}, ["add"]):
        with pytest.raises(Malformed, match="tools are no list"):
            read_tools(wrong)


THINKS = {"reasoning_content": "Sum.", "content": "<think>\nSum.\n</think>\n\nFour."}
IN_TAGS = f"I add.\n<tool_call>\n{json.dumps(CALL)}\n</tool_call>"


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (THINKS, {"content": "Four.", "reasoning_content": "Sum."}),
        ({**THINKS, "reasoning_content": None, "thinking": "Sum."}, {"content": "Four.", "reasoning_content": "Sum."}),
        ({"content": "<think></think>Four.", "thought": "Sum."}, {"content": "Four.", "reasoning_content": "Sum."}),
        ({"content": THINKS["content"]}, {"content": THINKS["content"]}),
        ({"content": IN_TAGS}, {"content": IN_TAGS}),
    ],
)
def test_thought_in_a_field_and_in_tags_is_read_once(message: dict, expected: dict) -> None:
    (found,) = read_messages([{"role": "assistant", **message}], {})
    assert found == {"role": "assistant", **expected}


def test_tool_call_in_a_field_and_in_tags_is_read_once() -> None:
    (found,) = read_messages([{"role": "assistant", "content": IN_TAGS, "tool_calls": [CALL]}], {})
    assert found["content"] == "I add." and [call["function"]["name"] for call in found["tool_calls"]] == ["add"]


@pytest.mark.parametrize(
    ("message", "why"),
    [
        ({**THINKS, "reasoning_content": "Guess."}, "different values in 'reasoning_content' and '<think> in the cont"),
        ({"content": IN_TAGS, "tool_calls": [{**CALL, "name": "sub"}]}, "different values in 'tool_calls' and '<too"),
        ({"content": "", "tool_calls": [{**CALL, "arguments": '{"a": 1'}]}, "arguments begin like JSON and are none"),
        (
            {"content": "", "tool_calls": [{**CALL, "arguments": '{"a": 1, "a": 2}'}]},
            "JSON in a text that is ambiguous",
        ),
    ],
)
def test_contradicting_or_broken_values_make_a_turn_malformed(message: dict, why: str) -> None:
    with pytest.raises(Malformed) as found:
        read_messages([{"role": "assistant", **message}], {})
    assert why in found.value.why and "message 1" in found.value.detail


def test_duplicate_json_key_in_messages_is_named() -> None:
    twice = '[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "content": "c"}]'
    with pytest.raises(Malformed, match=r"ambiguous.*'content' stands twice"):
        read_messages(twice, {})
