"""Batches of a run: rows of one length, or documents of uneven lengths that are assigned to ranks by computing time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from tawpipe.data.prepare import PreparedData
from tawpipe.data.rows import PackedDataset, RowSource
from tawpipe.dealing.balance import Packs
from tawpipe.dealing.dealer import Dealer
from tawpipe.dealing.lengths import in_like_lengths
from tawpipe.model.batch import MicroBatch
from tawpipe.model.files.build import check_longest
from tawpipe.pipeline.batch import LocalBatch
from tawpipe.pipeline.pipeline import Pipeline
from tawpipe.train.settings.decided import BatchShape


@dataclass(frozen=True)
class StepBatch:
    """Input of one step.

    Args:
        batch: this rank's part of the batch.
        samples: samples of the data in this step, over all ranks.
        tokens: tokens that all ranks compute, including padding.
    """

    batch: LocalBatch
    samples: int
    tokens: int


class Batches:
    """Source of the batches of a run, for training and evaluation. A thread makes training batches ahead of the steps.

    Args:
        shape: sizes of the batches.
        model: name of the model, for error messages.
        evaluated: number of batches in an evaluation.
    """

    def __init__(
        self, shape: BatchShape, pipeline: Pipeline, data: PreparedData, *, model: str, evaluated: int
    ) -> None:
        self.shape, self.pipeline, self.data = shape, pipeline, data
        self._model, self._evaluated = model, evaluated
        self._dealer = Dealer() if shape.dealt else None
        self._validation: list[tuple[list[int], Callable[[int], MicroBatch], Packs]] = []

    def train(self, samples: int, steps: int) -> Iterator[StepBatch]:
        """Yield the batches of the next steps.

        Args:
            samples: number of samples that were consumed before.
            steps: number of batches to yield.

        Raises:
            UserError: a document is too long.
        """
        for _ in range(steps):
            if self.shape.dealt:
                step = self.data.train.step(samples, self.shape.step_tokens)
                step_batch = self._of_documents(step.lengths, step.read, self._dealt(step.lengths))
            else:
                step_batch = self._of_rows(self.data.train, samples, self.shape.rows)
            if self.data.report.streamed:  # other data was checked before the run
                self._check_longest(step_batch.batch)
            yield step_batch
            samples += step_batch.samples

    def validation(self, source: PackedDataset) -> Iterator[LocalBatch]:
        """Yield the first batches of the held-out documents: the same batches every time, and no sample twice."""
        batches = self._evaluated
        if not self.shape.dealt:
            rows = min(self.shape.rows, len(source))
            for number in range(self._evaluated_rows(source) // rows):
                yield self._of_rows(source, number * rows, rows).batch
            return
        if not self._validation:
            first = 0
            while first < len(source) and len(self._validation) < batches:
                step = source.step(first, self.shape.step_tokens)
                lengths = step.lengths[: len(source) - first]
                self._validation.append((lengths, step.read, self._dealt(lengths)))
                first += len(lengths)
        for documents in self._validation:
            yield self._of_documents(*documents, training=False).batch

    def evaluated(self, source: PackedDataset) -> int:
        """Return the size of an evaluation: its rows, or under ``balanced`` the most tokens that it may have."""
        return self._evaluated * self.shape.step_tokens if self.shape.dealt else self._evaluated_rows(source)

    def _evaluated_rows(self, source: PackedDataset) -> int:
        """Return the number of rows in an evaluation, in full batches."""
        rows = min(self.shape.rows, len(source))
        return rows * max(1, min(self._evaluated, len(source) // rows))

    def close(self) -> None:
        """Stop the worker that assigns documents to ranks, if there is one."""
        if self._dealer is not None:
            self._dealer.close()

    def _of_rows(self, source: RowSource, first: int, rows: int) -> StepBatch:
        """Return the batch of ``rows`` rows from sample ``first`` on.

        Under packing ``none``, rows of similar length share a micro-batch, which is padded to its longest row.
        """
        length, order = self.shape.row_tokens, range(rows)
        computed = rows * length
        if self.shape.packing == "none":
            lengths, size = [source.length(first + row) for row in range(rows)], self.shape.micro_batch
            order = in_like_lengths(lengths, size)
            groups = (order[at : at + size] for at in range(0, rows, size))
            computed = sum(len(group) * max(lengths[row] for row in group) for group in groups)
        batch = self.pipeline.part_of(rows, length, lambda place: source.sample(first + order[place]))
        return StepBatch(batch, rows, computed)

    def _of_documents(
        self, lengths: Sequence[int], read: Callable[[int], MicroBatch], packs: Packs, *, training: bool = True
    ) -> StepBatch:
        """Return the batch of documents that ``packs`` assigns to the ranks.

        Args:
            lengths: tokens of each document.
            read: returns a document by its index.
        """
        batch = self.pipeline.part_of_documents(lengths, read, packs, training=training)
        return StepBatch(batch, len(lengths), sum(lengths))

    def _dealt(self, lengths: Sequence[int]) -> Packs:
        """Assign documents of these lengths to packed micro-batches of the ranks.

        Raises:
            UserError: a document is too long.
        """
        assert self._dealer is not None
        where = "" if self.data.report.streamed else self.data.report.longest[1]
        self.shape.check_longest(max(lengths), where)
        return self._dealer(lengths, self.pipeline.dealing)

    def _check_longest(self, batch: LocalBatch) -> None:
        """Raise UserError if the model has too few positions for a document in ``batch``."""
        longest = max((length for part in batch.micro_batches for length in part.lengths), default=0)
        with self.shape.naming_documents():
            check_longest(self._model, self.pipeline.chain.config, self.shape.document_tokens, longest)
