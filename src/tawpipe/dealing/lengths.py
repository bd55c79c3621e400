"""Lengths of documents: how long the data lets them be, and how evenly steps of them are dealt, by the model of time.

What ``auto`` decides by it must not depend on how many processes there are: a run that goes on with others has to see
the same documents. So the gain is that on a fixed number of devices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from tawpipe.dealing.balance import USUAL_BIN, Bins, LayerTime, deal
from tawpipe.dealing.unbalanced import in_turn

DEVICES = 8
"""Devices for which ``auto`` looks at the gain."""
STEPS, DOCUMENTS = 4, 2000
"""First steps that are looked at: so many, or as many as have so many documents."""

USUAL_LENGTH = 512
"""Tokens of a row that a length which follows from the data does not fall below: short documents share a row."""
USUAL_STEP = 8 * USUAL_LENGTH
"""Tokens of a step, where nothing says how many."""
STEP, LEAST = "the tokens of a step", "the minimum"
MOST_STREAMED = 8192
"""Tokens of a document of a stream, whose longest one nobody knows."""


@dataclass(frozen=True)
class LengthLimits:
    """Limits of a length that follows from the documents.

    Args:
        most: tokens of any document.
        why: what sets ``most``, in words.
        text: tokens of a text document: those of a step.
        dealing: makes the steps of the run for a length.
        looks: only the first documents are read, and the longest of them stands for all.
    """

    most: int
    why: str
    text: int
    dealing: Callable[[int], Dealing] | None = None
    looks: bool = False

    def within(self, *, masked: bool) -> int:
        """Tokens that a document may have.

        Args:
            masked: it may be a chat or an instruction, which stays whole.
        """
        return self.most if masked else min(self.most, self.text)

    def at_least_usual(self, length: int) -> int:
        """Return the length, or the usual one if that is longer and within the limits."""
        return max(length, min(USUAL_LENGTH, self.most))

    def words(self, length: int, lengths: NDArray[np.int64], cut: str = "") -> str:
        """The reason for a length.

        Args:
            lengths: of all documents.
            cut: the documents that were longer before they were cut, in words.
        """
        longer = int((lengths > length).sum())
        if not longer:
            is_longest = int(lengths.max()) == length
            why = "the longest document" if is_longest else self.least(length)
            return f"{why}; {cut}" if cut else why if is_longest else f"{why}; all documents are shorter"
        many = "1 document is longer" if longer == 1 else f"{longer:,} documents are longer"
        return f"{self.bound(length)}; {many}" + (f"; {cut}" if cut else "")

    def least(self, length: int) -> str:
        """The reason for a length that is longer than all documents."""
        return self.why if length == self.most else LEAST

    def bound(self, length: int) -> str:
        """The limit that a length has reached."""
        return self.why if length == self.most else STEP if length == self.text else "the longest chat"


@dataclass(frozen=True)
class Dealing:
    """What is known of steps before there is data: for the report, and for ``auto`` to choose.

    Args:
        tokens: of a step.
        world_size, cap, ranks: as in ``deal``.
        work: makes the time of documents by the model with so many tokens in its vocabulary.
        pretrained: the model has weights.
        asked: a setting that makes sense under ``balanced`` only, which ``auto`` therefore takes.
        against: why ``auto`` cannot take ``balanced``.
        rows, micro_batch: of a step, and those that are computed at once, under other packings.
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
        """The same steps on so many devices that compute no document together."""
        return replace(self, world_size=number, cap=int(longest * USUAL_BIN), ranks=1)


@dataclass(frozen=True)
class Balance:
    """Time of the busiest rank over the mean of all, by the model of time, over the first steps; 1 is even.

    Args:
        before: documents are packed into rows by their tokens, and these dealt in turn.
        after: they are dealt by their time.
        steps, processes: looked at.
    """

    before: float
    after: float
    steps: int
    processes: int

    @property
    def gain(self) -> float:
        return self.before / self.after

    @classmethod
    def of(cls, step: Callable[[int, int], Sequence[int]], dealing: Dealing, longest: int, work: LayerTime) -> Balance:
        """The balance of the first steps.

        Args:
            step: gives the lengths of the documents of a step from the number of its first one and its tokens.
            longest: tokens of a document.
            work: their time.
        """
        first, steps = 0, 0
        sums = np.zeros(4)
        while steps < STEPS and first < DOCUMENTS:
            lengths = step(first, dealing.tokens)
            rows = in_turn(lengths, dealing.world_size, longest, work)
            bins = deal(lengths, world_size=dealing.world_size, cap=dealing.cap, work=work, ranks=dealing.ranks)
            sums += *_times(rows), bins.seconds, bins.mean_seconds
            first, steps = first + len(lengths), steps + 1
        return cls(float(sums[0] / sums[1]), float(sums[2] / sums[3]), steps, dealing.world_size)


def in_like_lengths(lengths: Sequence[int], micro_batch: int) -> list[int]:
    """The order of a step's rows in which those of a micro-batch are about equally long, so that little is padding. The
    micro-batches themselves keep the order of their first rows: long ones are not all given to the same process.

    >>> in_like_lengths([5, 9, 1, 8, 2], 2)
    [0, 4, 1, 3, 2]
    """
    order = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    groups = [sorted(order[at : at + micro_batch]) for at in range(0, len(order), micro_batch)]
    whole, rest = groups[: len(order) // micro_batch], groups[len(order) // micro_batch :]
    return [row for group in (*sorted(whole), *rest) for row in group]


def padding_share(length: Callable[[int], int], dealing: Dealing) -> float:
    """Share of padding in the first steps, of documents with a row each.

    Args:
        length: of a document, by its number.
    """
    tokens = computed = 0
    for step in range(max(1, min(STEPS, DOCUMENTS // dealing.rows))):
        lengths = [length(step * dealing.rows + row) for row in range(dealing.rows)]
        order = in_like_lengths(lengths, dealing.micro_batch)
        groups = (order[at : at + dealing.micro_batch] for at in range(0, len(order), dealing.micro_batch))
        tokens += sum(lengths)
        computed += sum(len(group) * max(lengths[row] for row in group) for group in groups)
    return 1 - tokens / computed


def _times(rows: Bins) -> tuple[float, float]:
    """Time of the busiest rank, and the mean; of rounds in which every rank has a row, where there are any."""
    rounds = [group for group in rows.single if all(row.documents for row in group)] or rows.single[:1]
    busiest = mean = 0.0
    for group in rounds:
        times = [rows.time(row) for row in group]
        busiest, mean = busiest + max(times), mean + sum(times) / len(times)
    return busiest, mean
