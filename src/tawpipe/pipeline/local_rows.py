"""The rows that one rank computes of every batch: its part of rows that are alike, and of documents that are dealt."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil

import torch

from tawpipe.dealing.balance import Bin, Bins, BinsForm, LayerTime
from tawpipe.errors import UserError
from tawpipe.model.batch import IGNORE, MicroBatch
from tawpipe.pipeline.batches import Deal, LocalBatch
from tawpipe.pipeline.schedules import Schedules
from tawpipe.runtime.compute.step_input import DocumentSlice
from tawpipe.runtime.world import World


@dataclass(frozen=True)
class LocalRows:
    """One rank's rows.

    Args:
        deal: who computes which rows.
        bin_tokens: the most tokens of documents that a rank computes at once; 0 where documents are not dealt.
        work: the time of documents.
        cuts: see ``Strategy.dealing``.
    """

    deal: Deal
    schedules: Schedules
    world: World
    bin_tokens: int
    work: LayerTime
    cuts: float | None = None

    def form(self, local: LocalBatch) -> int | BinsForm:
        """What a schedule for a batch is asked for by: the number of micro-batches, or the form of bins."""
        return local.bins.form if local.bins else self.deal.count(local.rows)

    def tokens(self, local: LocalBatch) -> int:
        """Tokens of a micro-batch at most."""
        return local.sequence_length * (1 if local.bins else min(self.deal.micro_batch, local.rows))

    def busiest(self, local: LocalBatch) -> tuple[Sequence[int], float]:
        """Lengths of rows, and how many times the work of these the rank that has most of it does."""
        if (bins := local.bins) is not None:
            return bins.lengths, bins.seconds / bins.mean_seconds / self.world.size
        ranks = self.deal.ranks
        rounds = ceil(self.deal.count(local.rows) * ranks / self.world.size)
        return [local.sequence_length] * min(local.rows, self.deal.micro_batch * rounds), 1 / ranks

    def part_of(self, rows: int, sequence_length: int, row: Callable[[int], MicroBatch]) -> LocalBatch:
        """See ``Pipeline.part_of``."""
        parts = [MicroBatch.padded([row(number) for number in share.rows]) for share in self.deal.shares(rows)]
        return LocalBatch(rows, sequence_length, self._pinned(parts))

    def dealing(self) -> Callable[[Sequence[int]], Bins]:
        """See ``Pipeline.dealing``."""
        if self.bin_tokens < 1:
            raise UserError("bin_tokens", self.bin_tokens, "the most tokens that a process computes at once")
        step = self.schedules.smallest
        return step.strategy.dealing(step, cap=self.bin_tokens, work=self.work, cuts=self.cuts)

    def own_bins(self, bins: Bins) -> Sequence[Bin]:
        """This rank's bins, in the order of its micro-batches."""
        return bins.of(self.schedules.dealt_to)

    def slices(self, local: LocalBatch, numbers: Sequence[int]) -> dict[int, DocumentSlice]:
        """Of this rank's micro-batches those that are slices of a document.

        Args:
            numbers: of its micro-batches, in their order.
        """
        dealt = zip(numbers, self.own_bins(local.bins) if local.bins else (), strict=False)
        parts = [(m, bin.documents[0], *bin.part) for m, bin in dealt if bin.part is not None]
        of_document: dict[int, tuple[int, ...]] = {}
        for m, document, *_ in parts:
            of_document[document] = (*of_document.get(document, ()), m)
        return {m: DocumentSlice(begin, end, of_document[document]) for m, document, begin, end in parts}

    def part_of_documents(self, bins: Bins, document: Callable[[int], MicroBatch], *, training: bool) -> LocalBatch:
        """See ``Pipeline.part_of_documents``."""
        _ = self.schedules.of(bins.form, training=training)
        parts = self._pinned(rows_of(bins, self.schedules.dealt_to, document))
        digest = zlib.crc32(repr((bins.lengths, bins.shared, bins.single)).encode())
        count = sum(map(len, (*bins.shared, *bins.single)))
        return LocalBatch(count, self.bin_tokens * bins.ranks, parts, digest, bins)

    def _pinned(self, parts: list[MicroBatch]) -> list[MicroBatch]:
        return [part.pin_memory() for part in parts] if self.deal.pinned else parts


NOTHING = MicroBatch.of_documents(torch.zeros(1, 1, dtype=torch.int64), torch.full((1, 1), IGNORE), [1])
"""What an empty bin holds: a token of which nothing is learned."""


def rows_of(bins: Bins, number: int, document: Callable[[int], MicroBatch]) -> list[MicroBatch]:
    """A rank's bins, in the order of its rounds; the whole document for each of its slices.

    Args:
        number: of whom they are dealt to.
        document: makes one by its number, as a micro-batch of one row.

    Raises:
        UserError: a document has another length than that by which it was dealt.
    """

    def row(dealt: Bin) -> MicroBatch:
        joined = MicroBatch.in_a_row([document(number) for number in dealt.documents] or [NOTHING])
        said = sum(bins.lengths[number] for number in dealt.documents) or 1
        if (tokens := joined.input_ids.numel()) != said:
            given = f"{tokens} tokens in documents {', '.join(map(str, dealt.documents[:5]))}"
            raise UserError("documents", given, f"{said}, as their lengths say")
        return joined

    return [row(dealt) for dealt in bins.of(number)]
