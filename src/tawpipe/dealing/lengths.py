"""Length limits for documents, and the balance of steps by the model of time.

The choice of ``auto`` must not depend on the number of processes, because a run that is resumed on another number has
to see the same documents. Therefore the gain is computed for a fixed number of devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from tawpipe.dealing.balance import USUAL_PACK, LayerTime, Packs, deal
from tawpipe.dealing.unbalanced import in_turn

DEVICES = 8
"""Devices for which ``auto`` computes the gain of balancing."""
STEPS, DOCUMENTS = 4, 2000
"""Number of first steps that are examined; fewer if they contain ``DOCUMENTS`` documents."""

USUAL_LENGTH = 512
"""Least tokens of a row whose length follows from the data; short documents share a row."""
USUAL_STEP = 8 * USUAL_LENGTH
"""Default tokens of a step."""
STEP, LEAST = "the tokens of a step", "the minimum"
MOST_STREAMED = 8192
"""Most tokens of a document of a stream, because the longest document of a stream is unknown."""


@dataclass(frozen=True)
class LengthLimits:
    """Limits for a length that follows from the documents.

    Args:
        most: most tokens of any document.
        why: reason for ``most``.
        text: most tokens of a text document, which are the tokens of a step.
        dealing: makes the steps of the run for a length; None if unknown.
        looks: True if only the first documents are read, and the longest of them represents all.
    """

    most: int
    why: str
    text: int
    dealing: Callable[[int], Dealing] | None = None
    looks: bool = False

    def within(self, *, masked: bool) -> int:
        """Return the most tokens that a document may have.

        Args:
            masked: True if it may be a chat or an instruction, which is never cut. Then the tokens of a step are no
                limit.
        """
        return self.most if masked else min(self.most, self.text)

    def at_least_usual(self, length: int) -> int:
        """Return ``length``, or if that is longer the usual length, which is limited to ``most``."""
        return max(length, min(USUAL_LENGTH, self.most))

    def words(self, length: int, lengths: NDArray[np.int64], cut: str = "") -> str:
        """Return the reason for choosing ``length``, as a phrase that also tells how many documents are longer.

        Args:
            length: the chosen length, in tokens.
            lengths: lengths of all documents.
            cut: phrase about documents that were cut before, or ``""``.
        """
        longer = int((lengths > length).sum())
        if not longer:
            is_longest = int(lengths.max()) == length
            why = "the longest document" if is_longest else self.least(length)
            return f"{why}; {cut}" if cut else why if is_longest else f"{why}; all documents are shorter"
        many = "1 document is longer" if longer == 1 else f"{longer:,} documents are longer"
        return f"{self.bound(length)}; {many}" + (f"; {cut}" if cut else "")

    def least(self, length: int) -> str:
        """Return the reason for a length that is longer than all documents."""
        return self.why if length == self.most else LEAST

    def bound(self, length: int) -> str:
        """Return the words for the limit that ``length`` has reached."""
        return self.why if length == self.most else STEP if length == self.text else "the longest chat"


@dataclass(frozen=True)
class Dealing:
    """Facts about steps before their data is known; for the report, and for the choice of ``auto``.

    Args:
        tokens: tokens of a step.
        world_size, cap, ranks: as in ``deal``.
        work: returns the time of documents for a given vocabulary size.
        pretrained: True if the model has weights.
        asked: setting that needs ``balanced``, so that ``auto`` chooses it; or ``""``.
        against: reason why ``auto`` cannot choose ``balanced``; or ``""``.
        rows: rows of a step with other packings.
        micro_batch: rows that are computed at one time with other packings.
    """

    tokens: int
    world_size: int
    cap: int
    work: Callable[[int], LayerTime]
    ranks: int = 1
    pretrained: bool = False
    asked: str = ""
    against: str = ""
    rows: int = 1
    micro_batch: int = 1

    def on_devices(self, number: int, longest: int) -> Dealing:
        """Return a copy for ``number`` devices, each of which computes whole documents of up to ``longest``."""
        return replace(self, world_size=number, cap=int(longest * USUAL_PACK), ranks=1)


@dataclass(frozen=True)
class Balance:
    """Modelled time of the busiest rank relative to the mean of all ranks, over the first steps; 1 is even.

    Args:
        before: with documents packed into rows by tokens, and rows assigned in turn.
        after: with documents assigned by their time.
        steps: number of examined steps.
        processes: number of ranks.
    """

    before: float
    after: float
    steps: int
    processes: int

    @property
    def gain(self) -> float:
        """Factor by which assigning documents by their time is faster."""
        return self.before / self.after

    @classmethod
    def of(cls, step: Callable[[int, int], Sequence[int]], dealing: Dealing, longest: int, work: LayerTime) -> Balance:
        """Compute the balance of the first steps under both ways of assigning documents.

        Args:
            step: returns the lengths of a step's documents, given the number of its first document and its tokens.
            dealing: tokens of a step, number of ranks and limits.
            longest: most tokens of a document.
            work: time of documents.
        """
        first, steps = 0, 0
        sums = np.zeros(4)
        while steps < STEPS and first < DOCUMENTS:
            lengths = step(first, dealing.tokens)
            rows = in_turn(lengths, dealing.world_size, longest, work)
            packs = deal(lengths, world_size=dealing.world_size, cap=dealing.cap, work=work, ranks=dealing.ranks)
            sums += *_times(rows), packs.seconds, packs.mean_seconds
            first, steps = first + len(lengths), steps + 1
        return cls(float(sums[0] / sums[1]), float(sums[2] / sums[3]), steps, dealing.world_size)


def in_like_lengths(lengths: Sequence[int], micro_batch: int) -> list[int]:
    """Return an order of a step's rows in which each micro-batch has rows of similar length, so that padding is small.

    Micro-batches keep the order of their first rows, so that one process does not get all long rows.

    >>> in_like_lengths([5, 9, 1, 8, 2], 2)
    [0, 4, 1, 3, 2]
    """
    order = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    groups = [sorted(order[at : at + micro_batch]) for at in range(0, len(order), micro_batch)]
    whole, rest = groups[: len(order) // micro_batch], groups[len(order) // micro_batch :]
    return [row for group in (*sorted(whole), *rest) for row in group]


def padding_share(length: Callable[[int], int], dealing: Dealing) -> float:
    """Return the share of computed tokens in the first steps that are padding, with one row per document.

    Args:
        length: returns the length of a document, given its number.
        dealing: rows of a step, and rows that are padded together.
    """
    tokens = computed = 0
    for step in range(max(1, min(STEPS, DOCUMENTS // dealing.rows))):
        lengths = [length(step * dealing.rows + row) for row in range(dealing.rows)]
        order = in_like_lengths(lengths, dealing.micro_batch)
        groups = (order[at : at + dealing.micro_batch] for at in range(0, len(order), dealing.micro_batch))
        tokens += sum(lengths)
        computed += sum(len(group) * max(lengths[row] for row in group) for group in groups)
    return 1 - tokens / computed


def _times(rows: Packs) -> tuple[float, float]:
    """Return (time of the busiest rank, mean time of all ranks), both summed over rounds.

    Only rounds in which every rank has a row count, if there are any; else only the first."""
    rounds = [group for group in rows.single if all(row.documents for row in group)] or rows.single[:1]
    busiest = mean = 0.0
    for group in rounds:
        times = [rows.time(row) for row in group]
        busiest, mean = busiest + max(times), mean + sum(times) / len(times)
    return busiest, mean
