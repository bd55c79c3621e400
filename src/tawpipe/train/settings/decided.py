"""Sizes of a run's batches, decided from the settings, the packing and the number of processes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import ceil

from tawpipe.dealing.balance import USUAL_PACK
from tawpipe.errors import UserError
from tawpipe.options.library import as_option
from tawpipe.schedule.strategies.table import find
from tawpipe.train.settings.config import TrainConfig

ONE_ROUND = 1.1
"""Capacity of all packed micro-batches of one round by default, as a multiple of the tokens of a step."""


@dataclass(frozen=True)
class BatchShape:
    """Sizes of the batches of a run.

    Under ``balanced``, code that knows rows only sees each full packed micro-batch as one row. A step then has one row
    for every packed micro-batch.

    Args:
        packing: how documents are packed into rows; never ``auto``.
        rows: rows of a step, over all processes.
        row_tokens: tokens of a row at most.
        micro_batch: rows that are computed at one time.
        step_tokens: under ``balanced``, the tokens of all documents of a step.
        document_tokens: tokens of a document, or of a piece of a cut document, at most.
        bin_tokens: under ``balanced``, the tokens that a process computes at one time at most; 0 elsewhere.
        ranks: processes that compute a row together.
        slices: True if a pipeline takes a document longer than a packed micro-batch in slices.
        why: reason for ``micro_batch``, as words in brackets, if the run chose it; else ``""``.
    """

    packing: str
    rows: int
    row_tokens: int
    micro_batch: int
    step_tokens: int
    document_tokens: int
    bin_tokens: int = 0
    ranks: int = 1
    slices: bool = False
    why: str = ""

    @classmethod
    def of(cls, config: TrainConfig, packing: str, world_size: int, fills: int = 0) -> BatchShape:
        """Return the batch sizes for ``packing`` on ``world_size`` processes.

        Under ``balanced``, a row is a full packed micro-batch, and a step has enough rows to hold ``step_tokens``
        tokens. Packed micro-batches have at least ``fills`` tokens, unless fewer suffice for a step in one round."""
        tokens, longest, ranks = config.step_tokens, config.document_tokens, config.schedule.sequence_ranks or 1
        if packing != "balanced":
            rows, row_tokens = config.global_batch, config.sequence_length
            return cls(packing, rows, row_tokens, int(config.micro_batch), tokens, longest, ranks=ranks)
        usual = min(max(fills, int(longest * USUAL_PACK)), ceil(tokens * ONE_ROUND / world_size))
        cap = config.bin_tokens or max(usual, ceil(longest / ranks))
        rounds = ceil(tokens / (cap * world_size))
        rows = max(1, rounds * world_size // ranks)
        slices = find(config.schedule.strategy).cuts_documents
        return cls(packing, rows, cap * ranks, 1, tokens, longest, cap, ranks, slices)

    @property
    def dealt(self) -> bool:
        """True if documents are assigned to processes by their computing time (``balanced``)."""
        return self.packing == "balanced"

    def check_longest(self, longest: int, where: str) -> None:
        """Check that the longest document fits into a packed micro-batch, under ``balanced`` without document slices.

        Args:
            longest: tokens of the longest document.
            where: place of this document in the data; empty if not known.

        Raises:
            UserError: the document is too long.
        """
        if not self.dealt or self.slices or longest <= self.row_tokens:
            return
        piece = "a part of a document" if longest == self.document_tokens else "a document"
        over = f" over {self.ranks} processes" if self.ranks > 1 else ""
        least, place = -(-longest // self.ranks), where or "in the stream"
        raise UserError(
            "--bin-tokens",
            self.bin_tokens,
            (
                f"at least {least}{over}, as {piece} has {longest} tokens ({place}); or --max-document "
                f"{self.row_tokens}, or a larger --schedule.sequence-ranks; or a pipeline (--schedule.strategy "
                "1f1b), which cuts documents into slices"
            ),
        )

    @contextmanager
    def naming_documents(self) -> Iterator[None]:
        """Return a context in which an error about a too long row is renamed for ``balanced``.

        There, a ``UserError`` about ``--sequence-length`` is raised again as one about ``--max-document``.
        """
        try:
            yield
        except UserError as error:
            if not self.dealt or as_option(error).setting != "--sequence-length":
                raise
            raise UserError("--max-document", error.value, error.expected) from error
