"""The settings of the data, as a dataclass that the command line shows as options without loading torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

from tawpipe.errors import UserError

Packed = Literal["split", "fit", "balanced", "none"]
Packing = Literal["auto", "split", "fit", "balanced", "none"]
Rows = Literal["auto", "text", "chat", "instruction"]

SMALLEST_VOCABULARY = 257  # every byte, and the end-of-text token


@dataclass(frozen=True, kw_only=True)
class DataSettings:
    """Settings of the text, and of how it becomes rows of tokens."""

    data: list[str] = field(default_factory=lambda: ["stdlib"])
    """Globs of the training files (`**` crosses folders). .jsonl, .json and .parquet hold one document per row, any
    other file is UTF-8 text and one document. `stdlib` stands for the Python standard library's own source files."""

    validation_data: list[str] = field(default_factory=list)
    """Globs of the validation files. Empty: a fraction of the training documents is held out instead."""

    validation_fraction: float = 0.02
    """Share of the documents that is held out for validation, chosen by a hash of their content and the seed, so that
    copies of a document stay on one side. Of no effect with validation_data. 0: no validation."""

    rows: Rows = "auto"
    """Kind of a row of a .jsonl or .parquet file: text (text_column), chat (`messages` of `role` and `content`), or
    instruction (`prompt` and `completion`, or `instruction`, `output` and perhaps `input`). auto: by its columns,
    where a text_column other than the default goes first, then chat, instruction and text."""

    text_column: str = "text"
    """The column that holds the text of text rows."""

    tokenizer: str | None = None
    """A folder with a tokenizer, a tokenizer.json, or a Hub name. Unset: the model's own where it has one, else a
    byte-level BPE that is trained on the training files and kept in the cache."""

    vocab_size: int = 8192
    """Vocabulary of the tokenizer that is trained here. Of no effect on one that exists."""

    packing: Packing = "auto"
    """Documents in rows. split: end to end, a document may go on in another row as a document of its own. fit:
    whole documents, best fit, the rest of the row is padding, a document longer than a row is cut off. balanced: whole
    documents in rows of any length, dealt so that all processes compute for equally long; a document longer than
    max_document is cut into pieces. none: a row is one document, or a piece of one that is longer than sequence_length,
    and as long as the longest of its micro-batch. auto: none for models that mix the documents of a row (state spaces,
    linear attention, older code); balanced where there are chat or instruction rows, or where a model with weights
    meets documents of such uneven lengths that it is faster; else split."""

    streaming: bool = False
    """Read and tokenise during training instead of beforehand, for corpora too large to go through first. Every rank
    reads the whole stream. Documents are shuffled within windows of stream_window."""

    stream_window: int = 4096
    """Documents that are shuffled and packed together when streaming. They are held in memory, as tokens."""

    cache_dir: str | None = None
    """Folder for tokenised corpora and trained tokenizers. Unset: $TAWPIPE_CACHE, else ~/.cache/tawpipe."""

    def check_data(self) -> None:
        """Raise UserError for a value that cannot work, before anything is read."""
        if not self.data:
            raise UserError("--data", self.data, "at least one glob, or stdlib")
        if not 0.0 <= self.validation_fraction < 1.0:
            raise UserError(
                "--validation-fraction", self.validation_fraction, "a number from 0 up to, not including, 1"
            )
        if self.vocab_size < SMALLEST_VOCABULARY:
            raise UserError("--vocab-size", self.vocab_size, f"at least {SMALLEST_VOCABULARY}")
        if self.stream_window < 1:
            raise UserError("--stream-window", self.stream_window, "at least 1 document")
        if self.packing not in (known := get_args(Packing)):
            raise UserError("--packing", self.packing, f"one of {', '.join(known)}")
        if self.rows not in ("auto", "text", "chat", "instruction"):
            raise UserError("--rows", self.rows, "one of auto, text, chat, instruction")
