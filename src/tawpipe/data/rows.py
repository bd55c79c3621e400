"""Samples by number: rows cut out of a tokenised corpus, so that the position in the data is one integer.

A row has S tokens. It holds segments (documents or pieces of them) that do not attend to each other. Padding at its end
is in separate segments, none longer than the longest document, so that no position exceeds what documents need. Under
``balanced`` and ``none`` a row is one document with its own length. Under ``balanced`` a step takes as many documents
as fit into its tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from tawpipe.data.corpus import Corpus
from tawpipe.data.reading.sources import SourceFile, name_files
from tawpipe.data.settings import Packed
from tawpipe.dealing.packing import (
    EpochPlan,
    FitPlan,
    FitShape,
    Int64s,
    PiecePlan,
    Pieces,
    Segment,
    SplitPlan,
    split_rows,
)
from tawpipe.errors import UserError
from tawpipe.model.batch import IGNORE, MicroBatch

WHOLE: tuple[Packed, ...] = ("balanced", "none")
"""Packings whose samples are documents, or pieces of documents, with their own lengths."""
PLANS_KEPT = 2  # the current epoch and one that a prefetching thread may have entered


class RowSource(Protocol):
    """Interface of samples by global number, counted from 0 over all epochs.

    Each number gives an equal row on every rank.
    """

    def sample(self, number: int) -> MicroBatch:
        """Return sample ``number`` as a micro-batch of one row."""
        ...

    def step(self, first: int, tokens: int) -> StepDocuments:
        """Return the samples from ``first`` on that have up to ``tokens`` tokens together; at least one."""
        ...

    def length(self, number: int) -> int:
        """Return the tokens of sample ``number``."""
        ...

    def state_dict(self, number: int) -> dict[str, Any]:
        """Return a small JSON state with which another process can continue quickly at sample ``number``."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Move to the sample number in ``state``, so that the samples from there on can be read quickly."""
        ...


@dataclass(frozen=True)
class StepDocuments:
    """Documents of one step under ``balanced``.

    Args:
        lengths: tokens of each document.
        read: returns a document by its index in the step, as a micro-batch of one row.
    """

    lengths: list[int]
    read: Callable[[int], MicroBatch]


def read_step(sample: Callable[[int], MicroBatch], first: int, tokens: int) -> StepDocuments:
    """Read samples from ``first`` on until ``tokens`` tokens are reached, and return them as the documents of a step.

    For data sets whose lengths are known only after reading. Always reads at least one sample, and one beyond the
    limit.
    """
    samples: list[MicroBatch] = []

    def lengths() -> Iterator[int]:
        while True:
            samples.append(sample(first + len(samples)))
            yield samples[-1].lengths[0]

    return StepDocuments(take(lengths(), tokens), samples.__getitem__)


def take(lengths: Iterator[int], tokens: int) -> list[int]:
    """Return the first of ``lengths`` with a sum of up to ``tokens``; always at least one."""
    taken = [next(lengths)]
    total = taken[0]
    for length in lengths:
        total += length
        if total > tokens:
            break
        taken.append(length)
    return taken


def cut_row(
    corpus: Corpus, documents: Int64s, segments: Sequence[Segment], sequence_length: int, pad_id: int, longest: int
) -> MicroBatch:
    """Copy the tokens of segments into one row, followed by padding.

    Args:
        corpus: tokenised documents.
        documents: index in the corpus of each document that segments refer to.
        segments: parts of documents, from left to right.
        sequence_length: tokens of the row.
        pad_id: token id of padding.
        longest: most tokens of one segment of padding.
    """
    input_ids = np.full((1, sequence_length), pad_id, np.int64)
    labels = np.full((1, sequence_length), IGNORE, np.int64)
    lengths = [segment.length for segment in segments]
    at = 0
    for segment in segments:
        here = 0, slice(at, at + segment.length)
        tokens, counts = corpus.read(int(documents[segment.document]), segment.start, segment.length)
        input_ids[here] = labels[here] = tokens
        if counts is not None:
            labels[here][~counts] = IGNORE
        at += segment.length
    while at < sequence_length:
        lengths.append(min(sequence_length - at, longest))
        at += lengths[-1]
    return MicroBatch.of_documents(torch.from_numpy(input_ids), torch.from_numpy(labels), lengths)


def nothing_learned(setting: str, files: Sequence[SourceFile], sequence_length: int, packing: str) -> UserError:
    """Return the error for files of which no token would be learned."""
    places = {"fit": f"in the first {sequence_length:,} tokens of any document"} | dict.fromkeys(
        WHOLE, "in any document"
    )
    setting_of = {"fit": "--sequence-length, or --packing split", "balanced": "--max-document"}
    where, larger = places.get(packing, "in any row"), setting_of.get(packing, "--sequence-length")
    expected = f"tokens to learn, of which there are none {where}: a larger {larger}"
    return UserError(setting, name_files(files), expected)


