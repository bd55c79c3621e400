"""From settings to samples: tokenizer, cache, hold-out, what is skipped, two processes, streaming."""

import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch.distributed as dist
from transformers import AutoTokenizer

from found_files import find_files
from tawpipe.data.corpus import split_documents
from tawpipe.data.prepare import prepare_data
from tawpipe.data.prepared import changed_parts
from tawpipe.data.reading.cache import MARKER, is_complete, leader_first, make_folder
from tawpipe.data.reading.read import RowReader
from tawpipe.data.rows import PackedDataset, RowSource
from tawpipe.data.settings import DataSettings
from tawpipe.data.stream import StreamedDataset
from tawpipe.data.tokenizer import check_vocabulary, sample_texts, tokenizer_hash, train_tokenizer
from tawpipe.dealing.balance import LayerKind, LayerTime
from tawpipe.dealing.lengths import Dealing
from tawpipe.errors import RunError, UserError

WORDS = ["a", "rank", "sends", "the", "weights", "of", "its", "layers", "and", "keeps", "what", "they", "computed"]


def text(number: int) -> str:
    generator = np.random.default_rng(number)
    return f"{number} " + " ".join(generator.choice(WORDS, generator.integers(1, 120)))


@pytest.fixture
def corpus(tmp_path) -> Path:
    """A folder of 40 text files."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    for number in range(40):
        (folder / f"{number:02}.txt").write_text(text(number))
    return folder


@pytest.fixture
def settings_for(tmp_path):
    def build(*globs: object, **others) -> DataSettings:
        values = {"vocab_size": 400, "cache_dir": str(tmp_path / "cache"), "validation_fraction": 0.2} | others
        return DataSettings(data=[str(pattern) for pattern in globs], **values)

    return build


def samples(data: RowSource, numbers: Iterable[int] = range(12)) -> str:
    digest = hashlib.sha256()
    for number in numbers:
        row = data.sample(number)
        digest.update(row.input_ids.numpy().tobytes() + row.labels.numpy().tobytes() + repr(row.lengths).encode())
    return digest.hexdigest()


def documents_of(data: RowSource | None, tokenizer) -> set[str]:
    """The texts of one epoch, whose documents must all fit into one row."""
    assert isinstance(data, PackedDataset)
    found = set()
    for number in range(len(data)):
        row = data.sample(number)
        begin = 0
        for length in row.lengths:
            found.add(tokenizer.decode(row.input_ids[0, begin : begin + length], skip_special_tokens=True))
            begin += length
    return found - {""}


def test_training_and_validation_hold_every_document_once(corpus, settings_for):
    prepared = prepare_data(settings_for(corpus / "*.txt", packing="fit"), sequence_length=1024, seed=0)
    train = documents_of(prepared.train, prepared.tokenizer)
    validation = documents_of(prepared.validation, prepared.tokenizer)
    assert train | validation == {text(number) for number in range(40)} and not train & validation
    assert 1 <= len(validation) <= 20
    assert prepared.report.train and prepared.report.validation
    assert prepared.report.train.documents == len(train) and prepared.report.validation.documents == len(validation)


def test_held_out_documents_depend_on_the_seed_not_on_file_names_or_order(corpus, settings_for):
    first = prepare_data(settings_for(corpus / "*.txt", packing="fit"), sequence_length=1024, seed=0)
    for file in corpus.iterdir():
        file.rename(corpus / f"{99 - int(file.stem)}.txt")
    second = prepare_data(settings_for(corpus / "*.txt", packing="fit"), sequence_length=1024, seed=0)
    assert documents_of(first.validation, first.tokenizer) == documents_of(second.validation, second.tokenizer)
    other_seed = prepare_data(settings_for(corpus / "*.txt", packing="fit"), sequence_length=1024, seed=1)
    assert documents_of(first.validation, first.tokenizer) != documents_of(other_seed.validation, first.tokenizer)


def test_copies_of_a_document_stay_in_one_split_and_no_split_is_empty():
    identities = np.array([5, 6, 5, 7, 5], np.uint64)
    for seed in range(50):
        for fraction in (1e-9, 0.5, 0.999999):
            ((train, validation),) = split_documents([identities], fraction, seed)
            assert len(train) and len(validation)
            assert not set(identities[train]) & set(identities[validation])
    assert len(split_documents([identities], 0.0, 0)[0][1]) == 0
    assert len(split_documents([np.array([5, 5], np.uint64)], 0.5, 0)[0][1]) == 0


def test_validation_data_is_read_from_its_own_files(corpus, settings_for):
    settings = settings_for(corpus / "[0-2]*.txt", validation_data=[str(corpus / "3*.txt")], packing="fit")
    prepared = prepare_data(settings, sequence_length=1024, seed=0)
    assert documents_of(prepared.validation, prepared.tokenizer) == {text(number) for number in range(30, 40)}
    assert prepared.report.train and prepared.report.train.documents == 30
    missing = settings_for(corpus / "*.txt", validation_data=["nothing-*.txt"])
    with pytest.raises(UserError, match="--validation-data"):
        prepare_data(missing, sequence_length=64, seed=0)


def test_token_cache_is_reused_and_rebuilt_after_a_file_changes(corpus, settings_for):
    settings = settings_for(corpus / "*.txt")
    first = prepare_data(settings, sequence_length=64, seed=0)
    second = prepare_data(settings, sequence_length=64, seed=0)
    assert not first.report.reused and second.report.reused
    assert samples(first.train) == samples(second.train) and first.fingerprint == second.fingerprint
    (corpus / "07.txt").write_text("something else entirely")
    third = prepare_data(settings, sequence_length=64, seed=0)
    assert not third.report.reused
    assert "documents" in changed_parts(first.fingerprint, third.fingerprint)


def test_data_fingerprint_names_what_changed_and_ignores_file_paths(corpus, settings_for, tmp_path):
    tokenizer = train_tokenizer([text(number) for number in range(40)], 400)

    def fingerprint(folder, sequence_length=64, seed=0, with_tokenizer=tokenizer):
        settings = settings_for(folder / "*.txt")
        return prepare_data(settings, sequence_length=sequence_length, seed=seed, tokenizer=with_tokenizer).fingerprint

    first = fingerprint(corpus)
    moved = corpus.rename(tmp_path / "moved")
    assert fingerprint(moved) == first
    assert changed_parts(first, fingerprint(moved, sequence_length=32)) == ["rows"]
    other = train_tokenizer([text(number) for number in range(40)], 300)
    assert changed_parts(first, fingerprint(moved, with_tokenizer=other)) == ["tokenizer"]


def test_validation_fingerprint_depends_only_on_held_out_data_and_rows(corpus, settings_for):
    tokenizer = train_tokenizer([text(number) for number in range(40)], 400)

    def fingerprint(train="[0-2]*.txt", held_out="3*.txt", sequence_length=64, seed=0, **others):
        settings = settings_for(corpus / train, validation_data=[str(corpus / held_out)], packing="split", **others)
        prepared = prepare_data(settings, sequence_length=sequence_length, seed=seed, tokenizer=tokenizer)
        return prepared.validation_fingerprint

    first = fingerprint()
    assert first == fingerprint(train="[01]*.txt") != ""
    assert changed_parts(first, fingerprint(held_out="3[0-8].txt")) == ["documents"]
    assert (
        changed_parts(first, fingerprint(sequence_length=32)) == ["rows"] == changed_parts(first, fingerprint(seed=1))
    )
    nothing = settings_for(corpus / "*.txt", validation_fraction=0.0)
    assert prepare_data(nothing, sequence_length=64, seed=0, tokenizer=tokenizer).validation_fingerprint == ""


def test_damaged_token_cache_is_rebuilt(corpus, settings_for, tmp_path):
    settings = settings_for(corpus / "*.txt")
    first = prepare_data(settings, sequence_length=64, seed=0)
    expected = samples(first.train)
    del first
    (folder,) = (tmp_path / "cache" / "corpora").iterdir()
    tokens = (folder / "tokens.bin").read_bytes()
    (folder / "tokens.bin").write_bytes(tokens[:-2])
    assert not is_complete(folder)
    again = prepare_data(settings, sequence_length=64, seed=0)
    assert not again.report.reused and samples(again.train) == expected
    (folder / MARKER).unlink()
    assert not prepare_data(settings, sequence_length=64, seed=0).report.reused


def test_interrupted_cache_folder_leaves_nothing_and_is_made_again(tmp_path):
    def fill(work: Path) -> None:
        (work / "part").write_text("x")
        raise OSError("disk full")

    with pytest.raises(RunError, match=r"cannot write .*made: disk full \(--cache-dir"):
        make_folder(tmp_path / "made", fill)
    assert list(tmp_path.iterdir()) == []
    assert make_folder(tmp_path / "made", lambda work: None)
    assert not make_folder(tmp_path / "made", fill)


@pytest.mark.parametrize("parts", [("file", "made"), ("file", "folder", "made")])
def test_cache_folder_that_cannot_be_made_names_the_cache_dir_setting(tmp_path, parts):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match=r"cannot write .*made: .*--cache-dir names another folder"):
        make_folder(tmp_path.joinpath(*parts), lambda work: None)


def test_leader_reaches_the_barrier_if_its_failure_note_cannot_be_removed(tmp_path):
    waited = []
    (tmp_path / "note").mkdir()
    with pytest.raises(OSError):
        leader_first(lambda: None, leader=True, barrier=lambda: waited.append(0), note=tmp_path / "note")
    assert waited == [0]


def prepared_together(world, *, settings):
    """What a rank has of the data, and whether from a cache; or its error."""
    leader = world.rank == 0
    try:
        prepared = prepare_data(
            settings, sequence_length=64, seed=0, leader=leader, barrier=lambda: dist.barrier() and None
        )
        return samples(prepared.train), prepared.report.reused
    except (UserError, RunError) as error:
        return type(error).__name__, str(error)


@pytest.mark.slow
def test_one_of_two_processes_makes_the_cache_and_both_read_equal_data(pool, corpus, settings_for):
    settings = settings_for(corpus / "*.txt")
    first, second = pool.run("test_prepare:prepared_together", 1, 2, settings=settings)
    assert first[0] == second[0] and (first[1], second[1]) == (False, True)


@pytest.mark.slow
def test_failure_of_the_leader_fails_all_processes_with_its_message(pool, corpus, settings_for):
    for file in corpus.iterdir():
        file.write_bytes(b"\xff\xfe\xfa")
    first, second = pool.run("test_prepare:prepared_together", 1, 2, settings=settings_for(corpus / "*.txt"))
    assert first == second and first[0] == "UserError"
    assert "40 files left out, not UTF-8; the first: " in first[1] and "00.txt" in first[1]


def test_faulty_files_and_rows_are_skipped_named_and_counted(corpus, settings_for):
    (corpus / "03.txt").write_bytes(b"\xff")
    (corpus / "04.txt").write_text("\n")
    (corpus / "a.jsonl").write_text('{"text": "fine"}\n{broken\n{"text": 5}\n')
    prepared = prepare_data(settings_for(corpus / "*"), sequence_length=64, seed=0)
    read = prepared.report.read
    assert (read.files, read.text, read.bad_files, read.bad_rows, read.empty) == (41, 39, 1, 2, 1)
    lines = "\n".join(prepared.report.lines())
    for said in (
        r"1 file left out, not UTF-8; the first: .*03.txt \(byte 0\)",
        r"1 row left out, not JSON, .*a.jsonl, line 2 \(Expecting",
        r"1 row left out, whose column 'text' holds no text; .*a.jsonl, line 3 \(int\)",
        r"1 document left out, without text; the first: .*04.txt",
    ):
        assert re.search(said, lines), said


@pytest.mark.parametrize("streaming", [False, True])
def test_rows_without_known_columns_are_skipped_or_refused_if_alone(tmp_path, settings_for, streaming):
    other = json.dumps({"content": "x"})
    rows = [json.dumps({"text": text(n)}) for n in range(20)]
    (tmp_path / "a.jsonl").write_text("\n".join([*rows[:9], other, *rows[9:]]))
    pyarrow.parquet.write_table(pyarrow.table({"content": ["x"]}), tmp_path / "b.parquet")
    files = (tmp_path / "a.jsonl", tmp_path / "b.parquet")
    read = prepare_data(settings_for(*files, streaming=streaming), sequence_length=64, seed=0).report.read
    assert (read.text, read.bad_rows, read.bad_files) == (20, 1, 1)
    assert "a.jsonl, line 10" in read.troubles[0].line and "lacking the columns 'text'" in read.troubles[0].line
    (tmp_path / "a.jsonl").write_text(f"{other}\n{other}\n")
    with pytest.raises(UserError, match=r"--data.*2 rows left out, lacking .*it has \['content'\].*1 file left out"):
        prepare_data(settings_for(*files, streaming=streaming), sequence_length=64, seed=0)


def chats(file: Path, lengths: Iterable[int]) -> Path:
    """Chats with a question of so many words each."""
    rows = (
        [{"role": "user", "content": f"{n} " + "word " * n}, {"role": "assistant", "content": f"answer {n}"}]
        for n in lengths
    )
    file.write_text("\n".join(json.dumps({"messages": row}) for row in rows))
    return file


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("packing", ["fit", "split", "auto"])
def test_data_with_every_answer_behind_the_row_length_is_refused(tmp_path, settings_for, streaming, packing):
    """Every answer lies behind a row's length; laid end to end, some row has one, and so has a piece of a document."""
    file = chats(tmp_path / "a.jsonl", range(300, 310))
    settings = settings_for(file, long_chats="anywhere", streaming=streaming, packing=packing, validation_fraction=0.0)
    if packing != "fit":
        report = prepare_data(settings, sequence_length=64, seed=0).report
        assert report.train.learned > 0
        return
    with pytest.raises(UserError, match=r"--data: .*first 64 tokens.*larger --sequence-length, or --packing split"):
        prepare_data(settings, sequence_length=64, seed=0)


