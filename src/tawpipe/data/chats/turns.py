"""Chats that are longer than a row: cut where a user turn begins, or left out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain, pairwise
from typing import Any

from tawpipe.data.chats.chat import Chat, ChatRenderer, ChatText, Tools
from tawpipe.data.chats.columns import RowKind
from tawpipe.data.chats.forms import Message
from tawpipe.data.chats.messages import ASSISTANT, SYSTEM_ROLES, Malformed
from tawpipe.data.settings import LongChats

TOO_LONG = "too long: a question and its answer exceed {longest} (--long-chats anywhere cuts them)"
DROPPED = "longer than {longest} (--long-chats turns cuts chats at a user's turn)"
CUT = "longer than {longest}, cut at turns (--long-chats)"

Fits = Callable[[tuple[ChatText, ...], RowKind], bool]
"""Function that returns True if the pieces of a document of a kind are short enough."""


def chat_that_fits(
    renderer: ChatRenderer,
    messages: Sequence[Message],
    tools: Tools,
    options: Mapping[str, Any],
    fits: Fits,
    long_chats: LongChats,
    longest: str,
) -> Chat:
    """Render a chat, or parts of it that fit into a row, each after the system turns before it.

    A part takes as many questions with their answers as fit, beginning at the end of the chat, so that the last answers
    have the most history. A question that does not fit alone is added to ``lost``. Under ``drop``, all documents that
    do not fit are lost.

    Args:
        renderer: renders chats.
        messages: messages of the chat.
        tools: JSON schemas of the tools, or None.
        options: further variables of the template.
        fits: tests the length of a document.
        long_chats: the setting ``long_chats``: ``turns`` or ``drop``.
        longest: longest length and what determines it, for messages.

    Raises:
        Malformed: ``ChatRenderer.chat`` refuses the chat.
    """

    def all_fit(chat: Chat) -> bool:
        return all(fits(document, "chat") for document in chat.documents)

    whole = renderer.chat(messages, tools, options)
    if all_fit(whole):
        return whole
    if long_chats == "drop":
        kept = [document for document in whole.documents if fits(document, "chat")]
        lost = [Malformed(DROPPED.format(longest=longest))] * (len(whole.documents) - len(kept))
        return Chat(kept, whole.lost + lost, whole.notes)
    head, questions = _questions(messages)
    parts, end = list[Chat](), len(questions)
    while end > 0:
        best, begin, longer = Chat([], [Malformed(TOO_LONG.format(longest=longest))], []), end, -1
        step = 1
        while step:  # exponential, then binary search, because long parts render slowly
            chat = None
            if (first := begin - step) > longer:
                before = chain.from_iterable(questions[:first])
                systems = [message for message in before if message["role"] in SYSTEM_ROLES]
                part = [*head, *systems, *chain.from_iterable(questions[first:end])]
                chat = _rendered(renderer, part, tools, options)
            if chat is not None and all_fit(chat):
                best, begin, step = chat, first, 2 * step
            else:
                longer, step = max(longer, first), step // 2
        end = min(begin, end - 1)
        lost = [
            Malformed(error.why, f"from question {end + 1} on{error.detail and f': {error.detail}'}")
            for error in best.lost
        ]
        parts.insert(0, best._replace(lost=lost))
    cut = Malformed(CUT.format(longest=longest))
    return Chat(
        [document for part in parts for document in part.documents],
        [lost for part in parts for lost in part.lost],
        [*(note for part in parts for note in part.notes), cut],
    )


def _rendered(renderer: ChatRenderer, messages: Sequence[Message], tools: Tools, options: Mapping[str, Any]) -> Chat:
    """Render a part of a chat; if the template refuses it, return a ``Chat`` with only this reason, in ``lost``."""
    try:
        return renderer.chat(messages, tools, options)
    except Malformed as error:
        return Chat([], [error], [])


def _questions(messages: Sequence[Message]) -> tuple[Sequence[Message], list[Sequence[Message]]]:
    """Split messages into the turns before the first user or assistant turn, and parts that begin at user turns.

    Each part extends to the next user turn. The first part begins with an assistant turn if that precedes all user
    turns.

    Returns:
        The turns before all parts, which may be empty, and the parts.
    """
    first = next(number for number, message in enumerate(messages) if message["role"] in ("user", ASSISTANT))
    begins = [number for number, message in enumerate(messages) if message["role"] == "user" and number > first]
    edges = [first, *begins, len(messages)]
    return messages[:first], [messages[a:b] for a, b in pairwise(edges)]
