"""Placement of documents in rows, as a pure function of lengths, row length, seed and epoch.

A plan does not list its rows: any row is found in O(log documents), and processes that know the lengths know the rows.
All plans show every document once per epoch, and shuffle rows and documents anew in each epoch. All epochs have the
same number of rows, so that sample n is row n % rows of epoch n // rows."""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

Int64s = NDArray[np.int64]


class Segment(NamedTuple):
    """Tokens ``start`` to ``start + length`` of one document."""

    document: int
    start: int
    length: int


class EpochPlan(Protocol):
    """Rows of one epoch."""

    @property
    def rows(self) -> int: ...

    def segments(self, row: int) -> list[Segment]:
        """Return the segments of a row, left to right.

        Their lengths add up to the row length or less. The rest is padding."""
        ...


def _generator(seed: int, epoch: int) -> np.random.Generator:
    """Return the random number generator for one epoch."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, epoch])))


class SplitPlan:
    """Shuffled documents, concatenated and cut every ``sequence_length`` tokens; the rows are then shuffled.

    Without the second shuffle the pieces of a long document would be in one batch. Only the last row of an epoch can be
    padded, so an epoch has less than one row of padding. A corpus shorter than one row becomes one padded row.

    Args:
        lengths: [documents] tokens of each document, all positive.
    """

    def __init__(self, lengths: Int64s, sequence_length: int, *, seed: int, epoch: int) -> None:
        generator = _generator(seed, epoch)
        self._sequence_length = sequence_length
        self._documents = generator.permutation(len(lengths))
        self._starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths[self._documents], dtype=np.int64)])
        self._cuts = generator.permutation(split_rows(lengths, sequence_length))

    @property
    def rows(self) -> int:
        return len(self._cuts)

    def inner_cuts(self) -> tuple[Int64s, Int64s]:
        """Return, for rows that begin inside a document: (index of the document, its first token in the row)."""
        cuts = np.arange(1, self.rows, dtype=np.int64) * self._sequence_length
        places = np.searchsorted(self._starts, cuts, side="right") - 1
        tokens = cuts - self._starts[places]
        return self._documents[places[tokens > 0]], tokens[tokens > 0]

    def segments(self, row: int) -> list[Segment]:
        begin = int(self._cuts[row]) * self._sequence_length
        end = min(begin + self._sequence_length, int(self._starts[-1]))
        place = int(np.searchsorted(self._starts, begin, side="right")) - 1
        segments = []
        while begin < end:
            piece = min(int(self._starts[place + 1]), end) - begin
            segments.append(Segment(int(self._documents[place]), begin - int(self._starts[place]), piece))
            begin, place = begin + piece, place + 1
        return segments


def split_rows(lengths: Int64s, sequence_length: int) -> int:
    """Return the number of rows of one epoch of a SplitPlan."""
    return -(-int(lengths.sum()) // sequence_length)


class FitShape:
    """Best-fit decreasing packing: longest document first, each into the fullest row with enough space.

    The shape depends on the lengths only, so it is computed once. Every epoch fills it anew: documents of equal length
    swap places, and the rows are shuffled. Documents longer than a row are cut to the length of a row.

    Args:
        lengths: [documents] tokens of each document, all positive.
    """

    def __init__(self, lengths: Int64s, sequence_length: int) -> None:
        self.lengths = np.minimum(lengths, sequence_length)
        """[documents] tokens of each document that are used."""
        row_of_rank, self.rows = best_fit(np.sort(self.lengths)[::-1], sequence_length)
        self.ranks = np.argsort(row_of_rank, kind="stable")
        """[documents] ranks by decreasing length, grouped by row."""
        self.bounds = np.searchsorted(row_of_rank[self.ranks], np.arange(self.rows + 1))
        """[rows + 1] index in ``ranks`` at which each row begins, and the end."""


def best_fit(lengths: Int64s, sequence_length: int) -> tuple[Int64s, int]:
    """Put lengths, in their order, each into the fullest row with enough space; return the row of each.

    Lengths must not be above ``sequence_length``. The second result is the number of rows."""
    row_of = np.empty(len(lengths), np.int64)
    rows = 0
    spaces: list[int] = []  # distinct numbers of free tokens, ascending
    with_space: dict[int, list[int]] = {}
    for number, length in enumerate(lengths.tolist()):
        at = bisect_left(spaces, length)
        if at == len(spaces):
            row, space = rows, sequence_length
            rows += 1
        else:
            space = spaces[at]
            row = with_space[space].pop()
            if not with_space[space]:
                del with_space[space], spaces[at]
        row_of[number] = row
        if left := space - length:
            if left not in with_space:
                with_space[left] = []
                insort(spaces, left)
            with_space[left].append(row)
    return row_of, rows


class FitPlan:
    """Rows of whole documents in a ``FitShape``, filled for one epoch."""

    def __init__(self, shape: FitShape, *, seed: int, epoch: int) -> None:
        generator = _generator(seed, epoch)
        shuffled = generator.permutation(len(shape.lengths))
        by_rank = shuffled[np.argsort(-shape.lengths[shuffled], kind="stable")]
        self._shape = shape
        self._documents = by_rank[shape.ranks]
        self._order = generator.permutation(shape.rows)

    @property
    def rows(self) -> int:
        return self._shape.rows

    def segments(self, row: int) -> list[Segment]:
        begin, end = self._shape.bounds[self._order[row] : self._order[row] + 2]
        return [Segment(int(d), 0, int(self._shape.lengths[d])) for d in self._documents[begin:end]]


@dataclass(frozen=True, eq=False)
class Pieces:
    """Documents, cut into pieces where they are too long. Each piece is treated as a document."""

    documents: Int64s
    """[pieces] document to which each piece belongs."""
    starts: Int64s
    """[pieces] first token of each piece in its document."""
    lengths: Int64s
    """[pieces] tokens of each piece."""

    @classmethod
    def of(cls, lengths: Int64s, longest: int) -> Pieces:
        """Cut documents into pieces of at most ``longest`` tokens; shorter documents are one piece.

        Args:
            lengths: [documents] tokens of each document.
            longest: most tokens of a piece.
        """
        counts = -(-lengths // longest)
        documents = np.repeat(np.arange(len(lengths)), counts)
        starts = (np.arange(len(documents)) - np.repeat(np.cumsum(counts) - counts, counts)) * longest
        return cls(documents, starts, np.minimum(lengths[documents] - starts, longest))

    def those(self, wanted: NDArray[np.bool_]) -> Pieces:
        """Return the pieces that the mask ``wanted`` selects."""
        return Pieces(self.documents[wanted], self.starts[wanted], self.lengths[wanted])


class PiecePlan:
    """Rows of one piece each, each row as long as its piece, in an order that is shuffled for one epoch."""

    def __init__(self, pieces: Pieces, *, seed: int, epoch: int) -> None:
        self._pieces = pieces
        self._order = _generator(seed, epoch).permutation(len(pieces.lengths))

    @property
    def rows(self) -> int:
        return len(self._order)

    def length(self, row: int) -> int:
        """Return the tokens of a row."""
        return int(self._pieces.lengths[self._order[row]])

    def segments(self, row: int) -> list[Segment]:
        pieces, at = self._pieces, self._order[row]
        return [Segment(int(pieces.documents[at]), int(pieces.starts[at]), int(pieces.lengths[at]))]
