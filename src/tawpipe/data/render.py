"""Rows to documents: chats and instructions are learned in part, so a document has pieces that count or do not.

A document is a list of pieces. Text that the model is given (a prompt, other people's messages, the headers of a chat
template) does not count; text that it shall write does.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from tawpipe.data.report import Skipped
from tawpipe.data.sources import RawRow, RowKind

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ASSISTANT = "assistant"

BUILTIN_CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{ '<|' + message['role'] + '|>\n' + message['content'] }}"
    "{{ eos_token if message['role'] == 'assistant' and eos_token else '' }}{{ '\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|assistant|>\n' }}{%- endif -%}"
)
"""Chat template for tokenizers without one: ``<|role|>``, a line break, the content, the end-of-text token after the
assistant's, a line break. The headers are plain text, so that any vocabulary can spell them."""


class Piece(NamedTuple):
    """Some text; its tokens count in the loss, or all of them do not."""

    text: str
    counts: bool


@dataclass(frozen=True)
class Document:
    """Pieces of text that become one sequence of tokens.

    Attributes:
        complete: a chat template has placed the tokens that begin and end a text; the tokenizer adds none.
        where: it stands: the file, with the line or row where there is one.
        identity: a hash of the content, 64 bits. Copies of a document have one identity, wherever they are stored.
    """

    kind: RowKind
    pieces: tuple[Piece, ...]
    complete: bool = False
    where: str = ""
    identity: int = field(init=False)

    def __post_init__(self) -> None:
        digest = hashlib.blake2b(digest_size=8)
        for piece in self.pieces:
            digest.update(b"\x01" if piece.counts else b"\x00")
            digest.update(piece.text.encode())
        object.__setattr__(self, "identity", int.from_bytes(digest.digest(), "little"))


class _Malformed(Exception):
    """A row that has its columns, but not what belongs into them."""