@pytest.mark.parametrize("streaming", [False, True])
def test_documents_with_cut_off_answers_are_left_out_and_counted(tmp_path, settings_for, streaming):
    file = chats(tmp_path / "a.jsonl", [3, 300, 4, 301, 5])
    settings = settings_for(file, long_chats="anywhere", streaming=streaming, packing="fit", validation_fraction=0.0)
    prepared = prepare_data(settings, sequence_length=64, seed=0)
    size = prepared.report.train
    assert (size.documents, size.left_out) == (3, 2)
    rows = [prepared.train.sample(n) for n in range(size.rows)]
    assert all((row.labels != -100).any() for row in rows)
    learned = sum(int((row.labels != -100).sum()) for row in rows)
    assert size.learned == learned
    share = f"{learned / (64 * size.rows):.1%} learned"
    assert any(share in line and "2 left out" in line for line in prepared.report.lines())


def test_validation_data_without_learned_tokens_is_refused(tmp_path, settings_for):
    file, other = chats(tmp_path / "a.jsonl", range(1, 9)), chats(tmp_path / "b.jsonl", [300, 301])
    settings = settings_for(file, long_chats="anywhere", packing="fit", validation_data=[str(other)])
    with pytest.raises(UserError, match=r"--validation-data: .*first 64 tokens"):
        prepare_data(settings, sequence_length=64, seed=0)


