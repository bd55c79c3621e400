"""Rows to documents: chats and instructions are learned in part, so a document has pieces that count or do not.

A document is a list of pieces. Text that the model is given (a prompt, other people's messages, the headers of a chat
template) does not count; text that it shall write does.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tawpipe.data.chat import ChatRenderer, ChatText
from tawpipe.data.columns import EMPTY, RawRow, RowKind
from tawpipe.data.messages import ASSISTANT, Malformed, read_messages, read_tools
from tawpipe.data.report import Skipped
from tawpipe.data.settings import ANSWERS, CHATS, PROMPTS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Document:
    """Pieces of text that become one sequence of tokens.

    Attributes:
        complete: a chat template has placed the tokens that begin and end a text; the tokenizer adds none.
        where: it stands: the file, with the line or row where there is one.
        identity: a hash of the content, 64 bits. Copies of a document have one identity, wherever they are stored.
    """

    kind: RowKind
    pieces: tuple[ChatText, ...]
    complete: bool = False
    where: str = ""
    identity: int = field(init=False)

    def __post_init__(self) -> None:
        digest = hashlib.blake2b(digest_size=8)
        for piece in self.pieces:
            digest.update(b"\x01" if piece.counts else b"\x00")
            digest.update(piece.text.encode())
        object.__setattr__(self, "identity", int.from_bytes(digest.digest(), "little"))


class Renderer:
    """Maker of documents from raw rows.

    Args:
        tokenizer: the one whose chat template chat rows go through.
        names: as ``DataSettings.column_names`` gives them.
        as_chat: the setting of this name.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, names: Mapping[str, str] | None = None, *, as_chat: bool = False
    ) -> None:
        self._chats, self._names, self._as_chat = ChatRenderer(tokenizer), names or {}, as_chat

    def render(self, row: RawRow) -> list[Document | Skipped]:
        """Make the documents of a row, and name what of the row is left out.

        A ``Skipped`` of kind ``row`` means that the row is malformed, ``empty`` that nothing of it counts, ``answer``
        that one of its answers is not learned, ``note`` that something of it is used otherwise than it may seem.
        """
        documents = self._documents(row)
        return documents if isinstance(documents, list) else [documents]

    def _documents(self, row: RawRow) -> list[Document | Skipped] | Document | Skipped:
        try:
            match row.kind:
                case "text":
                    document = Document("text", (ChatText(self._text(row.columns, "text"), True),), where=row.where)
                case "chat":
                    document = self._chat(row)
                case "instruction":
                    document = self._instruction(row)
        except Malformed as error:
            return Skipped("row", row.where, error.why, error.detail)
        except UnicodeEncodeError:
            return Skipped("row", row.where, "with half a surrogate pair, which is no text")
        if isinstance(document, Document) and not any(piece.counts and piece.text.strip() for piece in document.pieces):
            return Skipped("empty", row.where, "without text" if row.kind == "text" else "without an answer to learn")
        return document

    def _chat(self, row: RawRow) -> list[Document | Skipped] | Skipped:
        chats = {name: read_messages(row.columns.get(name), self._names) for name in CHATS}
        messages = chats[self._meant(chats)]
        if not any(message["role"] == ASSISTANT for message in messages):
            return Skipped("empty", row.where, "without an assistant's turn")
        if (system := self._text(row.columns, "system")) and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": system}, *messages]
        return self._rendered(row, messages)

    def _rendered(self, row: RawRow, messages: list[dict[str, Any]], first: int = 0) -> list[Document | Skipped]:
        """The documents of a chat, and what is to be said of it."""
        chat = self._chats.chat(messages, read_tools(row.columns.get("tools")), first=first)
        if chat.lost and not chat.documents:
            raise chat.lost[0]
        if not chat.documents:
            return [_without_answer(row)]
        documents = [Document("chat", pieces, complete=True, where=row.where) for pieces in chat.documents]
        said = [("answer", lost) for lost in chat.lost] + [("note", note) for note in chat.said]
        return [*documents, *(Skipped(kind, row.where, why.why, why.detail) for kind, why in said)]

    def _instruction(self, row: RawRow) -> list[Document | Skipped] | Document | Skipped:
        """The prompt as it is written and then the completion; other names than completion in paragraphs."""
        columns = row.columns
        prompt, answer = (self._meant({name: columns.get(name) for name in group}) for group in (PROMPTS, ANSWERS))
        if isinstance(columns.get(answer), list) and isinstance(columns.get(prompt, []), list):
            given, said = (read_messages(columns.get(name), self._names) for name in (prompt, answer))
            return self._rendered(row, given + said, first=len(given)) if said else _without_answer(row)
        parts = [part for name in (prompt, "input") if (part := self._text(columns, name))]
        system, said = self._text(columns, "system"), self._text(columns, answer)
        if not said.strip():
            return _without_answer(row)
        if self._as_chat:
            turns = {"system": system, "user": "\n\n".join(parts), ASSISTANT: said}
            return self._rendered(row, [{"role": role, "content": text} for role, text in turns.items() if text])
        parts = [system, *parts] if system else parts
        given = "".join(parts) if answer == "completion" else "".join(part + "\n\n" for part in parts)
        pieces = (ChatText(given, False), ChatText(said, True))
        return Document("instruction", tuple(piece for piece in pieces if piece.text), where=row.where)

    def _meant(self, group: Mapping[str, object]) -> str:
        """The one of some columns for one use that holds something; those that the settings name come first.

        Raises:
            Malformed: several do, and say different things.
        """
        filled = [name for name, value in group.items() if value not in EMPTY]
        first, *others = [name for name in filled if name in self._names] or filled or list(group)[:1]
        if any(group[name] != group[first] for name in others):
            columns = " and ".join(repr(self._names.get(name, name)) for name in (first, *others))
            raise Malformed(f"with both {columns} filled, of which --columns names one ({first}=...)")
        return first

    def _text(self, columns: dict[str, Any], name: str) -> str:
        """The column's text; none at all is an empty text."""
        value = columns.get(name)
        if value is None:
            return ""
        if not isinstance(value, str):
            raise Malformed(f"whose column {self._names.get(name, name)!r} holds no text", type(value).__name__)
        return value


def _without_answer(row: RawRow) -> Skipped:
    return Skipped("empty", row.where, "without an answer to learn")


def raw_text(row: RawRow) -> str:
    """Text of a row without any template, on which a tokenizer is trained."""
    texts: list[str] = []
    for value in row.columns.values():
        for part in value if isinstance(value, list) else [value]:
            content = part.get("content", part.get("value")) if isinstance(part, dict) else part
            if isinstance(content, str):
                texts.append(content)
    return "\n".join(texts)
