"""Messages of a chat as chat templates want them, out of the forms in which data sets have them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

ASSISTANT = "assistant"
CALL = "function_call"
"""ShareGPT's role of a turn whose text is a call of a tool, in JSON."""

ROLES = {
    "human": "user",
    "gpt": ASSISTANT,
    "chatgpt": ASSISTANT,
    "model": ASSISTANT,
    "observation": "tool",
    "function": "tool",
    "function_response": "tool",
    CALL: ASSISTANT,
}
"""Other names of roles."""
KNOWN_ROLES = ("system", "user", ASSISTANT, "tool")

FORM = "messages that are objects with a role and a content"


class Malformed(Exception):
    """A row that has its columns, but not what belongs into them; a reason, and what is special about this row."""

    @property
    def why(self) -> str:
        return self.args[0]

    @property
    def detail(self) -> str:
        return str(self.args[1]) if len(self.args) > 1 else ""


def read_messages(value: object, names: Mapping[str, str]) -> list[dict[str, Any]]:
    """Messages with ``role`` and ``content``, perhaps ``tool_calls`` and ``weight`` (0: an answer that is not learned),
    and whatever else they have but nulls.

    Args:
        names: as ``DataSettings.column_names`` gives them.

    Raises:
        Malformed: there are none of this form.
    """
    value = _of_json(value)
    if value is None:
        return []
    if not isinstance(value, list):
        raise Malformed(f"without a list of {FORM}", f"{type(value).__name__} instead")
    return [_message(number, message, names) for number, message in enumerate(value, 1)]


def _message(number: int, value: object, names: Mapping[str, str]) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise Malformed(f"without {FORM}", f"message {number} is of type {type(value).__name__}")
    keys = {
        name: next((key for key in ([names[name]] if name in names else usual) if key in value), None)
        for name, usual in (("role", ("role", "from")), ("content", ("content", "value")))
    }
    role = value[keys["role"]] if keys["role"] else None
    if not isinstance(role, str):
        raise Malformed(f"without {FORM}", f"message {number} has {sorted(value)}")
    others = {key: field for key, field in value.items() if key not in keys.values() and field is not None}
    message = {"role": ROLES.get(role, role), "content": value[keys["content"]] if keys["content"] else None, **others}
    if role == CALL:
        message |= {"content": "", "tool_calls": message["content"]}
    if calls := message.pop("tool_calls", None):
        message["tool_calls"] = _calls(number, calls)
    message["content"] = _content(number, message)
    if message["role"] == ASSISTANT and message.get("weight", 1) not in (0, 1):
        raise Malformed("with an answer whose weight is other than 0 and 1", f"message {number}: {message['weight']!r}")
    return message


def _content(number: int, message: dict[str, Any]) -> str:
    """The message's text; that of a list of parts, if all of them are text."""
    content = message["content"]
    if content is None and "tool_calls" in message:
        return ""
    if isinstance(content, list) and all(
        isinstance(part, dict) and isinstance(part.get("text"), str) for part in content
    ):
        return "".join(part["text"] for part in content)
    if not isinstance(content, str):
        kind = "null" if content is None else "no text alone" if isinstance(content, list) else type(content).__name__
        raise Malformed("with a message whose content is no text", f"message {number}: {kind}")
    return content


def _calls(number: int, value: object) -> list[dict[str, Any]]:
    """Calls of tools, each a function's name and its arguments as an object."""
    value = _without_nulls(_of_json(value))
    calls = []
    for call in value if isinstance(value, list) else [value]:
        fields: dict[str, Any] = call if isinstance(call, dict) else {}
        function = fields.get("function", fields)
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise Malformed("with a tool call that has no name and arguments", f"message {number}")
        arguments = _of_json(function.get("arguments", {}))
        others = fields if "function" in fields else {}
        calls.append({"type": "function", **others, "function": {**function, "arguments": arguments}})
    return calls


def read_tools(value: object) -> list[dict[str, Any]] | None:
    """The tools' JSON schemas; None where there are none.

    Raises:
        Malformed: they are no list of objects.
    """
    value = _without_nulls(_of_json(value))
    if not value:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise Malformed("whose tools are no list of JSON schemas", f"{type(value).__name__}")
    bare = [tool if "function" not in tool and "name" in tool else None for tool in value]
    return [{"type": "function", "function": spec} if spec else tool for tool, spec in zip(value, bare, strict=True)]


def _of_json(value: object) -> Any:
    """What a text holds that is JSON's list or object; anything else as it is."""
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        try:
            return json.loads(value)
        except ValueError:
            return value
    return value


def _without_nulls(value: Any) -> Any:
    """The same without fields that are null, which tables give to all rows if one row has them."""
    if isinstance(value, dict):
        return {key: _without_nulls(field) for key, field in value.items() if field is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value
