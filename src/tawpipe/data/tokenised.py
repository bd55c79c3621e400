"""Text as tokens, made once and kept in the cache: tokenising a corpus takes longer than starting a run may."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tawpipe.data.cache import content_hash, is_complete, make_folder
from tawpipe.data.chat import with_template
from tawpipe.data.columns import Columns
from tawpipe.data.corpus import Corpus, write_corpus
from tawpipe.data.encode import Encoder
from tawpipe.data.read import RowReader
from tawpipe.data.render import Renderer
from tawpipe.data.report import ReadCounts
from tawpipe.data.settings import DataSettings
from tawpipe.data.sources import SourceFile, name_files
from tawpipe.data.tokenizer import (
    has_tokenizer,
    load_tokenizer,
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


class TokenisedText:
    """The tokenizer of a run, and the corpora that it makes of files.

    Args:
        files: the training files, on which a tokenizer is trained where there is none.
        root: the cache folder.
        tokenizer, model: as in ``prepare_data``.
    """

    def __init__(
        self,
        settings: DataSettings,
        files: Sequence[SourceFile],
        root: Path,
        *,
        tokenizer: PreTrainedTokenizerBase | None,
        model: str | None,
    ) -> None:
        self.settings, self.root = settings, root
        self.reader = RowReader(Columns.of(settings))
        self.tokenizer, self.origin = self._choose(files, tokenizer, model)
        if settings.chat_template is not None:
            self.tokenizer = with_template(self.tokenizer, settings.chat_template, "--chat-template")
        self.hash = tokenizer_hash(self.tokenizer)
        self.vocab_size = vocabulary_size(self.tokenizer)
        self.renderer = Renderer(self.tokenizer, self.reader.columns, as_chat=settings.as_chat)
        self.encoder = Encoder(self.tokenizer)
        known = (self.tokenizer.pad_token_id, self.tokenizer.eos_token_id)
        self.pad_id = next((token for token in known if isinstance(token, int)), 0)

    def _choose(
        self, files: Sequence[SourceFile], given: PreTrainedTokenizerBase | None, model: str | None
    ) -> tuple[PreTrainedTokenizerBase, str]:
        """The tokenizer, and its origin in words."""
        settings = self.settings
        if given is not None:
            return given, "given"
        if settings.tokenizer is not None:
            return load_tokenizer(settings.tokenizer), settings.tokenizer
        if model is not None and has_tokenizer(model):
            return load_tokenizer(model, "--model"), f"of the model, {model}"
        meaning = settings.rows, settings.columns, settings.ignore_columns
        key = content_hash(CACHE_FORMAT, stamps(files), meaning, settings.vocab_size)
        folder = self.root / "tokenizers" / key

        def fill(work: Path) -> None:
            train_tokenizer(sample_texts(files, self.reader), settings.vocab_size).save_pretrained(work)

        is_new = make_folder(folder, fill)
        return load_tokenizer(str(folder)), "trained on the training files" + ("" if is_new else ", from the cache")

    def corpus(self, files: Sequence[SourceFile], setting: str) -> tuple[Corpus, bool]:
        """The tokens of the files; True beside them if the cache had them already."""
        settings = self.settings
        meaning = settings.rows, settings.columns, settings.ignore_columns, settings.as_chat
        key = content_hash(CACHE_FORMAT, stamps(files), self.hash, meaning)
        folder = self.root / "corpora" / key

        def fill(work: Path) -> None:
            rows = (row for file in files for row in self.reader.read(file))
            counts = write_corpus(work, rows, self.renderer, self.encoder, files=len(files), vocab_size=self.vocab_size)
            if not counts.documents:
                raise no_documents(setting, files, counts)

        is_new = make_folder(folder, fill)
        assert is_complete(folder)
        return Corpus.open(folder, self.vocab_size), not is_new


def stamps(files: Sequence[SourceFile]) -> list[list[object]]:
    """Path, size and time of change of every file, which tell it from another version of itself."""
    return [[file.path, file.size, file.mtime_ns, file.wanted] for file in files]


def no_documents(setting: str, files: Sequence[SourceFile], counts: ReadCounts) -> UserError:
    """An error for files of which no document is left; ``files`` are those that matched."""
    expected = "; ".join(["at least one document to train on", *(trouble.line for trouble in counts.troubles)])
    return UserError(setting, name_files(files), expected)
