"""Samples from several data sets in given shares.

Each sample of a mixture is a sample of one set, chosen only by its number, the shares and the seed. The numbers n, n +
1, ... walk over the unit interval in equal strides of the golden ratio, and each set owns a part of the interval as
large as its share. Any run of consecutive samples therefore has these shares, up to a few samples, and no random state
must be stored.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from itertools import count
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tawpipe.data.rows import PackedDataset, StepDocuments, read_step, take
from tawpipe.data.stream import StreamedDataset
from tawpipe.dealing.packing import Int64s
from tawpipe.model.batch import MicroBatch

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
"""2**64 divided by the golden ratio."""
BLOCK = 1 << 16
"""Number of samples whose sets are computed at one time."""
BLOCKS_KEPT = 2


class Mixture:
    """Samples of several data sets by their global number; a set that is exhausted begins again in another order.

    Args:
        sets: data sets with rows of one length.
        shares: share of the samples for each set, with sum 1; see ``sample_shares``.
        seed: seed of the choice of sets.
    """

    def __init__(
        self, sets: Sequence[PackedDataset | StreamedDataset], shares: NDArray[np.float64], *, seed: int
    ) -> None:
        self.sets, self.shares = sets, shares
        ends = np.cumsum(shares)[:-1]
        self._ends = np.array([int(end * (1 << 64)) for end in ends], np.uint64)
        self._start = np.uint64(np.random.SeedSequence(seed).generate_state(1, np.uint64)[0])
        self._before = [np.zeros(len(sets), np.int64)]
        self._blocks: dict[int, tuple[Int64s, Int64s]] = {}
        self._lock = threading.Lock()

    def place(self, number: int) -> tuple[int, int]:
        """Return the index of the data set that sample ``number`` is from, and its number in that data set."""
        block, at = divmod(number, BLOCK)
        sets, numbers = self._block(block)
        return int(sets[at]), int(numbers[at])

    def counts(self, number: int) -> list[int]:
        """Return the number of samples of every data set among the first ``number`` samples."""
        block, at = divmod(number, BLOCK)
        sets, _ = self._block(block)
        return (self._before[block] + np.bincount(sets[:at], minlength=len(self.sets))).tolist()

    def _block(self, block: int) -> tuple[Int64s, Int64s]:
        """Return arrays ``(BLOCK,)`` of set indices and of sample numbers in these sets, for the samples of a block."""
        with self._lock:
            if (known := self._blocks.get(block)) is not None:
                return known
            while len(self._before) <= block:
                sets = self._sets_of(len(self._before) - 1)
                self._before.append(self._before[-1] + np.bincount(sets, minlength=len(self.sets)))
            sets = self._sets_of(block)
            numbers = np.empty(BLOCK, np.int64)
            for set_number, before in enumerate(self._before[block]):
                here = sets == set_number
                numbers[here] = before + np.arange(here.sum())
            self._blocks = dict([*self._blocks.items(), (block, (sets, numbers))][-BLOCKS_KEPT:])
            return sets, numbers

    def _sets_of(self, block: int) -> Int64s:
        """Return the set index of every sample of a block, ``(BLOCK,)``."""
        numbers = np.arange(block * BLOCK, (block + 1) * BLOCK, dtype=np.uint64)
        return np.searchsorted(self._ends, self._start + numbers * GOLDEN, side="right").astype(np.int64)

    @property
    def longest(self) -> int:
        """Tokens of the longest segment of all sets."""
        return max(dataset.longest for dataset in self.sets)

    def sample(self, number: int) -> MicroBatch:
        set_number, local_number = self.place(number)
        return self.sets[set_number].sample(local_number)

    def step(self, first: int, tokens: int) -> StepDocuments:
        """Return the documents of a step of up to ``tokens`` tokens; reads them at once if a set is streamed."""
        if all(isinstance(dataset, PackedDataset) for dataset in self.sets):
            return StepDocuments(self.step_lengths(first, tokens), lambda number: self.sample(first + number))
        return read_step(self.sample, first, tokens)

    def step_lengths(self, first: int, tokens: int) -> list[int]:
        """Return the tokens of each document of a step, without reading them. Not for streamed sets."""
        return take(map(self.length, count(first)), tokens)

    def length(self, number: int) -> int:
        """Return the tokens of sample ``number``; reads it only if its set is streamed."""
        set_number, local_number = self.place(number)
        return self.sets[set_number].length(local_number)

    def __len__(self) -> int:
        """Return the samples in one pass of the mixture: the sum over all sets that are not streamed."""
        return sum(len(dataset) for dataset in self.sets if isinstance(dataset, PackedDataset))

    def state_dict(self, number: int) -> dict[str, Any]:
        states = [dataset.state_dict(samples) for dataset, samples in zip(self.sets, self.counts(number), strict=True)]
        return {"sample": number, "sets": states}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for dataset, dataset_state in zip(self.sets, state["sets"], strict=True):
            dataset.load_state_dict(dataset_state)


def sample_shares(weights: Sequence[float], tokens_per_sample: Sequence[float]) -> NDArray[np.float64]:
    """Return shares of samples for which ``weights`` are the shares of tokens.

    >>> sample_shares([3, 1], [30, 10]).tolist()
    [0.5, 0.5]
    """
    shares = np.array(weights) / np.array(tokens_per_sample)
    return shares / shares.sum()
