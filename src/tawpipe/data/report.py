"""Counts of what was read and what was skipped, so that no document is lost without a message."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal

from tawpipe.data.settings import Packed

if TYPE_CHECKING:
    from tawpipe.dealing.lengths import Balance
    from tawpipe.report.lengths import Histogram


Left = Literal["file", "folder", "row", "empty", "answer", "note", "remark"]
"""Kinds of things that are left out. A ``note`` about a row and a ``remark`` about an answer leave nothing out; they
are reported once, with a count."""
LEFT_NOTHING_OUT: tuple[Left, ...] = ("note", "remark")


MOST_NAMES = 20
"""Number of columns or fields that one line lists."""


@dataclass(frozen=True)
class Skipped:
    """A document, row, file or folder that was left out, with the reason."""

    kind: Left
    where: str
    """File, with line or row if there is one."""
    why: str
    """Reason, in words that are equal for all cases of this problem; they are counted together."""
    detail: str = ""
    """Details of this case; ``""`` if there are none."""
    names: tuple[str, ...] = ()
    """Columns or fields concerned; the names of all cases of this problem are reported together."""

    def __str__(self) -> str:
        return f"{self.where}: {self.why}{_named(self.names)}" + (f" ({self.detail})" if self.detail else "")

    @property
    def sentence(self) -> str:
        """Text for a log."""
        return str(self) if self.kind in LEFT_NOTHING_OUT else f"left out {self}"


@dataclass
class Trouble:
    """Documents, rows or files that were left out for one reason."""

    kind: Left
    why: str
    first: str
    """Place and details of the first case."""
    number: int = 1
    names: list[str] = field(default_factory=list)
    """Columns or fields concerned."""

    @property
    def line(self) -> str:
        """Text for the console, with number, reason and first case."""
        noun = {"empty": "document", "note": "row", "remark": "answer"}.get(self.kind, self.kind)
        out = "" if self.kind in LEFT_NOTHING_OUT else "left out, "
        why = out + self.why + _named(self.names)
        return f"{self.number:,} {noun}{'s' if self.number > 1 else ''} {why}; the first: {self.first}"


def _named(names: Sequence[str]) -> str:
    """Return the first ``MOST_NAMES`` names after a colon, and the number of further ones; ``""`` without names."""
    more = len(names) - MOST_NAMES
    listed = ", ".join(names[:MOST_NAMES])
    return (f": {listed}" if names else "") + (f" and {more} more" if more > 0 else "")


@dataclass
class ReadCounts:
    """Numbers of a corpus's documents and of what was left out; stored with the tokens in the cache."""

    files: int = 0
    """Number of files that matched the globs."""
    rows: int = 0
    """Number of rows read, including rows left out."""
    text: int = 0
    """Number of documents of plain text."""
    chat: int = 0
    """Number of documents from chat rows."""
    instruction: int = 0
    """Number of documents from instruction rows."""
    empty: int = 0
    """Number of documents left out because no token counts."""
    bad_files: int = 0
    """Number of files and folders left out, or read only up to a damaged place."""
    bad_rows: int = 0
    """Number of rows left out."""
    bad_answers: int = 0
    """Number of answers that are not learned although other answers of their rows are."""
    troubles: list[Trouble] = field(default_factory=list)
    """Reasons for which something was left out, in the order of their first cases."""
    longest: int = 0
    """Tokens of the longest document."""
    longest_where: str = ""
    """File and row of the longest document."""

    @property
    def documents(self) -> int:
        """Number of documents of all kinds."""
        return self.text + self.chat + self.instruction

    @property
    def masked(self) -> bool:
        """True if some tokens do not count in the loss, as in chat and instruction rows."""
        return self.chat + self.instruction > 0

    @property
    def mostly_left_out(self) -> str:
        """Warning if more than one row in ten is left out, else ``""``."""
        out = self.bad_rows + self.empty
        if 10 * out <= self.rows:
            return ""
        worst = max(self.troubles, key=lambda trouble: trouble.number * (trouble.kind in ("row", "empty")))
        return f"left out {out:,} of {self.rows:,} rows, {worst.number:,} of them {worst.why}: {worst.first}"

    def add_row(self, row: object) -> None:
        """Count a row that was read; a ``Skipped`` about a file or folder is not counted."""
        self.rows += not isinstance(row, Skipped) or row.kind in ("row", "empty")

    def add_document(self, kind: Literal["text", "chat", "instruction"]) -> None:
        """Count a document of a kind."""
        setattr(self, kind, getattr(self, kind) + 1)

    def add_length(self, tokens: int, where: str) -> None:
        """Record the length and place of a document if it is the longest so far."""
        if tokens > self.longest:
            self.longest, self.longest_where = tokens, where

    def add_skipped(self, skipped: Skipped) -> bool:
        """Count ``skipped`` under its kind and reason; return True if the reason, or one of its names, is new.

        A note or remark, which leaves nothing out, is counted under its reason only."""
        if skipped.kind == "empty":
            self.empty += 1
        elif skipped.kind == "row":
            self.bad_rows += 1
        elif skipped.kind == "answer":
            self.bad_answers += 1
        elif skipped.kind not in LEFT_NOTHING_OUT:
            self.bad_files += 1
        first = skipped.where + (f" ({skipped.detail})" if skipped.detail else "")
        return self._add_trouble(Trouble(skipped.kind, skipped.why, first, names=list(skipped.names)))

    def _add_trouble(self, trouble: Trouble) -> bool:
        """Add to the count of this kind and reason; return True if the reason, or one of its names, is new."""
        for known in self.troubles:
            if (known.kind, known.why) == (trouble.kind, trouble.why):
                known.number += trouble.number
                known.names += (new := [name for name in trouble.names if name not in known.names])
                return bool(new)
        self.troubles.append(replace(trouble, names=[*trouble.names]))
        return True

    def lines(self, name: str) -> list[str]:
        """Return one line for the console per reason, each beginning with ``name``, the name of the data."""
        return [f"{name}: {trouble.line}" for trouble in self.troubles]

    @classmethod
    def merged(cls, parts: Sequence[ReadCounts]) -> ReadCounts:
        """Return the sum of the counts of several sets; for one set its counts themselves, not a copy."""
        if len(parts) == 1:
            return parts[0]
        total = cls()
        for name in ("files", "rows", "text", "chat", "instruction", "empty", "bad_files", "bad_rows", "bad_answers"):
            setattr(total, name, sum(getattr(part, name) for part in parts))
        for trouble in (entry for part in parts for entry in part.troubles):
            total._add_trouble(trouble)
        longest = max(parts, key=lambda part: part.longest)
        total.longest, total.longest_where = longest.longest, longest.longest_where
        return total

    @classmethod
    def loaded(cls, values: dict[str, Any]) -> ReadCounts:
        """Return the counts from the output of ``asdict``."""
        return cls(**{**values, "troubles": [Trouble(**trouble) for trouble in values["troubles"]]})


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
    """Documents longer than a row, which ``fit`` packing truncates."""
    left_out: int = 0
    """Documents left out because no token that would be in a row is learned."""
    cut: int = 0
    """Documents that ``balanced`` and ``none`` cut into pieces."""
    padding: int = 0
    """Padding tokens of an epoch."""
    torn: int = 0
    """Pieces of documents that lack their beginning."""
    usual: tuple[int, int, int] = (0, 0, 0)
    """Median, 90 % quantile and maximum of the tokens of documents; without truncated ends."""

    @classmethod
    def sum(cls, parts: Sequence[SetSize], usual: tuple[int, int, int]) -> SetSize:
        """Return the total size of several sets; ``usual`` are the quantiles over all their documents."""
        counted = [item.name for item in fields(cls) if item.name != "usual"]
        return cls(**{name: sum(getattr(part, name) for part in parts) for name in counted}, usual=usual)

    def text(self, sequence_length: int, packing: str) -> str:
        """Return the size as text; ``sequence_length`` is the length of a row, or the longest length of a document."""
        if packing in ("balanced", "none"):
            rows = "balanced" if packing == "balanced" else "one per row"
            words = f"{self.documents:,} documents ({rows}), {self.tokens:,} tokens, {self.learned / self.tokens:.1%} "
            words += "learned"
            if self.cut:
                words += f", {self.cut:,} longer than {sequence_length:,} tokens cut into {self.rows:,} in all"
            return words + (
                f", {self.left_out:,} left out because they have no token to learn" if self.left_out else ""
            )
        all_tokens = self.rows * sequence_length
        half, most, longest = self.usual
        lengths = f" (median {half:,} tokens, 90th percentile {most:,}, longest {longest:,})" if longest else ""
        rows = f"{self.rows:,} rows of {sequence_length:,} ({packing}), {self.learned / all_tokens:.1%} learned"
        rows += f", {padding:.1%} padding" if (padding := self.padding / all_tokens) >= 5e-4 else ""
        cut = f", {self.truncated:,} documents truncated to one row" if self.truncated else ""
        out = f", {self.left_out:,} left out because no answer begins before that" if self.left_out else ""
        return f"{self.documents:,} documents{lengths}, {self.tokens:,} tokens in {rows}{cut}{out}"


