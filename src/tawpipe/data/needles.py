"""Test rows that hide a fact at some depth of a long text and ask for it at the end.

The text is the user's own. A sample has one fact and one beginning of its text at every length and depth, so that
results differ only by length and depth.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from tawpipe.data.chats.render import ChatText, Document
from tawpipe.data.encode import Encoder
from tawpipe.data.rows import PackedDataset
from tawpipe.dealing.packing import Int64s
from tawpipe.errors import UserError
from tawpipe.model.batch import IGNORE, MicroBatch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NAMES = "Anna", "Boris", "Clara", "David", "Emma", "Felix", "Grace", "Henry", "Irene", "Jonas", "Laura", "Nora"
CODES = 10_000, 100_000
"""Range of the hidden numbers: the first one, and the one after the last."""
FACT = "\nThe access code of {name} is {code}.\n"
QUESTION = "\nWhat is the access code of {name}? The access code of {name} is"
ANSWER = " {code}"


@dataclass(frozen=True)
class Needle:
    """Tokens of one fact, its question and its answer, and the index of the document with which the text begins."""

    fact: Int64s
    question: Int64s
    answer: Int64s
    document: int


class Needles:
    """Rows with hidden facts, determined by the arguments and the number of a row.

    Args:
        text: documents in which facts are hidden; joined end to end, without special tokens.
        tokenizer: tokenizer of the model.
        depths: number of depths, evenly spaced from 0 (beginning of the text) to 1 (its end); with 1 only the middle.
        samples: number of facts hidden at every depth.
        seed: seed of the facts and texts.

    Raises:
        UserError: the tokenizer cannot represent numbers, or there is no text.
    """

    def __init__(
        self, text: PackedDataset, tokenizer: PreTrainedTokenizerBase, *, depths: int, samples: int, seed: int
    ) -> None:
        encoder = Encoder(tokenizer)
        self.text, self.samples = text, samples
        self.depths = [depth / (depths - 1) for depth in range(depths)] if depths > 1 else [0.5]
        self._begin = np.array(encoder.begin, np.int64)
        self._special = tokenizer.all_special_ids
        self._needles: list[Needle] = []
        for sample in range(samples):
            draw = np.random.default_rng([seed, sample])
            words = {"name": str(draw.choice(NAMES)), "code": str(draw.integers(*CODES))}
            documents = [_in_the_middle(pattern.format(**words)) for pattern in (FACT, QUESTION, ANSWER)]
            parts = [tokens.ids.astype(np.int64) for tokens in encoder.encode(documents)]
            spelled = tokenizer.decode(parts[2].tolist())
            if "".join(str(spelled).split()) != words["code"]:
                name = tokenizer.name_or_path or f"a tokenizer of {len(tokenizer):,} tokens"
                expected = f"one that can spell numbers, to look for hidden ones: {words['code']} becomes {spelled!r}"
                raise UserError("--tokenizer", name, expected)
            self._needles.append(Needle(*parts, document=int(draw.integers(text.num_documents))))
        if not len(text.text(0, 1, self._special)):
            raise UserError("--data", "special tokens alone", "text, to hide facts in it")

    @property
    def shortest(self) -> int:
        """Tokens of the shortest possible row: fact, question, answer and one token of text for every depth."""
        return len(self.depths) + max(self._taken(needle) for needle in self._needles)

    def _taken(self, needle: Needle) -> int:
        """Return the tokens of a row that are not text: its beginning, fact, question and answer."""
        return sum(map(len, (self._begin, needle.fact, needle.question, needle.answer)))

    @property
    def rows(self) -> int:
        """Number of rows of one length."""
        return len(self.depths) * self.samples

    def row(self, length: int, first: int, number: int) -> MicroBatch:
        """Return row ``first + number``: one document of ``length`` tokens with labels only on the answer.

        Rows are ordered by depth; the samples of one depth are consecutive.
        """
        depth, sample = divmod(first + number, self.samples)
        needle = self._needles[sample]
        text = self.text.text(needle.document, length - self._taken(needle), self._special)
        place = round(self.depths[depth] * len(text))
        parts = self._begin, text[:place], needle.fact, text[place:], needle.question, needle.answer
        ids = torch.from_numpy(np.concatenate(parts))[None]
        labels = torch.full_like(ids, IGNORE)
        labels[:, length - len(needle.answer) :] = ids[:, length - len(needle.answer) :]
        return MicroBatch.of_documents(ids, labels, [length])


def _in_the_middle(text: str) -> Document:
    """Return a document whose text is tokenised as in the middle of a document."""
    return Document("text", (ChatText("", False), ChatText(text, True)), complete=True)
