"""Text as tokens, made once and kept in the cache: tokenising a corpus takes longer than starting a run may."""

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
"""Part of every cache key: raised whenever the same settings and files give other tokens or other files."""


ROWS_LOOKED_AT = 64
"""First rows of a file by which it is known whether there are chats in it."""


class TokenisedText:
    """The tokenizer of a run, and the corpora that it makes of files.

    Args:
        files: the training files, on which a tokenizer is trained where there is none.
        root: the cache folder.
        tokenizer, model, date: as in ``prepare_data``.
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
        """The chat template for a tokenizer that has none."""
        self.as_chat = settings.as_chat == "on" or (settings.as_chat == "auto" and not self.fallback)
        if self.fallback == "chatml" and self._has_chats(files):  # then all rows end as chats do
            self.tokenizer = with_template(self.tokenizer, self.fallback)
        self.hash = tokenizer_hash(self.tokenizer)
        self.vocab_size = vocabulary_size(self.tokenizer)
        self.encoder = Encoder(self.tokenizer, settings.special_in_text)
        if self.encoder.begin and self.tokenizer.bos_token_id is None:  # earlier versions placed none then
            self.hash = content_hash(self.hash, self.encoder.begin)
        chats = with_template(self.tokenizer, self.fallback) if self.fallback else self.tokenizer
        beginning = str(self.tokenizer.decode(self.encoder.begin))
        self.chats = with_beginning(chats, beginning) if beginning else chats
        """The tokenizer with the template that chats go through."""
        self.renderer = self.rendering()
        known = (self.tokenizer.pad_token_id, self.tokenizer.eos_token_id)
        self.pad_id = next((token for token in known if isinstance(token, int)), 0)

    def rendering(self, limit: int | None = None, why: str = "") -> Renderer:
        """A renderer of chats and instructions of at most ``limit`` tokens, of any number where it is None.

        Args:
            why: the setting or the limit that says so.
        """
        settings, encoder = self.settings, self.encoder

        def fits(pieces: tuple[ChatText, ...], kind: RowKind) -> bool:
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
        self, files: Sequence[SourceFile], given: PreTrainedTokenizerBase | None, model: str | None
    ) -> tuple[PreTrainedTokenizerBase, str]:
        """The tokenizer, and its origin in words."""
        settings = self.settings
        if given is not None:
            return given, "given"
        if settings.tokenizer is not None:
            return _loaded(settings.tokenizer, "--tokenizer", settings.tokenizer)
        if model is not None and has_tokenizer(model):
            return _loaded(model, "--model", f"of the model, {model}")
        meaning = settings.rows, settings.columns, settings.ignore_columns
        key = content_hash(CACHE_FORMAT, stamps(files), meaning, settings.vocab_size)
        folder = self.root / "tokenizers" / key

        def fill(work: Path) -> None:
            train_tokenizer(sample_texts(files, self.reader), settings.vocab_size).save_pretrained(work)

        is_new = make_folder(folder, fill)
        return load_tokenizer(str(folder)), "trained on the training files" + ("" if is_new else ", from the cache")

    def _has_chats(self, files: Sequence[SourceFile]) -> bool:
        """True if one of the first rows of some file is one that a chat template renders."""
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
        """The tokens of the files; True beside them if the cache had them already.

        Args:
            limit, why: as in ``rendering``.
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
            rows = (row for file in files for row in self.reader.read(file))
            renderer = self.rendering(limit, why)
            try:
                counts = write_corpus(work, rows, renderer, self.encoder, files=len(files), vocab_size=self.vocab_size)
            except UserError as error:  # a row's refusal, which does not know whose files these are
                name = setting if error.setting == "--data" else error.setting
                raise UserError(name, error.value, error.expected) from error
            if not counts.documents:
                raise no_documents(setting, files, counts)

        is_new = make_folder(folder, fill)
        assert is_complete(folder)
        return Corpus.open(folder, self.vocab_size), not is_new


def _loaded(name: str, setting: str, origin: str) -> tuple[PreTrainedTokenizerBase, str]:
    """The tokenizer, and its origin in words."""
    tokenizer, other = load_with_class(name, setting)
    why = f" (ids from tokenizer.json; class {other} in its config would give other ids)" if other else ""
    return tokenizer, origin + why


def no_documents(setting: str, files: Sequence[SourceFile], counts: ReadCounts) -> UserError:
    """An error for files of which no document is left; ``files`` are those that matched."""
    expected = "; ".join(["at least one document to train on", *(trouble.line for trouble in counts.troubles)])
    return UserError(setting, name_files(files), expected)
