"""Counts of what was read and what was skipped, so that no document is lost without a word."""

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
"""Kinds of things that are left out. A ``note`` on a row and a ``remark`` on an answer leave nothing out: they are said
once, with a count."""
LEFT_NOTHING_OUT: tuple[Left, ...] = ("note", "remark")


MOST_NAMES = 20
"""Columns or fields that one line names."""


@dataclass(frozen=True)
class Skipped:
    """A document, row, file or folder that was left out, and why."""

    kind: Left
    where: str
    """The file, with the line or row where there is one."""
    why: str
    """Words that are the same for all with this trouble, which are counted together."""
    detail: str = ""
    """What is special about this one."""
    names: tuple[str, ...] = ()
    """Columns or fields that it is about. Those of all with this trouble are told together."""

    def __str__(self) -> str:
        return f"{self.where}: {self.why}{_named(self.names)}" + (f" ({self.detail})" if self.detail else "")

    @property
    def sentence(self) -> str:
        return str(self) if self.kind in LEFT_NOTHING_OUT else f"left out {self}"


@dataclass
class Trouble:
    """Documents, rows or files that were left out for one reason."""

    kind: Left
    why: str
    first: str
    """Where the first one stands, and what is special about it."""
    number: int = 1
    names: list[str] = field(default_factory=list)
    """Columns or fields that they are about."""

    @property
    def line(self) -> str:
        noun = {"empty": "document", "note": "row", "remark": "answer"}.get(self.kind, self.kind)
        out = "" if self.kind in LEFT_NOTHING_OUT else "left out, "
        why = out + self.why + _named(self.names)
        return f"{self.number:,} {noun}{'s' if self.number > 1 else ''} {why}; the first: {self.first}"


def _named(names: Sequence[str]) -> str:
    """The names behind a colon, of many the first ones; empty without names."""
    more = len(names) - MOST_NAMES
    listed = ", ".join(names[:MOST_NAMES])
    return (f": {listed}" if names else "") + (f" and {more} more" if more > 0 else "")


@dataclass
class ReadCounts:
    """Numbers of a corpus's documents and of what was left out. Kept with the tokens in the cache."""

    files: int = 0
    """Files that matched the globs."""
    rows: int = 0
    """Rows that were read, those left out included."""
    text: int = 0
    """Documents of plain text."""
    chat: int = 0
    """Documents that were chat rows."""
    instruction: int = 0
    """Documents that were instruction rows."""
    empty: int = 0
    """Documents without a token that counts, left out."""
    bad_files: int = 0
    """Files and folders left out, or left off at the place that cannot be read."""
    bad_rows: int = 0
    """Rows left out."""
    bad_answers: int = 0
    """Answers that are not learned, of rows whose other answers are."""
    troubles: list[Trouble] = field(default_factory=list)
    """The same by reason, in the order of the first of each."""
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

    @property
    def mostly_left_out(self) -> str:
        """A warning if more than one row in ten is left out, or ``""``."""
        out = self.bad_rows + self.empty
        if 10 * out <= self.rows:
            return ""
        worst = max(self.troubles, key=lambda trouble: trouble.number * (trouble.kind in ("row", "empty")))
        return f"left out {out:,} of {self.rows:,} rows, {worst.number:,} of them {worst.why}: {worst.first}"

    def add_row(self, row: object) -> None:
        """Count a row that was read; a ``Skipped`` of a file is none."""
        self.rows += not isinstance(row, Skipped) or row.kind in ("row", "empty")

    def add_document(self, kind: Literal["text", "chat", "instruction"]) -> None:
        setattr(self, kind, getattr(self, kind) + 1)

    def add_length(self, tokens: int, where: str) -> None:
        if tokens > self.longest:
            self.longest, self.longest_where = tokens, where

    def add_skipped(self, skipped: Skipped) -> bool:
        """Count it; True if it is the first with its trouble or with one of its names."""
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
        """Count it with those of its kind; True if it is the first one or has a new name."""
        for known in self.troubles:
            if (known.kind, known.why) == (trouble.kind, trouble.why):
                known.number += trouble.number
                known.names += (new := [name for name in trouble.names if name not in known.names])
                return bool(new)
        self.troubles.append(replace(trouble, names=[*trouble.names]))
        return True

    def lines(self, name: str) -> list[str]:
        """A line for the console for every kind of trouble; ``name`` says of which data."""
        return [f"{name}: {trouble.line}" for trouble in self.troubles]

    @classmethod
    def merged(cls, parts: Sequence[ReadCounts]) -> ReadCounts:
        """The counts of several sets together."""
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
        """The counts that ``asdict`` made plain."""
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
    """Documents longer than a row of which ``fit`` packing cuts off the end."""
    left_out: int = 0
    """Documents without a token that it would show and that is learned."""
    cut: int = 0
    """Documents that ``balanced`` and ``none`` cut into pieces."""
    padding: int = 0
    """Tokens of an epoch that fill up rows."""
    torn: int = 0
    """Pieces of documents that lack their beginning."""
    usual: tuple[int, int, int] = (0, 0, 0)
    """Tokens that half of the documents have at most, that nine of ten have at most, and of the longest; when rows cut
    them off, of what is shown.
    """

    @classmethod
    def sum(cls, parts: Sequence[SetSize], usual: tuple[int, int, int]) -> SetSize:
        """The size of several sets together; ``usual`` of all their documents."""
        counted = [item.name for item in fields(cls) if item.name != "usual"]
        return cls(**{name: sum(getattr(part, name) for part in parts) for name in counted}, usual=usual)

    def text(self, sequence_length: int, packing: str) -> str:
        """The size in words; ``sequence_length`` of a row, or of a document at most."""
        if packing in ("balanced", "none"):
            rows = "balanced" if packing == "balanced" else "one per row"
            said = f"{self.documents:,} documents ({rows}), {self.tokens:,} tokens, {self.learned / self.tokens:.1%} "
            said += "learned"
            if self.cut:
                said += f", {self.cut:,} longer than {sequence_length:,} tokens cut into {self.rows:,} in all"
            return said + (f", {self.left_out:,} left out because they have no token to learn" if self.left_out else "")
        all_tokens = self.rows * sequence_length
        half, most, longest = self.usual
        lengths = f" (median {half:,} tokens, 90th percentile {most:,}, longest {longest:,})" if longest else ""
        rows = f"{self.rows:,} rows of {sequence_length:,} ({packing}), {self.learned / all_tokens:.1%} learned"
        rows += f", {padding:.1%} padding" if (padding := self.padding / all_tokens) >= 5e-4 else ""
        cut = f", {self.truncated:,} documents truncated to one row" if self.truncated else ""
        out = f", {self.left_out:,} left out because no answer begins before that" if self.left_out else ""
        return f"{self.documents:,} documents{lengths}, {self.tokens:,} tokens in {rows}{cut}{out}"


