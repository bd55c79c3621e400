"""Tokenising of documents piece by piece, so that every token either counts in the loss or does not."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from tawpipe.data.chats.render import Document
from tawpipe.data.chats.special import BREAK, ESCAPED, SpecialTokens
from tawpipe.data.settings import SpecialInText
from tawpipe.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")

PART_CHARACTERS = 1 << 18
"""Longer texts are tokenised in parts, cut before a space: a tokenizer needs about 100 bytes per token, and runs only
different texts in parallel. At a cut a few tokens may differ from the tokens of the whole text."""

ANCHORS = ("\n", "\ue000", ".")
"""Characters after which the middle of a document is tokenised; the next one is used for texts that merge with the
first."""

BATCH_CHARACTERS = 1 << 22
"""Number of characters that are tokenised at one time."""


class Tokens(NamedTuple):
    """Tokenised document."""

    ids: NDArray[np.uint32]
    counts: NDArray[np.bool_]
    """True for tokens that count in the loss. The first token may count too: only its row knows if it is predicted."""


class Encoder:
    """Tokeniser of documents in batches.

    Every piece of a document is tokenised separately, as the prompt is at inference, so no token crosses the border
    between text that counts and text that does not. A document begins with the beginning-of-text token if the tokenizer
    itself places one. It ends with the end-of-text token if the tokenizer has one; this token counts. Tokens that a
    text has already are not repeated. Chats begin like texts, whatever their template has written, and end as their
    template says.

    Args:
        tokenizer: tokenizer of the run.
        special: the setting ``special_in_text``.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, special: SpecialInText = "keep") -> None:
        # TOKENIZERS_PARALLELISM is not set here. If unset, tokenizers turns parallelism off in a forked child; if true,
        # a forked child that tokenises hangs.
        self._tokenizer = tokenizer
        self._special = SpecialTokens(tokenizer, special)
        with_special, (alone,) = list(tokenizer("a")["input_ids"]), self._plain(["a"])
        places = (at for at in range(len(with_special)) if with_special[at : at + len(alone)] == alone)
        begin = with_special[: next(places, 0)]
        is_named = tokenizer.bos_token_id is not None
        self.begin: list[int] = begin if not is_named or tokenizer.bos_token_id in begin else []
        """Token ids with which a text begins."""
        self._end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        self._anchors = self._find_anchors()

    def _find_anchors(self) -> dict[str, list[int]]:
        """Return anchor characters with their tokens if text after a line break has other tokens than at the beginning.

        Returns an empty mapping if it has equal tokens. Tokenizers of the SentencePiece family put a space before every
        text. Inside of a document that space would be wrong. A piece there is tokenised after an anchor, whose tokens
        are then removed.
        """
        (alone,) = self._plain(["a"])
        anchors, inside = dict[str, list[int]](), list[int]()
        for anchor in ANCHORS:
            anchor_tokens, behind = self._plain([anchor, anchor + "a"])
            inside = inside or behind[len(anchor_tokens) :]
            if behind == anchor_tokens + inside and inside != alone:
                anchors[anchor] = anchor_tokens
        return anchors

    def _plain(self, texts: list[str]) -> list[list[int]]:
        """Return the token ids of each text without added special tokens."""
        encoded = self._tokenizer(
            texts, add_special_tokens=False, return_attention_mask=False, return_token_type_ids=False, verbose=False
        )
        ids: Any = encoded["input_ids"]
        if self._special.mode == "plain":
            texts = [text.replace(ESCAPED, BREAK) for text in texts]
            broken = (self._special.encode(text) if BREAK in text else None for text in texts)
            return [some or usual for some, usual in zip(broken, ids, strict=True)]
        return ids

    def beginning(self, text: str) -> list[int]:
        """Return the token ids of an unfinished document that begins with ``text``; may be empty for an empty text."""
        (tokens,) = self._plain([text])
        return tokens if tokens[:1] == self.begin else self.begin + tokens

    def encode(self, documents: Sequence[Document]) -> list[Tokens]:
        """Return the tokens of each document, in order."""
        parts = [
            [(part, piece.counts) for piece in document.pieces for part in split_text(piece.text)]
            for document in documents
        ]
        texts = [
            self._anchor(document[place - 1][0]) + text if place else text
            for document in parts
            for place, (text, _) in enumerate(document)
        ]
        encoded = (ids for batch in _batches(texts, len) for ids in self._plain(batch))
        return [self._join(document, part, encoded) for document, part in zip(documents, parts, strict=True)]

    def _join(self, document: Document, parts: list[tuple[str, bool]], encoded: Iterator[list[int]]) -> Tokens:
        """Join the tokens of a document's parts; adds beginning and end tokens where they are missing.

        Args:
            document: the document.
            parts: texts of the document, each with True if it counts in the loss.
            encoded: token ids of each part; as many are taken from it as there are ``parts``.
        """
        begin = self.begin if not document.complete or document.kind == "chat" else []
        end = [] if document.complete else self._end
        ids, counts = list[NDArray[np.uint32]](), list[NDArray[np.bool_]]()
        for place, (text, part_counts) in enumerate(parts):
            tokens = self._inside(text, next(encoded), self._anchor(parts[place - 1][0])) if place else next(encoded)
            if place == 0 and begin:  # the text may have it already, once or twice
                while document.complete and tokens[: 2 * len(begin)] == 2 * begin:
                    tokens = tokens[len(begin) :]
                if tokens[: len(begin)] != begin:
                    ids.append(np.array(begin, np.uint32))
                    counts.append(np.zeros(len(begin), np.bool_))
            if place == len(parts) - 1 and tokens[-1:] == end:
                end = []
            ids.append(np.array(tokens, np.uint32))
            counts.append(np.full(len(ids[-1]), part_counts, np.bool_))
        ids.append(np.array(end, np.uint32))
        counts.append(np.ones(len(end), np.bool_))
        return Tokens(np.concatenate(ids), np.concatenate(counts))

    def _anchor(self, before: str) -> str:
        """Return the text after which a piece is tokenised: the special token that ends ``before``, or an anchor."""
        last = self._special.last(before)
        return last if last and (self._anchors or last in self._special.stripping) else next(iter(self._anchors), "")

    def _inside(self, text: str, tokens: list[int], anchor: str) -> list[int]:
        """Return the tokens of ``text`` inside of a document, cut out of ``tokens``, which begin with ``anchor``.

        If text and anchor have merged (two line breaks may be one token), other anchors are tried.

        Raises:
            UserError: every anchor merges with this text.
        """
        if anchor and anchor not in self._anchors:
            return tokens[1:]
        for number, (anchor, anchor_tokens) in enumerate(self._anchors.items()):
            tokens = self._plain([anchor + text])[0] if number else tokens
            if tokens[: len(anchor_tokens)] == anchor_tokens:
                return tokens[len(anchor_tokens) :]
        if self._anchors:
            name = self._tokenizer.name_or_path or "the tokenizer as given"
            raise UserError("--tokenizer", name, f"one that does not merge {text[:9]!r} with any letter before it")
        return tokens

    def encode_all(self, documents: Iterable[Document]) -> Iterator[tuple[Document, Tokens]]:
        """Yield documents with their tokens; keeps about ``BATCH_CHARACTERS`` characters in memory."""
        for batch in _batches(documents, lambda document: sum(len(piece.text) for piece in document.pieces)):
            yield from zip(batch, self.encode(batch), strict=True)


def _batches(items: Iterable[T], characters: Callable[[T], int]) -> Iterator[list[T]]:
    """Yield lists of consecutive items that have about ``BATCH_CHARACTERS`` characters together."""
    batch, total = list[T](), 0
    for item in items:
        batch.append(item)
        total += characters(item)
        if total >= BATCH_CHARACTERS:
            yield batch
            batch, total = [], 0
    if batch:
        yield batch


def split_text(text: str) -> Iterator[str]:
    """Yield parts of a text of at most ``PART_CHARACTERS``, cut before a space that follows a word if possible."""
    begin = 0
    while len(text) - begin > PART_CHARACTERS:
        end = begin + PART_CHARACTERS
        space = text.rfind(" ", begin + PART_CHARACTERS // 2, end)
        while space > begin and text[space - 1].isspace():
            space -= 1
        if space > begin and text[space] == " ":
            end = space
        yield text[begin:end]
        begin = end
    yield text[begin:]
