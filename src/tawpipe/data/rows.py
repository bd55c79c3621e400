"""Samples by number: rows cut out of a tokenised corpus, so that the position in the data is one integer.

A row has S tokens. It holds segments (documents or pieces of them) that do not see each other; the padding at its end
is in segments of its own, none longer than the longest document, so that no position is beyond what documents need.
Under ``balanced`` and ``none`` a row is one document, as long as it is; under ``balanced`` a step takes as many of them
as its tokens allow.
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
"""Packings whose samples are documents, or pieces of them, of their own lengths."""
PLANS_KEPT = 2  # the epoch that is read and the one that a prefetching thread may have entered


class RowSource(Protocol):
    """Samples by their global number, counted from 0 over all epochs. A number gives the same row everywhere."""

    def sample(self, number: int) -> MicroBatch:
        """The sample as a micro-batch of one row."""
        ...

    def step(self, first: int, tokens: int) -> StepDocuments:
        """The samples from ``first`` on that have so many tokens together at most, or one that has more."""
        ...

    def length(self, number: int) -> int:
        """Tokens of the sample."""
        ...

    def state_dict(self, number: int) -> dict[str, Any]:
        """State with which another process goes on at sample ``number`` at once. Small, and of plain JSON types."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Make the samples from the state's number on cheap to reach."""
        ...


@dataclass(frozen=True)
class StepDocuments:
    """The documents of one step under ``balanced``.

    Args:
        lengths: of the documents, in tokens.
        read: makes a document, by its number in the step, a micro-batch of one row.
    """

    lengths: list[int]
    read: Callable[[int], MicroBatch]


def read_step(sample: Callable[[int], MicroBatch], first: int, tokens: int) -> StepDocuments:
    """The documents of a step whose lengths are known only when they are read, which is done here, in their order."""
    samples: list[MicroBatch] = []

    def lengths() -> Iterator[int]:
        while True:
            samples.append(sample(first + len(samples)))
            yield samples[-1].lengths[0]

    return StepDocuments(take(lengths(), tokens), samples.__getitem__)


