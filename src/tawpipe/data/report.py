"""Counts of what was read and what was skipped, so that no document is lost without a word."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from tawpipe.data.settings import Packed

if TYPE_CHECKING:
    from tawpipe.data.lengths import Balance
    from tawpipe.report.lengths import Histogram

MESSAGES_KEPT = 20
"""Skipped files and rows that are kept word by word; all are counted."""


@dataclass(frozen=True)
class Skipped:
    """A document, row or file that was left out, and why."""

    kind: Literal["file", "row", "empty"]
    where: str
    """The file, with the line or row where there is one."""
    why: str


@dataclass
class ReadCounts:
    """Numbers of a corpus's documents and of what was left out. Kept with the tokens in the cache."""

    files: int = 0
    """Files that matched the globs."""
    text: int = 0
    """Documents of plain text."""
    chat: int = 0
    """Documents that were chat rows."""
    instruction: int = 0
    """Documents that were instruction rows."""
    empty: int = 0
    """Documents without a token that counts, left out."""
    bad_files: int = 0
    """Files left out, or left off at the place that cannot be read."""
    bad_rows: int = 0
    """Rows left out."""
    messages: list[str] = field(default_factory=list)
    """The first files and rows that were left out, one line each."""
    longest: int = 0
    """Tokens of the longest document."""
    longest_where: str = ""
    """Where that one stands."""

    @property
    def documents(self) -> int:
        return self.text + self.chat + self.instruction

    @property
    def masked(self) -> bool:
        """True if some tokens do not count, as in chat and instruction rows."""
        return self.chat + self.instruction > 0

    def add_document(self, kind: Literal["text", "chat", "instruction"]) -> None:
        setattr(self, kind, getattr(self, kind) + 1)

    def add_length(self, tokens: int, where: str) -> None:
        if tokens > self.longest:
            self.longest, self.longest_where = tokens, where

    def add_skipped(self, skipped: Skipped) -> None:
        if skipped.kind == "empty":
            self.empty += 1
            return
        if skipped.kind == "file":
            self.bad_files += 1
        else:
            self.bad_rows += 1
        if len(self.messages) < MESSAGES_KEPT:
            self.messages.append(f"{skipped.where}: {skipped.why}")

    def skipped(self) -> str:
        """Documents, rows and files that were left out, in words; empty if there are none."""
        counted = [(self.bad_files, "unreadable file"), (self.bad_rows, "bad row"), (self.empty, "empty document")]
        return ", ".join(f"{number} {name}{'s' if number > 1 else ''}" for number, name in counted if number)

    def lines(self, name: str) -> list[str]:
        """Lines for the console on what was left out; ``name`` says of which corpus."""
        lines = []
        if skipped := self.skipped():
            lines.append(f"{name}: skipped {skipped}")
            lines += [f"  skipped {message}" for message in self.messages]
            if (more := self.bad_files + self.bad_rows - len(self.messages)) > 0:
                lines.append(f"  and {more} more")
        return lines


@dataclass(frozen=True)
class SetSize:
    """Size of a dataset."""

    documents: int
    tokens: int
    rows: int
    """Rows per epoch; under ``balanced`` and ``none`` documents and pieces of documents."""
    learned: int
    """Labels of an epoch that count."""
    truncated: int = 0
    """Documents longer than a row of which ``fit`` packing cuts off the end."""
    left_out: int = 0
    """Documents without a token that it would show and that is learned."""
    cut: int = 0
    """Documents that ``balanced`` and ``none`` cut into pieces."""

    def text(self, sequence_length: int, packing: str) -> str:
        """The size in words; ``sequence_length`` of a row, or of a document at most."""
        if packing in ("balanced", "none"):
            rows = "balanced" if packing == "balanced" else "one in a row"
            said = f"{self.documents:,} documents ({rows}), {self.tokens:,} tokens, {self.learned / self.tokens:.1%} "
            said += "of them learned"
            if self.cut:
                said += f", {self.cut:,} longer than {sequence_length:,} tokens cut, which makes {self.rows:,} of them"
            return said + (f", {self.left_out:,} left out as nothing of them is learned" if self.left_out else "")
        share = self.learned / (self.rows * sequence_length)
        rows = f"{self.rows:,} rows of {sequence_length:,} ({packing}), {share:.1%} of them learned"
        cut = f", {self.truncated:,} documents cut off at a row's length" if self.truncated else ""
        out = f", {self.left_out:,} left out as no answer begins before that" if self.left_out else ""
        return f"{self.documents:,} documents, {self.tokens:,} tokens, {rows}{cut}{out}"


@dataclass(frozen=True)
class DataReport:
    """Outcome of ``prepare_data``, for the user."""

    tokenizer: str
    """Origin and size of the tokenizer."""
    packing: Packed
    sequence_length: int
    """Tokens of a row; under ``balanced`` and ``none`` of a document at most."""
    seconds: float
    reused: bool
    """True if the tokens were in the cache already."""
    train: SetSize
    """Size of the training data; when streaming, of the first window: nobody has counted the rest."""
    validation: SetSize | None
    read: ReadCounts
    """Counts of the training files; when streaming, of what has been read so far."""
    validation_read: ReadCounts | None = None
    """Counts of the validation files, if they are others."""
    notes: tuple[str, ...] = ()
    """Sentences on what was done otherwise than asked, and why."""
    streamed: bool = False
    why: str = ""
    """The reason for the packing, where it was left to be chosen."""
    histogram: Histogram | None = None
    """Lengths of the training documents under ``balanced`` and ``none``; when streaming, of the first window."""
    padding: float | None = None
    """Under ``none``, the share of padding in the first steps."""
    balance: Balance | None = None
    """How evenly the first steps are dealt under ``balanced``."""

    @property
    def longest(self) -> tuple[int, str]:
        """Tokens of the longest document, before any is cut, and where it stands."""
        found = max((self.read, self.validation_read or self.read), key=lambda counts: counts.longest)
        return found.longest, found.longest_where

    def lines(self) -> list[str]:
        """Lines for the console."""
        lines = [f"tokenizer: {self.tokenizer}"]
        if self.why:
            lines.append(f"packing: {self.packing}, because {self.why}")
        size = self.train.text(self.sequence_length, self.packing)
        if self.streamed:
            lines.append(f"training data: streamed from {self.read.files:,} files; in the first window {size}")
        else:
            origin = "from the cache" if self.reused else f"tokenised in {self.seconds:.1f} s"
            lines.append(f"training data: {self.read.files:,} files, {size}, {origin}")
        if self.validation is not None:
            lines.append(f"validation data: {self.validation.text(self.sequence_length, self.packing)}")
        else:
            lines.append("validation data: none")
        if self.train.cut and (where := self.longest[1]):
            lines.append(f"the longest document, cut into pieces, has {self.longest[0]:,} tokens: {where}")
        if self.histogram is not None:
            lines += ["lengths of the training documents:", *self.histogram.lines()]
        if self.padding is not None:
            lines.append(f"padding: {self.padding:.1%} of the tokens that the first steps compute")
        if (one := self.balance) is not None and one.processes > 1:
            lines.append(
                f"balance, modelled for {one.processes} processes and the first steps: the busiest computes "
                f"{one.before:.2f} times as long as the mean if documents are packed by their tokens, {one.after:.2f} "
                "times as they are dealt"
            )
        lines += self.read.lines("training files")
        if self.validation_read is not None:
            lines += self.validation_read.lines("validation files")
        return lines + [f"note: {note}" for note in self.notes]
