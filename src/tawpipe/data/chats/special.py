"""Special tokens in the text of users, tools and system turns: kept, or tokenised as text."""

from __future__ import annotations

import json
import re
from functools import cached_property
from typing import TYPE_CHECKING, Any

from tawpipe.data.chats.messages import ASSISTANT
from tawpipe.data.report import Skipped
from tawpipe.data.settings import SpecialInText
from tawpipe.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ESCAPED = "\\ufdd0"
"""``BREAK`` as JSON and Python escape it."""

BREAK = "\ufdd0"
"""Character that occurs in no text. Placed after the first character of a special token, it keeps it text until the
text is tokenised."""

WHY = "with special tokens in what users, tools or the system said, which "
USES = {
    "keep": "stay special tokens (--special-in-text plain makes them text)",
    "plain": "are tokenised as text (--special-in-text)",
}


class SpecialTokens:
    """Special tokens of a tokenizer, and their treatment in text that users, tools or the system wrote.

    Args:
        tokenizer: tokenizer of the run.
        mode: the setting ``special_in_text``.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, mode: SpecialInText) -> None:
        self._tokenizer, self.mode = tokenizer, mode
        added = [token for token in tokenizer.added_tokens_decoder.values() if token.special and str(token)]
        names = {str(token) for token in added}
        self.stripping = {str(token) for token in added if token.rstrip}
        """Special tokens that remove white space after them."""
        self._broken = {name: name[0] + BREAK + name[1:] for name in sorted(names, key=len, reverse=True)}
        self._names = re.compile("|".join(map(re.escape, self._broken)) or "(?!)")
        self._swapped = re.compile("|".join(map(re.escape, [*self._broken.values(), *self._broken, BREAK])))

    def last(self, text: str) -> str:
        """Return the special token with which ``text`` ends, or ``""``."""
        return next((name for name in self._broken if text.endswith(name)), "")

    def prepare(self, value: Any, where: str) -> tuple[Any, list[Skipped]]:
        """Return ``value``, with its special tokens made text in the mode ``plain``, and a list of notes about them.

        In the mode ``plain``, each special token in a copy of ``value`` gets a ``BREAK``. In the mode ``keep`` the
        value is returned unchanged. There is one note if the texts contain special tokens, else none.

        Args:
            value: text, or a list or object that contains texts.
            where: file, with line or row.
        """
        seen: list[str] = []
        broken = self._break(value, seen)
        notes = [Skipped("note", where, WHY + USES[self.mode], seen[0])] if seen else []
        return (broken if self.mode == "plain" else value), notes

    def messages(
        self, messages: list[dict[str, Any]], tools: Any, where: str
    ) -> tuple[list[dict[str, Any]], Any, list[Skipped]]:
        """Apply ``prepare`` to ``tools`` and to the messages of all roles except the assistant.

        Returns:
            The messages in their order, the tools, and the notes of ``prepare``.
        """
        others = [message for message in messages if message["role"] != ASSISTANT]
        (others, tools), notes = self.prepare([others, tools], where)
        rest = iter(others)
        return [message if message["role"] == ASSISTANT else next(rest) for message in messages], tools, notes

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text in which ``prepare`` has turned special tokens into text.

        Raises:
            UserError: the tokenizer has no tokenizer.json, so it cannot distinguish them.
        """
        swapped = self._swapped.sub(lambda match: self._broken.get(match[0], match[0].replace(BREAK, "")), text)
        return self._renamed.encode(swapped, add_special_tokens=False).ids

    @cached_property
    def _renamed(self) -> Any:
        """Copy of the tokenizer that has a ``BREAK`` in the names of its special tokens; their old spelling is text."""
        from tokenizers import Tokenizer

        if (backend := getattr(self._tokenizer, "backend_tokenizer", None)) is None:
            raise UserError("--special-in-text", "plain", "keep, as this tokenizer has no tokenizer.json")
        content = backend.to_str()
        for name, other in self._broken.items():
            content = content.replace(json.dumps(name, ensure_ascii=False), json.dumps(other, ensure_ascii=False))
        renamed = Tokenizer.from_str(content)
        renamed.no_truncation()
        renamed.no_padding()
        return renamed

    def _break(self, value: Any, seen: list[str]) -> Any:
        """Return ``value`` with a ``BREAK`` in the special tokens of its texts; adds the tokens to ``seen``."""
        if isinstance(value, dict):
            return {self._break(key, seen): self._break(item, seen) for key, item in value.items()}
        if isinstance(value, list):
            return [self._break(item, seen) for item in value]
        if not isinstance(value, str):
            return value
        seen += self._names.findall(value)
        return self._names.sub(lambda match: self._broken[match[0]], value)