def _learnable(corpus: Corpus, documents: Int64s, longest: int) -> tuple[Pieces, int]:
    """Return the pieces of ``documents`` with a token to learn, and the number of learned tokens.

    Documents longer than ``longest`` tokens are cut into pieces. The first token of a piece is not learned, because
    nothing predicts it.
    """
    pieces = Pieces.of(corpus.lengths[documents], longest)
    begins = corpus.offsets[documents[pieces.documents]] + pieces.starts
    learned = corpus.counted(begins + 1, begins + pieces.lengths)
    return pieces.those(learned > 0), int(learned.sum())


class PackedDataset:
    """Rows of some documents of a tokenised corpus.

    Sample n depends only on (corpus, documents, sequence_length, packing, seed, n), in whatever order samples are read.
    The position in the data is therefore one integer: the number of samples consumed.

    Args:
        corpus: tokenised documents.
        documents: indices of the documents that take part, ``(documents,)``.
        sequence_length: tokens of a row; under ``balanced`` and ``none`` the most tokens of a document.
        seed: seed of the order of documents.
        packing: placement of documents in rows, see ``tawpipe.dealing.packing``.
        pad_id: token id of padding; any id works, because padding never counts and nothing attends to it.
    """

    def __init__(
        self,
        corpus: Corpus,
        documents: NDArray[np.int64],
        *,
        sequence_length: int,
        seed: int,
        packing: Packed,
        pad_id: int,
    ) -> None:
        assert len(documents), "a dataset has at least one document"
        self.sequence_length, self.seed = sequence_length, seed
        self._corpus, self.documents, self._pad_id = corpus, documents, pad_id
        self._lengths = corpus.lengths[documents]
        self._shape = FitShape(self._lengths, sequence_length) if packing == "fit" else None
        self._pieces = _learnable(corpus, documents, sequence_length)[0] if packing in WHOLE else None
        if self._pieces is not None:
            self._rows = len(self._pieces.lengths)
        else:
            self._rows = split_rows(self._lengths, sequence_length) if self._shape is None else self._shape.rows
        assert self._rows, "a dataset has at least one row"
        self._plans: dict[int, EpochPlan] = {}
        self.longest = min(int(self._lengths.max()), sequence_length)
        """Tokens of the longest segment: the length of the longest document, but at most ``sequence_length``."""

    @classmethod
    def of_learnable(
        cls, corpus: Corpus, documents: Int64s, sequence_length: int, *, seed: int, packing: Packed, pad_id: int
    ) -> PackedDataset | None:
        """Return the data set of the documents with a token to learn; None if there is none.

        Under ``fit`` a document is truncated, so an answer beyond ``sequence_length`` would not be learned. Under
        ``balanced`` and ``none`` pieces without a learned token are left out. Under ``split`` either all documents take
        part or none.
        """
        if packing in WHOLE:
            kept = documents[np.unique(_learnable(corpus, documents, sequence_length)[0].documents)]
        else:
            learned = corpus.learned(documents, sequence_length if packing == "fit" else None)
            kept = documents[learned > 0] if packing == "fit" or not learned.any() else documents
        if not len(kept):
            return None
        return cls(corpus, kept, sequence_length=sequence_length, seed=seed, packing=packing, pad_id=pad_id)

    @property
    def num_documents(self) -> int:
        """Number of documents that take part."""
        return len(self.documents)

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the documents, including truncated ends and pieces that are left out."""
        return int(self._lengths.sum())

    @property
    def contents(self) -> NDArray[np.uint64]:
        """Hash of the pieces of each document: ``(documents,)``."""
        return self._corpus.contents[self.documents]

    @property
    def num_padding(self) -> int:
        """Number of padding tokens in one epoch."""
        return 0 if self._pieces is not None else self._rows * self.sequence_length - int(self.lengths.sum())

    @property
    def num_learned(self) -> int:
        """Number of labels that count in the first epoch; under ``fit`` in every epoch."""
        if self._pieces is not None:
            return _learnable(self._corpus, self.documents, self.sequence_length)[1]
        if self._shape is not None:
            return int(self._corpus.learned(self.documents, self.sequence_length).sum())
        plan = self._plan(0)
        assert isinstance(plan, SplitPlan)
        documents, tokens = plan.inner_cuts()
        places = self._corpus.offsets[self.documents[documents]] + tokens
        lost = self._corpus.counted(places, places + 1).sum()  # nothing predicts a row's first token
        return int(self._corpus.learned(self.documents).sum() - lost)

    @property
    def num_truncated(self) -> int:
        """Number of documents that ``fit`` truncates."""
        return 0 if self._shape is None else self._num_longer

    @property
    def num_cut(self) -> int:
        """Number of documents that are cut into pieces."""
        return 0 if self._pieces is None else self._num_longer

    @property
    def num_torn(self) -> int:
        """Number of pieces of documents that are learned without the text before them.

        Under ``split`` the pieces of the first epoch are counted.
        """
        if self._pieces is not None:
            return int((self._pieces.starts > 0).sum())
        plan = self._plan(0)
        return len(plan.inner_cuts()[0]) if isinstance(plan, SplitPlan) else 0

    @property
    def _num_longer(self) -> int:
        """Number of documents longer than ``sequence_length``."""
        return int((self._lengths > self.sequence_length).sum())

    @property
    def lengths(self) -> Int64s:
        """Tokens of each document, without truncated ends, or of each piece if documents are cut into pieces."""
        if self._pieces is not None:
            return self._pieces.lengths
        return self._lengths if self._shape is None else self._shape.lengths

    def __len__(self) -> int:
        """Return the number of rows of an epoch, equal for all epochs."""
        return self._rows

    def sample(self, number: int) -> MicroBatch:
        """Return row ``number % rows`` of epoch ``number // rows``."""
        epoch, row = divmod(number, self._rows)
        segments = self._plan(epoch).segments(row)
        length = self.sequence_length if self._pieces is None else segments[0].length
        return cut_row(self._corpus, self.documents, segments, length, self._pad_id, self.longest)

    def length(self, number: int) -> int:
        """Return the tokens of sample ``number`` without reading it."""
        epoch, row = divmod(number, self._rows)
        plan = self._plan(epoch)
        return plan.length(row) if isinstance(plan, PiecePlan) else self.sequence_length

    def step(self, first: int, tokens: int) -> StepDocuments:
        """Return the documents of a step of up to ``tokens`` tokens from sample ``first`` on, to be read later."""
        return StepDocuments(self.step_lengths(first, tokens), lambda number: self.sample(first + number))

    def step_lengths(self, first: int, tokens: int) -> list[int]:
        """Return the tokens of each document of a step without reading them."""
        return take(map(self.length, count(first)), tokens)

    def document(self, number: int) -> tuple[NDArray, NDArray[np.bool_]]:
        """Return the token ids of document ``number``, and a boolean mask that is True for learned tokens.

        The mask is False for the first token, which nothing predicts. The document is whole, even if rows truncate it.
        """
        tokens, counts = self._corpus.read(int(self.documents[number]), 0, int(self._lengths[number]))
        learned = np.ones(len(tokens), np.bool_) if counts is None else counts
        return tokens, np.append(np.zeros(1, np.bool_), learned[1:])[: len(tokens)]

    def text(self, document: int, tokens: int, without: Sequence[int]) -> Int64s:
        """Return ``tokens`` tokens of the documents end to end, from the beginning of ``document`` on.

        The documents are repeated as often as needed.

        Args:
            document: index of the first document.
            tokens: number of tokens.
            without: token ids to remove. If nothing is left without them, the result is empty.
        """
        pieces, left, end = [np.zeros(0, np.int64)], tokens, document + self.num_documents
        while left and document < end:
            first, begin_and_end = document % self.num_documents, 2
            # Read only documents that are needed if each has one token, and of each only the needed part.
            some = slice(first, min(first + min(left, end - document), self.num_documents))
            lengths = np.minimum(self._lengths[some], left + begin_and_end)
            lengths = lengths[: np.searchsorted(lengths.cumsum(), left) + 1]
            before = self._corpus.offsets[self.documents[some]][: len(lengths)] - (lengths.cumsum() - lengths)
            piece = self._corpus.tokens[np.repeat(before, lengths) + np.arange(lengths.sum())]
            pieces.append(piece[~np.isin(piece, without)][:left].astype(np.int64))
            left, document = left - len(pieces[-1]), document + len(lengths)
        once = np.concatenate(pieces)
        return np.resize(once, tokens) if len(once) else once

    def _plan(self, epoch: int) -> EpochPlan:
        """Return the plan of an epoch; the last ``PLANS_KEPT`` plans are kept."""
        plan = self._plans.get(epoch)
        if plan is None:
            if self._pieces is not None:
                plan = PiecePlan(self._pieces, seed=self.seed, epoch=epoch)
            elif self._shape is None:
                plan = SplitPlan(self._lengths, self.sequence_length, seed=self.seed, epoch=epoch)
            else:
                plan = FitPlan(self._shape, seed=self.seed, epoch=epoch)
            # Replace the dict instead of changing it: a prefetching thread may read it.
            self._plans = dict([*self._plans.items(), (epoch, plan)][-PLANS_KEPT:])
        return plan

    def state_dict(self, number: int) -> dict[str, Any]:
        return {"sample": number}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing, because every sample can be read equally fast."""
