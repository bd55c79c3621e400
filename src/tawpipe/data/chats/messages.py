"""Messages of a chat as chat templates want them, out of the forms in which data sets have them."""

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
"""Roles of a turn whose text is a call of a tool in JSON, or a list of calls: ShareGPT's and ms-swift's."""

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
"""Other names of roles."""
KNOWN_ROLES = ("system", "user", ASSISTANT, "tool")
SYSTEM_ROLES = ("system", "developer")

FIELDS = {"role": ("role", "from"), "content": ("content", "value")}
"""Fields of a message, and the names that they have in data sets."""

THOUGHT = "reasoning_content"
THOUGHTS = (THOUGHT, "reasoning", "thinking", "thought", "thoughts", "think")
"""Names of the field with a turn's thought; the first is the name in the messages that are returned."""

MARKS = ("weight", "loss", "train", "training", "trainable", "loss_mask", "loss_weight")
"""Names of the mark that says whether a turn is learned; the first is the name in the returned messages."""

PARTS = {
    **dict.fromkeys(("reasoning", "thinking"), ("thought", ("reasoning", "thinking", "text", "value"))),
    **dict.fromkeys(("text", "input_text", "output_text"), ("text", ("text", "value"))),
    "tool_call": ("call", ("tool_call", "value", "text")),
}
"""Use of a content's part by its type, and the fields that may hold what is said."""
CALL = (("name",), ("arguments", "parameters", "args", "input"))
"""Fields of a call: its name, and the names of its arguments."""

