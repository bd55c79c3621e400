"""Conversion of messages and texts to prompts, and of an answer's tokens to text as they arrive."""

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
"""Character that decoding yields for bytes which are not a whole character."""
PATIENCE = 16
"""Number of tokens after which incomplete bytes are emitted as they are. A character has at most four bytes."""


class Prompt(NamedTuple):
    """Tokens of a prompt.

    Attributes:
        ids: token ids, at least one.
        text: text of the prompt, if it was asked for; else empty.
        offsets: for each token, the number of characters of the text before it.
    """

    ids: list[int]
    text: str = ""
    offsets: Sequence[int] = ()


class Prompts:
    """Makes prompts from messages with a chat template, or from texts.

    Args:
        tokenizer: it is copied, so that another thread can use it at the same time.
        template: ``chatml``, ``plain``, or a file with a Jinja template. None uses the template of the tokenizer, if it
            has one.

    Raises:
        UserError: the template cannot render a chat.
    """

    def __init__(self, tokenizer: Any, template: str | None = None) -> None:
        changed = (
            copy.deepcopy(tokenizer) if template is None else with_template(tokenizer, template, "--chat-template")
        )
        self._tokenizer: Any = changed
        self.template = str(changed.chat_template or "")
        """Chat template; empty if there is none."""
        self.end_of_text: Any = changed.eos_token_id
        """Token id that ends a turn in the template; None if the tokenizer has none."""

    def tokens(self, messages: Sequence[dict[str, str]], *, reasoning: bool = True) -> list[int]:
        """Render a chat with the chat template, and return the token ids after which the model generates its answer.

        The role ``developer`` becomes ``system``, unless the template knows ``developer``.

        Args:
            messages: role and content of each message.
            reasoning: False for an answer without reasoning before it.

        Raises:
            Malformed: there is no template; or it refuses the messages, renders no tokens, or cannot switch off
                reasoning.
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
        """Return the tokens of a prompt that is continued without a chat template.

        A text gets the special tokens that the tokenizer adds. An empty prompt becomes the token that begins a text.

        Args:
            prompt: a text, or token ids.
            echo: also return the text, and the offset of each token in it.

        Raises:
            Malformed: the prompt has no tokens, and the tokenizer has none that begins a text.
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
        added = len(decoded) - len(text) if decoded.endswith(text) else 0  # characters of special tokens
        return Prompt(ids, text, [min(max(0, begin - added), len(text)) for begin in begins])


class TextPieces:
    """Converts tokens to pieces of text that never end within a character.

    Tokens are decoded together with the tokens of the previous piece, because many tokenizers spell the beginning of a
    word depending on the token before it.

    Args:
        tokenizer: decodes tokens.
        before: tokens that precede the text.
        special: include the text of special tokens.
    """

    def __init__(self, tokenizer: Any, before: Sequence[int] = (), *, special: bool = False) -> None:
        # The backend of a fast tokenizer decodes a few tokens in a tenth of the time.
        self._tokenizer = getattr(tokenizer, "backend_tokenizer", tokenizer)
        self._special = special
        self._ids = [*before[-PATIENCE:]]
        self._told = len(self._ids)
        """Number of ids whose text was emitted."""

    def add(self, token: int) -> str:
        """Add a token and return the text that is complete with it; empty if a character is incomplete."""
        self._ids.append(token)
        return self._new(whole=len(self._ids) - self._told > PATIENCE)

    def end(self) -> str:
        """Return the remaining text when no token follows, even if its last character is incomplete."""
        return self._new(whole=True)

    def _new(self, *, whole: bool) -> str:
        """Return the text that was not emitted yet; empty if it ends within a character, unless ``whole`` is set."""
        before, text = self._decode(self._ids[: self._told]), self._decode(self._ids)
        if not whole and (len(text) <= len(before) or text.endswith(BROKEN)):
            return ""
        self._ids, self._told = self._ids[self._told :], len(self._ids) - self._told
        return text[len(before) :]

    def _decode(self, ids: list[int]) -> str:
        """Decode token ids, with special tokens only if ``special`` was set."""
        return self._tokenizer.decode(ids, skip_special_tokens=not self._special)


class StopStrings:
    """Emits text up to the first of several stop strings, which is left out.

    Text at the end that may be the beginning of a stop string is held back. If several strings match, the one that ends
    first counts. So the emitted text does not depend on how it is divided into pieces.

    >>> stops = StopStrings(["END", "."])
    >>> [stops.add("so E"), stops.add("N"), stops.add("T E"), stops.add("ND?"), stops.hit]
    ['so ', '', 'ENT ', '', True]
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""
        self.hit = False

    def add(self, text: str) -> str:
        """Append text; return the text that can be emitted now, which may be ``""``. Call only until ``hit`` is set.

        If a stop string is complete, ``hit`` becomes True. Only the text before the stop string is returned, and the
        rest is dropped. An end of the text that may begin a stop string is held back."""
        text = self._held + text
        ends = [(place + len(stop), place) for stop in self._stops if (place := text.find(stop)) >= 0]
        if ends:
            self.hit, self._held = True, ""
            return text[: min(ends)[1]]
        held = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def end(self) -> str:
        """Return the text that is held back, when no text follows; afterwards none is held."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Return the number of characters at the end of ``text`` that may begin ``stop``; 0 if none may."""
    longest = min(len(text), len(stop) - 1)
    return next((length for length in range(longest, 0, -1) if text.endswith(stop[:length])), 0)


@dataclass
class AnswerText(Generic[T]):
    """Text of one answer as its tokens arrive, with a note for each token that is returned when its text is emitted.

    Attributes:
        pieces: converts tokens to text.
        stops: stop strings. After one is found, no more text is emitted.
        come: number of characters of the tokens so far.
    """

    pieces: TextPieces
    stops: StopStrings
    come: int = 0
    _let_out: int = 0
    _notes: list[tuple[int, T]] = field(default_factory=list)
    """For each token whose text is held back: number of characters before it, and its note."""

    def add(self, token: int, note: T) -> tuple[str, list[T]]:
        """Append a token with a note; return the text, and the notes of tokens, that can be emitted now.

        Both may be empty. A note is returned when the first character of its token is emitted."""
        self._notes.append((self.come, note))
        return self._out(self.pieces.add(token))

    def end(self) -> tuple[str, list[T]]:
        """Return the remaining text and notes when no token follows.

        If a stop string was found, notes of later tokens are dropped.
        """
        text, notes = self._out(self.pieces.end())
        if self.stops.hit:
            return text, notes
        return text + self.stops.end(), notes + [note for _, note in self._notes]

    def _out(self, piece: str) -> tuple[str, list[T]]:
        """Append a piece of text; return the text that can be emitted, and the notes of tokens that begin in it."""
        self.come += len(piece)
        text = self.stops.add(piece)
        self._let_out += len(text)
        notes = [note for place, note in self._notes if place < self._let_out]
        self._notes = self._notes[len(notes) :]
        return text, notes
