"""Assignment of a global batch to ranks. A micro-batch holds equal rows whatever the number of processes."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from math import ceil
from typing import Any

import torch
from torch import Tensor

from tawpipe.dealing.balance import Pack, Packs, PacksForm
from tawpipe.errors import UserError
from tawpipe.model.batch import IGNORE, MicroBatch
from tawpipe.model.discovery.discovery import PositionUse
from tawpipe.runtime.compute.step_input import DocumentSlice
from tawpipe.schedule.spec import share_micro_batches

COUNTED_FROM_0 = PositionUse()
REQUIRED = ("input_ids", "labels")
OPTIONAL = ("position_ids", "attention_mask")
NOTHING = MicroBatch.of_documents(torch.zeros(1, 1, dtype=torch.int64), torch.full((1, 1), IGNORE), [1])
"""Content of an empty packed micro-batch: one token without a label."""


@dataclass(frozen=True)
class Share:
    """One micro-batch of this rank.

    Args:
        index: global index of the micro-batch in the step.
        rows: indices of the rows of the global batch that it holds.
    """

    index: int
    rows: range


@dataclass(frozen=True)
class LocalBatch:
    """Part of a global batch that this rank computes, in the order of ``Pipeline.shares``.

    Args:
        rows: number of rows of the whole global batch; with ``packs`` the number of packed micro-batches.
        sequence_length: tokens of a row; with ``packs`` the most tokens that a packed micro-batch may have.
        micro_batches: micro-batches of this rank, in the order of its shares; may be empty.
        digest: checksum of the global batch, which must be equal on all ranks; None if this rank knows only its own
            part.
        packs: assignment of documents of uneven lengths to ranks; each packed micro-batch is one row. None for plain
            rows.
    """

    rows: int
    sequence_length: int
    micro_batches: Sequence[MicroBatch]
    digest: int | None = None
    packs: Packs | None = field(default=None, repr=False)


@dataclass(frozen=True)
class Deal:
    """Assignment of the rows of a global batch to ranks, with checks of the batch.

    A micro-batch holds equal rows whatever the number of processes; only the rank that computes it changes.

    Args:
        micro_batch: rows of a micro-batch; the last one of a global batch may have fewer.
        rank: this process.
        world_size: number of processes.
        positions: how the model uses position ids.
        vocabulary: token ids must be below this number, and labels unless ``own_loss``; None switches the check off.
        own_loss: True if the user gives the loss, so that labels need not be token ids.
        ranks: number of neighbouring ranks that compute the same micro-batches together.
        in_turn: reason why documents of a row are computed one after another; ``""`` if they are computed together.
        share: returns the micro-batch indices of every rank for a number of micro-batches; None for
            ``share_micro_batches``.
        dealt_to: index, in ``Packs``, of the rank or pipeline whose packed micro-batches this rank computes.
        pinned: copy micro-batches to page-locked memory. Copies from other memory to a GPU would block the thread that
            issues actions.
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
        """Return the number of micro-batches of a global batch of ``rows`` rows."""
        return -(-rows // self.micro_batch)

    def form(self, local: LocalBatch) -> int | PacksForm:
        """Return the key of the schedule for ``local``: number of micro-batches, or ``Packs.form`` for documents."""
        return local.packs.form if local.packs else self.count(local.rows)

    def tokens(self, local: LocalBatch) -> int:
        """Return the most tokens that one micro-batch of ``local`` may have."""
        return local.sequence_length * (1 if local.packs else min(self.micro_batch, local.rows))

    def busiest(self, local: LocalBatch) -> tuple[Sequence[int], float]:
        """Return lengths of rows in tokens, and the part of the work on these rows that the busiest rank does.

        For documents the rows are all documents of the step. For plain rows they are the rows of the busiest rank's
        rounds, and the part is 1 / ``ranks``.
        """
        if (packs := local.packs) is not None:
            return packs.lengths, packs.seconds / packs.mean_seconds / self.world_size
        rounds = ceil(self.count(local.rows) * self.ranks / self.world_size)
        return [local.sequence_length] * min(local.rows, self.micro_batch * rounds), 1 / self.ranks

    def shares(self, rows: int) -> tuple[Share, ...]:
        """Return the micro-batches of this rank for a global batch of ``rows`` rows.

        >>> Deal(micro_batch=2, rank=1, world_size=2).shares(7)
        (Share(index=2, rows=range(4, 6)), Share(index=3, rows=range(6, 7)))
        """
        size = self.micro_batch
        share = self.share or (lambda count: share_micro_batches(count, self.world_size, self.ranks))
        numbers = share(self.count(rows))[self.rank]
        return tuple(Share(m, range(m * size, min((m + 1) * size, rows))) for m in numbers)

    def local(self, batch: Mapping[str, Tensor] | LocalBatch) -> LocalBatch:
        """Check a global batch and return the part of this rank as copies on the CPU.

        The caller may overwrite ``batch`` afterwards, although the step still runs.

        Args:
            batch: tensors ``(rows, tokens)`` in the Hugging Face convention (see ``MicroBatch.from_rows``), or a
                ``LocalBatch``, whose micro-batches are checked and copied.

        Raises:
            UserError: a tensor is missing, unknown, has another shape or does not hold integers, or a token id or
                position is outside of the model's vocabulary or position table.
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
        whole = self._checked(MicroBatch.from_rows(**tensors))  # all rows are checked: every rank raises the same error
        parts = [self._scaled_alike(whole.part(share.rows).copy(pinned=self.pinned)) for share in self.shares(rows)]
        digest = 0
        for name in sorted(tensors):
            digest = zlib.crc32(tensors[name].contiguous().numpy().data, digest)
        return LocalBatch(rows, length, parts, digest)

    def _checked(self, batch: MicroBatch) -> MicroBatch:
        """Return ``batch`` unchanged, or raise UserError if a token id, label or position is out of range."""
        if self.vocabulary is not None:
            tokens = {"input_ids": batch.input_ids}
            if not self.own_loss:
                tokens["labels"] = batch.labels[batch.labels != IGNORE]
            for name, numbers in tokens.items():
                if numbers.numel() and not 0 <= int(numbers.min()) <= int(numbers.max()) < self.vocabulary:
                    value = f"{name} from {int(numbers.min())} to {int(numbers.max())}"
                    expected = f"numbers below {self.vocabulary}, the model's vocabulary" + (
                        f", or {IGNORE}" if name == "labels" else ""
                    )
                    raise UserError("batch", value, expected)
        last = int(batch.position_ids.max())
        if self.in_turn:
            last = max(last, max(batch.lengths) - 1)  # the model counts positions itself
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
        """Return ``batch`` unchanged, or raise UserError if longrope would scale documents by a longer one beside them.

        transformers chooses the rotary scaling by the longest document of a micro-batch. Documents with labels must
        therefore be on the same side of ``positions.scaled_from`` as the longest one."""
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
        """Map the indices ``numbers`` of this rank's micro-batches in the schedule to the micro-batches of ``local``.

        Raises:
            UserError: ``local`` has more or fewer micro-batches than ``numbers``.
        """
        if len(numbers) != len(local.micro_batches):
            value = f"{len(local.micro_batches)} micro-batches"
            raise UserError("batch", value, f"{len(numbers)} on rank {self.rank}, as Pipeline.shares says")
        return dict(zip(numbers, local.micro_batches, strict=True))

    def slices(self, local: LocalBatch, numbers: Sequence[int]) -> dict[int, DocumentSlice]:
        """Return the ``DocumentSlice`` of every micro-batch of this rank that is a slice of a document, by index.

        Args:
            local: the part of this rank.
            numbers: indices of its micro-batches in the schedule, in order.
        """
        dealt = zip(numbers, local.packs.of(self.dealt_to) if local.packs else (), strict=False)
        parts = [(m, pack.documents[0], *pack.part) for m, pack in dealt if pack.part is not None]
        of_document: dict[int, tuple[int, ...]] = {}
        for m, document, *_ in parts:
            of_document[document] = (*of_document.get(document, ()), m)
        return {m: DocumentSlice(begin, end, of_document[document]) for m, document, begin, end in parts}

    def local_of_rows(self, rows: int, sequence_length: int, row: Callable[[int], MicroBatch]) -> LocalBatch:
        """Build this rank's part of ``rows`` rows; calls ``row(index)`` only for its own. See ``Pipeline.part_of``."""
        parts = [MicroBatch.padded([row(number) for number in share.rows]) for share in self.shares(rows)]
        return LocalBatch(rows, sequence_length, self._pinned(parts))

    def local_of_packs(self, packs: Packs, document: Callable[[int], MicroBatch], *, pack_tokens: int) -> LocalBatch:
        """Build this rank's part of the documents assigned by ``packs``; see ``Pipeline.part_of_documents``."""
        digest = zlib.crc32(repr((packs.lengths, packs.shared, packs.single)).encode())
        count = sum(map(len, (*packs.shared, *packs.single)))
        parts = self._pinned(rows_of(packs, self.dealt_to, document))
        return LocalBatch(count, pack_tokens * packs.ranks, parts, digest, packs)

    def _pinned(self, parts: list[MicroBatch]) -> list[MicroBatch]:
        return [part.pin_memory() for part in parts] if self.pinned else parts


def rows_of(packs: Packs, number: int, document: Callable[[int], MicroBatch]) -> list[MicroBatch]:
    """Build one row per packed micro-batch of one rank or pipeline, in the order of its rounds.

    Documents of a packed micro-batch are concatenated. A slice of a document holds the whole document. An empty packed
    micro-batch holds one token without a label.

    Args:
        packs: assignment of documents.
        number: index of the rank or pipeline in ``packs``.
        document: returns a document by its index, as a micro-batch of one row.

    Raises:
        UserError: a document has another length than ``packs.lengths`` says.
    """

    def row(dealt: Pack) -> MicroBatch:
        joined = MicroBatch.in_a_row([document(number) for number in dealt.documents] or [NOTHING])
        expected = sum(packs.lengths[number] for number in dealt.documents) or 1
        if (tokens := joined.input_ids.numel()) != expected:
            value = f"{tokens} tokens in documents {', '.join(map(str, dealt.documents[:5]))}"
            raise UserError("documents", value, f"{expected}, as their lengths say")
        return joined

    return [row(dealt) for dealt in packs.of(number)]
