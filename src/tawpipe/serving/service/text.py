"""Messages and texts to prompts, and tokens of an answer to its text as they come."""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Generic, NamedTuple, TypeVar

from tawpipe.data.chats.chat import with_template
from tawpipe.data.chats.messages import Malformed

T = TypeVar("T")
BROKEN = "\ufffd"
"""What decoding gives for bytes that are no whole character."""
PATIENCE = 16
"""Tokens after which bytes that are still no text are let out as they are: one character has four at most."""


class Prompt(NamedTuple):
    """A prompt.

    Attributes:
        ids: at least one token.
        text: of the prompt, where it is asked for.
        offsets: characters of the text before each token.
    """

    ids: list[int]
    text: str = ""
    offsets: Sequence[int] = ()


class Prompts:
    """Maker of prompts: from messages by a chat template, or from texts.

    Args:
        tokenizer: it is copied, so that another thread may use it at the same time.
        template: ``chatml``, ``plain``, or a file with a Jinja template; None for the tokenizer's, if it has one.

    Raises:
        UserError: the template cannot render a chat.
    """

    def __init__(self, tokenizer: Any, template: str | None = None) -> None:
        changed = (
            copy.deepcopy(tokenizer) if template is None else with_template(tokenizer, template, "--chat-template")
        )
        self._tokenizer: Any = changed
        self.template = str(changed.chat_template or "")
        """The chat template; empty where there is none."""
        self.end_of_text: Any = changed.eos_token_id
        """The token that ends a turn by the template; None where the tokenizer has none."""

    def tokens(self, messages: Sequence[dict[str, str]], *, reasoning: bool = True) -> list[int]:
        """Tokens of the prompt for an answer to messages. A developer is the system, unless the template names both.

        Args:
            reasoning: False for an answer without reasoning before it.

        Raises:
            Malformed: the template refuses the messages, makes nothing of them, or has no way to answer without
                reasoning; or there is no template.
        """
        from jinja2.exceptions import TemplateError

        if not self.template:
            raise Malformed("for which this model has no chat template (--chat-template)")
        more: dict[str, Any] = {} if reasoning or "enable_thinking" not in self.template else {"enable_thinking": False}
        if not reasoning and not more and re.search("think|reason", self.template):
            raise Malformed("whose chat template has no enable_thinking, as reasoning_effort = none needs")
        more |= {"tokenize": False, "add_generation_prompt": True}
        system = {"role": "developer" if "developer" in self.template else "system"}
        messages = [message | system if message["role"] == "developer" else message for message in messages]
        try:
            text = self._tokenizer.apply_chat_template(messages, **more)
        except TemplateError as error:
            raise Malformed("which the model's chat template refuses", str(error)) from error
        if ids := self._tokenizer.encode(text, add_special_tokens=False):
            return ids
        raise Malformed("of which the model's chat template makes no tokens")

    def completed(self, prompt: str | list[int], *, echo: bool = False) -> Prompt:
        """Return the prompt that a completion continues, with the special tokens that the tokenizer adds to a text.

        Args:
            echo: say its text, and where each token begins in it.

        Raises:
            Malformed: there are no tokens.
        """
        tokenizer = self._tokenizer
        ids = tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        if not ids:
            if tokenizer.bos_token_id is None:
                raise Malformed("of which the tokenizer makes no tokens; and it has none that begins a text")
            ids = [tokenizer.bos_token_id]
        if not echo:
            return Prompt(ids)
        read = TextPieces(tokenizer, special=True)
        pieces = [*map(read.add, ids), read.end()]
        decoded, begins = "".join(pieces), accumulate(map(len, pieces[:-2]), initial=0)
        text = prompt if isinstance(prompt, str) else decoded
        added = len(decoded) - len(text) if decoded.endswith(text) else 0  # by special tokens in front of a text
        return Prompt(ids, text, [min(max(0, begin - added), len(text)) for begin in begins])


class TextPieces:
    """Tokens to pieces of text, none of which ends within a character.

    Tokens are decoded behind those of the piece before, as many tokenizers spell a word's beginning by what precedes.

    Args:
        before: tokens behind which the text begins.
        special: special tokens are text, too.
    """

    def __init__(self, tokenizer: Any, before: Sequence[int] = (), *, special: bool = False) -> None:
        # What is under a fast tokenizer decodes a few tokens in a tenth of the time.
        self._tokenizer = getattr(tokenizer, "backend_tokenizer", tokenizer)
        self._special = special
        self._ids = [*before[-PATIENCE:]]
        self._told = len(self._ids)
        """How many of the ids were let out."""

    def add(self, token: int) -> str:
        """The text that is complete with this token."""
        self._ids.append(token)
        return self._new(whole=len(self._ids) - self._told > PATIENCE)

    def end(self) -> str:
        """What is left when no token follows."""
        return self._new(whole=True)

    def _new(self, *, whole: bool) -> str:
        before, text = self._decode(self._ids[: self._told]), self._decode(self._ids)
        if not whole and (len(text) <= len(before) or text.endswith(BROKEN)):
            return ""
        self._ids, self._told = self._ids[self._told :], len(self._ids) - self._told
        return text[len(before) :]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=not self._special)


class StopStrings:
    """Text up to the first of some strings, which is left out; the end of what came is held back while it may begin
    one.

    Of several, that counts which ends first: however the text is cut into pieces, the same is let out.

    >>> stops = StopStrings(["END", "."])
    >>> [stops.add("so E"), stops.add("N"), stops.add("T E"), stops.add("ND?"), stops.found]
    ['so ', '', 'ENT ', '', True]
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""
        self.found = False

    def add(self, text: str) -> str:
        """The text that can be let out now."""
        text = self._held + text
        ends = [(place + len(stop), place) for stop in self._stops if (place := text.find(stop)) >= 0]
        if ends:
            self.found, self._held = True, ""
            return text[: min(ends)[1]]
        held = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def end(self) -> str:
        """What is held back, when nothing follows."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Characters at the end of ``text`` that may begin ``stop``."""
    longest = min(len(text), len(stop) - 1)
    return next((length for length in range(longest, 0, -1) if text.endswith(stop[:length])), 0)


@dataclass
class AnswerText(Generic[T]):
    """The text of one answer as its tokens come, and what is told of each token once its text is let out.

    Attributes:
        stops: once one was found, nothing more comes.
        come: characters of the tokens so far.
    """

    pieces: TextPieces
    stops: StopStrings
    come: int = 0
    _let_out: int = 0
    _notes: list[tuple[int, T]] = field(default_factory=list)
    """Of tokens whose text is held back: characters that came before each, and what is told of it."""

    def add(self, token: int, note: T) -> tuple[str, list[T]]:
        """The text, and the notes of tokens, that can be let out now."""
        self._notes.append((self.come, note))
        return self._out(self.pieces.add(token))

    def end(self) -> tuple[str, list[T]]:
        """What is left, when no token follows."""
        text, notes = self._out(self.pieces.end())
        if self.stops.found:
            return text, notes
        return text + self.stops.end(), notes + [note for _, note in self._notes]

    def _out(self, piece: str) -> tuple[str, list[T]]:
        self.come += len(piece)
        text = self.stops.add(piece)
        self._let_out += len(text)
        notes = [note for place, note in self._notes if place < self._let_out]
        self._notes = self._notes[len(notes) :]
        return text, notes
