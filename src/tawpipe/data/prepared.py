"""What training needs to know of its data, and what a checkpoint remembers of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tawpipe.data.mixture import Mixture
from tawpipe.data.report import DataReport
from tawpipe.data.rows import PackedDataset
from tawpipe.data.stream import StreamedDataset

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, eq=False)
class PreparedData:
    """Everything that training needs to know of its data."""

    train: PackedDataset | StreamedDataset | Mixture
    validation: PackedDataset | None
    tokenizer: PreTrainedTokenizerBase
    report: DataReport
    fingerprint: str
    """Hashes of all that sample n depends on, in parts ``name:hash``; see ``changed_parts``."""
    validation_fingerprint: str = ""
    """Hashes of the held-out documents and their rows, in parts like ``fingerprint``; empty if there are none."""
    date: str = ""
    """The day that chat templates print."""
    ends: tuple[int, ...] = ()
    """Special tokens that end what is learned in the first documents."""

    @property
    def sets(self) -> Sequence[PackedDataset | StreamedDataset]:
        """The data sets of a mixture, or the only one."""
        return self.train.sets if isinstance(self.train, Mixture) else [self.train]

    @property
    def some_text(self) -> PackedDataset:
        """Documents that are at hand, of validation where there are any."""
        first = self.sets[0]
        return self.validation or (first if isinstance(first, PackedDataset) else first.first_window())

    @property
    def longest(self) -> int:
        """Tokens of the longest document, or piece of one, in a row; when streaming, of what has been read so far."""
        return max(self.train.longest, 0 if self.validation is None else self.validation.longest)

    @property
    def samples_per_epoch(self) -> int | None:
        """Samples in one pass of the training data: rows, under ``balanced`` documents and pieces of them; of a mixture
        as many as all its sets have. None when streaming, as nobody has counted them.
        """
        return None if isinstance(self.train, StreamedDataset) or self.report.streamed else len(self.train)

    def steps_in(self, epochs: float, *, rows: int, tokens: int) -> int | None:
        """Steps from the beginning of the data after which it has been seen so many times; None when streaming.

        Args:
            rows: samples of a step; of no effect under ``balanced``.
            tokens: of a step under ``balanced``, which has as many documents as stay within them.
        """
        if isinstance(self.train, StreamedDataset) or self.samples_per_epoch is None:
            return None
        samples = math.ceil(epochs * self.samples_per_epoch)
        if self.report.packing != "balanced":
            return -(-samples // rows)
        steps = first = 0
        while first < samples:
            first += len(self.train.step_lengths(first, tokens))
            steps += 1
        return steps

    def passes(self, samples: int) -> list[tuple[str, float]]:
        """The data sets, and how many times each has been seen after so many samples; when streaming, how many times
        it has been gone through.
        """
        counts = self.train.counts(samples) if isinstance(self.train, Mixture) else [samples]
        names = [part.name for part in self.report.parts] or ["the training data"]
        return [
            (name, seen / len(dataset) if isinstance(dataset, PackedDataset) else dataset.state_dict(seen)["epoch"])
            for name, dataset, seen in zip(names, self.sets, counts, strict=True)
        ]


def changed_parts(before: str, now: str) -> list[str]:
    """The names of the parts in which two fingerprints differ: documents, tokenizer, rows."""
    old, new = (
        dict(part.split(":", 1) for part in fingerprint.split() if ":" in part) for fingerprint in (before, now)
    )
    return [name for name in sorted({*old, *new}) if old.get(name) != new.get(name)]
