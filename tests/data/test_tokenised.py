"""Text as tokens, made once: the same files come from the cache, and changed ones do not."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from found_files import find_files
from tawpipe.data.reading.sources import stamps
from tawpipe.data.settings import DataSettings
from tawpipe.data.tokenised import TokenisedText
from tawpipe.errors import UserError


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    folder = tmp_path / "corpus"
    folder.mkdir()
    for number in range(3):
        (folder / f"{number}.txt").write_text(f"the weights of layer {number} travel over the links " * 4)
    return folder


def text(corpus: Path, root: Path, **settings) -> TokenisedText:
    made = DataSettings(data=[str(corpus)], vocab_size=300, **settings)
    return TokenisedText(made, find_files([str(corpus)]), root, tokenizer=None, model=None)


def test_tokenizer_and_corpus_are_cached_until_a_file_changes(corpus: Path, tmp_path: Path) -> None:
    files = find_files([str(corpus)])
    first = text(corpus, tmp_path)
    found, cached = first.corpus(files, "--data")
    assert first.origin == "trained on the training files" and not cached and len(found.lengths) == 3
    second = text(corpus, tmp_path)
    assert second.origin.endswith("from the cache") and second.hash == first.hash
    assert second.corpus(files, "--data")[1]
    changed = corpus / "1.txt"
    changed.write_text(changed.read_text() + "and back")
    again = find_files([str(corpus)])
    assert stamps(again)[1] != stamps(files)[1] and stamps(again)[::2] == stamps(files)[::2]
    assert not second.corpus(again, "--data")[1]
    os.utime(corpus / "2.txt", (1, 1))  # perhaps another version
    assert not second.corpus(find_files([str(corpus)]), "--data")[1]


def test_other_data_settings_make_another_cached_corpus(corpus: Path, tmp_path: Path) -> None:
    files = find_files([str(corpus)])
    given = text(corpus, tmp_path)
    given.corpus(files, "--data")
    settings = DataSettings(data=[str(corpus)], as_chat="on", rows="text")
    chat = TokenisedText(settings, files, tmp_path, tokenizer=given.tokenizer, model=None)
    assert chat.origin == "given" and chat.vocab_size == given.vocab_size
    assert not chat.corpus(files, "--data")[1]


def test_files_without_a_document_are_refused_and_not_cached(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "full.txt").write_text("some words to train a tokenizer on")
    given = text(tmp_path / "full.txt", tmp_path)
    for _ in range(2):  # not from the cache, either
        with pytest.raises(UserError, match=r"--validation-data: got .*empty\.txt'; at least one document"):
            given.corpus(find_files([str(tmp_path / "empty.txt")]), "--validation-data")
