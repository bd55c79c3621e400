"""Several data sets in shares, data sets of the Hub, and held-out documents that are enough."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tawpipe.data.mixture
from tawpipe.data.corpus import in_shares
from tawpipe.data.mixture import Mixture
from tawpipe.data.prepare import prepare_data
from tawpipe.data.reading.hub import load
from tawpipe.data.report import SetSize, too_small
from tawpipe.data.rows import PackedDataset, RowSource
from tawpipe.data.settings import DataSettings
from tawpipe.data.tokenizer import train_tokenizer
from tawpipe.errors import UserError

TOKENIZER = train_tokenizer(["one rank sends the weights of its layers and keeps what it computed " * 9], 300)


def rows(path: Path, word: str, lengths: range) -> Path:
    """Documents that begin with their set's word and their number."""
    path.write_text("\n".join(json.dumps({"text": f"{word} {n} " + "weights " * n}) for n in lengths))
    return path


def prepared(tmp_path, *entries: object, sequence_length=64, **others):
    values = {"cache_dir": str(tmp_path / "cache"), "validation_fraction": 0.0, "packing": "split"} | others
    given = DataSettings(data=[str(entry) for entry in entries], **values)
    return prepare_data(given, sequence_length=sequence_length, seed=0, tokenizer=TOKENIZER)


def digest(data: RowSource, number: int) -> str:
    row = data.sample(number)
    return hashlib.sha256(row.input_ids.numpy().tobytes() + repr(row.lengths).encode()).hexdigest()


