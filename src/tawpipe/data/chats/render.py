"""Rendering of rows as documents, whose pieces of text count in the loss or do not.

Text that the model is given (a prompt, messages of others, headers of a chat template) does not count. Text that the
model should write counts.
"""

from __future__ import annotations

import hashlib
import json
import re
import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tawpipe.data.chats.chat import ChatRenderer, ChatText
from tawpipe.data.chats.columns import Columns, RawRow, RowKind
from tawpipe.data.chats.forms import parts_of, spelled
from tawpipe.data.chats.messages import (
    ASSISTANT,
    EMPTY,
    MARKS,
    SYSTEM_ROLES,
    THOUGHT,
    THOUGHTS,
    Malformed,
    Untrainable,
    meant_calls,
    of_messages,
    only,
    read_messages,
    read_options,
    read_tools,
    without_nulls,
)
from tawpipe.data.chats.special import SpecialTokens
from tawpipe.data.chats.turns import TOO_LONG, Fits, chat_that_fits
from tawpipe.data.report import Skipped
from tawpipe.data.settings import ANSWERS, CHATS, PROMPTS, Answers, LongChats, SpecialInText
from tawpipe.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Document:
    """Pieces of text that become one sequence of tokens.

    Attributes:
        kind: kind of the row.
        pieces: texts, each with True if it counts in the loss.
        complete: True if a chat template has placed the tokens that begin and end a text; the encoder then adds no end.
        where: file, with line or row.
        identity: hash of the row, equal for all of its documents; ``content`` if not given.
        content: 64-bit hash of the pieces.
    """

    kind: RowKind
    pieces: tuple[ChatText, ...]
    complete: bool = False
    where: str = ""
    identity: int = 0

    content: int = field(init=False)

    def __post_init__(self) -> None:
        digest = hashlib.blake2b(digest_size=8)
        for piece in self.pieces:
            digest.update(b"\x01" if piece.counts else b"\x00")
            digest.update(piece.text.encode())
        object.__setattr__(self, "content", int.from_bytes(digest.digest(), "little"))
        object.__setattr__(self, "identity", self.identity or self.content)


WITHOUT_ANSWER = "without an answer to learn"
UNREAD_COLUMNS = "with columns that are not read"
UNREAD_FIELDS = "with fields that are neither learned nor shown by the chat template"


MEDIA_MARK = re.compile(r"<(image|video|audio)>")
MARKED = "with <image>, <video> or <audio> in the text, read as text"
AS_CHAT = "with an instruction, written by the chat template (--as-chat off writes the plain text)"


