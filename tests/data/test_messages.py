"""Messages out of the forms in which data sets have them, and what is none of them with its reason."""

from __future__ import annotations

import json

import pytest

from tawpipe.data.messages import KNOWN_ROLES, ROLES, Malformed, read_messages, read_tools

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
def test_all_forms_of_a_chat_are_one(value: object, names: dict[str, str]) -> None:
    assert read_messages(value, names) == PLAIN


def test_other_names_of_roles_stand_for_known_ones_and_no_other_field_is_lost() -> None:
    assert set(ROLES.values()) <= set(KNOWN_ROLES)
    (message,) = read_messages(
        [{"role": "critic", "content": "no", "weight": 0, "name": "x", "tool_call_id": None}], {}
    )
    assert message == {"role": "critic", "content": "no", "weight": 0, "name": "x"}
    assert read_messages(None, {}) == []


@pytest.mark.parametrize(
    "message",
    [
        {"from": "function_call", "value": json.dumps(CALL)},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": CALL}]},
        {"role": "assistant", "tool_calls": [{"function": {**CALL, "arguments": json.dumps(CALL["arguments"])}}]},
        {"role": "assistant", "content": "", "tool_calls": [{**CALL, "arguments": {**CALL["arguments"], "c": None}}]},
    ],
)
def test_calls_of_tools_are_names_with_arguments_as_objects(message: dict) -> None:
    (found,) = read_messages([message], {})
    assert found == {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": CALL}],
    }


@pytest.mark.parametrize(
    ("value", "why", "detail"),
    [
        ("hello", "without a list of messages", "str instead"),
        ([*PLAIN, "hello"], "without messages", "message 3 is of type str"),
        ([{"content": "x"}], "without messages", "message 1 has ['content']"),
        ([{"role": 1, "content": "x"}], "without messages", "message 1"),
        ([{"role": "user", "content": None}], "whose content is no text", "message 1: null"),
        ([{"role": "user", "content": [{"image": "x"}]}], "whose content is no text", "message 1: no text alone"),
        ([{"role": "user", "content": 3}], "whose content is no text", "message 1: int"),
        ([{"role": "assistant", "tool_calls": [{"arguments": {}}]}], "that has no name and arguments", "message 1"),
    ],
)
def test_what_is_no_message_is_named(value: object, why: str, detail: str) -> None:
    with pytest.raises(Malformed) as found:
        read_messages(value, {})
    assert why in found.value.why and detail in found.value.detail


def test_tools_are_schemas_in_one_form() -> None:
    bare = {"name": "add", "parameters": {"type": "object"}}
    known = {"type": "function", "function": bare}
    assert read_tools([known]) == read_tools(json.dumps([known])) == [known]
    assert read_tools([{**bare, "strict": None}]) == [known]
    assert read_tools([{"type": "web_search", "limit": None}]) == [{"type": "web_search"}]  # no function
    assert read_tools(None) is None and read_tools([]) is None and read_tools("") is None
    for wrong in ("add", {"name": "add"}, ["add"]):
        with pytest.raises(Malformed, match="tools are no list"):
            read_tools(wrong)
