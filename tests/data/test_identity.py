"""The identity of a row: what keeps a document on its side of the split, and what a run and the cache know data by."""

from __future__ import annotations

import datetime
import hashlib
import json
import os
from pathlib import Path

import pandas
import pytest
from transformers import PreTrainedTokenizerBase

from chat_families import TRAINED
from chats import with_own
from found_files import find_files
from letters import letters
from tawpipe.data.chats.columns import Columns, RawRow
from tawpipe.data.chats.render import Document, Renderer
from tawpipe.data.prepare import prepare_data
from tawpipe.data.prepared import PreparedData, changed_parts
from tawpipe.data.reading.read import RowReader
from tawpipe.data.reading.sources import BLOCK_BYTES, BLOCKS, stamps
from tawpipe.data.settings import DataSettings

DATED = (
    "{{ strftime_now('%d %B %Y') }}{% for m in messages %}{{ '<' + m.role + '>' + m.content }}{% endfor %}"
    "{{ '<assistant>' if add_generation_prompt else eos_token }}"
)
DEFAULTS = DATED.replace(
    "{{ strftime_now('%d %B %Y') }}", "{%- set date_string = strftime_now('%Y') %}{{ date_string }}"
)


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerBase:
    return letters()


def chat(number: int, **others) -> dict:
    said = [("user", f"ask {number}"), ("assistant", f"yes {number}")]
    return {"messages": [{"role": role, "content": content} for role, content in said], **others}