class Renderer:
    """Maker of documents from raw rows.

    Args:
        tokenizer: the one whose chat template chat rows go through; BUILTIN_CHAT_TEMPLATE where it has none.
        text_column: the setting of this name.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, text_column: str) -> None:
        self._tokenizer, self._text_column = tokenizer, text_column

    def render(self, row: RawRow) -> Document | Skipped:
        """The row's document, or ``Skipped``: ``empty`` where no token would count, ``row`` where it is malformed."""
        try:
            match row.kind:
                case "text":
                    document = Document("text", (Piece(_text(row.columns, self._text_column), True),), where=row.where)
                case "chat":
                    document = self._chat("chat", _messages(row.columns["messages"]), row.where)
                case "instruction":
                    document = self._instruction(row.columns, row.where)
        except _Malformed as error:
            return Skipped("row", row.where, str(error))
        except UnicodeEncodeError:
            return Skipped("row", row.where, "holds half a surrogate pair, which is no text")
        if not any(piece.counts and piece.text.strip() for piece in document.pieces):
            return Skipped("empty", row.where, "has no text that counts")
        return document

    def _instruction(self, columns: dict[str, Any], where: str) -> Document:
        """The prompt as it is written and then the completion; of three columns, the prompt's parts in paragraphs."""
        if "completion" in columns:
            prompt, completion = columns.get("prompt"), columns["completion"]
            if isinstance(prompt, list) and isinstance(completion, list):
                return self._chat("instruction", _messages(prompt) + _messages(completion), where, first=len(prompt))
            pieces = (Piece(_text(columns, "prompt"), False), Piece(_text(columns, "completion"), True))
        else:
            parts = [_text(columns, "instruction"), _text(columns, "input") if columns.get("input") else ""]
            prompt = "".join(part + "\n\n" for part in parts if part)
            pieces = (Piece(prompt, False), Piece(_text(columns, "output"), True))
        return Document("instruction", tuple(piece for piece in pieces if piece.text), where=where)

    def _chat(self, kind: RowKind, messages: list[dict[str, Any]], where: str, first: int = 0) -> Document:
        """Render as a whole and find, between two prefixes, what the assistant says from message ``first`` on."""
        if not messages:
            return Document(kind, ())
        whole = self._apply(messages)
        pieces: list[Piece] = []
        done = 0
        for number in range(first, len(messages)):
            if messages[number]["role"] != ASSISTANT:
                continue
            begin, end = self._turn(whole, messages, number, done)
            pieces += [Piece(whole[done:begin], False), Piece(whole[begin:end], True)]
            done = end
        pieces.append(Piece(whole[done:], False))
        return Document(kind, tuple(piece for piece in pieces if piece.text), complete=True, where=where)

    def _turn(self, whole: str, messages: list[dict[str, Any]], number: int, done: int) -> tuple[int, int]:
        """Begin and end in ``whole`` of the assistant's message ``number``, its end-of-turn token included."""
        before = self._prefix(whole, messages[:number], add_generation_prompt=True)
        after = self._prefix(whole, messages[: number + 1], add_generation_prompt=False)
        if before is not None and after is not None and done <= before < after:
            return before, after
        # Some templates write earlier turns otherwise than the last one (they drop what the model thought), so that
        # the beginning of a chat is no prefix of it. The words themselves must then be found.
        content = messages[number]["content"].strip()
        begin = whole.find(content, done if before is None else max(done, before)) if content else -1
        if begin < 0:
            raise _Malformed("the chat template does not show what the assistant says")
        end = begin + len(content)
        for token in self._tokenizer.all_special_tokens:
            if whole.startswith(token, end):
                return begin, end + len(token)
        return begin, end

    def _prefix(self, whole: str, messages: list[dict[str, Any]], *, add_generation_prompt: bool) -> int | None:
        if not messages:
            return None
        try:
            text = self._apply(messages, add_generation_prompt=add_generation_prompt)
        except _Malformed:
            return None
        return len(text) if whole.startswith(text) else None

    def _apply(self, messages: list[dict[str, Any]], *, add_generation_prompt: bool = False) -> str:
        from jinja2.exceptions import TemplateError

        try:
            text = self._tokenizer.apply_chat_template(
                messages,
                chat_template=None if self._tokenizer.chat_template else BUILTIN_CHAT_TEMPLATE,
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
            )
        except (TemplateError, TypeError, ValueError, KeyError) as error:
            raise _Malformed(f"the chat template refuses it ({error})") from error
        assert isinstance(text, str)
        return text


def with_generation_prompt(tokenizer: PreTrainedTokenizerBase, text: str) -> str:
    """A user's message as the chat template shows it to a model that shall answer."""
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": text}],
        chat_template=None if tokenizer.chat_template else BUILTIN_CHAT_TEMPLATE,
        add_generation_prompt=True,
        tokenize=False,
    )
    assert isinstance(rendered, str)
    return rendered


def raw_text(row: RawRow) -> str:
    """Text of a row without any template, on which a tokenizer is trained."""
    texts: list[str] = []
    for value in row.columns.values():
        parts: Sequence[object] = value if isinstance(value, list) else [value]
        contents = (part.get("content") if isinstance(part, dict) else part for part in parts)
        texts += [content for content in contents if isinstance(content, str)]
    return "\n".join(texts)


def _text(columns: dict[str, Any], name: str) -> str:
    """The column's text; none at all is an empty text."""
    value = columns.get(name)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise _Malformed(f"column {name!r} holds {type(value).__name__}, not text")
    return value


def _messages(value: object) -> list[dict[str, Any]]:
    """Messages with a role and a text each."""
    if value is None:
        return []
    if not isinstance(value, list):
        raise _Malformed(f"messages are a list, not {type(value).__name__}")
    for message in value:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise _Malformed("a message is an object with 'role' and 'content'")
        if not isinstance(message.get("content"), str):
            raise _Malformed(f"the content of a message is text, not {type(message.get('content')).__name__}")
    return value
