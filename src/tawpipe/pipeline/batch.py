"""A global batch dealt to the ranks, in micro-batches that hold the same rows for every number of processes."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from math import ceil
from typing import Any

import torch
from torch import Tensor

from tawpipe.dealing.balance import Bin, Bins, BinsForm
from tawpipe.errors import UserError
from tawpipe.model.batch import IGNORE, MicroBatch
from tawpipe.model.discovery.discovery import PositionUse
from tawpipe.runtime.compute.step_input import DocumentSlice
from tawpipe.schedule.spec import share_micro_batches

COUNTED_FROM_0 = PositionUse()
REQUIRED = ("input_ids", "labels")
OPTIONAL = ("position_ids", "attention_mask")
NOTHING = MicroBatch.of_documents(torch.zeros(1, 1, dtype=torch.int64), torch.full((1, 1), IGNORE), [1])
"""Content of an empty bin: a token of which nothing is learned."""


@dataclass(frozen=True)
class Share:
    """One micro-batch of this rank: its global number in the step, and the rows of the global batch that it holds."""

    index: int
    rows: range


@dataclass(frozen=True)
class LocalBatch:
    """The part of a global batch that this rank computes, as ``Pipeline.shares`` says.

    Args:
        rows: of the whole global batch.
        sequence_length: tokens in a row.
        micro_batches: this rank's, in the order of their shares; may be empty.
        digest: of the global batch, which must be the same on all ranks; None where a rank knows its own part only.
        bins: where documents of uneven lengths were dealt, how; a bin is a row then, and ``sequence_length`` the most
            tokens that one may have.
    """

    rows: int
    sequence_length: int
    micro_batches: Sequence[MicroBatch]
    digest: int | None = None
    bins: Bins | None = field(default=None, repr=False)


@dataclass(frozen=True)
class Deal:
    """Who computes which rows. A micro-batch holds the same rows for every number of processes; only who computes it
    changes.

    Args:
        micro_batch: rows in one; the last of a global batch may have fewer.
        ranks: so many neighbours compute the same micro-batches together.
        share: micro-batches 0..n-1 for every rank; as ``share_micro_batches`` does it if None.
        dealt_to: number of the process or the pipeline whose bins this rank computes.
        pinned: what is dealt is copied to a device, and is in page-locked memory: the thread that issues would wait for
            the device at every copy from other memory.
        in_turn: why documents are computed one after the other; empty where they are not.
        positions: how the model uses them.
        vocabulary: token numbers must be below; labels too, unless the loss is the user's own.
    """

    micro_batch: int
    rank: int
    world_size: int
    positions: PositionUse = COUNTED_FROM_0
    vocabulary: int | None = None
    own_loss: bool = False
    ranks: int = 1
    in_turn: str = ""
    share: Callable[[int], Sequence[Sequence[int]]] | None = None
    dealt_to: int = 0
    pinned: bool = False

    def count(self, rows: int) -> int:
        """Micro-batches in a global batch of ``rows`` rows."""
        return -(-rows // self.micro_batch)

    def form(self, local: LocalBatch) -> int | BinsForm:
        """Key of the schedule for a batch: the number of its micro-batches, or the form of its bins."""
        return local.bins.form if local.bins else self.count(local.rows)

    def tokens(self, local: LocalBatch) -> int:
        """Most tokens of a micro-batch."""
        return local.sequence_length * (1 if local.bins else min(self.micro_batch, local.rows))

    def busiest(self, local: LocalBatch) -> tuple[Sequence[int], float]:
        """Lengths of rows, and the busiest rank's share of the work on them."""
        if (bins := local.bins) is not None:
            return bins.lengths, bins.seconds / bins.mean_seconds / self.world_size
        rounds = ceil(self.count(local.rows) * self.ranks / self.world_size)
        return [local.sequence_length] * min(local.rows, self.micro_batch * rounds), 1 / self.ranks

    def shares(self, rows: int) -> tuple[Share, ...]:
        """This rank's micro-batches of a global batch of ``rows`` rows.

        >>> Deal(micro_batch=2, rank=1, world_size=2).shares(7)
        (Share(index=2, rows=range(4, 6)), Share(index=3, rows=range(6, 7)))
        """
        size = self.micro_batch
        share = self.share or (lambda count: share_micro_batches(count, self.world_size, self.ranks))
        mine = share(self.count(rows))[self.rank]
        return tuple(Share(m, range(m * size, min((m + 1) * size, rows))) for m in mine)

    def local(self, batch: Mapping[str, Tensor] | LocalBatch) -> LocalBatch:
        """This rank's part of a global batch, on the CPU, in tensors of its own: the step may still run when the caller
        fills its batch anew.

        Args:
            batch: tensors [rows, S] in the Hugging Face convention, as ``MicroBatch.from_rows`` takes them.

        Raises:
            UserError: a tensor is missing, is unknown, has another shape or does not hold whole numbers, or a number is
                out of the model's vocabulary or table of positions.
        """
        if isinstance(batch, LocalBatch):
            if batch.rows < 1:
                raise UserError("batch", f"{batch.rows} rows", "at least one row")
            parts = [self._scaled_alike(self._checked(part.copy(pinned=self.pinned))) for part in batch.micro_batches]
            return replace(batch, micro_batches=parts)
        for name in REQUIRED:
            if name not in batch:
                raise UserError("batch", sorted(batch), f"a mapping with {name!r}")
        known = (*REQUIRED, *OPTIONAL)
        if unknown := set(batch).difference(known):
            raise UserError("batch", sorted(unknown), f"{', '.join(known)} and nothing else")
        if strange := {name: type(value).__name__ for name, value in batch.items() if not isinstance(value, Tensor)}:
            raise UserError("batch", strange, "tensors")
        shapes = {name: tuple(tensor.shape) for name, tensor in batch.items()}
        if len(set(shapes.values())) > 1 or len(shapes["input_ids"]) != 2:
            raise UserError("batch", shapes, "tensors of one shape [rows, tokens]")
        for name, tensor in batch.items():
            whole = not (tensor.dtype.is_floating_point or tensor.dtype.is_complex)
            if not whole or (tensor.dtype == torch.bool and name != "attention_mask"):
                raise UserError("batch", f"{name} of {tensor.dtype}", "whole numbers, for example torch.int64")
        rows, length = shapes["input_ids"]
        if not rows or not length:
            raise UserError("batch", f"{rows} rows of {length} tokens", "at least one row and one token")
        tensors: dict[str, Any] = {name: tensor.to("cpu", torch.int64) for name, tensor in batch.items()}
        whole = self._checked(MicroBatch.from_rows(**tensors))  # so that no rank waits for one that refuses its part
        parts = [self._scaled_alike(whole.part(share.rows).copy(pinned=self.pinned)) for share in self.shares(rows)]
        digest = 0
        for name in sorted(tensors):
            digest = zlib.crc32(tensors[name].contiguous().numpy().data, digest)
        return LocalBatch(rows, length, parts, digest)

    def _checked(self, batch: MicroBatch) -> MicroBatch:
        if self.vocabulary is not None:
            tokens = {"input_ids": batch.input_ids}
            if not self.own_loss:
                tokens["labels"] = batch.labels[batch.labels != IGNORE]
            for name, numbers in tokens.items():
                if numbers.numel() and not 0 <= int(numbers.min()) <= int(numbers.max()) < self.vocabulary:
                    given = f"{name} from {int(numbers.min())} to {int(numbers.max())}"
                    expected = f"numbers below {self.vocabulary}, the model's vocabulary" + (
                        f", or {IGNORE}" if name == "labels" else ""
                    )
                    raise UserError("batch", given, expected)
        last = int(batch.position_ids.max())
        if self.in_turn:
            last = max(last, max(batch.lengths) - 1)  # where the model counts by itself
            firsts = batch.position_ids.flatten()[[0, *accumulate(batch.lengths[:-1])]]
            if int(firsts.max()):
                expected = f"documents that begin at position 0: {self.in_turn}"
                raise UserError("position_ids", firsts.tolist()[:5], expected)
        limit = self.positions.limit
        last += 0 if batch.positions_given else self.positions.first
        if limit is not None and last >= limit:
            expected = f"below {limit}: the model looks positions up in a table of that size; give shorter documents"
            raise UserError("batch", f"position {last}", expected)
        return batch

    def _scaled_alike(self, batch: MicroBatch) -> MicroBatch:
        """Refuse a micro-batch of which transformers would rotate some documents otherwise than each alone."""
        if self.in_turn or (edge := self.positions.scaled_from) is None:
            return batch
        longest = int(batch.position_ids.max()) + 1
        positions = batch.position_ids.flatten().split(batch.lengths)
        labels = batch.labels.flatten().split(batch.lengths)
        for of_document, learned in zip(positions, labels, strict=True):
            length = int(of_document.max()) + 1
            if bool((learned != IGNORE).any()) and (length > edge) != (longest > edge):
                raise UserError(
                    "batch",
                    f"documents of {length} and {longest} tokens in one micro-batch",
                    f"all of them above {edge} tokens or none: longrope would scale them all by the longest",
                )
        return batch

    def numbered(self, local: LocalBatch, numbers: Sequence[int]) -> dict[int, MicroBatch]:
        """Key this rank's micro-batches by the numbers that the schedule has for them.

        Raises:
            UserError: there are more or fewer of them.
        """
        if len(numbers) != len(local.micro_batches):
            given = f"{len(local.micro_batches)} micro-batches"
            raise UserError("batch", given, f"{len(numbers)} on rank {self.rank}, as Pipeline.shares says")
        return dict(zip(numbers, local.micro_batches, strict=True))

    def slices(self, local: LocalBatch, numbers: Sequence[int]) -> dict[int, DocumentSlice]:
        """Those of this rank's micro-batches that are slices of a document.

        Args:
            numbers: of its micro-batches, in their order.
        """
        dealt = zip(numbers, local.bins.of(self.dealt_to) if local.bins else (), strict=False)
        parts = [(m, bin.documents[0], *bin.part) for m, bin in dealt if bin.part is not None]
        of_document: dict[int, tuple[int, ...]] = {}
        for m, document, *_ in parts:
            of_document[document] = (*of_document.get(document, ()), m)
        return {m: DocumentSlice(begin, end, of_document[document]) for m, document, begin, end in parts}

    def local_of_rows(self, rows: int, sequence_length: int, row: Callable[[int], MicroBatch]) -> LocalBatch:
        """Make this rank's part of ``rows`` rows, see ``Pipeline.part_of``."""
        parts = [MicroBatch.padded([row(number) for number in share.rows]) for share in self.shares(rows)]
        return LocalBatch(rows, sequence_length, self._pinned(parts))

    def local_of_bins(self, bins: Bins, document: Callable[[int], MicroBatch], *, bin_tokens: int) -> LocalBatch:
        """Make this rank's part of documents that were dealt, see ``Pipeline.part_of_documents``."""
        digest = zlib.crc32(repr((bins.lengths, bins.shared, bins.single)).encode())
        count = sum(map(len, (*bins.shared, *bins.single)))
        parts = self._pinned(rows_of(bins, self.dealt_to, document))
        return LocalBatch(count, bin_tokens * bins.ranks, parts, digest, bins)

    def _pinned(self, parts: list[MicroBatch]) -> list[MicroBatch]:
        return [part.pin_memory() for part in parts] if self.pinned else parts


def rows_of(bins: Bins, number: int, document: Callable[[int], MicroBatch]) -> list[MicroBatch]:
    """Make rows of a rank's bins, in the order of its rounds; a slice has the whole document.

    Args:
        number: of the process or pipeline that they are dealt to.
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