def take(lengths: Iterator[int], tokens: int) -> list[int]:
    """The first lengths that are at most so many tokens together, at least one."""
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
    """Copy the segments' tokens into one row.

    Args:
        documents: the corpus's number of each document that the segments count.
        longest: tokens of a segment of padding at most.
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
    """An error for files of which no token would be learned."""
    places = {"fit": f"in the first {sequence_length:,} tokens of any document"} | dict.fromkeys(
        WHOLE, "in any document"
    )
    setting_of = {"fit": "--sequence-length, or --packing split", "balanced": "--max-document"}
    where, larger = places.get(packing, "in any row"), setting_of.get(packing, "--sequence-length")
    expected = f"tokens to learn, of which there are none {where}: a larger {larger}"
    return UserError(setting, name_files(files), expected)


def _learnable(corpus: Corpus, documents: Int64s, longest: int) -> tuple[Pieces, int]:
    """The pieces of documents of which something is learned, and how many tokens are. Nothing predicts the first token
    of a piece.
    """
    pieces = Pieces.of(corpus.lengths[documents], longest)
    begins = corpus.offsets[documents[pieces.documents]] + pieces.starts
    learned = corpus.counted(begins + 1, begins + pieces.lengths)
    return pieces.those(learned > 0), int(learned.sum())


class PackedDataset:
    """The rows of some documents of a tokenised corpus.

    Sample n is decided by (corpus, documents, sequence_length, packing, seed, n) alone, in whatever order samples are
    asked for; the position in the data is therefore one integer, the number of samples consumed.

    Args:
        documents: [documents] numbers of the corpus's documents that take part.
        sequence_length: tokens of a row; under ``balanced`` and ``none`` of a document at most.
        packing: how they fill rows, see ``tawpipe.dealing.packing``.
        pad_id: the token that fills up rows; any will do, as it never counts and nothing sees it.
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
        """Tokens that a segment may have at most: of the longest document, or of a row."""

    @classmethod
    def of_learnable(
        cls, corpus: Corpus, documents: Int64s, sequence_length: int, *, seed: int, packing: Packed, pad_id: int
    ) -> PackedDataset | None:
        """The rows of those documents of which something is learned; None if there is none.

        ``fit`` cuts documents off: where an answer lies behind that, nothing of the document would be learned. Under
        ``balanced`` and ``none`` pieces of which nothing is learned are left out. Under ``split`` all take part, or
        none.
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
        return len(self.documents)

    @property
    def num_tokens(self) -> int:
        """Tokens of the documents, also those that ``fit`` cuts off, and pieces that are left out."""
        return int(self._lengths.sum())

    @property
    def contents(self) -> NDArray[np.uint64]:
        """[documents] a hash of each one's pieces."""
        return self._corpus.contents[self.documents]

    @property
    def num_padding(self) -> int:
        """Tokens of an epoch that fill up rows."""
        return 0 if self._pieces is not None else self._rows * self.sequence_length - int(self.lengths.sum())

    @property
    def num_learned(self) -> int:
        """Labels of the first epoch that count; under ``fit`` those of every epoch."""
        if self._pieces is not None:
            return _learnable(self._corpus, self.documents, self.sequence_length)[1]
        if self._shape is not None:
            return int(self._corpus.learned(self.documents, self.sequence_length).sum())
        plan = self._plan(0)
        assert isinstance(plan, SplitPlan)
        documents, tokens = plan.inner_cuts()
        places = self._corpus.offsets[self.documents[documents]] + tokens
        lost = self._corpus.counted(places, places + 1).sum()  # nothing predicts the first token of a row
        return int(self._corpus.learned(self.documents).sum() - lost)

    @property
    def num_truncated(self) -> int:
        """Documents whose end ``fit`` cuts off."""
        return 0 if self._shape is None else self._num_longer

    @property
    def num_cut(self) -> int:
        """Documents that are cut into pieces."""
        return 0 if self._pieces is None else self._num_longer

    @property
    def num_torn(self) -> int:
        """Pieces of documents that are learned without what stands before them."""
        if self._pieces is not None:
            return int((self._pieces.starts > 0).sum())
        plan = self._plan(0)
        return len(plan.inner_cuts()[0]) if isinstance(plan, SplitPlan) else 0

    @property
    def _num_longer(self) -> int:
        return int((self._lengths > self.sequence_length).sum())

    @property
    def lengths(self) -> Int64s:
        """[documents] tokens of each, of the part that is shown; of every piece where they are cut into pieces."""
        if self._pieces is not None:
            return self._pieces.lengths
        return self._lengths if self._shape is None else self._shape.lengths

    def __len__(self) -> int:
        """Rows of an epoch; the same for all."""
        return self._rows

    def sample(self, number: int) -> MicroBatch:
        """Row ``number % rows`` of epoch ``number // rows``."""
        epoch, row = divmod(number, self._rows)
        segments = self._plan(epoch).segments(row)
        length = self.sequence_length if self._pieces is None else segments[0].length
        return cut_row(self._corpus, self.documents, segments, length, self._pad_id, self.longest)

    def length(self, number: int) -> int:
        """Tokens of the sample, without reading it."""
        epoch, row = divmod(number, self._rows)
        plan = self._plan(epoch)
        return plan.length(row) if isinstance(plan, PiecePlan) else self.sequence_length

    def step(self, first: int, tokens: int) -> StepDocuments:
        return StepDocuments(self.step_lengths(first, tokens), lambda number: self.sample(first + number))

    def step_lengths(self, first: int, tokens: int) -> list[int]:
        """Tokens of the documents of a step, without reading them."""
        return take(map(self.length, count(first)), tokens)

    def document(self, number: int) -> tuple[NDArray, NDArray[np.bool_]]:
        """Tokens of a document, and which of them are learned; nothing predicts the first."""
        tokens, counts = self._corpus.read(int(self.documents[number]), 0, int(self._lengths[number]))
        learned = np.ones(len(tokens), np.bool_) if counts is None else counts
        return tokens, np.append(np.zeros(1, np.bool_), learned[1:])[: len(tokens)]

    def text(self, document: int, tokens: int, without: Sequence[int]) -> Int64s:
        """So many tokens of the documents end to end, from the beginning of one on, over and over; none where nothing
        is left ``without`` some tokens.
        """
        pieces, left, end = [np.zeros(0, np.int64)], tokens, document + self.num_documents
        while left and document < end:
            first, begin_and_end = document % self.num_documents, 2
            # No more documents than are needed if each has a token, and of none more than is needed.
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
        plan = self._plans.get(epoch)
        if plan is None:
            if self._pieces is not None:
                plan = PiecePlan(self._pieces, seed=self.seed, epoch=epoch)
            elif self._shape is None:
                plan = SplitPlan(self._lengths, self.sequence_length, seed=self.seed, epoch=epoch)
            else:
                plan = FitPlan(self._shape, seed=self.seed, epoch=epoch)
            # A new dict instead of a changed one: a prefetching thread may be reading it.
            self._plans = dict([*self._plans.items(), (epoch, plan)][-PLANS_KEPT:])
        return plan

    def state_dict(self, number: int) -> dict[str, Any]:
        return {"sample": number}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing: every sample is equally near."""
