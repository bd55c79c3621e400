"""Tokenised text, made once and kept in the cache, because tokenising a corpus takes long."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from tawpipe.data.chats.chat import ChatText, with_beginning, with_template
from tawpipe.data.chats.columns import Columns, RawRow, RowKind
from tawpipe.data.chats.render import Document, Renderer
from tawpipe.data.chats.templates import PRINTS_DATE, fallback_template
from tawpipe.data.corpus import Corpus, write_corpus
from tawpipe.data.encode import Encoder
from tawpipe.data.reading.cache import content_hash, is_complete, make_folder
from tawpipe.data.reading.read import RowReader
from tawpipe.data.reading.sources import SourceFile, name_files, stamps
from tawpipe.data.report import ReadCounts
from tawpipe.data.settings import DataSettings
from tawpipe.data.tokenizer import (
    has_tokenizer,
    load_tokenizer,
    load_with_class,
    sample_texts,
    tokenizer_hash,
    train_tokenizer,
    vocabulary_size,
)
from tawpipe.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CACHE_FORMAT = 5
"""Part of every cache key; increased when equal settings and files give other tokens or other cache files."""


ROWS_LOOKED_AT = 64
"""Number of first rows of a file that are searched for chats."""


class TokenisedText:
    """Tokenizer and chat template of a run, and the corpora made with them.

    Args:
        settings: data settings.
        files: training files, on which a tokenizer is trained if there is none.
        root: cache folder.
        tokenizer: tokenizer to use, or None to follow the settings.
        model: folder of the model, whose tokenizer is used if the settings name none; or None.
        date: date that chat templates print.
    """

    def __init__(
        self,
        settings: DataSettings,
        files: Sequence[SourceFile],
        root: Path,
        *,
        tokenizer: PreTrainedTokenizerBase | None,
        model: str | None,
        date: str = "",
    ) -> None:
        self.settings, self.root, self.date = settings, root, date
        self.reader = RowReader(Columns.of(settings))
        self.tokenizer, self.origin = self._choose(files, tokenizer, model)
        if settings.chat_template is not None:
            self.tokenizer = with_template(self.tokenizer, settings.chat_template, "--chat-template")
        self.fallback = "" if self.tokenizer.chat_template else fallback_template(self.tokenizer)
        """Name of the built-in chat template, for a tokenizer that has none; else ``""``."""
        self.as_chat = settings.as_chat == "on" or (settings.as_chat == "auto" and not self.fallback)
        if self.fallback == "chatml" and self._has_chats(files):  # chatml changes the end of all rows
            self.tokenizer = with_template(self.tokenizer, self.fallback)
        self.hash = tokenizer_hash(self.tokenizer)
        self.vocab_size = vocabulary_size(self.tokenizer)
        self.encoder = Encoder(self.tokenizer, settings.special_in_text)
        if self.encoder.begin and self.tokenizer.bos_token_id is None:  # earlier versions placed none in this case
            self.hash = content_hash(self.hash, self.encoder.begin)
        chats = with_template(self.tokenizer, self.fallback) if self.fallback else self.tokenizer
        beginning = str(self.tokenizer.decode(self.encoder.begin))
        self.chats = with_beginning(chats, beginning) if beginning else chats
        """Tokenizer with the template that renders chats."""
        self.renderer = self.rendering()
        known = (self.tokenizer.pad_token_id, self.tokenizer.eos_token_id)
        self.pad_id = next((token for token in known if isinstance(token, int)), 0)

    def rendering(self, limit: int | None = None, why: str = "") -> Renderer:
        """Return a renderer of chats and instructions of at most ``limit`` tokens.

        Args:
            limit: most tokens of a chat or instruction; None for no limit.
            why: setting or limit that determines ``limit``, for messages.
        """
        settings, encoder = self.settings, self.encoder

        def fits(pieces: tuple[ChatText, ...], kind: RowKind) -> bool:
            """Return True if a document of these pieces has at most ``limit`` tokens."""
            bounded = sum(len(piece.text.encode()) for piece in pieces) + len(encoder.begin) + 1 <= (limit or 0)
            document = Document(kind, pieces, complete=kind == "chat")
            return bounded or len(encoder.encode([document])[0].ids) <= (limit or 0)

        return Renderer(
            self.chats,
            self.reader.columns,
            as_chat=self.as_chat,
            date=self.date,
            special=settings.special_in_text,
            answers=settings.answers,
            long_chats=settings.long_chats,
            fits=None if limit is None or settings.long_chats == "anywhere" else fits,
            longest=f"{limit:,} tokens ({why})" if limit else "",
        )

    def _choose(
        self, files: Sequence[SourceFile], tokenizer: PreTrainedTokenizerBase | None, model: str | None
    ) -> tuple[PreTrainedTokenizerBase, str]:
        """Return the tokenizer and its origin as text; trains a tokenizer if there is none."""
        settings = self.settings
        if tokenizer is not None:
            return tokenizer, "given"
        if settings.tokenizer is not None:
            return _loaded(settings.tokenizer, "--tokenizer", settings.tokenizer)
        if model is not None and has_tokenizer(model):
            return _loaded(model, "--model", f"of the model, {model}")
        meaning = settings.rows, settings.columns, settings.ignore_columns
        key = content_hash(CACHE_FORMAT, stamps(files), meaning, settings.vocab_size)
        folder = self.root / "tokenizers" / key

        def fill(work: Path) -> None:
            """Train a tokenizer and save it in the folder ``work``."""
            train_tokenizer(sample_texts(files, self.reader), settings.vocab_size).save_pretrained(work)

        is_new = make_folder(folder, fill)
        return load_tokenizer(str(folder)), "trained on the training files" + ("" if is_new else ", from the cache")

    def _has_chats(self, files: Sequence[SourceFile]) -> bool:
        """Return True if the first rows of some file include one that a chat template renders."""
        kinds = {"chat", "instruction"} if self.as_chat else {"chat"}
        for file in files:
            rows = self.reader.read(file) if file.format != "text" else ()
            for row in islice((row for row in rows if isinstance(row, RawRow)), ROWS_LOOKED_AT):
                if row.kind in kinds or any(isinstance(value, list) for value in row.columns.values()):
                    return True
        return False

    def corpus(
        self, files: Sequence[SourceFile], setting: str, limit: int | None = None, why: str = ""
    ) -> tuple[Corpus, bool]:
        """Return the tokenised documents of the files from the cache; tokenises the files first if they are not there.

        Args:
            files: files to tokenise.
            setting: setting that names the files, for errors.
            limit: most tokens of a chat or instruction; None for no limit.
            why: setting or limit that determines ``limit``, for messages.

        Returns:
            The documents, and True if they were in the cache already.

        Raises:
            UserError: the files hold no document, or a row cannot be trained on.
        """
        settings = self.settings
        template = self.chats.chat_template
        has_rows = any(file.format != "text" for file in files)
        date = self.date if PRINTS_DATE in str(template) and has_rows else ""
        meaning = settings.rows, settings.columns, settings.ignore_columns, self.as_chat, settings.special_in_text
        meaning = *meaning, settings.answers, (limit, why, settings.long_chats) if limit else ""
        key = content_hash(CACHE_FORMAT, stamps(files), self.hash, meaning, template, date)
        folder = self.root / "corpora" / key

        def fill(work: Path) -> None:
            """Tokenise all rows into the folder ``work``."""
            rows = (row for file in files for row in self.reader.read(file))
            renderer = self.rendering(limit, why)
            try:
                counts = write_corpus(work, rows, renderer, self.encoder, files=len(files), vocab_size=self.vocab_size)
            except UserError as error:  # the error of a row does not know the setting of its file
                name = setting if error.setting == "--data" else error.setting
                raise UserError(name, error.value, error.expected) from error
            if not counts.documents:
                raise no_documents(setting, files, counts)

        is_new = make_folder(folder, fill)
        assert is_complete(folder)
        return Corpus.open(folder, self.vocab_size), not is_new


def _loaded(name: str, setting: str, origin: str) -> tuple[PreTrainedTokenizerBase, str]:
    """Load the tokenizer ``name``; return it and its origin as text."""
    tokenizer, other = load_with_class(name, setting)
    why = f" (ids from tokenizer.json; class {other} in its config would give other ids)" if other else ""
    return tokenizer, origin + why


def no_documents(setting: str, files: Sequence[SourceFile], counts: ReadCounts) -> UserError:
    """Return the error for files without any document, with the reasons why documents were left out."""
    expected = "; ".join(["at least one document to train on", *(trouble.line for trouble in counts.troubles)])
    return UserError(setting, name_files(files), expected)
