"""What the settings name, as files: globs, folders, data sets of the Hub, and the weights of a mixture."""

from __future__ import annotations

import glob
import math
import os
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tawpipe.errors import UserError

STDLIB, HUB = "stdlib", "hf:"
STDLIB_EXCLUDED = frozenset({"site-packages", "dist-packages", "test", "tests", "idlelib", "idle_test", "__pycache__"})

Format = Literal["text", "json", "jsonl", "parquet", "csv", "tsv", "hub"]
FORMATS: dict[str, Format] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".parquet": "parquet",
    ".pq": "parquet",
    ".csv": "csv",
    ".tsv": "tsv",
}
"""Formats that hold rows, by the end of the file's name."""
PACKED = {".gz": "gz", ".zst": "zst"}

SMALLEST_SHARE = 1e-9
"""Of the tokens of a mixture; of a smaller one no run would see anything."""


@dataclass(frozen=True, order=True)
class SourceFile:
    """A file of the corpus, or a part of a data set of the Hub, and what tells it from another version of itself.

    Attributes:
        path: for the Hub ``hf:`` and a name, and behind ``#`` the part and their number.
        wanted: False for a file beside the rows of a folder, which is counted and left out.
    """

    path: str
    size: int
    mtime_ns: int
    wanted: bool = True

    @property
    def packed(self) -> Literal["", "gz", "zst"]:
        """The way in which it is compressed."""
        return PACKED.get(Path(self.path).suffix.lower(), "")  # pyright: ignore[reportReturnType]

    @property
    def format(self) -> Format:
        if self.path.startswith(HUB):
            return "hub"
        path = Path(self.path)
        return FORMATS.get((path.with_suffix("") if self.packed else path).suffix.lower(), "text")

    @property
    def seekable(self) -> bool:
        """True if rows can be read from the middle on."""
        return not self.packed and self.format in ("text", "jsonl", "parquet")


@dataclass(frozen=True)
class SourceSet:
    """Files that are one data set.

    Attributes:
        name: as the settings have it.
        weight: its share of the mixture before all are divided by their sum; None where nothing is mixed.
    """

    name: str
    weight: float | None
    files: Sequence[SourceFile]


def find_sets(entries: Sequence[str], setting: str = "--data") -> list[SourceSet]:
    """The data sets to mix, in the order given; or a single one of all files, where no weights are given.

    Raises:
        UserError: an entry that leads to no file, a weight that is none, weights for some entries only.
    """
    parsed = [_with_weight(entry, setting) for entry in entries]
    if not entries:
        return []
    without = [name for name, weight in parsed if weight is None]
    if len(without) == len(parsed):
        return [SourceSet(", ".join(without), None, find_files(without, setting))]
    if without:
        raise UserError(setting, without[0], "a weight for every data set, or for none: a.jsonl=0.7 b.jsonl=0.3")
    total = sum(weight or 0.0 for _, weight in parsed)
    for entry, (_, weight) in zip(entries, parsed, strict=True):
        if weight is not None and not weight >= SMALLEST_SHARE * total:
            raise UserError(setting, entry, f"a weight of {SMALLEST_SHARE:g} of all weights or more, or no such entry")
    return [SourceSet(name, weight, find_files([name], setting)) for name, weight in parsed]


def _with_weight(entry: str, setting: str) -> tuple[str, float | None]:
    """An entry without its weight, and the weight; ``=`` may be part of a name as well."""
    name, equals, number = entry.rpartition("=")
    if not equals or Path(entry).expanduser().exists():
        return entry, None
    try:
        weight = float(number)
    except ValueError:
        return entry, None
    if not 0 < weight < math.inf:
        raise UserError(setting, entry, "a weight above 0")
    return name, weight


def find_files(entries: Iterable[str], setting: str = "--data") -> list[SourceFile]:
    """Files that the entries name, sorted by path, each once.

    Raises:
        UserError: an entry leads to no file.
    """
    files: dict[str, SourceFile] = {}
    for entry in entries:
        if entry == STDLIB:
            named = [file for path in _stdlib_files() if (file := _source_file(path)).size]
        elif entry.startswith(HUB):
            named = [SourceFile(entry, 0, 0)]
        elif Path(entry).expanduser().is_dir():
            named = _files_of_folder(Path(entry).expanduser(), setting)
        else:
            matches = glob.glob(str(Path(entry).expanduser()), recursive=True)  # noqa: PTH207 (absolute patterns)
            named = [_source_file(Path(match)) for match in matches if not Path(match).is_dir()]
            if not named:
                missing = "no file matches" if glob.has_magic(entry) else "no such file"
                expected = f"{missing}; files, folders or globs, {STDLIB}, or {HUB}NAME are taken"
                raise UserError(setting, entry, expected)
        files |= {file.path: file for file in named}
    return sorted(files.values())


def name_files(files: Sequence[SourceFile]) -> str:
    """The first file, and how many more there are."""
    return files[0].path + (f" and {len(files) - 1} more files" if len(files) > 1 else "")


def _files_of_folder(folder: Path, setting: str) -> list[SourceFile]:
    """The folder's files of rows, those of its folders and links included, and others as not wanted; where there are
    none, every file as text. Hidden ones do not count.
    """
    files = [_source_file(path) for path in _paths_under(folder)]
    if not files:
        raise UserError(setting, str(folder), "a folder with files in it")
    if all(file.format == "text" for file in files):
        return files
    return [SourceFile(file.path, file.size, file.mtime_ns, wanted=file.format != "text") for file in files]


def _paths_under(root: Path) -> Iterator[Path]:
    """What is no folder and not hidden, of each folder once: by its path rather than by links that lead to it."""
    seen, links = set[Path](), [root]
    while links:
        for folder, inner, names in os.walk(links.pop(0)):
            real = Path(folder).resolve()
            if real in seen:
                inner.clear()
                continue
            seen.add(real)
            inner[:] = sorted(name for name in inner if not name.startswith("."))
            links += [path for name in inner if (path := Path(folder, name)).is_symlink()]
            yield from (Path(folder, name) for name in names if not name.startswith("."))


def _stdlib_files() -> list[Path]:
    root = Path(sysconfig.get_paths()["stdlib"])
    files: list[Path] = []
    for folder, inner, names in os.walk(root):
        # Folders that are left out are not looked into: there are more files in site-packages than in the rest.
        inner[:] = [name for name in inner if name not in STDLIB_EXCLUDED]
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    if not files:
        raise UserError("--data", STDLIB, f"globs of your own files: this Python has no source files in {root}")
    return files


def _source_file(path: Path) -> SourceFile:
    path = path.absolute()
    try:
        stat = path.stat()
    except OSError:  # named and counted when it is read
        return SourceFile(str(path), 0, 0)
    return SourceFile(str(path), stat.st_size, stat.st_mtime_ns)
