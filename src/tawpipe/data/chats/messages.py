"""Messages of a chat: converted from the forms in data sets to the form that chat templates expect."""

from __future__ import annotations

import json
import re
import reprlib
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any

ASSISTANT = "assistant"
CALL_ROLES = ("function_call", "tool_call")
"""Roles of a turn whose text is a tool call in JSON, or a list of calls, as in ShareGPT and ms-swift."""

ROLES = {
    "human": "user",
    "gpt": ASSISTANT,
    "chatgpt": ASSISTANT,
    "bot": ASSISTANT,
    "ai": ASSISTANT,
    "model": ASSISTANT,
    "observation": "tool",
    "function": "tool",
    "function_response": "tool",
    "tool_response": "tool",
    "ipython": "tool",
    **dict.fromkeys(CALL_ROLES, ASSISTANT),
}
"""Other names of roles, with the usual name of each."""
KNOWN_ROLES = ("system", "user", ASSISTANT, "tool")
SYSTEM_ROLES = ("system", "developer")

FIELDS = {"role": ("role", "from"), "content": ("content", "value")}
"""Fields of a message, and their names in data sets."""

THOUGHT = "reasoning_content"
THOUGHTS = (THOUGHT, "reasoning", "thinking", "thought", "thoughts", "think")
"""Names of the field with a turn's thought; returned messages use the first one."""

MARKS = ("weight", "loss", "train", "training", "trainable", "loss_mask", "loss_weight")
"""Names of the mark that decides whether a turn is learned; returned messages use the first one."""

PARTS = {
    **dict.fromkeys(("reasoning", "thinking"), ("thought", ("reasoning", "thinking", "text", "value"))),
    **dict.fromkeys(("text", "input_text", "output_text"), ("text", ("text", "value"))),
    "tool_call": ("call", ("tool_call", "value", "text")),
}
"""Use of a content part by its type, and the fields that may hold its text."""
CALL = (("name",), ("arguments", "parameters", "args", "input"))
"""Fields of a call: names for its name, and names for its arguments."""