class Counted(PackedDataset):
    """A data set that is only counted."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples


@settings(max_examples=30)
@given(st.lists(st.floats(0.01, 1), min_size=1, max_size=5), st.integers(0, 9), st.integers(0, 3 << 6))
def test_any_span_of_samples_has_the_shares_of_the_mixture(weights, seed, first):
    shares = np.array(weights) / sum(weights)
    mixture = Mixture([Counted(7) for _ in weights], shares, seed=seed)
    before = mixture.counts(first)
    seen = list(before)
    for number in range(first, first + 500):
        one, there = mixture.place(number)
        assert there == seen[one]
        seen[one] += 1
    assert seen == mixture.counts(first + 500)
    assert np.abs((np.array(seen) - before) - 500 * shares).max() < 5


def test_sample_of_a_mixture_is_independent_of_the_reading_order(monkeypatch):
    monkeypatch.setattr(tawpipe.data.mixture, "BLOCK", 16)
    build = lambda: Mixture([Counted(7), Counted(9)], np.array([0.3, 0.7]), seed=1)  # noqa: E731
    expected = [build().place(number) for number in range(100)]
    mixture = build()
    assert [mixture.place(number) for number in (99, 3, 50, 0)] == [expected[number] for number in (99, 3, 50, 0)]


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("packing", ["split", "fit", "balanced", "none"])
def test_weights_are_token_shares_and_a_mixture_resumes_in_the_middle(tmp_path, packing, streaming):
    """Long documents in one set and short ones in the other; the second runs out and begins again."""
    long, short = rows(tmp_path / "a.jsonl", "one", range(40, 60)), rows(tmp_path / "b.jsonl", "rank", range(2, 18))
    same = {"packing": packing, "streaming": streaming, "stream_window": 7}
    data = prepared(tmp_path, f"{long}=3", f"{short}=1", **same)
    number = 250 if packing in ("balanced", "none") else 120
    expected, tokens = [], {"one": 0, "rank": 0}
    for n in range(number):
        row = data.train.sample(n)
        expected.append(digest(data.train, n))
        text = str(data.tokenizer.decode(row.input_ids[0], skip_special_tokens=True))
        real = int(np.count_nonzero(row.input_ids.numpy() != data.tokenizer.pad_token_id)) + len(row.lengths)
        tokens["rank" if "rank" in text else "one"] += real
    assert tokens["one"] / sum(tokens.values()) == pytest.approx(0.75, abs=0.08)
    (_, once), (name, often) = data.passes(number)
    assert often >= once and often > 1 and name.endswith("b.jsonl")
    assert len(data.report.parts) == 2 and "a.jsonl: 75.0% of the tokens, " in "\n".join(data.report.lines())
    state = json.loads(json.dumps(data.train.state_dict(77)))
    resumed = prepared(tmp_path, f"{long}=3", f"{short}=1", **same)
    assert resumed.fingerprint == data.fingerprint
    resumed.train.load_state_dict(state)
    assert [digest(resumed.train, n) for n in range(77, number)] == expected[77:]
    assert [data.train.length(n) for n in (0, 5)] == [data.train.sample(n).input_ids.numel() for n in (0, 5)]
    assert (data.samples_per_epoch is None) == streaming
    if packing == "balanced":
        step = resumed.train.step(80, 300)
        assert 0 < sum(step.lengths) <= 300
        assert [step.read(n).lengths[0] for n in range(len(step.lengths))] == step.lengths
    other = prepared(tmp_path, f"{long}=1", f"{short}=1", **same)
    assert other.fingerprint.split()[:2] == data.fingerprint.split()[:2] and other.fingerprint != data.fingerprint


def test_validation_of_a_mixture_has_its_token_shares(tmp_path):
    long, short = rows(tmp_path / "a.jsonl", "one", range(40, 140)), rows(tmp_path / "b.jsonl", "rank", range(2, 40))
    data = prepared(tmp_path, f"{long}=1", f"{short}=1", validation_fraction=0.2, packing="fit", sequence_length=256)
    assert data.validation is not None
    tokens = {"one": 0, "rank": 0}
    for n in range(len(data.validation)):
        row = data.validation.sample(n)
        for document in str(data.tokenizer.decode(row.input_ids[0])).split("<|endoftext|>"):
            if document:
                tokens[document.split()[0]] += len(data.tokenizer(document)["input_ids"])  # pyright: ignore
    assert tokens["one"] / sum(tokens.values()) == pytest.approx(0.5, abs=0.1)


SHARED = ["ab a", "a b", "ab bc", "abc a", "abc bcd cde", "ab bc ca", "abcdefgh efghijkl a", "abcdefghijkl a bc l"]
"""The documents of every set, a letter each."""


@pytest.mark.parametrize("together", SHARED)
@pytest.mark.parametrize("fraction", [0.1, 0.5, 0.9])
def test_document_in_several_sets_is_in_training_or_validation_never_both(tmp_path, together, fraction):
    files = []
    for number, letters in enumerate(together.split()):
        files.append(tmp_path / f"{number}.jsonl")
        files[-1].write_text("\n".join(json.dumps({"text": letter * 9}) for letter in letters))
    some = {"packing": "balanced", "validation_fraction": fraction}
    data = prepared(tmp_path, *(f"{file}=1" for file in files), **some)

    def texts(one: RowSource) -> set[str]:
        assert isinstance(one, PackedDataset)
        rows = [data.tokenizer.decode(one.sample(n).input_ids[0], skip_special_tokens=True) for n in range(len(one))]
        return {str(row)[0] for row in rows}

    trained = [texts(one) for one in data.sets]
    out = texts(data.validation) if data.validation is not None else set()
    assert all(trained) and not out & set.union(*trained)
    if any(len(letters) > 1 for letters in together.split()):
        assert out


def test_weight_too_small_to_show_any_sample_is_refused(tmp_path):
    one, other = (rows(tmp_path / name, "one", range(20)) for name in ("a.jsonl", "b.jsonl"))
    for weights in (("1", "1e-17"), ("1e308", "1e308")):
        with pytest.raises(UserError, match=r"--data: got '.*\.jsonl=1e.*a weight"):
            prepared(tmp_path, *(f"{file}={weight}" for file, weight in zip((one, other), weights, strict=True)))
    rare = prepared(tmp_path, f"{one}=1", f"{other}=1e-8")
    assert [rare.train.sample(n).tokens > 0 for n in (0, 1 << 20)] == [True, True]


def test_in_shares_repeats_a_small_set_only_as_its_share_needs():
    assert in_shares([np.array([10, 10, 10]), np.array([2])], [1, 1]).tolist() == [0, *[3] * 8]


def test_too_small_validation_set_is_reported_with_a_sufficient_fraction(tmp_path):
    assert not too_small(SetSize(100, 10_000, 9, 10_000), 0.02)
    assert "--validation-fraction 0.2 or --validation-data" in too_small(SetSize(10, 90_000, 9, 90_000), 0.02)
    assert "recommended (--validation-data)" in too_small(SetSize(5, 900, 9, 900), 0.02)
    file = rows(tmp_path / "a.jsonl", "one", range(300))
    for streaming in (False, True):
        same = {"validation_fraction": 0.05, "streaming": streaming, "stream_window": 20}
        small = prepared(tmp_path, file, **same)
        assert small.report.validation is not None and small.report.validation.documents > 5
        assert any("validation loss will be noisy" in note for note in small.report.notes)
        many = prepared(tmp_path, file, **{**same, "validation_fraction": 0.5})
        assert many.report.validation is not None and many.report.validation.documents >= 100
        assert not any("noisy" in note for note in many.report.notes)


# The Hub


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """A data set as the Hub has them, with two splits, one of them in two files."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets")
    load.cache_clear()
    there = tmp_path / "set"
    there.mkdir()
    for number, name in enumerate(["train-00000-of-00002", "train-00001-of-00002", "test-00000-of-00001"]):
        rows(there / f"{name}.jsonl", "one", range(10 * number, 10 * number + 10))
    return there


