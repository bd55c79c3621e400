"""The settings of the data, as a dataclass that the command line shows as options without loading torch."""

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
"""Columns of a row by their use: its text; its turns; what is asked and what is answered; what there may be besides."""

COLUMN_NAMES = (*TEXT, *CHATS, "role", "content", *PROMPTS, *ANSWERS, *BESIDES)
"""Names in ``columns``; role and content are those of a message."""

SMALLEST_VOCABULARY = 257  # every byte, and the end-of-text token


@dataclass(frozen=True, kw_only=True)
class DataSettings:
    """Settings of the text, and of how it becomes rows of tokens."""

    data: list[str] = field(default_factory=lambda: ["stdlib"])
    """Training data: files, folders, globs (`**` crosses folders; a name that exists is no glob), and data sets of the
    Hub as hf:NAME, hf:NAME:SPLIT or hf:NAME:CONFIG:SPLIT. .jsonl, .json, .parquet, .csv and .tsv hold one document per
    row, any other file is UTF-8 text and one document; .gz and .zst are unpacked. With =WEIGHT behind each (a.jsonl=0.7
    hf:org/b=0.3) they are mixed by these shares of the tokens. `stdlib` stands for the Python standard library's own
    source files."""

    validation_data: list[str] = field(default_factory=list)
    """Validation data, named as --data does, without weights. Empty: a fraction of the training documents is held out
    instead."""

    validation_fraction: float = 0.02
    """Share of the documents that is held out for validation, chosen by a hash of the row and the seed, so that copies
    of a document stay on one side. Of no effect with validation_data. 0: no validation."""

    rows: Rows = "auto"
    """Kind of a row: text, chat (`messages`, or `conversations` as ShareGPT has them), or instruction (`prompt` or
    `instruction`, with `completion`, `response` or `output`, and perhaps `input`). auto: by its columns, where those
    that --columns names go first, then chat, instruction and text."""

    columns: list[str] = field(default_factory=list)
    """Columns under other names than tawpipe's, as NAME=COLUMN: text=body, or prompt=question response=answer. In
    chats, role=speaker content=words name the two parts of a message."""

    ignore_columns: list[str] = field(default_factory=list)
    """Columns that are taken to be absent. Without this a chat or instruction row is refused, with its whole data set,
    for columns that change what it means: preferences, a true or false label, history, pictures, sounds, films, a
    weight or loss of the row that is not 1 or true. A type of parts of a message's content may be named as well."""

    chat_template: str | None = None
    """Chat template: chatml, plain, or a file with a Jinja template. Unset: the tokenizer's own where it has one, else
    chatml where the tokenizer has its tokens, else plain. It is exported with the model."""

    answers: Answers = "each"
    """Answers of a chat that are learned. each: every answer as it will be asked for, in a document of its own where
    the chat template shows earlier turns otherwise than the last one. last: the last answer alone. shown: one document,
    with what the template shows of each answer; what it leaves out is said with a count."""

    long_chats: LongChats = "turns"
    """Chats and instructions longer than a row, or than max_document. turns: cut where a user's turn begins, with the
    system's turn repeated; a question that is too long with its answer is left out. drop: documents that are too long
    are left out. anywhere: cut into pieces of tokens, which may lack their question. Under split rows are cut
    anywhere."""

    as_chat: AsChat = "auto"
    """Write instruction rows by the chat template, as a user's turn and an assistant's. auto: where the tokenizer has a
    template of its own or --chat-template names one. off: as they are."""

    special_in_text: SpecialInText = "keep"
    """Special tokens that users, tools and the system wrote, as `<|im_end|>` in a question: keep tokenises them as
    special tokens, as servers do when a model is asked; plain as text. Said with a count."""

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
        """Names as tawpipe has them, with the columns that ``columns`` says for them.

        Raises:
            UserError: something else than NAME=COLUMN, or a name that tawpipe does not have.
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
