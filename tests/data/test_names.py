"""Names in --data: what exists is that, patterns match as those of ``glob``, and every file is read once."""

import glob
import json
import os
import random
from functools import partial
from pathlib import Path
from typing import Any

import pandas
import pytest

from found_files import find_files
from tawpipe.data.prepare import prepare_data
from tawpipe.data.reading.hub import load, opened
from tawpipe.data.reading.sources import find_sets
from tawpipe.data.settings import DataSettings
from tawpipe.errors import UserError


def write(path: Path, count: int = 1) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"text": f"{path.name} {number}"}) + "\n" for number in range(count)))
    return path


def found(*entries: str | Path) -> list[str]:
    return [file.path for file in find_files([str(entry) for entry in entries])]


@pytest.mark.parametrize(
    ("name", "neighbour"),
    [
        ("notes[2].jsonl", "notes2.jsonl"),
        ("a*b.jsonl", "a and b.jsonl"),
        ("what?.txt", "what1.txt"),
        ("[lab] notes/a.jsonl", "l notes/a.jsonl"),
        ("*", "other"),
        ("**", "other"),
        ("{a,b}.txt", "a.txt"),
        ("half=0.5", "half"),
        ("~nobody.jsonl", "nobody.jsonl"),
        ("[!a].jsonl", "b.jsonl"),
    ],
)
@pytest.mark.parametrize("link", [False, True])
def test_existing_file_name_is_not_taken_for_a_pattern(tmp_path, monkeypatch, name: str, neighbour: str, link: bool):
    monkeypatch.chdir(tmp_path)
    path, _ = tmp_path / name, write(tmp_path / neighbour)
    if link:
        path.parent.mkdir(exist_ok=True)
        path.symlink_to(write(tmp_path / "elsewhere" / "rows.jsonl"))
    else:
        write(path)
    for entry in (name, path):
        assert found(entry) == [str(path)]
        (only,) = find_sets([f"{entry}=0.25"])
        assert (only.name, only.weight, [file.path for file in only.files]) == (str(entry), 0.25, [str(path)])


def test_existing_folder_names_are_not_taken_for_patterns(tmp_path):
    inside = [write(tmp_path / "[lab] notes" / name) for name in ("a.jsonl", "deep [1]/b.jsonl")]
    write(tmp_path / "l notes" / "c.jsonl")
    write(tmp_path / "[lab] notes" / "deep 1" / "d.jsonl")
    (tmp_path / "what?").symlink_to(tmp_path / "[lab] notes")
    write(tmp_path / "what1" / "e.jsonl")
    paths = [str(path) for path in inside]
    assert found(tmp_path / "[lab] notes") == [paths[0], str(tmp_path / "[lab] notes" / "deep 1" / "d.jsonl"), paths[1]]
    assert found(tmp_path / "[lab] notes" / "*.jsonl") == paths[:1]
    assert found(tmp_path / "[lab] notes" / "**" / "[ab].jsonl") == paths
    assert found(tmp_path / "*" / "deep [1]" / "*.jsonl") == paths[1:]
    assert found(tmp_path / "what?" / "*.jsonl") == [str(tmp_path / "what?" / "a.jsonl")]


def test_hub_folder_name_with_an_equals_sign_has_no_weight(tmp_path):
    write(tmp_path / "year=2024" / "a.jsonl")
    assert [(one.name, one.weight) for one in find_sets([f"hf:{tmp_path}/year=2024"])] == [
        (f"hf:{tmp_path}/year=2024", None)
    ]


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("ending", ["jsonl", "csv", "parquet"])
def test_datasets_reads_files_whose_names_look_like_patterns(tmp_path, ending: str, streaming: bool):
    for name in ("a[1]", "a1", "what?"):
        frame = pandas.DataFrame({"text": [f"of {name}"]})
        path = tmp_path / "set" / f"{name}.{ending}"
        path.parent.mkdir(exist_ok=True)
        writes = {"jsonl": partial(frame.to_json, orient="records", lines=True), "parquet": frame.to_parquet}
        writes.get(ending, partial(frame.to_csv, index=False))(path)
    (tmp_path / "set" / "README[old].md").write_text("no rows")
    rows = load(f"hf:{tmp_path}/set", streaming, "--data")
    assert sorted(row["text"] for row in rows) == ["of a1", "of a[1]", "of what?"]


@pytest.mark.parametrize("name", ["set [1]/a.jsonl", "what?/a.jsonl"])
def test_a_folder_that_datasets_takes_for_a_pattern_is_refused(tmp_path, name: str):
    folder = write(tmp_path / name).parent
    files = find_files([f"hf:{folder}"])
    with pytest.raises(UserError, match=r"for a pattern; --data .* without hf:"):
        opened(files, streaming=False, setting="--data")


@pytest.mark.parametrize("entry", ["", "no[pe].jsonl", "~nobody/a.jsonl"])
def test_name_that_matches_no_file_is_refused(tmp_path, monkeypatch, entry: str):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "nope.txt")
    with pytest.raises(UserError, match=r"--data.*files, folders or globs"):
        find_files([entry])