def test_longest_document_length_is_recorded(corpus, settings_for):
    """So that rows may be longer than the positions that a model has."""
    prepared = prepare_data(settings_for(corpus / "*.txt"), sequence_length=2048, seed=0)
    assert isinstance(prepared.train, PackedDataset)
    rows = [prepared.train.sample(n) for n in range(len(prepared.train))]
    assert max(max(row.lengths) for row in rows) <= prepared.longest < 2048
    assert prepare_data(settings_for(corpus / "*.txt"), sequence_length=32, seed=0).longest == 32


@pytest.mark.parametrize("streaming", [False, True])
def test_only_answers_of_chat_and_instruction_rows_have_labels(tmp_path, settings_for, streaming):
    chat = [
        {"messages": [{"role": "user", "content": f"say {n}"}, {"role": "assistant", "content": text(n)}]}
        for n in range(20)
    ]
    rows = [{"prompt": f"number {n}:", "completion": text(n)} for n in range(20, 40)]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps(row) for row in chat))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "b.parquet")
    settings = settings_for(tmp_path / "*.jsonl", tmp_path / "*.parquet", validation_fraction=0.0, streaming=streaming)
    prepared = prepare_data(settings, sequence_length=700, seed=0)
    assert prepared.report.packing == "balanced"
    counted = set()
    for number in range(40):
        row = prepared.train.sample(number)
        begin = 0
        for length in row.lengths:
            labels = row.labels[0, begin : begin + length]
            counted.add(str(prepared.tokenizer.decode(labels[labels != -100], skip_special_tokens=True)).strip())
            begin += length
    assert counted - {""} == {text(n) for n in range(40)}
    assert "assistant" in prepared.tokenizer.chat_template