TAGGED = re.compile(r"\s*<think>(.*?)</think>\s*", re.DOTALL)
CALLED = re.compile(r"\s*<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
"""A thought and a call in the words of a turn."""

USES = ("thought", "text", "call")
"""Uses of parts in the order in which a turn has them."""

MEDIA = frozenset({"image", "images", "img", "imgs", "video", "videos", "audio", "audios"})
"""Words in the names of columns and parts that hold something else than text."""

TRUTHS = {"true": True, "yes": True, "1": True, "1.0": True, 1: True}
TRUTHS |= {"false": False, "no": False, "0": False, "0.0": False, 0: False}
"""Truth of words and of numbers; fields of csv files are words."""

EMPTY = (None, "", [], {})
"""Values of a column or field that holds nothing: tables give every row the columns of all."""

RESERVED = frozenset({"conversation", "messages", "tools", "chat_template", "add_generation_prompt", "tokenize"})
"""Names that are no variables of a chat template to set in a row."""

FORM = "messages that are objects with a role and a content"


class Malformed(Exception):
    """A row that has its columns, but not what belongs into them; a reason, and what is special about this row."""

    def __init__(self, why: str, detail: str = "") -> None:
        super().__init__(*filter(None, (why, detail)))
        self.why, self.detail = why, detail


class Untrainable(Malformed):
    """A row that shows that its data set cannot be trained on as it is."""


def read_messages(value: object, names: Mapping[str, str], ignored: Collection[str] = ()) -> list[dict[str, Any]]:
    """Return the messages of a chat in one form.

    A message has ``role`` and ``content``: a text, or None beside ``tool_calls`` of the assistant. It may have
    ``tool_calls`` in OpenAI's nested form, ``reasoning_content``, and ``weight`` (0: an answer that is not learned).
    All other fields are as they were given. A field ``content.NAME`` stood in a part of the content.

    Args:
        names: as ``DataSettings.column_names`` gives them.
        ignored: types of parts of a content that are left out.

    Raises:
        Malformed: there are none of this form, or two fields for one use differ.
        Untrainable: there are pictures, sounds or films.
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
        if is_call and all(last.get(key) == message.get(key) for key in compared):  # of one turn, or behind its words
            messages[-1] = last | {"tool_calls": [*last.get("tool_calls", []), *message["tool_calls"]]}
        else:
            messages.append(message)
    return messages


def _turns(fields: dict[str, Any]) -> object:
    """The turns of an object whose fields are lists with an item for each turn; any other object as it is.

    A null there fills up the list of a field that the turn lacks.
    """
    lists = {name: items for name, items in fields.items() if items is not None}
    if len({len(items) if isinstance(items, list) else -1 for items in lists.values()} | {-1}) != 2:
        return fields
    turns = zip(*lists.values(), strict=True)
    return [{name: item for name, item in zip(lists, turn, strict=True) if item is not None} for turn in turns]


def _message(value: dict[str, Any], names: Mapping[str, str], ignored: Collection[str]) -> tuple[dict[str, Any], bool]:
    """The message; True beside it if its role says that its content is a call."""
    fields, taken = dict(value), dict[str, Any]()
    shown = [name for name, field in value.items() if field not in EMPTY and not isinstance(field, int | float)]
    _refuse_media(shown, ignored)
    for name, usual in FIELDS.items():
        named = names.get(name)
        taken[name] = only(_popped(fields, (named,) if named else usual), _known_role)
        if name in fields:  # beside the one that --columns names
            fields[f"{name} beside {named}"] = fields.pop(name)
    role, content, is_call = _known_role(taken["role"]), taken["content"], taken["role"] in CALL_ROLES
    said: dict[str, list[Any]] = {use: [] for use in USES}
    if isinstance(content, list) or is_call:
        for part in [{"type": "tool_call", "value": content}] if is_call else content:
            fields |= _read_part(part, ignored, said)
        content = "".join(said["text"])
    calls = _popped(fields, ("tool_calls", "function_call"))
    calls = {name: _calls(some) for name, some in calls.items() if some} | {"content": said["call"]}
    thoughts = _popped(fields, THOUGHTS) | {"a part of the content": "".join(said["thought"])}
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
    """Return the content without a thought or calls in tags, if fields hold them as well; they become one more source
    of ``thoughts`` or ``calls``.
    """
    if any(thoughts.values()) and (tagged := TAGGED.match(content)):
        thoughts["<think> in the content"] = tagged[1].strip()
        content = content[tagged.end() :]
    if any(calls.values()) and (texts := CALLED.findall(content)):
        calls["<tool_call> in the content"] = [call for text in texts for call in _calls(text)]
        content = CALLED.sub("", content)
    return content


def _read_part(part: object, ignored: Collection[str], said: dict[str, list[Any]]) -> dict[str, Any]:
    """Add to ``said`` by use what a part of a content says; return its other fields."""
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
        said[use] += _calls(fields if text is None else text)
        return {}
    if not isinstance(text, str):
        names = " or ".join(map(repr, names))
        raise Malformed(f"with a part of a content that holds no text in {names}", reprlib.repr(part))
    if any(said[later] for later in USES[USES.index(use) + 1 :]):
        raise Malformed(f"with parts of a content in another order than {', '.join(USES)}")
    said[use].append(text)
    return {f"content.{name}": field for name, field in fields.items() if field not in EMPTY}


def _refuse_media(names: Collection[str], ignored: Collection[str]) -> None:
    for name in names:
        if words(name) & MEDIA and name not in ignored:
            raise Untrainable(f"chats with text only; --ignore-columns {name} leaves these parts out", repr(name))


def _calls(value: object) -> list[dict[str, Any]]:
    """Calls of tools, each a function's name and its arguments, as they were given."""
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
    """Return the learning mark as ``weight``; for other roles than the assistant only marks that ask to learn."""
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
    """The tools' JSON schemas; None where there are none.

    Raises:
        Malformed: they are no list of objects.
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
    """The variables of a chat template; none where there are none.

    Raises:
        Malformed: they are no object, or those that rendering sets.
    """
    value = _of_json(value) or {}
    if not isinstance(value, dict) or RESERVED & value.keys():
        raise Malformed("whose chat_template_kwargs are no object of a template's variables", reprlib.repr(value))
    return value


def only(sources: Mapping[str, Any], same: Callable[[Any], object] = lambda value: value) -> Any:
    """Return the value of the source that holds something, the first if all are equal; None without any source.

    Args:
        sources: the names of columns or fields for one use, and their values.
        same: gives one value for all that mean the same.

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
    """Return what a boolean, a number or a word says; None if that is neither true nor false."""
    word = value.strip().lower() if isinstance(value, str) else value
    return TRUTHS.get(word) if isinstance(word, str | int | float) else None


@lru_cache(maxsize=10_000)
def words(name: str) -> frozenset[str]:
    """Return the words of a name, which stand apart by signs or capital letters."""
    return frozenset(re.findall("[a-z]+", re.sub("(?<=[a-z])(?=[A-Z])", "_", name).lower()))


def without_nulls(value: Any) -> Any:
    """Return the value without fields that are null, which an Arrow table gives to all rows if one row has them."""
    if isinstance(value, dict):
        return {key: without_nulls(field) for key, field in value.items() if field is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


def _popped(fields: dict[str, Any], names: Collection[str]) -> dict[str, Any]:
    """The fields of these names, which leave ``fields``."""
    return {name: fields.pop(name) for name in names if name in fields}


def _known_role(role: Any) -> Any:
    """The role under its usual name, however it is written."""
    if not isinstance(role, str):
        return role
    lower = role.lower()
    return ROLES.get(lower, lower if lower in KNOWN_ROLES else role)


def meant_calls(calls: list[dict[str, Any]]) -> list[list[Any]]:
    """Names and arguments of calls, alike for arguments as an object and as a text."""
    return [[call["function"]["name"], _of_json(call["function"]["arguments"])] for call in calls]


def of_messages(value: object) -> Any:
    """Return the messages that a text of JSON holds; anything else as it is."""
    turns = None
    with suppress(Malformed):  # it is a text, then
        turns = _of_json(value)
    if not isinstance(turns, list) or not turns:
        return value
    are_messages = all(isinstance(turn, dict) and any(name in turn for name in FIELDS["role"]) for turn in turns)
    return turns if are_messages else value


class DoubleKeyError(ValueError):
    """A key that stands twice in an object of JSON."""


def unique_keys(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object, of which json itself would keep the last value of a key in silence."""
    item = dict(pairs)
    if len(item) < len(pairs):
        keys = [key for key, _ in pairs]
        raise DoubleKeyError(f"the key {next(key for key in keys if keys.count(key) > 1)!r} stands twice")
    return item


def _of_json(value: object) -> Any:
    """Read a text that is a list or an object of JSON; any other value is returned unchanged.

    Raises:
        Malformed: a key stands twice in an object.
    """
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        try:
            return json.loads(value, object_pairs_hook=unique_keys)
        except DoubleKeyError as error:
            raise Malformed("with JSON in a text that is ambiguous", str(error)) from error
        except ValueError:
            return value
    return value