class Renderer:
    """Maker of documents from rows.

    Args:
        tokenizer: tokenizer whose chat template renders chats.
        columns: meaning of columns.
        as_chat: render instructions with the chat template.
        date: date that a template prints; today by default.
        special: the setting ``special_in_text``.
        answers: the setting ``answers``.
        long_chats: the setting ``long_chats``.
        fits: returns True if the pieces of a document are short enough; None for any length.
        longest: longest length and what determines it, for messages.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        columns: Columns | None = None,
        *,
        as_chat: bool = False,
        date: str = "",
        special: SpecialInText = "keep",
        answers: Answers = "each",
        long_chats: LongChats = "turns",
        fits: Fits | None = None,
        longest: str = "",
    ) -> None:
        self._chats, self._columns = ChatRenderer(tokenizer, answers, date), columns or Columns()
        self._only_last = answers == "last"
        self._fits, self._longest = fits, longest
        self._long_chats: LongChats = long_chats
        self._special = SpecialTokens(tokenizer, special)
        self._names = self._columns.names
        self._as_chat = as_chat

    def render(self, row: RawRow) -> list[Document | Skipped]:
        """Return the documents of a row, and a ``Skipped`` for everything that is left out or reported.

        A ``Skipped`` of kind ``row`` means that the row is malformed, ``empty`` that nothing of it counts, ``answer``
        that one of its answers is not learned, and ``note`` or ``remark`` that something is reported.

        Raises:
            UserError: the row shows that training on its data set would ignore its meaning.
        """
        notes = [Skipped("note", row.where, UNREAD_COLUMNS, names=row.unread)] if row.unread else []
        try:
            match row.kind:
                case "text":
                    text = ChatText(self._text(row.columns, "text"), True)
                    documents: list[Document | Skipped] = [Document("text", (text,), where=row.where)]
                case "chat":
                    documents = self._chat(row)
                case "instruction":
                    documents = self._instruction(row)
        except Untrainable as error:
            raise UserError("--data", f"{row.where}, {error.detail}", error.why) from error
        except Malformed as error:
            return [Skipped("row", row.where, error.why, error.detail)]
        except UnicodeEncodeError:
            return [Skipped("row", row.where, "with half a surrogate pair, which is no text")]
        for number, document in enumerate(documents):
            if isinstance(document, Document) and not any(p.counts and p.text.strip() for p in document.pieces):
                why = "without text" if document.kind == "text" else WITHOUT_ANSWER
                documents[number] = Skipped("empty", row.where, why)
        return documents + notes

    def _chat(self, row: RawRow) -> list[Document | Skipped]:
        """Return the documents of a chat row, or one ``Skipped`` of kind ``empty`` if no turn is the assistant's."""
        chats = {name: self._messages(row, name) for name in CHATS}
        messages = chats[self._meant(chats)]
        if not any(message["role"] == ASSISTANT for message in messages):
            roles = ", ".join(sorted({str(message["role"]) for message in messages}))
            return [Skipped("empty", row.where, "without an assistant's turn", roles and f"its roles are {roles}")]
        return self._rendered(row, self._with_system(row, messages))

    def _messages(self, row: RawRow, name: str, role: str = "") -> list[dict[str, Any]]:
        """Return the messages in the column ``name``; with ``role``, a plain text there is one message of that role."""
        value = of_messages(row.columns.get(name))
        if role and not isinstance(value, list | dict):
            return [{"role": role, "content": text}] if (text := self._text(row.columns, name)) else []
        return read_messages(value, self._names, self._columns.ignored)

    def _with_system(self, row: RawRow, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the messages with the text of the column ``system`` as the first one, if it has text.

        Raises:
            Malformed: the column and a system message differ, or a column ``input`` has text that is in no message.
        """
        system, input_text = self._text(row.columns, "system"), self._text(row.columns, "input")
        if input_text and all(message["content"] != input_text for message in messages):
            name = self._names.get("input", "input")
            why = f"with {name!r} beside messages, where it has no place (--ignore-columns {name})"
            raise Malformed(why, reprlib.repr(input_text))
        if messages and messages[0]["role"] in SYSTEM_ROLES:
            name = self._names.get("system", "system")
            system = only({name: system, "the first message": messages[0]["content"]}) or ""
            return [{**messages[0], "content": system}, *messages[1:]]
        return [{"role": "system", "content": system}, *messages] if system else messages

    def _rendered(self, row: RawRow, messages: list[dict[str, Any]], first: int = 0) -> list[Document | Skipped]:
        """Render a chat; return its documents, and notes on what is left out or not shown.

        Args:
            row: the row.
            messages: messages of the chat.
            first: answers before this index are not learned.
        """
        columns, head, names = row.columns, dict(messages[0]), ("tools", "functions")
        sources = {self._names.get(name, name): columns.get(name) for name in names}
        if head["role"] in SYSTEM_ROLES:  # form of DeepSeek
            sources |= {f"{name} of the first message": head.pop(name, None) for name in names}
        tools = only({name: read_tools(value) for name, value in sources.items()})
        options, messages = read_options(columns.get("chat_template_kwargs")), [head, *messages[1:]]
        if any(message.get(name) for message in messages for name in names):
            raise Malformed("with tools of a message that is not the first system turn")
        learned = [n for n, turn in enumerate(messages) if turn["role"] == ASSISTANT and turn.get("weight", 1)]
        for number in [n for n in learned if n < first] + (learned[:-1] if self._only_last else []):
            messages[number] = {**messages[number], "weight": 0}
        identity = _identity(messages, tools, options)
        messages, tools, notes = self._special.messages(messages, tools, row.where)
        if any(MEDIA_MARK.search(turn["content"] or "") for turn in messages):
            notes.append(Skipped("note", row.where, MARKED))
        if self._fits is None:
            chat = self._chats.chat(messages, tools, options)
        else:
            chat = chat_that_fits(self._chats, messages, tools, options, self._fits, self._long_chats, self._longest)
        if chat.lost and not chat.documents:
            raise chat.lost[0]
        if not chat.documents:
            return [_without_answer(row)]
        documents: list[Document | Skipped] = [*notes]
        documents += [
            Document("chat", pieces, complete=True, where=row.where, identity=identity) for pieces in chat.documents
        ]
        documents += [Skipped("answer", row.where, lost.why, lost.detail) for lost in chat.lost]
        documents += [Skipped("remark" if note.detail else "note", row.where, *note.args) for note in chat.notes]
        unread = [f"chat_template_kwargs.{name}" for name in sorted(options.keys() - self._chats.variables(tools))]
        unread += self._unread(messages, tools, options)
        if chat.documents and tools:
            unread += _hidden(tools, "".join(piece.text for piece in chat.documents[0]))
        if unread:
            documents.append(Skipped("note", row.where, UNREAD_FIELDS, names=tuple(dict.fromkeys(unread))))
        return documents

    def _unread(self, messages: list[dict[str, Any]], tools: Any, options: Mapping[str, Any]) -> Iterator[str]:
        """Yield the names of non-empty fields of messages and calls that are neither learned nor rendered."""

        def is_shown(role: str, change: Callable[[dict[str, Any]], dict[str, Any]]) -> bool:
            """Return True if the rendered chat changes when ``change`` is applied to the messages of ``role``."""
            others = [change(turn) if turn["role"] == role else turn for turn in messages]
            return self._chats.differ(messages, others, tools, options)

        taken = (*MARKS, THOUGHT, "tool_calls")
        fields, of_calls = dict[tuple[str, str], None](), set[str]()
        for message in messages:
            learned = taken if message["role"] == ASSISTANT else ()
            names = [name for name, value in message.items() if value not in EMPTY]
            fields |= {(message["role"], name): None for name in names if name not in ("role", "content", *learned)}
            for call in message.get("tool_calls", ()) if learned else ():
                of_calls |= {*call, *call["function"]} - {"type", "function", "name", "arguments"}
        for role, name in fields:
            if not is_shown(role, lambda turn, name=name: _without(turn, name)):
                others = any(other == name for asked, other in fields if asked != role)
                yield f"{name} of {role}" if name in taken or others else name
        for name in sorted(of_calls):
            if not is_shown(ASSISTANT, lambda turn, name=name: _without_in_calls(turn, name)):
                yield f"tool_calls.{name}"

    def _instruction(self, row: RawRow) -> list[Document | Skipped]:
        """Return the documents of an instruction row.

        With the column ``completion`` the answer directly follows the prompt. With other columns the parts are
        paragraphs. With ``as_chat``, or if prompt or answer hold messages, the row is rendered as a chat.
        """
        columns = row.columns
        prompt, answer = (self._meant({name: columns.get(name) for name in group}) for group in (PROMPTS, ANSWERS))
        if any(isinstance(of_messages(columns.get(name)), list | dict) for name in (prompt, answer)):
            prompt_messages = self._with_system(row, self._messages(row, prompt, "user"))
            answer_messages = self._messages(row, answer, ASSISTANT)
            return (
                self._rendered(row, prompt_messages + answer_messages, first=len(prompt_messages))
                if answer_messages
                else [_without_answer(row)]
            )
        parts = [part for name in (prompt, "input") if (part := self._text(columns, name))]
        system, answer_text = self._text(columns, "system"), self._text(columns, answer)
        if not answer_text.strip():
            return [_without_answer(row)]
        turns = {"system": system, "user": "\n".join(parts), ASSISTANT: answer_text}
        messages = [{"role": role, "content": text} for role, text in turns.items() if text]
        if self._as_chat:
            return [*self._rendered(row, messages), Skipped("note", row.where, AS_CHAT)]
        for name in ("tools", "functions", "chat_template_kwargs"):
            if name in columns:
                name = self._names.get(name, name)
                raise Malformed(f"with {name!r} beside an instruction that is no chat (--as-chat makes it one)")
        parts = [system, *parts] if system else parts
        prompt_text = "".join(parts) if answer == "completion" else "".join(part + "\n\n" for part in parts)
        prompt_text, notes = self._special.prepare(prompt_text, row.where)
        pieces = tuple(piece for piece in (ChatText(prompt_text, False), ChatText(answer_text, True)) if piece.text)
        if self._fits is not None and not self._fits(pieces, "instruction"):
            raise Malformed(TOO_LONG.format(longest=self._longest))
        return [*notes, Document("instruction", pieces, where=row.where, identity=_identity(messages))]

    def _meant(self, group: Mapping[str, object]) -> str:
        """Return the name of the filled column of ``group``; columns named in the settings have priority.

        Without a filled column it is the first name of ``group``.

        Raises:
            Malformed: several columns are filled with different values.
        """
        filled = [name for name, value in group.items() if value not in EMPTY]
        first, *others = [name for name in filled if name in self._names] or filled or list(group)[:1]
        if any(group[name] != group[first] for name in others):
            columns = " and ".join(repr(self._names.get(name, name)) for name in (first, *others))
            raise Malformed(f"with both {columns} filled, of which --columns names one ({first}=...)")
        return first

    def _text(self, columns: dict[str, Any], name: str) -> str:
        """Return the text of a column; ``""`` if it is missing.

        Raises:
            Malformed: the column does not hold text.
        """
        value = columns.get(name)
        if value is None:
            return ""
        if not isinstance(value, str):
            raise Malformed(f"whose column {self._names.get(name, name)!r} holds no text", type(value).__name__)
        return value


def _identity(
    messages: Sequence[Mapping[str, Any]], tools: Any = None, options: Mapping[str, Any] | None = None
) -> int:
    """Return a 64-bit hash of what a chat says; template, other fields and form of the row do not change it."""
    turns = [
        [turn["role"], turn["content"] or "", turn.get(THOUGHT), meant_calls(turn.get("tool_calls", []))]
        for turn in messages
    ]
    meaning = without_nulls([turns, tools or [], dict(options or {})])
    content = json.dumps(meaning, sort_keys=True, separators=(",", ":"), default=str)
    return int.from_bytes(hashlib.blake2b(content.encode(), digest_size=8).digest(), "little")


def _hidden(tools: Any, text: str) -> list[str]:
    """Return the places of names and texts in tool definitions that ``text`` lacks; only ``tools`` if it lacks all."""
    parts = [(place, part in text or any(form in text for form in spelled(part))) for place, part in parts_of(tools)]
    return [place for place, shown in parts if not shown] if any(shown for _, shown in parts) else ["tools"]


def _without(fields: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in fields.items() if key != name}


def _without_in_calls(message: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the message without the field ``name`` of its calls."""
    calls = [
        {**_without(call, name), "function": _without(call["function"], name)} for call in message.get("tool_calls", ())
    ]
    return {**message, "tool_calls": calls} if calls else message


def _without_answer(row: RawRow) -> Skipped:
    return Skipped("empty", row.where, WITHOUT_ANSWER)


def raw_text(row: RawRow) -> str:
    """Return the text of a row without any template, for the training of a tokenizer."""
    return "\n".join(text for value in row.columns.values() for text in _texts(value))


def _texts(value: object) -> Iterator[str]:
    """Yield the texts of messages in any form."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)
    elif isinstance(value, dict):
        for name in ("content", "value", "text", *THOUGHTS):
            yield from _texts(value.get(name))
