"""Prepared data of a run, and fingerprints by which a checkpoint recognises it."""

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
    """Data sets, tokenizer, report and fingerprints of a run."""

    train: PackedDataset | StreamedDataset | Mixture
    validation: PackedDataset | None
    tokenizer: PreTrainedTokenizerBase
    report: DataReport
    fingerprint: str
    """Hashes of everything that determines the samples, in parts ``name:hash``; see ``changed_parts``."""
    validation_fingerprint: str = ""
    """Hashes of the validation documents and their rows, in parts like ``fingerprint``; ``""`` if there are none."""
    date: str = ""
    """Date that chat templates print."""
    ends: tuple[int, ...] = ()
    """Special tokens that end learned text in the first documents."""

    @property
    def sets(self) -> Sequence[PackedDataset | StreamedDataset]:
        """Data sets of a mixture, or a list of the only data set."""
        return self.train.sets if isinstance(self.train, Mixture) else [self.train]

    @property
    def some_text(self) -> PackedDataset:
        """Documents for a test: the validation set if there is one, else the first training set or its first window."""
        first = self.sets[0]
        return self.validation or (first if isinstance(first, PackedDataset) else first.first_window())

    @property
    def longest(self) -> int:
        """Tokens of the longest document, or piece of a document, in a row; when streaming, of what was read so far."""
        return max(self.train.longest, 0 if self.validation is None else self.validation.longest)

    @property
    def samples_per_epoch(self) -> int | None:
        """Samples in one pass of the training data; None when streaming, because their number is unknown.

        A sample is a row; under ``balanced`` it is a document or a piece of one. For a mixture the samples of all sets
        are added.
        """
        return None if isinstance(self.train, StreamedDataset) or self.report.streamed else len(self.train)

    def steps_in(self, epochs: float, *, rows: int, tokens: int) -> int | None:
        """Return the number of steps from the beginning that see the data ``epochs`` times; None when streaming.

        Args:
            epochs: number of passes over the data.
            rows: samples of a step; ignored under ``balanced``.
            tokens: most tokens of a step under ``balanced``.
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
        """Return the name of each data set and the number of passes over it in the first ``samples`` samples.

        When streaming, the number counts only completed passes.
        """
        counts = self.train.counts(samples) if isinstance(self.train, Mixture) else [samples]
        names = [part.name for part in self.report.parts] or ["the training data"]
        return [
            (name, seen / len(dataset) if isinstance(dataset, PackedDataset) else dataset.state_dict(seen)["epoch"])
            for name, dataset, seen in zip(names, self.sets, counts, strict=True)
        ]


def changed_parts(before: str, now: str) -> list[str]:
    """Return the sorted names of the parts in which two fingerprints differ: documents, tokenizer, rows.

    The list is empty if the fingerprints are equal. A part that only one of them has counts as different."""
    old, new = (
        dict(part.split(":", 1) for part in fingerprint.split() if ":" in part) for fingerprint in (before, now)
    )
    return [name for name in sorted({*old, *new}) if old.get(name) != new.get(name)]
