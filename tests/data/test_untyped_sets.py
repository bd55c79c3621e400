"""Data sets whose files have no types: the same rows by their names, through ``hf:`` and streamed."""

from __future__ import annotations

import csv
import gzip
import json
from pathlib import Path
from unittest.mock import patch

import pytest

from tawpipe.data.chats.columns import RawRow
from tawpipe.data.reading import hub
from tawpipe.data.reading.hub import opened
from tawpipe.data.reading.read import RowReader
from tawpipe.data.reading.sources import find_sets

WORDS = ["007", "NA", "1e5", "True", "", "1.50", "2020-01-01", "N/A", " x ", 'say "no"', "12345678901234567890", "null"]
OBJECTS = [
    {"prompt": "2020-01-01T00:00:00", "completion": "2021-05-06 07:08:09"},
    {"prompt": "q", "completion": "x", "system": "s"},
    {"messages": [{"role": "user", "content": "2020-01-01"}, {"role": "assistant", "content": "a", "weight": 1}]},
    {"messages": [{"role": "user", "content": "b"}, {"role": "assistant", "content": None, "tool_calls": [{}]}]},
]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets")
    hub.load.cache_clear()
    hub._builder.cache_clear()


def table(path: Path, fields: list[str], delimiter: str = ",") -> None:
    text = path.with_suffix("") if path.suffix == ".gz" else path
    with text.open("w", newline="") as file:
        lines = [["prompt", "completion"], *([f"q{n}", field] for n, field in enumerate(fields))]
        csv.writer(file, delimiter=delimiter).writerows(lines)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.read_bytes()))
        text.unlink()


def rows_of(name: str, streaming: bool = False) -> list[dict | str]:
    files = opened(find_sets([name])[0].files, streaming=streaming, setting="--data")
    rows = [row for file in files for row in RowReader().read(file)]
    return [row.columns if isinstance(row, RawRow) else row.why for row in rows]


@pytest.mark.parametrize("name", ["a.csv", "a.tsv", "a.csv.gz", "a.jsonl", "a.json", "a.jsonl.gz"])
def test_path_hub_and_stream_read_equal_rows(tmp_path, name):
    folder = tmp_path / "set"
    folder.mkdir()
    path = folder / name
    if ".json" not in name:
        table(path, WORDS, "\t" if ".tsv" in name else ",")
        wanted = [{"prompt": f"q{n}", **({"completion": word} if word else {})} for n, word in enumerate(WORDS)]
    else:
        text = json.dumps(OBJECTS) if path.suffix == ".json" else "\n".join(map(json.dumps, OBJECTS))
        path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
        wanted = OBJECTS
    plain = rows_of(str(path))
    assert plain == wanted
    assert rows_of(f"hf:{folder}") == rows_of(f"hf:{folder}", streaming=True) == plain
    assert rows_of(f"hf:{folder}:train[25%:50%]") == plain[len(plain) // 4 : len(plain) // 2]


def test_unreadable_row_skips_only_itself_through_hf(tmp_path):
    (tmp_path / "set").mkdir()
    path = tmp_path / "set" / "a.csv"
    path.write_text("prompt,completion\nq,007\nq\nq,a,b\nq,NA\n")
    rows = rows_of(f"hf:{tmp_path}/set")
    assert rows == rows_of(str(path)) and [type(row) for row in rows] == [dict, str, str, dict]


@pytest.mark.parametrize("streaming", [False, True])
def test_splits_configurations_and_options_of_a_dataset_card_are_applied(tmp_path, streaming):
    (tmp_path / "set").mkdir()
    table(tmp_path / "set" / "one.csv", ["007", "NA"], ";")
    table(tmp_path / "set" / "two.csv", ["042"])
    page = "configs:\n- config_name: main\n  data_files: one.csv\n  sep: ';'\n"
    page += "- config_name: more\n  data_files:\n  - split: dev\n    path: two.csv\n"
    (tmp_path / "set" / "README.md").write_text(f"---\n{page}---\n")
    rows = rows_of(f"hf:{tmp_path}/set:main:train", streaming)
    assert [row["completion"] for row in rows if isinstance(row, dict)] == ["007", "NA"]
    assert rows_of(f"hf:{tmp_path}/set:more:dev", streaming) == [{"prompt": "q0", "completion": "042"}]


def test_downloaded_hub_data_set_is_read_without_a_connection(tmp_path):
    (tmp_path / "snapshot").mkdir()
    table(tmp_path / "snapshot" / "a.csv.gz", ["007"])
    import datasets

    def load(path, *args, real=datasets.load_dataset_builder, **others):
        if path == "org/name":
            raise ConnectionError("Couldn't reach the Hub")
        return real(path, *args, **others)

    with (
        patch("datasets.load_dataset_builder", load),
        patch("huggingface_hub.snapshot_download", lambda *_, **__: str(tmp_path / "snapshot")),
    ):
        assert rows_of("hf:org/name") == [{"prompt": "q0", "completion": "007"}]


@pytest.mark.parametrize("streaming", [False, True])
def test_hub_file_is_downloaded_or_streamed_by_its_name(tmp_path, monkeypatch, streaming):
    (tmp_path / "set").mkdir()
    table(tmp_path / "set" / "a.csv.gz", ["NA"])
    remote = "hf://datasets/org/name@0123/a.csv.gz"
    builder = hub._builder(str(tmp_path / "set"), None)
    builder.config.data_files = {"train": [remote]}
    monkeypatch.setattr(hub, "_builder", lambda *_: builder)
    downloads = []

    def download(repo, path, **_):
        downloads.append(path)
        return str(tmp_path / "set" / path)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)

    class System:
        def info(self, name):
            assert name == remote
            return {"size": 9}

        def resolve_path(self, name):
            place = type("Place", (), {"repo_id": "org/name", "path_in_repo": "a.csv.gz", "revision": "0123"})
            assert name == remote
            return place

    monkeypatch.setattr("huggingface_hub.HfFileSystem", System)
    monkeypatch.setattr(
        "tawpipe.data.reading.read._stored", lambda path: (tmp_path / "set" / Path(path).name).open("rb")
    )
    assert rows_of("hf:org/name", streaming) == [{"prompt": "q0", "completion": "NA"}]
    assert bool(downloads) != streaming
