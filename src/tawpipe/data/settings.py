"""Data settings: a dataclass that the command line shows as options without loading torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

from tawpipe.errors import UserError

Packed = Literal["split", "fit", "balanced", "none"]
Packing = Literal["auto", "split", "fit", "balanced", "none"]
Rows = Literal["auto", "text", "chat", "instruction"]
Answers = Literal["each", "last", "shown"]
LongChats = Literal["turns", "drop", "anywhere"]
AsChat = Literal["auto", "on", "off"]
SpecialInText = Literal["keep", "plain"]

TEXT, CHATS = ("text",), ("messages", "conversations")
PROMPTS, ANSWERS = ("prompt", "instruction"), ("completion", "response", "output")
BESIDES = ("input", "system", "tools", "functions", "chat_template_kwargs")
"""Columns of a row by their use: its text, its turns, the question, the answer, and optional further columns."""

COLUMN_NAMES = (*TEXT, *CHATS, "role", "content", *PROMPTS, *ANSWERS, *BESIDES)
"""Names that ``columns`` may map; ``role`` and ``content`` are fields of a message."""

SMALLEST_VOCABULARY = 257  # 256 bytes and the end-of-text token


@dataclass(frozen=True, kw_only=True)
class DataSettings:
    """Settings of the data and of how it becomes rows of tokens."""

    data: list[str] = field(default_factory=lambda: ["stdlib"])
    """Training data: files, folders, globs, and Hub data sets. In globs `**` crosses folders; the name of an existing
    file is never a glob. Hub data sets are named hf:NAME, hf:NAME:SPLIT or hf:NAME:CONFIG:SPLIT. Files .jsonl, .json,
    .parquet, .csv and .tsv hold one document per row. Any other file is UTF-8 text and one document. Files .gz and .zst
    are decompressed. With =WEIGHT after each name (a.jsonl=0.7 hf:org/b=0.3) the data sets are mixed; weights are
    shares of the tokens. `stdlib` stands for the source files of the Python standard library."""

    validation_data: list[str] = field(default_factory=list)
    """Validation data, named as in --data, without weights. Empty: a fraction of the training documents is held out
    instead."""

    validation_fraction: float = 0.02
    """Fraction of the training documents that is held out for validation. A hash of the row and the seed chooses them,
    so all copies of a document are on one side. Ignored with validation_data. 0: no validation."""

    rows: Rows = "auto"
    """Type of the rows: text, chat or instruction. A chat row has `messages`, or `conversations` as in ShareGPT. An
    instruction row has `prompt` or `instruction`, one of `completion`, `response` and `output`, and optionally `input`.
    auto: recognised by the columns of a row; columns named in --columns have priority, then chat, instruction and text.
    """

    columns: list[str] = field(default_factory=list)
    """Columns that have other names in the data, as NAME=COLUMN: text=body, or prompt=question response=answer. In
    chats, role=speaker content=words name the two fields of a message."""

    ignore_columns: list[str] = field(default_factory=list)
    """Columns to treat as absent. Without this setting, chat or instruction data is refused if it has columns that
    change the meaning of a row: preferences, a true or false label, history, images, audio, video, or a weight or loss
    of the row other than 1 or true. A type of content parts of a message may be named as well."""

    chat_template: str | None = None
    """Chat template: chatml, plain, or a file with a Jinja template. Unset: the tokenizer's own template if it has one,
    else chatml if the tokenizer has its tokens, else plain. The template is exported with the model."""

    answers: Answers = "each"
    """Answers of a chat that are trained. each: every answer, with the prompt that the template makes for it; if the
    template shows earlier turns differently from the last one, each answer gets a document of its own. last: only the
    last answer. shown: one document with the part of each answer that the template shows; answers it leaves out are
    counted and reported."""

    long_chats: LongChats = "turns"
    """Treatment of chats and instructions that are longer than a row, or than max_document. turns: cut them where a
    user turn begins and repeat the system turn; a question that is too long together with its answer is left out. drop:
    leave out documents that are too long. anywhere: cut them at any token, so that an answer may lack its question.
    With packing split, rows are always cut anywhere."""

    as_chat: AsChat = "auto"
    """Write instruction rows with the chat template, as a user turn and an assistant turn. auto: if the tokenizer has
    its own template or --chat-template names one. off: leave them as they are."""

    special_in_text: SpecialInText = "keep"
    """Special tokens written by users, tools and the system, such as `<|im_end|>` in a question. keep: tokenise them as
    special tokens, as servers do at inference. plain: tokenise them as text. Their number is reported."""

    tokenizer: str | None = None
    """Tokenizer: a folder, a tokenizer.json, or a Hub name. Unset: the model's own if it has one, else a byte-level BPE
    trained on the training files and kept in the cache."""

    vocab_size: int = 8192
    """Vocabulary size of a tokenizer that is trained here. No effect on an existing tokenizer."""

    packing: Packing = "auto"
    """Placement of documents in rows. split: end to end; a document may continue in another row as a separate document.
    fit: whole documents by best fit; the rest of a row is padding, and a document longer than a row is truncated.
    balanced: whole documents in rows of any length, assigned so that all processes compute for equally long; a document
    longer than max_document is cut into pieces. none: each row is one document, or a piece of one longer than
    sequence_length, padded to the longest row of its micro-batch. auto: none for models that mix the documents of a row
    (state spaces, linear attention, older code); balanced for chat or instruction rows, and for a pretrained model if
    its documents are so uneven that balanced is faster; else split."""

    streaming: bool = False
    """Read and tokenise during training instead of before it, for corpora too large to process first. Every rank reads
    the whole stream. Documents are shuffled within windows of stream_window documents."""

    stream_window: int = 4096
    """Number of documents that are shuffled and packed together when streaming. They are kept in memory as tokens."""

    cache_dir: str | None = None
    """Folder for tokenised corpora and trained tokenizers. Unset: $TAWPIPE_CACHE, else ~/.cache/tawpipe."""

    def check_data(self) -> None:
        """Raise UserError for a value that cannot work; reads no data."""
        if not self.data:
            raise UserError("--data", self.data, "at least one glob, or stdlib")
        if not 0.0 <= self.validation_fraction < 1.0:
            raise UserError(
                "--validation-fraction", self.validation_fraction, "a number from 0 up to, not including, 1"
            )
        self.column_names()
        if self.vocab_size < SMALLEST_VOCABULARY:
            raise UserError("--vocab-size", self.vocab_size, f"at least {SMALLEST_VOCABULARY}")
        if self.stream_window < 1:
            raise UserError("--stream-window", self.stream_window, "at least 1 document")
        of_few = {"packing": Packing, "rows": Rows, "as_chat": AsChat, "special_in_text": SpecialInText}
        for name, kind in {**of_few, "answers": Answers, "long_chats": LongChats}.items():
            if (value := getattr(self, name)) not in (known := get_args(kind)):
                raise UserError(f"--{name.replace('_', '-')}", value, f"one of {', '.join(known)}")

    def column_names(self) -> dict[str, str]:
        """Return the mapping of ``columns``: tawpipe's name to the column's name.

        Raises:
            UserError: an entry is not NAME=COLUMN, its name is unknown or occurs twice, or its column is also ignored.
        """
        names: dict[str, str] = {}
        for word in self.columns:
            name, _, column = word.partition("=")
            if name not in COLUMN_NAMES or not column or name in names:
                expected = f"NAME=COLUMN, each name once, of {', '.join(COLUMN_NAMES)}"
                raise UserError("--columns", word, expected)
            names[name] = column
            if column in self.ignore_columns:
                raise UserError("--ignore-columns", column, f"other columns than --columns {word} asks for")
        return names