def test_tokenizer_training_is_deterministic_and_survives_saving(corpus, tmp_path):
    texts = [text(number) for number in range(200)]
    first, second = train_tokenizer(iter(texts), 350), train_tokenizer(iter(texts), 350)
    assert tokenizer_hash(first) == tokenizer_hash(second) and len(first) == 350
    first.save_pretrained(tmp_path / "saved")
    loaded = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert tokenizer_hash(loaded) == tokenizer_hash(first)
    strange = "naïve \t 数 \x00 é"
    assert loaded.decode(loaded(strange)["input_ids"], skip_special_tokens=True) == strange
    assert loaded("a")["input_ids"][0] == loaded.bos_token_id == loaded.eos_token_id == loaded.pad_token_id


def test_tokenizer_is_loaded_from_a_folder_a_file_or_the_model(corpus, settings_for, tmp_path):
    saved = train_tokenizer([text(number) for number in range(40)], 300)
    saved.save_pretrained(tmp_path / "saved")
    (tmp_path / "alone.json").write_bytes((tmp_path / "saved" / "tokenizer.json").read_bytes())
    for given in ({"tokenizer": str(tmp_path / "saved")}, {"tokenizer": str(tmp_path / "alone.json")}, {}):
        model = None if given else str(tmp_path / "saved")
        prepared = prepare_data(settings_for(corpus / "*.txt", **given), sequence_length=64, seed=0, model=model)
        assert len(prepared.tokenizer) == 300 and prepared.tokenizer.eos_token == "<|endoftext|>"
    (tmp_path / "alone.json").write_text("{}")
    with pytest.raises(UserError, match="--tokenizer"):
        prepare_data(settings_for(corpus / "*.txt", tokenizer=str(tmp_path / "alone.json")), sequence_length=64, seed=0)