PIECES_SHOWN = 6
"""Number of pieces of the first document shown on the console."""

ENOUGH_DOCUMENTS, ENOUGH_TOKENS = 100, 10_000
"""Number of validation documents, and of their tokens that count, below which the loss is mostly noise. Means of
documents vary by a few tenths, losses of tokens by a few units."""


def too_small(size: SetSize, fraction: float | None) -> str:
    """Return a sentence if a validation set is too small, with advice; else ``""``.

    Args:
        size: size of the validation set.
        fraction: fraction of documents that was held out; None if a larger one would not help.
    """
    lacking = max(ENOUGH_DOCUMENTS / size.documents, ENOUGH_TOKENS / max(1, size.learned))
    if lacking <= 1:
        return ""
    larger = math.ceil(100 * lacking * (fraction or 1)) / 100
    advice = f"--validation-fraction {larger:g} or " if fraction and larger <= LARGEST_FRACTION else ""
    return (
        f"validation loss will be noisy: {size.documents:,} documents with {size.learned:,} tokens that count; "
        f"at least {ENOUGH_DOCUMENTS:,} with {ENOUGH_TOKENS:,} are recommended ({advice}--validation-data)"
    )


LARGEST_FRACTION = 0.3
"""Largest fraction of held-out documents that is advised."""


