"""Forms of messages that chat templates expect, and search for the words and calls of a turn in rendered text."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any

Message = Mapping[str, Any]

OF_SCHEMAS = {
    *("type", "function", "name", "description", "parameters", "properties", "required", "items", "enum", "strict"),
    *("default", "additionalProperties", "$schema", "anyOf", "oneOf", "allOf", "$ref", "$defs", "definitions"),
    *("object", "string", "number", "integer", "boolean", "array", "null"),
}
"""Words of JSON schemas, which templates may render differently."""
SHOWN_AS = ("reasoning_content", "reasoning", "thinking")
"""Fields in which templates look for the thought of a turn."""


def forms(template: str, messages: Sequence[Message]) -> Iterator[list[Message]]:
    """Yield the messages in the forms that a template may expect.

    Thoughts are stored under the name that the template reads. If there are tool calls, four forms are tried: arguments
    as an object or as JSON text, and missing content beside a call as an empty text or as null.
    """
    reads = next((name for name in SHOWN_AS if re.search(rf"[.'\"]{name}\b", template)), SHOWN_AS[0])
    roles = {} if re.search(r"['\"]developer['\"]", template) else {"developer": "system"}

    def form(message: Message, as_text: bool, as_null: bool) -> Message:
        """Return a copy of ``message`` with its role, thought and tool calls as a template may expect them.

        Args:
            message: message in the form of ``read_messages``.
            as_text: True for arguments of tool calls as JSON text, False for objects.
            as_null: True for None as missing content beside tool calls, False for an empty text.
        """
        changed = {**message, "role": roles.get(message["role"], message["role"])}
        thought = changed.pop("reasoning_content", None)
        if thought:
            changed[reads] = thought
        if calls := changed.get("tool_calls"):
            changed["tool_calls"] = [_with_arguments(call, as_text=as_text) for call in calls]
            changed["content"] = changed["content"] or (None if as_null else "")
        return changed

    if not any(message.get("tool_calls") for message in messages):
        yield [form(message, False, False) for message in messages]
        return
    for as_null, as_text in product((False, True), repeat=2):
        yield [form(message, as_text, as_null) for message in messages]


def without_thought(message: Message) -> Message:
    """Return the message without its thought, in fields and in tags."""
    changed = {key: value for key, value in message.items() if key not in SHOWN_AS}
    return changed if message["content"] is None else {**changed, "content": thought_and_words(message)[1]}


def _with_arguments(call: Message, *, as_text: bool) -> Message:
    """Return the call with its arguments as JSON text or as an object."""
    arguments = call["function"].get("arguments") or {}
    if as_text and not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    elif not as_text and isinstance(arguments, str):
        with contextlib.suppress(ValueError):
            arguments = json.loads(arguments)
    return {**call, "function": {**call["function"], "arguments": arguments}}


def thought_and_words(message: Message) -> tuple[str, str]:
    """Return the thought of a turn, from its field or from tags, and the rest of its content; both may be ``""``."""
    content = message["content"] or ""
    field = next((message[name] for name in SHOWN_AS if message.get(name)), "")
    tagged, close, words = content.partition("</think>")
    if close and (tagged.lstrip().startswith("<think>") or not (field or "<think>" in tagged)):
        return (field or tagged.lstrip().removeprefix("<think>")).strip(), words.strip()
    return field.strip(), content.strip()


def _leaves(call: Message) -> Iterator[str]:
    """Yield the name of a call, and the keys, texts and numbers of its arguments."""
    function = call["function"]
    waiting: list[Any] = [function["name"], function.get("arguments")]
    if isinstance(waiting[1], str):
        with contextlib.suppress(ValueError):
            waiting[1] = json.loads(waiting[1])
    while waiting:
        value = waiting.pop(0)
        if isinstance(value, Mapping):
            waiting[:0] = [part for item in value.items() for part in item]
        elif isinstance(value, list):
            waiting[:0] = value
        elif isinstance(value, (str, int, float)) and not isinstance(value, bool):
            yield str(value).strip()


def lacking(call: Message, text: str) -> str:
    """Return the first name, key or value of a call that ``text`` lacks, or ``""``."""
    return next((leaf for leaf in _leaves(call) if not any(form in text for form in spelled(leaf))), "")


def parts_of(tools: Any) -> Iterator[tuple[str, str]]:
    """Yield the place and the text of each name and line in tool definitions, except words of JSON schemas."""
    waiting: list[tuple[str, Any]] = [("tools", tools)]
    while waiting:
        place, value = waiting.pop(0)
        if isinstance(value, Mapping):
            waiting += [(f"{place}.{name}", item) for name, item in value.items()]
            yield from ((f"{place}.{name}", name) for name in value if name not in OF_SCHEMAS)
        elif isinstance(value, list):
            waiting += [(place, item) for item in value]
        elif isinstance(value, str):
            lines = map(str.strip, value.splitlines())
            yield from ((place, line) for line in lines if line and line not in OF_SCHEMAS)


def spelled(text: str) -> tuple[str, ...]:
    """Return the spellings of a text in a template: unchanged, as in JSON, or as in Python."""
    quoted = text.replace("\\", "\\\\").replace("'", "\\'")
    return text, json.dumps(text)[1:-1], json.dumps(text, ensure_ascii=False)[1:-1], quoted


def end_of_words(message: Message, text: str, begin: int) -> int:
    """Return the index in ``text`` after the words and calls of a turn that begins at ``begin``.

    Words or names that ``text`` lacks are passed over."""
    leaves = [
        thought_and_words(message)[1],
        *(leaf for call in message.get("tool_calls") or [] for leaf in _leaves(call)),
    ]
    end = begin
    for leaf in leaves:
        places = [(place, len(form)) for form in spelled(leaf) if (place := text.find(form, end)) >= 0]
        end = sum(min(places)) if places else end
    return end