TAGGED = re.compile(r"\s*<think>(.*?)</think>\s*", re.DOTALL)
CALLED = re.compile(r"\s*<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
"""Patterns of a thought and of a call in the words of a turn."""

USES = ("thought", "text", "call")
"""Uses of content parts in the order in which a turn has them."""

MEDIA = frozenset({"image", "images", "img", "imgs", "video", "videos", "audio", "audios"})
"""Words in names of columns and parts that hold something other than text."""

TRUTHS = {"true": True, "yes": True, "1": True, "1.0": True, 1: True}
TRUTHS |= {"false": False, "no": False, "0": False, "0.0": False, 0: False}
"""Truth values of words and numbers; fields of csv files are words."""

EMPTY = (None, "", [], {})
"""Values of an empty column or field; tables give every row the columns of all rows."""

RESERVED = frozenset({"conversation", "messages", "tools", "chat_template", "add_generation_prompt", "tokenize"})
"""Names that a row must not set as variables of a chat template."""

FORM = "messages that are objects with a role and a content"


class Malformed(Exception):
    """Error about a row whose columns have wrong content: a reason, and details of this row."""

    def __init__(self, why: str, detail: str = "") -> None:
        super().__init__(*filter(None, (why, detail)))
        self.why, self.detail = why, detail


class Untrainable(Malformed):
    """Error about a row which shows that its data set cannot be trained on unchanged."""


def read_messages(value: object, names: Mapping[str, str], ignored: Collection[str] = ()) -> list[dict[str, Any]]:
    """Return the messages of a chat in one form.

    A message has ``role`` and ``content``. The content is a text, or None beside ``tool_calls`` of the assistant. A
    message may have ``tool_calls`` in OpenAI's nested form, ``reasoning_content``, and ``weight`` (0 for an answer that
    is not learned). All other fields are unchanged. A field of a content part is named ``content.NAME``. A turn that is
    a call is joined to the assistant's message before it.

    Args:
        value: messages, as a list, an object of lists, or JSON text.
        names: result of ``DataSettings.column_names``.
        ignored: types of content parts to leave out.

    Raises:
        Malformed: the value has another form, or two fields for one use differ.
        Untrainable: there are images, audio or video.
    """
    value = _of_json(value)
    if value is None:
        return []
    if isinstance(value, dict):
        value = _turns(value)
    if not isinstance(value, list):
        kind = f"an object with {sorted(value)}" if isinstance(value, dict) else type(value).__name__
        raise Malformed(f"without a list of {FORM}", f"{kind} instead")
    messages = list[dict[str, Any]]()
    roles = (names["role"],) if "role" in names else FIELDS["role"]
    for number, item in enumerate(value, 1):
        if not isinstance(item, dict) or not any(isinstance(item.get(name), str) for name in roles):
            kind = f"has {sorted(item)}" if isinstance(item, dict) else f"is of type {type(item).__name__}"
            raise Malformed(f"without {FORM}", f"message {number} {kind}")
        try:
            message, is_call = _message(item, names, ignored)
        except Malformed as error:
            raise type(error)(error.why, f"message {number}: {error.detail}".rstrip(": ")) from error
        last = messages[-1] if messages else {}
        compared = {*message, MARKS[0]} - {"content", "tool_calls"}
        if is_call and all(last.get(key) == message.get(key) for key in compared):  # calls of one turn
            messages[-1] = last | {"tool_calls": [*last.get("tool_calls", []), *message["tool_calls"]]}
        else:
            messages.append(message)
    return messages


def _turns(fields: dict[str, Any]) -> object:
    """Return the turns of an object whose fields are lists with one item per turn; any other object unchanged.

    A null in a list means that the turn lacks the field.
    """
    lists = {name: items for name, items in fields.items() if items is not None}
    if len({len(items) if isinstance(items, list) else -1 for items in lists.values()} | {-1}) != 2:
        return fields
    turns = zip(*lists.values(), strict=True)
    return [{name: item for name, item in zip(lists, turn, strict=True) if item is not None} for turn in turns]


def _message(value: dict[str, Any], names: Mapping[str, str], ignored: Collection[str]) -> tuple[dict[str, Any], bool]:
    """Return a message in the common form, and True if its role says that its content is a call."""
    fields, taken = dict(value), dict[str, Any]()
    shown = [name for name, field in value.items() if field not in EMPTY and not isinstance(field, int | float)]
    _refuse_media(shown, ignored)
    for name, usual in FIELDS.items():
        named = names.get(name)
        taken[name] = only(_popped(fields, (named,) if named else usual), _known_role)
        if name in fields:  # not the one in --columns
            fields[f"{name} beside {named}"] = fields.pop(name)
    role, content, is_call = _known_role(taken["role"]), taken["content"], taken["role"] in CALL_ROLES
    parts_by_use: dict[str, list[Any]] = {use: [] for use in USES}
    if isinstance(content, list) or is_call:
        for part in [{"type": "tool_call", "value": content}] if is_call else content:
            fields |= _read_part(part, ignored, parts_by_use)
        content = "".join(parts_by_use["text"])
    calls = _popped(fields, ("tool_calls", "function_call"))
    calls = {name: _calls(some) for name, some in calls.items() if some} | {"content": parts_by_use["call"]}
    thoughts = _popped(fields, THOUGHTS) | {"a part of the content": "".join(parts_by_use["thought"])}
    if isinstance(content, str) and role == ASSISTANT:
        content = _without_copies(content, thoughts, calls)
    message = {"role": role, "content": content}
    if called := only(calls, meant_calls):
        message["tool_calls"] = called
    if thought := only(thoughts, lambda some: some.strip() if isinstance(some, str) else some):
        if not isinstance(thought, str):
            raise Malformed("with a thought that is no text", reprlib.repr(thought))
        message[THOUGHT] = thought
    message |= _weight(role, fields)
    if not isinstance(content, str) and not (content is None and called and role == ASSISTANT):
        kind = f"null in {sorted(value)}" if content is None else type(content).__name__
        why = "with a message whose content is neither a text nor a list of parts"
        raise Malformed(f"{why} (--columns content=NAME names another field)", kind)
    return message | fields, is_call


def _without_copies(content: str, thoughts: dict[str, Any], calls: dict[str, list[dict[str, Any]]]) -> str:
    """Return ``content`` without a thought or calls in tags, if fields hold a thought or calls as well.

    What was removed is added to ``thoughts`` or ``calls`` as one more source.
    """
    if any(thoughts.values()) and (tagged := TAGGED.match(content)):
        thoughts["<think> in the content"] = tagged[1].strip()
        content = content[tagged.end() :]
    if any(calls.values()) and (texts := CALLED.findall(content)):
        calls["<tool_call> in the content"] = [call for text in texts for call in _calls(text)]
        content = CALLED.sub("", content)
    return content


def _read_part(part: object, ignored: Collection[str], parts_by_use: dict[str, list[Any]]) -> dict[str, Any]:
    """Append the text or calls of a content part to the list in ``parts_by_use`` for its use; return its other fields.

    These fields are named ``content.NAME``. A part whose type is in ``ignored`` adds nothing and returns ``{}``.

    Args:
        part: the part.
        ignored: types of parts to leave out.
        parts_by_use: texts and calls of the message so far, by use (``USES``).

    Raises:
        Malformed: the part has an unknown type, no text, or is in a wrong order.
        Untrainable: the part is an image, audio or video.
    """
    fields = {name: field for name, field in part.items() if field is not None} if isinstance(part, dict) else {}
    kind = str(fields.pop("type", None) or next((name for name in fields if words(name) & MEDIA), "text"))
    _refuse_media([kind], ignored)
    if kind in ignored:
        return {}
    if kind not in PARTS:
        raise Malformed(f"with a part of a content whose type is none of {', '.join(PARTS)}", repr(kind))
    use, names = PARTS[kind]
    text = only(_popped(fields, names))
    if use == "call":
        parts_by_use[use] += _calls(fields if text is None else text)
        return {}
    if not isinstance(text, str):
        names = " or ".join(map(repr, names))
        raise Malformed(f"with a part of a content that holds no text in {names}", reprlib.repr(part))
    if any(parts_by_use[later] for later in USES[USES.index(use) + 1 :]):
        raise Malformed(f"with parts of a content in another order than {', '.join(USES)}")
    parts_by_use[use].append(text)
    return {f"content.{name}": field for name, field in fields.items() if field not in EMPTY}


def _refuse_media(names: Collection[str], ignored: Collection[str]) -> None:
    """Raise Untrainable if a name stands for images, audio or video and is not ignored."""
    for name in names:
        if words(name) & MEDIA and name not in ignored:
            raise Untrainable(f"chats with text only; --ignore-columns {name} leaves these parts out", repr(name))


def _calls(value: object) -> list[dict[str, Any]]:
    """Return tool calls in OpenAI's nested form, with their arguments as they were given.

    Raises:
        Malformed: a call has no name, or its arguments are not valid.
    """
    value, calls = _of_json(value), []
    for call in value if isinstance(value, list) else [value]:
        outer = dict(call) if isinstance(call, dict) else {}
        inner = dict(inner) if isinstance(inner := outer.pop("function", None), dict) else {}
        name, arguments = (
            only({f"function.{key}": inner.pop(key, None) for key in keys} | _popped(outer, keys), _of_json)
            for keys in CALL
        )
        arguments = {} if arguments is None else arguments
        if isinstance(arguments, str) and arguments.lstrip()[:1] == "{" and _of_json(arguments) is arguments:
            raise Malformed("with a tool call whose arguments begin like JSON and are none", reprlib.repr(arguments))
        if not isinstance(name, str) or not isinstance(arguments, dict | str):
            expected = "with a tool call that has no name and arguments as an object or a text"
            raise Malformed(expected, reprlib.repr(call))
        function = {"name": name, "arguments": arguments, **inner}
        calls.append({**outer, "type": outer.get("type") or "function", "function": function})
    return calls


def _weight(role: str, fields: dict[str, Any]) -> dict[str, Any]:
    """Remove the learning marks of a message from ``fields``, and return ``{"weight": 0 or 1}``, or ``{}`` without any.

    For roles other than the assistant, the marks are returned unchanged if they ask to learn, else ``{}``.

    Raises:
        Malformed: the mark is neither true nor false, or two marks differ.
    """
    marks = _popped(fields, MARKS)
    mark = only(marks, truth)
    learns = truth(mark)
    if mark not in EMPTY and learns is None:
        detail = ", ".join(f"{name}={value!r}" for name, value in marks.items())
        raise Malformed("with a learning mark other than 0, 1, true or false", detail)
    if role != ASSISTANT:
        return marks if learns else {}
    return {} if learns is None else {MARKS[0]: int(learns)}


def read_tools(value: object) -> list[dict[str, Any]] | None:
    """Return the JSON schemas of the tools; None if there are none.

    Raises:
        Malformed: they are not a list of objects.
    """
    value = _of_json(value)
    if not value:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise Malformed("whose tools are no list of JSON schemas", type(value).__name__)
    tools = list[dict[str, Any]]()
    for tool in value:
        if "function" not in tool and "name" in tool:
            spec = {"parameters" if key == "input_schema" else key: field for key, field in tool.items()}  # Anthropic's
            tools.append({"type": "function", "function": tool if "parameters" in tool else spec})
        else:
            tools.append(tool)
    return tools


def read_options(value: object) -> dict[str, Any]:
    """Return the variables for a chat template; empty if there are none.

    Raises:
        Malformed: they are not an object, or set variables that rendering sets.
    """
    value = _of_json(value) or {}
    if not isinstance(value, dict) or RESERVED & value.keys():
        raise Malformed("whose chat_template_kwargs are no object of a template's variables", reprlib.repr(value))
    return value


def only(sources: Mapping[str, Any], same: Callable[[Any], object] = lambda value: value) -> Any:
    """Return the value of the non-empty sources, which must be equal; None if there is no source.

    Args:
        sources: values of columns or fields for one use, by their names.
        same: returns a value that is equal for all values of one meaning.

    Raises:
        Malformed: two of them differ.
    """
    filled = {name: value for name, value in sources.items() if value not in EMPTY}
    if not filled:
        return next((value for value in sources.values() if value is not None), None)
    (first, value), *others = filled.items()
    for name, other in others:
        if same(other) != same(value):
            why = f"with different values in {first!r} and {name!r}"
            raise Malformed(why, f"{reprlib.repr(value)} and {reprlib.repr(other)}")
    return value


def truth(value: object) -> bool | None:
    """Return the truth value of a boolean, number or word; None if it is neither true nor false."""
    word = value.strip().lower() if isinstance(value, str) else value
    return TRUTHS.get(word) if isinstance(word, str | int | float) else None


@lru_cache(maxsize=10_000)
def words(name: str) -> frozenset[str]:
    """Return the lower-case words of a name, separated by signs or capital letters."""
    return frozenset(re.findall("[a-z]+", re.sub("(?<=[a-z])(?=[A-Z])", "_", name).lower()))


def without_nulls(value: Any) -> Any:
    """Return the value without null fields, which an Arrow table gives to all rows if one row has the field."""
    if isinstance(value, dict):
        return {key: without_nulls(field) for key, field in value.items() if field is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


def _popped(fields: dict[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Remove the fields ``names`` from ``fields`` and return them."""
    return {name: fields.pop(name) for name in names if name in fields}


def _known_role(role: Any) -> Any:
    """Return the usual name of a role: ``user`` for ``human``, lower case for a known name.

    An unknown name, or a value that is no text, is returned unchanged."""
    if not isinstance(role, str):
        return role
    lower = role.lower()
    return ROLES.get(lower, lower if lower in KNOWN_ROLES else role)


def meant_calls(calls: list[dict[str, Any]]) -> list[list[Any]]:
    """Return names and arguments of calls; arguments as JSON text are parsed, so that equal calls compare equal."""
    return [[call["function"]["name"], _of_json(call["function"]["arguments"])] for call in calls]


def of_messages(value: object) -> Any:
    """Return the list of messages in a JSON text; any other value unchanged."""
    turns = None
    with suppress(Malformed):  # treat it as text then
        turns = _of_json(value)
    if not isinstance(turns, list) or not turns:
        return value
    are_messages = all(isinstance(turn, dict) and any(name in turn for name in FIELDS["role"]) for turn in turns)
    return turns if are_messages else value


class DoubleKeyError(ValueError):
    """Error about a key that occurs twice in a JSON object."""


def unique_keys(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object from its pairs, or raise DoubleKeyError if a key occurs twice.

    ``json`` itself would keep only the last value of the key.
    """
    item = dict(pairs)
    if len(item) < len(pairs):
        keys = [key for key, _ in pairs]
        raise DoubleKeyError(f"the key {next(key for key in keys if keys.count(key) > 1)!r} stands twice")
    return item


def _of_json(value: object) -> Any:
    """Parse a text that is a JSON list or object; return any other value unchanged.

    Raises:
        Malformed: a key occurs twice in an object.
    """
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        try:
            return json.loads(value, object_pairs_hook=unique_keys)
        except DoubleKeyError as error:
            raise Malformed("with JSON in a text that is ambiguous", str(error)) from error
        except ValueError:
            return value
    return value