@dataclass(frozen=True)
class PartReport:
    """Report of one data set of a mixture.

    Attributes:
        name: name of the set.
        share: share of the tokens.
        passes: number of passes over it in one pass of the mixture; None when streaming.
        size: size of the set.
    """

    name: str
    share: float
    passes: float | None
    size: SetSize

    def line(self, sequence_length: int, packing: str) -> str:
        """Return a line for the console."""
        seen = "" if self.passes is None else f", {self.passes:.2f} epochs in one epoch of the mixture"
        return f"  {self.name}: {self.share:.1%} of the tokens, {self.size.text(sequence_length, packing)}{seen}"


@dataclass(frozen=True)
class DataReport:
    """Outcome of ``prepare_data``, for the user."""

    tokenizer: str
    """Origin and size of the tokenizer."""
    packing: Packed
    sequence_length: int
    """Tokens of a row; under ``balanced`` and ``none`` the most tokens of a document."""
    seconds: float
    reused: bool
    """True if the tokens were in the cache already."""
    train: SetSize
    """Size of the training data; when streaming, of the first window, because the total is unknown."""
    validation: SetSize | None
    read: ReadCounts
    """Counts of the training files; when streaming, of what was read so far."""
    validation_read: ReadCounts | None = None
    """Counts of the validation files; None if validation documents were held out."""
    notes: tuple[str, ...] = ()
    """Sentences about deviations from the settings, with reasons."""
    warnings: tuple[str, ...] = ()
    """Sentences about sets of which much is left out."""
    streamed: bool = False
    why: str = ""
    """Reason for the packing, if ``auto`` chose it."""
    why_length: str = ""
    """Reason for the sequence length, if it follows from the documents."""
    histogram: Histogram | None = None
    """Lengths of the training documents under ``balanced`` and ``none``; when streaming, of the first window."""
    padding: float | None = None
    """Share of padding in the first steps, under ``none``."""
    balance: Balance | None = None
    """Balance between processes in the first steps, under ``balanced``."""
    parts: tuple[PartReport, ...] = ()
    """Reports of the data sets of a mixture."""
    example: tuple[tuple[str, bool], ...] = ()
    """First document of a set with chats or instructions, as pieces of text with a flag: True if learned."""

    @property
    def longest(self) -> tuple[int, str]:
        """Tokens of the longest document before cutting, and its file and row."""
        longest = max((self.read, self.validation_read or self.read), key=lambda counts: counts.longest)
        return longest.longest, longest.longest_where

    def example_lines(self, most: int | None = None) -> list[str]:
        """Return lines that show the example, with learned text marked; an empty list without an example.

        Args:
            most: show only ``PIECES_SHOWN`` pieces of about this many characters each; None shows everything.
        """

        def shortened(text: str) -> str:
            """Return the beginning and end of ``text`` if it is longer than ``most``."""
            cut = most is not None and len(text) > most
            return f"{text[: most // 2]} ... {text[-(most // 2) :]}" if cut and most else text

        if not self.example:
            return []
        pieces = self.example[: PIECES_SHOWN if most else None]
        text = "".join(f">>>{shortened(text)}<<<" if learned else shortened(text) for text, learned in pieces)
        text += " ..." if len(pieces) < len(self.example) else ""
        return ["first document (learned text between >>> and <<<):", *(f"  {line}" for line in text.split("\n"))]

    def lines(self) -> list[str]:
        """Return the lines for the console."""
        lines = [f"tokenizer: {self.tokenizer}"]
        if self.why and self.packing != "split":  # split is the usual packing
            lines.append(f"packing: {self.packing} ({self.why})")
        if self.why_length:
            lines.append(f"sequence length: {self.sequence_length:,} tokens, {self.why_length} (--sequence-length)")
        size = self.train.text(self.sequence_length, self.packing)
        if self.streamed:
            lines.append(f"training data: streamed from {self.read.files:,} files; first window: {size}")
        else:
            origin = "from the cache" if self.reused else f"tokenised in {self.seconds:.1f} s"
            lines.append(f"training data: {self.read.files:,} files, {size}, {origin}")
        lines += [part.line(self.sequence_length, self.packing) for part in self.parts]
        if self.validation is not None:
            lines.append(f"validation data: {self.validation.text(self.sequence_length, self.packing)}")
        else:
            lines.append("validation data: none")
        if self.train.cut and (where := self.longest[1]):
            lines.append(f"longest document: {self.longest[0]:,} tokens, cut into parts ({where})")
        if self.histogram is not None:
            lines += ["document lengths:", *self.histogram.lines()]
        if self.read.masked and self.train.torn:
            many = self.train.torn != 1
            torn = f"{self.train.torn:,} part{'s' * many} of documents lack{'s' * (not many)} the beginning"
            lines.append(f"{torn} (a larger --sequence-length, or --packing balanced, keeps documents whole)")
        if self.padding is not None:
            lines.append(f"padding: {self.padding:.1%} of the tokens computed in the first steps")
        if (balance := self.balance) is not None and balance.processes > 1:
            lines.append(
                f"balance (predicted for {balance.processes} processes and the first steps): the busiest "
                f"process computes {balance.after:.2f} times the mean; {balance.before:.2f} times with "
                "documents packed by tokens"
            )
        lines += self.read.lines("training files")
        if self.validation_read is not None:
            lines += self.validation_read.lines("validation files")
        return lines + [f"note: {note}" for note in self.notes]
