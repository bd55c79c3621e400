"""Rows with hidden facts: what is in them, for tokenizers of every kind, and what a row depends on."""

from __future__ import annotations

import re
from itertools import pairwise

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from tawpipe.data.chats.chat import ChatText
from tawpipe.data.chats.render import Document
from tawpipe.data.corpus import Corpus
from tawpipe.data.encode import Encoder, Tokens
from tawpipe.data.needles import Needles
from tawpipe.data.report import ReadCounts
from tawpipe.data.rows import PackedDataset
from tawpipe.data.tokenizer import train_tokenizer
from tawpipe.errors import UserError

TEXTS = ["The river is long and slow.\n", "Stones lie in it, and fish swim past them.\n", "It is cold.\n"]
SPELLED = [*map(chr, range(32, 127)), "\n", "▁", "<unk>"]


def space_first(tokens: list[str]) -> PreTrainedTokenizerFast:
    """A tokenizer of single characters that puts a space before every text."""
    merges = [("▁", "1"), ("1", "2"), ("s", "▁")]
    vocabulary = {token: n for n, token in enumerate([*tokens, *(a + b for a, b in merges)])}
    backend = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Metaspace(prepend_scheme="first", split=False)
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")


TOKENIZERS = {"bytes": train_tokenizer([" ".join(TEXTS * 20)], 300), "space first": space_first(SPELLED)}


def needles_of(tokenizer: PreTrainedTokenizerBase, depths: int = 5, samples: int = 3, seed: int = 0) -> Needles:
    documents = [Document("text", (ChatText(text, True),)) for text in TEXTS]
    corpus = Corpus.from_tokens(Encoder(tokenizer).encode_all(documents), ReadCounts())
    text = PackedDataset(corpus, np.arange(3), sequence_length=8, seed=0, packing="split", pad_id=0)
    return Needles(text, tokenizer, depths=depths, samples=samples, seed=seed)


@pytest.fixture(params=TOKENIZERS)
def tokenizer(request) -> PreTrainedTokenizerBase:
    return TOKENIZERS[request.param]


def test_needle_row_is_text_with_a_fact_then_question_and_answer(tokenizer):
    needles = needles_of(tokenizer)
    for length in (needles.shortest, needles.shortest + 37, 600):
        for number in range(needles.rows):
            row = needles.row(length, 0, number)
            assert row.input_ids.shape == (1, length) and row.lengths == (length,)
            said = tokenizer.decode(row.input_ids[0].tolist(), skip_special_tokens=True)
            pattern = r"(.*)\nThe access code of (\w+) is (\d{5})\.\n(.*)"
            pattern += r"\nWhat is the access code of (\w+)\? The access code of (\w+) is (\d{5})"
            found = re.fullmatch(pattern, said, re.DOTALL)
            assert found, said
            before, name, code, after, *asked = found.groups()
            assert asked == [name, name, code] and "code" not in before + after
            share = len(before) / len(before + after)
            assert abs(share - needles.depths[number // needles.samples]) < 20 / len(before + after)
            counts = row.labels[0] != -100
            answer = row.labels[0][counts].tolist()
            assert "".join(tokenizer.decode(answer).split()) == code
            # What precedes the answer predicts it, and nothing but the answer counts.
            assert counts[-1 - len(answer) : -1].all() and int(counts.sum()) == len(answer)


def test_needle_depth_moves_the_fact_and_length_adds_text(tokenizer):
    needles = needles_of(tokenizer)
    ids = {number: needles.row(600, 0, number).input_ids[0].tolist() for number in range(needles.rows)}
    words = {number: tokenizer.decode(row, skip_special_tokens=True) for number, row in ids.items()}
    for sample in range(needles.samples):
        own = [words[number] for number in range(sample, needles.rows, needles.samples)]
        fact = re.findall(r"\nThe access code of \w+ is \d{5}\.\n", own[0])[0]
        assert len({one.replace(fact, "", 1).strip() for one in own}) == 1
        places = [one.index(fact) for one in own]
        assert all(first < second for first, second in pairwise(places))
        longer = needles.row(700, 0, needles.rows - needles.samples + sample).input_ids[0].tolist()
        begun = ids[needles.rows - needles.samples + sample].index(longer[10])
        assert longer[begun : begun + 300] == ids[needles.rows - needles.samples + sample][begun : begun + 300]
    assert len({one[-40:] for one in words.values()}) == needles.samples


def test_text_repeats_the_documents_from_the_given_document():
    ids = [[5], [1, 2, 3], [4, 9], [9, 9], [6, 7, 8, 9, 4]]
    tokens = [
        (Document("text", (ChatText(str(own), True),)), Tokens(np.array(own), np.ones(len(own), bool))) for own in ids
    ]
    corpus = Corpus.from_tokens(tokens, ReadCounts())
    chosen = np.array([1, 2, 3, 4])
    dataset = PackedDataset(corpus, chosen, sequence_length=8, seed=0, packing="split", pad_id=0)
    for document in range(4):
        whole = [token for own in np.roll(chosen, -document) for token in ids[own] if token != 9]
        for count in range(20):
            assert dataset.text(document, count, [9]).tolist() == (whole * 3)[:count]
    assert not len(dataset.text(0, 5, [*range(10)]))


def test_needle_rows_depend_only_on_seed_and_number(tokenizer):
    one, same, other = needles_of(tokenizer), needles_of(tokenizer), needles_of(tokenizer, seed=1)
    rows = [[needles.row(200, 1, number).input_ids.tolist() for number in range(5)] for needles in (one, same, other)]
    assert rows[0] == rows[1] and rows[0] != rows[2]
    assert rows[0][0] == needles_of(tokenizer).row(200, 0, 1).input_ids.tolist()
    assert needles_of(tokenizer, depths=1).depths == [0.5]


def test_a_tokenizer_without_digits_is_refused():
    with pytest.raises(UserError, match=r"--tokenizer: got .*; one that can spell numbers.*'<unk>"):
        needles_of(space_first([token for token in SPELLED if not token.isdigit() or token in "12"]))