def write(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def prepared(tokenizer: PreTrainedTokenizerBase, path: Path, **others) -> PreparedData:
    date = others.pop("date", "")
    values = {"validation_fraction": 0.3, "cache_dir": str(path.parent / "cache"), "packing": "none"} | others
    settings = DataSettings(data=[str(path)], **values)
    return prepare_data(settings, sequence_length=512, seed=0, tokenizer=tokenizer, date=date)


def asked(data: PreparedData, tokenizer: PreTrainedTokenizerBase) -> set[str]:
    """The questions that are held out."""
    assert data.validation is not None
    rows = [data.validation.sample(number).input_ids[0].tolist() for number in range(len(data.validation))]
    return {str(tokenizer.decode(row)).partition("ask ")[2].split("<")[0] for row in rows}


def identity(row: dict | RawRow) -> int:
    raw = row if isinstance(row, RawRow) else Columns().row("here", row)
    assert isinstance(raw, RawRow)
    (document,) = [each for each in Renderer(TRAINED).render(raw) if isinstance(each, Document)]
    return document.identity


@pytest.mark.parametrize(
    "rows",
    [
        [chat(1), chat(1, id=7), chat(1, url="x", score=0.5), {"id": 3, **chat(1)}],
        [{"prompt": "a", "completion": "b"}, {"completion": "b", "prompt": "a", "note": None, "system": ""}],
        [{"text": "a"}, {"text": "a", "timestamp": "2020"}],
        [chat(1), {"messages": [{**message, "name": None} for message in chat(1)["messages"]]}],
        [chat(1), {"messages": [{**message, "id": n} for n, message in enumerate(chat(1)["messages"])]}],
        [
            chat(1),
            {"messages": json.dumps(chat(1)["messages"])},
            {
                "conversations": [
                    {"from": message["role"], "value": message["content"]} for message in chat(1)["messages"]
                ]
            },
        ],
        [
            {"prompt": "a", "completion": "b"},
            {"instruction": "a", "output": "b"},
            {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
        ],
    ],
)
def test_rows_that_differ_in_unread_columns_have_one_identity(rows):
    assert len({identity(row) for row in rows}) == 1


@pytest.mark.parametrize(
    ("row", "other"),
    [
        (chat(1), chat(2)),
        (chat(1), chat(1, system="Be brief.")),
        ({"prompt": "a", "completion": "b"}, {"prompt": "ab", "completion": "b"}),
        ({"prompt": "a", "completion": "b"}, {"prompt": "a", "completion": "b", "input": "c"}),
    ],
)
def test_rows_that_differ_in_read_columns_have_two_identities(row, other):
    assert identity(row) != identity(other)


def test_table_row_and_json_line_of_equal_content_have_one_identity(tmp_path):
    rows = [chat(1), {**chat(2), "tools": [{"name": "now"}]}]
    pandas.DataFrame(rows).to_parquet(tmp_path / "a.parquet")
    paths = [str(write(tmp_path / "a.jsonl", rows)), str(tmp_path / "a.parquet")]
    known = [[identity(row) for row in RowReader().read(file) if isinstance(row, RawRow)] for file in find_files(paths)]
    assert len(known[0]) == 2 and known[0] == known[1]


def test_text_keeps_the_identity_of_earlier_versions(tokenizer):
    digest = hashlib.blake2b(b"\x01" + "naïve".encode(), digest_size=8).digest()
    (document,) = Renderer(tokenizer).render(RawRow("here", "text", {"text": "naïve"}))
    assert isinstance(document, Document)
    assert document.identity == document.content == int.from_bytes(digest, "little")


@pytest.mark.parametrize(
    ("streaming", "documents", "rows"),
    [(False, "53e12a4562e6eb51", "3595c98acf59f71a"), (True, "21ac61a43c62e1a8", "781616da6aa70e27")],
)
def test_data_fingerprint_of_texts_equals_that_of_an_earlier_version(tmp_path, streaming, documents, rows):
    """The fingerprint is what commit 1eeab342 wrote into its checkpoints."""
    path = write(tmp_path / "rows.jsonl", [{"text": f"Text number {n}, as it was."} for n in range(60)])
    settings = DataSettings(
        data=[str(path)],
        validation_fraction=0.2,
        cache_dir=str(tmp_path / "cache"),
        vocab_size=300,
        streaming=streaming,
        stream_window=40,
    )
    data = prepare_data(settings, sequence_length=64, seed=0)
    assert data.fingerprint == f"documents:{documents} tokenizer:d8ece0bbc412bce3 rows:{rows}"
    assert data.validation_fingerprint.startswith("documents:adf2170c5c296d6b tokenizer:d8ece0bbc412bce3")


@pytest.mark.parametrize("template", [DATED, DEFAULTS])
@pytest.mark.parametrize("streaming", [False, True])
def test_date_or_template_moves_no_row_between_training_and_validation(tokenizer, tmp_path, template, streaming):
    path = write(tmp_path / "rows.jsonl", [chat(number) for number in range(60)])
    dated, other = with_own(tokenizer, template), with_own(tokenizer, DATED.replace("<", "["))
    first, second = (prepared(dated, path, date=date, streaming=streaming) for date in ("2024-02-29", "2025-11-01"))
    third = prepared(other, path, streaming=streaming)
    assert asked(first, dated) == asked(second, dated) and len(asked(first, dated)) > 5
    assert {one.partition("[")[0] for one in asked(third, other)} == asked(first, dated)
    assert not first.report.reused and not second.report.reused
    assert changed_parts(first.fingerprint, second.fingerprint) == ["documents"]
    assert changed_parts(first.fingerprint, third.fingerprint) == ["documents", "tokenizer"]
    shown = str(dated.decode(first.train.sample(0).input_ids[0]))
    assert "2024" in shown and str(datetime.datetime.now().year) not in shown


def test_date_is_part_of_the_cache_key_only_if_a_template_prints_it(tokenizer, tmp_path):
    path = write(tmp_path / "rows.jsonl", [chat(number) for number in range(9)])
    for template, again in ((None, True), (DATED, False)):
        own = with_own(tokenizer, template)
        prepared(own, path, date="2024-02-29")
        assert prepared(own, path, date="2024-02-29").report.reused
        assert prepared(own, path, date="2024-03-01").report.reused == again


@pytest.mark.parametrize("size", [40, BLOCKS * BLOCK_BYTES + 3, 40 * BLOCKS * BLOCK_BYTES])
def test_edited_file_with_unchanged_size_and_time_is_detected(tmp_path, size, monkeypatch):
    path = tmp_path / "a.txt"
    path.write_bytes(b"a" * size)
    before, stat = stamps(find_files([str(path)])), path.stat()
    for place in (0, size - 1):
        with path.open("r+b") as file:
            file.seek(place)
            file.write(b"b")
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        now = stamps(find_files([str(path)]))
        assert now[0][:4] == before[0][:4] and now[0][5] != before[0][5] and now[0][4] != before[0][4]
        before = now


def test_moved_file_is_tokenized_again_with_an_equal_fingerprint(tokenizer, tmp_path):
    path = write(tmp_path / "rows.jsonl", [chat(number) for number in range(9)])
    first = prepared(tokenizer, path)
    moved = prepared(tokenizer, path.rename(tmp_path / "moved.jsonl"))
    assert not moved.report.reused and moved.fingerprint == first.fingerprint


def test_documents_of_one_row_share_its_identity(tokenizer):
    template = (
        "{% for m in messages %}{{ '<' + m.role + '>' }}{{ '!' if m.role == 'assistant' and loop.last }}"
        "{{ m.content }}{% endfor %}{{ '<assistant>' if add_generation_prompt else eos_token }}"
    )
    own = with_own(tokenizer, template)
    raw = Columns().row("here", {"messages": [*chat(1)["messages"], *chat(2)["messages"]]})
    assert isinstance(raw, RawRow)
    first, second = Renderer(own).render(raw)
    assert isinstance(first, Document) and isinstance(second, Document)
    assert first.identity == second.identity == identity(raw) and first.content != second.content


def test_null_argument_of_a_tool_call_does_not_change_the_identity(tmp_path):
    """A table of Arrow gives every row the fields of all, as null."""
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": 1, "unit": None}}}
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    other = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    without = [messages[0], {**messages[1], "tool_calls": [other]}]
    raws = [Columns().row("here", {"messages": some}) for some in (messages, without)]
    first, second = (identity(raw) for raw in raws if isinstance(raw, RawRow))
    assert first == second