def test_a_tokenizer_larger_than_the_models_vocabulary_is_refused():
    tokenizer = train_tokenizer(["a b c"], 300)
    check_vocabulary(tokenizer, len(tokenizer))
    with pytest.raises(UserError, match="vocab_size of 256"):
        check_vocabulary(tokenizer, 256)


def test_tokenizer_training_sample_is_bounded_and_spread_over_all_files(tmp_path):
    (tmp_path / "a.txt").write_text("".join(f"{n:07}\n" for n in range(500_000)))
    (tmp_path / "b.jsonl").write_text(
        "".join(json.dumps({"text": f"row {n:07} {'x' * 50}"}) + "\n" for n in range(50_000))
    )
    files = find_files([str(tmp_path / "*")])
    sample = list(sample_texts(files, RowReader(), limit=1 << 20))
    assert (1 << 19) < sum(map(len, sample)) < (1 << 20) + (1 << 17)
    numbers = [int(part.split()[1]) for part in sample if part.startswith("row")]
    assert numbers and max(numbers) > 45_000 and min(numbers) < 5_000


@pytest.mark.slow
def test_document_of_a_million_tokens_is_packed(tmp_path, settings_for):
    words = " ".join(["weights travel, activations stay;"] * 32_000)
    (tmp_path / "long.jsonl").write_text(json.dumps({"text": words}) + '\n{"text": "short"}\n')
    settings = settings_for(tmp_path / "long.jsonl", validation_fraction=0.0, vocab_size=257)
    prepared = prepare_data(settings, sequence_length=131072, seed=0)
    assert isinstance(prepared.train, PackedDataset) and prepared.train.num_tokens > 1_000_000
    row = prepared.train.sample(len(prepared.train) // 2)
    assert max(row.lengths) > 100_000


@pytest.mark.parametrize(
    "wrong",
    [{"validation_fraction": 1.0}, {"vocab_size": 100}, {"stream_window": 0}, {"packing": "tight"}, {"rows": "poems"}],
)
def test_invalid_data_settings_are_refused(corpus, settings_for, wrong):
    with pytest.raises(UserError):
        prepare_data(settings_for(corpus / "*.txt", **wrong), sequence_length=64, seed=0)


def test_unwritable_cache_folder_is_refused(corpus, settings_for, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="--cache-dir"):
        prepare_data(settings_for(corpus / "*.txt", cache_dir=str(tmp_path / "file" / "x")), sequence_length=64, seed=0)


def test_environment_variable_names_the_cache_folder(corpus, settings_for, tmp_path, monkeypatch):
    monkeypatch.setenv("TAWPIPE_CACHE", str(tmp_path / "elsewhere"))
    prepare_data(settings_for(corpus / "*.txt", cache_dir=None), sequence_length=64, seed=0)
    assert {path.name for path in (tmp_path / "elsewhere").iterdir()} == {"corpora", "tokenizers"}


@pytest.mark.slow
def test_default_corpus_is_prepared_and_cached(tmp_path):
    settings = DataSettings(cache_dir=str(tmp_path))
    first, second = (prepare_data(settings, sequence_length=512, seed=0) for _ in range(2))
    assert isinstance(first.train, PackedDataset) and first.train.num_tokens > 1_000_000
    assert len(first.tokenizer) == 8192 and samples(first.train) == samples(second.train)
    assert first.validation is not None and len(first.validation) > 10


# Streaming


def streamed(settings, sequence_length=64, seed=0) -> StreamedDataset:
    prepared = prepare_data(settings, sequence_length=sequence_length, seed=seed)
    assert isinstance(prepared.train, StreamedDataset)
    return prepared.train


@pytest.fixture
def stream_settings(corpus, settings_for):
    (corpus / "rows.jsonl").write_text("".join(json.dumps({"text": text(n)}) + "\n" for n in range(100, 140)))
    return settings_for(corpus / "*.txt", corpus / "*.jsonl", streaming=True, stream_window=7)


def test_stream_sample_depends_only_on_its_number(stream_settings):
    data = streamed(stream_settings)
    expected = [samples(data, [number]) for number in range(150)]
    again = streamed(stream_settings)
    for number in (149, 3, 77, 76, 140, 0):
        assert samples(again, [number]) == expected[number]
    every_other = streamed(stream_settings)
    assert [samples(every_other, [number]) for number in range(1, 150, 2)] == expected[1::2]


def test_a_stream_resumes_at_any_sample_from_its_small_state(stream_settings):
    data = streamed(stream_settings)
    expected = [samples(data, [number]) for number in range(150)]
    data.sample(149)
    for number in (0, 1, 60, 148):
        state = json.loads(json.dumps(data.state_dict(number)))
        assert len(json.dumps(state)) < 1000
        resumed = streamed(stream_settings)
        resumed.load_state_dict(state)
        assert [samples(resumed, [n]) for n in range(number, 150)] == expected[number:]


def test_resumed_stream_reads_no_document_twice_for_its_first_window(stream_settings):
    data = streamed(stream_settings)
    expected = samples(data, [148])
    read = []
    for looks in (False, True):
        resumed = streamed(stream_settings)
        resumed.load_state_dict(data.state_dict(148))
        if looks:
            resumed.first_window()
        before = resumed.counts.documents
        assert samples(resumed, [148]) == expected
        read.append(resumed.counts.documents - before)
    assert read[0] == read[1] > 0


def test_stream_yields_every_training_document_once_per_epoch(stream_settings):
    prepared = prepare_data(stream_settings, sequence_length=1024, seed=0)
    data = prepared.train
    seen: list[str] = []
    number = 0
    while True:
        row = data.sample(number)
        if data.state_dict(number)["epoch"] > 0:
            break
        words = [
            str(prepared.tokenizer.decode(row.input_ids[0, a : a + n], skip_special_tokens=True))
            for a, n in zip(np.cumsum([0, *row.lengths[:-1]]), row.lengths, strict=True)
        ]
        seen += [word for word in words if word]
        number += 1
    everything = {text(n) for n in [*range(40), *range(100, 140)]}
    whole = [document for document in seen if document in everything]
    assert len(whole) == len(set(whole)) and len(whole) > 40
    validation = documents_of(prepared.validation, prepared.tokenizer) if prepared.validation else set()
    assert not validation & set(whole)


def test_balanced_stream_has_equal_steps_from_any_start(stream_settings):
    """Steps go over the borders of windows; whoever starts in the middle sees what is left, and nothing twice."""
    settings = replace(stream_settings, packing="balanced", stream_window=5, validation_fraction=0.0)
    data, first, expected = streamed(settings, 32), 0, []
    while first < 300:
        step = data.step(first, 200)
        documents = [step.read(number) for number in range(len(step.lengths))]
        assert [document.lengths for document in documents] == [(length,) for length in step.lengths]
        assert sum(step.lengths) <= 200 < sum(step.lengths) + data.sample(first + len(documents)).lengths[0]
        expected += [samples(data, [first + number]) for number in range(len(documents))]
        first += len(documents)
    epoch_of = lambda n: data.state_dict(n)["epoch"]  # noqa: E731
    one_epoch = [row for number, row in enumerate(expected) if epoch_of(number) == 0]
    assert len(set(one_epoch)) == len(one_epoch) < len(expected)
    resumed = streamed(settings, 32)
    resumed.load_state_dict(data.state_dict(57))
    assert [samples(resumed, [number]) for number in range(57, 200)] == expected[57:200]


def test_report_gives_the_imbalance_and_place_of_the_longest_document(corpus, settings_for):
    (corpus / "long.txt").write_text("layers " * 3000)
    settings = settings_for(corpus / "*.txt", packing="auto", validation_fraction=0.0)
    dealing = Dealing(
        tokens=32768, world_size=4, cap=768, work=lambda _: LayerTime((LayerKind(2, 100.0, 1.0),)), pretrained=True
    )
    prepared = prepare_data(settings, sequence_length=512, seed=0, dealing=dealing)
    report = prepared.report
    assert report.packing == "balanced" and report.why and report.balance is not None and report.histogram is not None
    assert 1 <= report.balance.after < report.balance.before
    assert sum(report.histogram.documents) == pytest.approx(1) == pytest.approx(sum(report.histogram.tokens))
    said = "\n".join(report.lines())
    assert "packing: balanced (steps are " in said and "long.txt" in said and report.longest[0] > 512
    for changed, packing in (
        ({"pretrained": False}, "split"),
        ({"against": "no"}, "split"),
        ({"pretrained": False, "asked": "--max-document"}, "balanced"),
    ):
        other = prepare_data(settings, sequence_length=512, seed=0, dealing=replace(dealing, **changed))
        assert other.report.packing == packing and changed_parts(prepared.fingerprint, other.fingerprint) == (
            [] if packing == "balanced" else ["rows"]
        )
    even = replace(dealing, work=lambda _: LayerTime((LayerKind(2, 100.0, 0.0),)))
    assert prepare_data(settings, sequence_length=512, seed=0, dealing=even).report.packing == "split"


@pytest.mark.parametrize("packing", ["split", "fit", "balanced"])
def test_steps_in_counts_the_steps_of_the_given_epochs(corpus, settings_for, packing):
    prepared = prepare_data(settings_for(corpus / "*.txt", packing=packing), sequence_length=64, seed=0)
    assert isinstance(prepared.train, PackedDataset)
    for epochs in (0.5, 1.0, 3.0):
        steps, first = prepared.steps_in(epochs, rows=8, tokens=200), [0]
        while first[-1] < epochs * (prepared.samples_per_epoch or 0):
            taken = len(prepared.train.step(first[-1], 200).lengths) if packing == "balanced" else 8
            first.append(first[-1] + taken)
        assert steps == len(first) - 1
    stream = prepare_data(settings_for(corpus / "*.txt", streaming=True), sequence_length=64, seed=0)
    assert stream.samples_per_epoch is None and stream.steps_in(1, rows=8, tokens=200) is None


def test_a_stream_without_a_document_is_refused(tmp_path, settings_for):
    (tmp_path / "a.jsonl").write_text('{"text": ""}\n')
    with pytest.raises(UserError, match="1 document left out, without text"):
        prepare_data(settings_for(tmp_path / "a.jsonl", streaming=True), sequence_length=64, seed=0)


@pytest.mark.slow
def test_forked_child_can_tokenize_without_a_warning(corpus, tmp_path):
    program = (
        "import os, signal, sys\n"
        "from tawpipe.data.prepare import prepare_data\n"
        "from tawpipe.data.settings import DataSettings\n"
        "settings = DataSettings(data=[sys.argv[1]], cache_dir=sys.argv[2], vocab_size=400)\n"
        "prepared = prepare_data(settings, sequence_length=64, seed=0)\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    signal.alarm(20)  # a child that hangs does not outlive the test\n"
        "    prepared.tokenizer(['once more'] * 1000)\n"
        "else:\n"
        "    sys.exit(os.waitpid(child, 0)[1] != 0)\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "TOKENIZERS_PARALLELISM"}
    command = [sys.executable, "-c", program, str(corpus / "*.txt"), str(tmp_path / "cache")]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
    assert "forked" not in ran.stderr