@pytest.mark.parametrize("streaming", [False, True])
def test_hub_data_set_is_read_whole_and_by_split(tmp_path, folder, streaming):
    def numbers(entry: str) -> list[int]:
        data = prepared(tmp_path, entry, streaming=streaming, packing="balanced", sequence_length=128)
        shown = [str(data.tokenizer.decode(data.train.sample(n).input_ids[0])) for n in range(data.report.train.rows)]
        return sorted(int(text.split()[1]) for text in shown)

    assert numbers(f"hf:{folder}") == list(range(20))
    assert numbers(f"hf:{folder}:test") == list(range(20, 30))
    assert numbers(f"hf:{folder}:default:test") == list(range(20, 30))
    if streaming:
        data = prepared(tmp_path, f"hf:{folder}", f"hf:{folder}:test", streaming=True, stream_window=4)
        expected = [digest(data.train, n) for n in range(60)]
        again = prepared(tmp_path, f"hf:{folder}", f"hf:{folder}:test", streaming=True, stream_window=4)
        again.train.load_state_dict(json.loads(json.dumps(data.train.state_dict(31))))
        assert [digest(again.train, n) for n in range(31, 60)] == expected[31:]
    assert numbers(f"hf:{folder}:train[:5]") == list(range(5))
    assert numbers(f"hf:{folder}:train+test") == numbers(f"hf:{folder}:all") == list(range(30))
    for wrong in ("train[foo]", "train[:200%]", "train+dev", "dev"):
        with pytest.raises(UserError, match=f"hf:{folder}:"):
            prepared(tmp_path, f"hf:{folder}:{wrong}", streaming=streaming)
    if not streaming:
        with pytest.raises(UserError, match="lacking the columns 'words'"):
            prepared(tmp_path, f"hf:{folder}", columns=["text=words"], rows="text")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ConnectionError("Couldn't reach 'org/x' on the Hub"), "Couldn't reach.*found without a connection"),
        ("Dataset 'org/x' is a gated dataset on the Hub.", "gated.*hf auth login"),
        (ValueError("Config name is missing. Please pick one among: ['main']"), r"main.*hf:org/x:CONFIG:SPLIT"),
        (ValueError("Unknown split 'dev'. Should be one of ['train']."), "'train'"),
    ],
)
def test_hub_data_set_that_cannot_be_loaded_is_named_with_a_way_out(tmp_path, monkeypatch, error, said):
    from datasets.exceptions import DatasetNotFoundError

    def fail(*args, **others):
        raise DatasetNotFoundError(error) if isinstance(error, str) else error

    load.cache_clear()
    monkeypatch.setattr("datasets.load_dataset", fail)
    monkeypatch.setattr("datasets.load_dataset_builder", fail)
    with pytest.raises(UserError, match=rf"--data: got 'hf:org/x:dev'.*{said}"):
        prepared(tmp_path, "hf:org/x:dev")


def test_malformed_data_set_name_is_refused(tmp_path):
    with pytest.raises(UserError, match="hf:NAME:CONFIG:SPLIT"):
        prepared(tmp_path, "hf:a:b:c:d")
    file = rows(tmp_path / "a.jsonl", "one", range(3))
    with pytest.raises(UserError, match="no weights"):
        prepared(tmp_path, file, validation_data=[f"{file}=1"])
