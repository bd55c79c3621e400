"""What a run decides about its batches, beside what its user has said."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import ceil

from tawpipe.dealing.balance import USUAL_BIN
from tawpipe.errors import UserError
from tawpipe.options.library import as_option
from tawpipe.schedule.strategies.table import find
from tawpipe.train.settings.config import TrainConfig

ONE_ROUND = 1.1
"""Of the tokens of a step over all processes, for what bins of one round have room by default."""


@dataclass(frozen=True)
class BatchShape:
    """The batches of a run. Under ``balanced`` a row is a full bin for all that knows rows alone, and a step has a row
    for every bin.

    Args:
        packing: of documents into rows, never ``auto``.
        rows, row_tokens: of a step, and of a row at most.
        micro_batch: rows that are computed at one time.
        step_tokens: of the documents of a step, under ``balanced``.
        document_tokens: that a document, or a piece of one, may have.
        bin_tokens: that a process computes at one time at most, under ``balanced``; 0 elsewhere.
        ranks: processes that compute a bin together.
        slices: a document that is longer than a bin passes a pipeline in slices.
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

    @classmethod
    def of(cls, config: TrainConfig, packing: str, world_size: int) -> BatchShape:
        """The batches under a packing, on so many processes."""
        tokens, longest, ranks = config.step_tokens, config.document_tokens, config.schedule.sequence_ranks or 1
        if packing != "balanced":
            rows, row_tokens = config.global_batch, config.sequence_length
            return cls(packing, rows, row_tokens, config.micro_batch, tokens, longest, ranks=ranks)
        usual = min(int(longest * USUAL_BIN), ceil(tokens * ONE_ROUND / world_size))
        cap = config.bin_tokens or max(usual, ceil(longest / ranks))
        rounds = ceil(tokens / (cap * world_size))
        rows = max(1, rounds * world_size // ranks)
        slices = find(config.schedule.strategy).cuts_documents
        return cls(packing, rows, cap * ranks, config.micro_batch, tokens, longest, cap, ranks, slices)

    @property
    def dealt(self) -> bool:
        """True if documents are dealt by their time, in bins."""
        return self.packing == "balanced"

    def check_longest(self, longest: int, where: str) -> None:
        """The longest document has room in a bin, if there are bins.

        Args:
            where: it stands; empty where that is not known.

        Raises:
            UserError: it has none.
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
        """Within it, a document that is longer than it may be is a matter of ``--max-document`` under ``balanced``, not
        of rows.
        """
        try:
            yield
        except UserError as error:
            if not self.dealt or as_option(error).setting != "--sequence-length":
                raise
            raise UserError("--max-document", error.value, error.expected) from error
