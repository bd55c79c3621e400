"""Chats that are too long, cut where a user's turn begins."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain, pairwise
from typing import Any

from tawpipe.data.chat import Chat, ChatRenderer, ChatText, Message, Tools
from tawpipe.data.messages import ASSISTANT, Malformed

TOO_LONG = "with a question that is longer than a row together with its answer"


def cut_at_turns(
    renderer: ChatRenderer,
    messages: Sequence[Message],
    tools: Tools,
    options: Mapping[str, Any],
    fits: Callable[[tuple[ChatText, ...]], bool],
) -> Chat:
    """The documents of a chat, or of parts of it that fit, each behind the system's turn.

    A part takes as many questions with their answers as fit, in the chat's order. A question that does not fit alone is
    among the ``lost`` ones.

    Args:
        fits: says whether the pieces of a document are short enough.

    Raises:
        Malformed: as in ``ChatRenderer.chat``.
    """
    whole = renderer.chat(messages, tools, options)
    if all(map(fits, whole.documents)):
        return whole
    system, questions = _questions(messages)
    parts, begin = list[Chat](), 0
    while begin < len(questions):
        best, end = Chat([], [Malformed(TOO_LONG, f"question {begin + 1}")], []), begin + 1
        for more in range(begin + 1, len(questions) + 1):
            part = [*system, *chain.from_iterable(questions[begin:more])]
            try:
                chat = renderer.chat(part, tools, options)
            except Malformed as error:
                chat = Chat([], [error], [])
            if not all(map(fits, chat.documents)):
                break
            best, end = chat, more
        parts.append(best)
        begin = end
    documents, lost, said = (list(chain.from_iterable(lists)) for lists in zip(*parts, strict=True))
    return Chat(documents, lost, [*said, Malformed("are longer than a row and are cut at turns (--long-chats)")])


def _questions(messages: Sequence[Message]) -> tuple[Sequence[Message], list[Sequence[Message]]]:
    """The turns before the first question, and every question with what follows it."""
    first = next(number for number, message in enumerate(messages) if message["role"] in ("user", ASSISTANT))
    begins = [number for number, message in enumerate(messages) if message["role"] == "user" and number > first]
    edges = [first, *begins, len(messages)]
    return messages[:first], [messages[a:b] for a, b in pairwise(edges)]