PIECES_SHOWN = 6
"""Pieces of the first document on the console."""

ENOUGH_DOCUMENTS, ENOUGH_TOKENS = 100, 10_000
"""Held-out documents, and tokens of them that count, below which a loss is mostly noise: means of documents spread by
some tenths, and those of tokens by some units.
"""


def too_small(size: SetSize, fraction: float | None) -> str:
    """A sentence on a validation set that is too small, and what would be enough; empty for one that is not.

    Args:
        fraction: the share of the documents that was held out, where a larger one would hold out more.
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
"""Share of the documents that one would still hold out."""


@dataclass(frozen=True)
class PartReport:
    """A data set of a mixture.

    Attributes:
        share: of the tokens.
        passes: times that it is seen in one pass of the mixture; None when streaming.
    """

    name: str
    share: float
    passes: float | None
    size: SetSize

    def line(self, sequence_length: int, packing: str) -> str:
        seen = "" if self.passes is None else f", {self.passes:.2f} epochs in one epoch of the mixture"
        return f"  {self.name}: {self.share:.1%} of the tokens, {self.size.text(sequence_length, packing)}{seen}"


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
    warnings: tuple[str, ...] = ()
    """Sentences on the sets of which much is left out."""
    streamed: bool = False
    why: str = ""
    """The reason for the packing, where it was left to be chosen."""
    why_length: str = ""
    """The reason for the length, where it follows from the documents."""
    histogram: Histogram | None = None
    """Lengths of the training documents under ``balanced`` and ``none``; when streaming, of the first window."""
    padding: float | None = None
    """Under ``none``, the share of padding in the first steps."""
    balance: Balance | None = None
    """How evenly the first steps are dealt under ``balanced``."""
    parts: tuple[PartReport, ...] = ()
    """The data sets of a mixture."""
    example: tuple[tuple[str, bool], ...] = ()
    """The first document of a set with chats or instructions, in pieces, and which of them are learned."""

    @property
    def longest(self) -> tuple[int, str]:
        """Tokens of the longest document, before any is cut, and where it stands."""
        longest = max((self.read, self.validation_read or self.read), key=lambda counts: counts.longest)
        return longest.longest, longest.longest_where

    def example_lines(self, most: int | None = None) -> list[str]:
        """The example with learned text marked; given ``most``, six pieces of about so many letters."""

        def shortened(text: str) -> str:
            cut = most is not None and len(text) > most
            return f"{text[: most // 2]} ... {text[-(most // 2) :]}" if cut and most else text

        if not self.example:
            return []
        pieces = self.example[: PIECES_SHOWN if most else None]
        text = "".join(f">>>{shortened(text)}<<<" if learned else shortened(text) for text, learned in pieces)
        text += " ..." if len(pieces) < len(self.example) else ""
        return ["first document (learned text between >>> and <<<):", *(f"  {line}" for line in text.split("\n"))]

    def lines(self) -> list[str]:
        """Lines for the console."""
        lines = [f"tokenizer: {self.tokenizer}"]
        if self.why and self.packing != "split":  # which is the usual one
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
