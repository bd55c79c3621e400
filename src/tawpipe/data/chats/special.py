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
"""A letter that no text has. Behind its first letter it makes a special token text, until the text is tokenised."""

WHY = "with special tokens in what users, tools or the system said, which "
USES = {
    "keep": "stay special tokens (--special-in-text plain makes them text)",
    "plain": "are tokenised as text (--special-in-text)",
}


class SpecialTokens:
    """The special tokens of a tokenizer, and what becomes of those that somebody wrote.

    Args:
        mode: the setting ``special_in_text``.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, mode: SpecialInText) -> None:
        self._tokenizer, self.mode = tokenizer, mode
        added = [token for token in tokenizer.added_tokens_decoder.values() if token.special and str(token)]
        names = {str(token) for token in added}
        self.stripping = {str(token) for token in added if token.rstrip}
        """Those that take away the white space behind them."""
        self._broken = {name: name[0] + BREAK + name[1:] for name in sorted(names, key=len, reverse=True)}
        self._names = re.compile("|".join(map(re.escape, self._broken)) or "(?!)")
        self._swapped = re.compile("|".join(map(re.escape, [*self._broken.values(), *self._broken, BREAK])))

    def last(self, text: str) -> str:
        """The special token with which a text ends, or ``""``."""
        return next((name for name in self._broken if text.endswith(name)), "")

    def given(self, value: Any, where: str) -> tuple[Any, list[Skipped]]:
        """Texts inside lists and objects as they go into a template, and a note if they have special tokens."""
        seen: list[str] = []
        broken = self._break(value, seen)
        notes = [Skipped("note", where, WHY + USES[self.mode], seen[0])] if seen else []
        return (broken if self.mode == "plain" else value), notes

    def messages(
        self, messages: list[dict[str, Any]], tools: Any, where: str
    ) -> tuple[list[dict[str, Any]], Any, list[Skipped]]:
        """Messages and tools as they go into a template, and a note if another than the assistant wrote such tokens."""
        others = [message for message in messages if message["role"] != ASSISTANT]
        (others, tools), notes = self.given([others, tools], where)
        rest = iter(others)
        return [message if message["role"] == ASSISTANT else next(rest) for message in messages], tools, notes

    def encode(self, text: str) -> list[int]:
        """The tokens of a text in which ``given`` has made special tokens text.

        Raises:
            UserError: the tokenizer cannot tell them apart.
        """
        swapped = self._swapped.sub(lambda match: self._broken.get(match[0], match[0].replace(BREAK, "")), text)
        return self._renamed.encode(swapped, add_special_tokens=False).ids

    @cached_property
    def _renamed(self) -> Any:
        """The tokenizer with a ``BREAK`` in its special tokens' names, so that text in their old spelling is text."""
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
        """Return ``value`` with a ``BREAK`` in the special tokens of its texts, which ``seen`` takes in."""
        if isinstance(value, dict):
            return {self._break(key, seen): self._break(item, seen) for key, item in value.items()}
        if isinstance(value, list):
            return [self._break(item, seen) for item in value]
        if not isinstance(value, str):
            return value
        seen += self._names.findall(value)
        return self._names.sub(lambda match: self._broken[match[0]], value)