def tree(draw: random.Random, root: Path, *, links: bool) -> None:
    """Folders and files with names that patterns are made of, and links among them, circles included."""
    names = ["a", "b", "ab", ".a", "a[b]", "x?", "c.txt", "d.jsonl"]
    folders = [root]
    for _ in range(6):
        folder = draw.choice(folders) / draw.choice(names[:6])
        folder.mkdir(exist_ok=True)
        folders.append(folder)
    for _ in range(9):
        path = draw.choice(folders) / draw.choice(names)
        if not path.exists():
            path.write_text("x")
    for _ in range(5 if links else 0):
        path = draw.choice(folders) / draw.choice(["link", "l", "b"])
        if not os.path.lexists(path):
            path.symlink_to(draw.choice([*folders, *(path for path in root.rglob("*") if path.is_file()), root / "no"]))


PATTERNS = ["**", "*", "a*", "?", "[ab]", "a", "b/..", ".*", "*.txt", "[!a]*"]


@pytest.mark.parametrize("seed", range(30))
def test_patterns_without_links_match_as_in_glob(tmp_path, seed: int):
    draw = random.Random(seed)
    tree(draw, tmp_path, links=False)
    for _ in range(10):
        pattern = "/".join([str(tmp_path), *draw.choices(PATTERNS, k=draw.randint(1, 4))])
        if Path(pattern).is_dir():
            continue  # a folder stands for what is in it
        paths = glob.glob(pattern, recursive=True)  # noqa: PTH207 (the judge)
        matches = {os.path.realpath(path) for path in paths if Path(path).is_file()}
        try:
            files = [os.path.realpath(path) for path in found(pattern)]
        except UserError:
            files = []
        assert len(files) == len(set(files)) and set(files) == matches, pattern


@pytest.mark.parametrize("seed", range(30))
def test_every_file_is_read_once_with_any_links(tmp_path, seed: int):
    """What there is, is said by ``os.walk``, which follows no links."""
    draw, root = random.Random(seed), tmp_path / "root"
    root.mkdir()
    tree(draw, root, links=True)
    there = set()
    for folder, inner, names in os.walk(root):
        inner[:] = [name for name in inner if not name.startswith(".")]
        there |= {os.path.realpath(Path(folder, name)) for name in names if not name.startswith(".")}
    hidden = {os.path.realpath(path) for path in there if "/." in path.removeprefix(str(root))}
    for entries in ([root / "**"], [root / "**" / "*"], [root, root / "**"]):
        try:
            files = [os.path.realpath(path) for path in found(*entries)]
        except UserError:
            files = []
        assert len(files) == len(set(files))
        # Links may lead to what is hidden elsewhere, and so show it.
        assert there - hidden <= {*files} | {str(root / "no")} and all(path.startswith(str(root)) for path in files)


def report(tmp_path: Path, *entries: str, **more) -> list[str]:
    given: dict[str, Any] = {"vocab_size": 300, "cache_dir": str(tmp_path / "cache"), "validation_fraction": 0.0}
    settings = DataSettings(data=list(entries), **given, **more)
    return prepare_data(settings, sequence_length=16, seed=0).report.lines()


@pytest.mark.parametrize("more", [{}, {"streaming": True}])
def test_files_left_out_as_duplicates_are_counted(tmp_path, more: dict):
    folder, file = tmp_path / "data", write(tmp_path / "data" / "parts" / "b.jsonl", 4)
    (folder / "parts" / "above").symlink_to("..")
    (folder / "a.jsonl").symlink_to("parts/b.jsonl")
    os.link(file, folder / "c.jsonl")
    for _ in range(2):  # from the cache, too
        lines = report(tmp_path, f"{folder}/**/*.jsonl", str(file), **more)
        assert any("4 documents" in line for line in lines)
        assert (
            "training files: 1 folder left out, read already by another path; the first: "
            f"{folder}/parts/above (read as {folder})"
        ) in lines
        (line,) = [line for line in lines if "files left out" in line]
        assert line.startswith("training files: 3 files left out, read already under this or another name; the first: ")
    other = write(tmp_path / "other.jsonl", 3)
    lines = report(tmp_path, str(file), validation_data=[str(other), str(other)], **more)
    assert "validation files: 1 file left out, read already under this or another name" in "\n".join(lines)


def test_file_with_several_names_is_read_under_the_name_with_rows(tmp_path):
    path = write(tmp_path / "z.jsonl")
    os.link(path, tmp_path / "a.txt")
    (tmp_path / "b.jsonl").symlink_to("z.jsonl")
    assert found(tmp_path / "*") == [str(path)]
    readme = tmp_path / "README.md"
    readme.write_text("words")
    for entries in ([tmp_path, readme], [readme, tmp_path]):
        assert [file.path for file in find_files(map(str, entries)) if file.wanted] == [str(readme), str(path)]
