"""Sources named in the settings: globs, folders, Hub data sets, and the weights of a mixture."""

from __future__ import annotations

import glob
import hashlib
import math
import os
import sysconfig
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal

from tawpipe.data.report import Skipped
from tawpipe.errors import UserError

STDLIB, HUB, REMOTE = "stdlib", "hf:", "hf://"
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
"""Formats that hold rows, by file name suffix."""
PACKED = {".gz": "gzip", ".zst": "zstd"}
ANY_FOLDERS, ANY_NAME = "**", "*"

BLOCKS, BLOCK_BYTES = 64, 4096
"""Number and size in bytes of the evenly spaced blocks that identify a file; a smaller file is read completely."""

SMALLEST_SHARE = 1e-9
"""Smallest share of the tokens of a mixture; a run would never read a smaller one."""


@dataclass(frozen=True, order=True)
class SourceFile:
    """A file of the corpus, or a part of a Hub data set, with values that change when its content changes.

    Attributes:
        path: path of the file. For a Hub data set ``hf:`` and its name, then ``#`` with the part and the number of
            parts. For a file on the Hub ``hf://`` and its path.
        size: bytes.
        mtime_ns: time of modification in nanoseconds, or a version number.
        wanted: False for a file without rows in a folder of row files; it is counted and left out.
    """

    path: str
    size: int
    mtime_ns: int
    wanted: bool = True

    @property
    def packed(self) -> str:
        """Name of its compression, ``gzip`` or ``zstd``, or ``""``."""
        return PACKED.get(Path(self.path).suffix.lower(), "")

    @property
    def format(self) -> Format:
        """Format of the file, by its name."""
        if self.path.startswith(HUB) and not self.path.startswith(REMOTE):
            return "hub"
        path = Path(self.path)
        return FORMATS.get((path.with_suffix("") if self.packed else path).suffix.lower(), "text")

    @property
    def seekable(self) -> bool:
        """True if rows can be read from the middle on."""
        return not self.packed and self.format in ("text", "jsonl", "parquet")


@dataclass(frozen=True)
class SourceSet:
    """Files that form one data set.

    Attributes:
        name: name in the settings.
        weight: weight in the mixture, not normalised; None if nothing is mixed.
        files: the files.
        left_out: further names of the files, folders that were already read by another path, and unreadable folders.
    """

    name: str
    weight: float | None
    files: Sequence[SourceFile]
    left_out: Sequence[Skipped] = ()


def find_sets(entries: Sequence[str], setting: str = "--data") -> list[SourceSet]:
    """Return the data sets to mix, in the order of ``entries``; without weights one data set of all files.

    Args:
        entries: values of the setting: files, folders, globs or Hub names, with weights for all or for none.
        setting: name of the setting, for errors.

    Raises:
        UserError: an entry matches no file, a weight is not valid, or only some entries have weights.
    """
    parsed = [_with_weight(entry, setting) for entry in entries]
    if not entries:
        return []
    without = [name for name, weight in parsed if weight is None]
    if len(without) == len(parsed):
        return [SourceSet(", ".join(without), None, *_find(without, setting))]
    if without:
        raise UserError(setting, without[0], "a weight for every data set, or for none: a.jsonl=0.7 b.jsonl=0.3")
    total = sum(weight or 0.0 for _, weight in parsed)
    for entry, (_, weight) in zip(entries, parsed, strict=True):
        if weight is not None and not weight >= SMALLEST_SHARE * total:
            raise UserError(setting, entry, f"a weight of {SMALLEST_SHARE:g} of all weights or more, or no such entry")
    return [SourceSet(name, weight, *_find([name], setting)) for name, weight in parsed]


def _with_weight(entry: str, setting: str) -> tuple[str, float | None]:
    """Return an entry without its weight, and the weight or None; ``=`` may also be part of a file name."""
    name, equals, number = entry.rpartition("=")
    if not equals or os.path.lexists(_path_of(entry.removeprefix(HUB))):
        return entry, None
    try:
        weight = float(number)
    except ValueError:
        return entry, None
    if not 0 < weight < math.inf:
        raise UserError(setting, entry, "a weight above 0")
    return name, weight


def _find(entries: Iterable[str], setting: str) -> tuple[list[SourceFile], list[Skipped]]:
    """Return the files that the entries name, sorted by path, and what is left out so that each file is read once.

    Raises:
        UserError: an entry matches no file.
    """
    names_of: dict[object, list[SourceFile]] = {}
    left_out: list[Skipped] = []
    for entry in entries:
        path = _path_of(entry)
        if entry == STDLIB:
            named = [file for source in _stdlib_files() if (file := source_file(source)).size]
        elif entry.startswith(HUB):
            named = [SourceFile(entry, 0, 0)]
        else:
            is_folder = bool(entry) and path.is_dir()
            paths, passed = match_files(path) if is_folder else _named(path) if entry else ([], [])
            left_out += passed
            named = [source_file(each) for each in paths]
            if not named:
                missing = "no file matches" if glob.has_magic(entry) else "no such file"
                expected = f"{missing}; files, folders or globs, {STDLIB}, or {HUB}NAME are taken"
                raise UserError(setting, entry, "a folder with files in it" if is_folder else expected)
            if is_folder and any(file.format != "text" for file in named):
                named = [replace(file, wanted=file.format != "text") for file in named]
        for file in named:
            names_of.setdefault(_identity(file.path), []).append(file)
    files = list[SourceFile]()
    for names in names_of.values():
        file, *others = sorted(names, key=_preference) if names[1:] else names
        files.append(file)
        why, as_what = "read already under this or another name", f"read as {file.path}"
        left_out += [Skipped("file", other.path, why, as_what) for other in others]
    return sorted(files), left_out


def _path_of(entry: str) -> Path:
    """Return the path that an entry names; ``~`` is the home directory unless a file or folder has that name."""
    path = Path(entry)
    try:
        return path if os.path.lexists(path) else path.expanduser()
    except RuntimeError:  # no such user
        return path


def _identity(path: str | Path) -> tuple[object, ...]:
    """Return device and inode, which all names of a file or folder share, or the path if it cannot be read."""
    try:
        stat = Path(path).stat()
    except OSError:
        return (str(path),)
    return stat.st_dev, stat.st_ino


def _preference(file: SourceFile) -> tuple[object, ...]:
    """Return a sort key for several names of one file: rows before text, its real path before links."""
    return not file.wanted, file.format == "text", os.path.realpath(file.path) != file.path, file.path


def name_files(files: Sequence[SourceFile]) -> str:
    """Return the path of the first file and the number of further files as text."""
    return files[0].path + (f" and {len(files) - 1} more files" if len(files) > 1 else "")


def stamps(files: Sequence[SourceFile]) -> list[list[object]]:
    """Return path, size, times and a hash of some bytes of every file; they change when a file changes."""
    return [[file.path, file.size, file.mtime_ns, file.wanted, *_looked_at(file)] for file in files]


def _looked_at(file: SourceFile) -> list[object]:
    """Return the time of change (ctime) in ns, which no program sets, and a hash of ``BLOCKS`` blocks.

    The hash is for file systems with coarse clocks. A file that was copied, renamed or got other permissions has a new
    time, so it is tokenised again. Returns an empty list for a Hub part, an unwanted file, or a file that cannot be
    read; the last is reported when its rows are read.
    """
    if file.format == "hub" or not file.wanted:
        return []
    try:
        with Path(file.path).open("rb", buffering=0) as stream:
            stat = os.fstat(stream.fileno())
            digest, last = hashlib.blake2b(digest_size=16), max(0, stat.st_size - BLOCK_BYTES)
            for place in sorted({number * last // (BLOCKS - 1) for number in range(BLOCKS)}):
                stream.seek(place)
                digest.update(stream.read(BLOCK_BYTES))
    except OSError:
        return []
    return [stat.st_ctime_ns, digest.hexdigest()]


def _named(path: Path) -> tuple[list[Path], list[Skipped]]:
    """Return the file with this name, or the files that match it as a pattern; see ``match_files``."""
    matches, passed = match_files(Path(path.anchor), path.parts[bool(path.anchor) :])
    if not os.path.lexists(path) or matches == [path]:
        return matches, passed
    why = "fitting a name that exists and so is not a pattern"  # for example a file named "*"
    return [path], passed + [Skipped("file", str(match), why, str(path)) for match in matches if match != path]


def match_files(start: Path, pattern: tuple[str, ...] = (ANY_FOLDERS, ANY_NAME)) -> tuple[list[Path], list[Skipped]]:
    """Return the visible files below ``start`` that match a pattern, and the folders that were left out.

    A component that exists in its folder stands only for itself. A folder is read once for one rest of the pattern, by
    its own path rather than by links to it.

    Args:
        start: folder to begin in.
        pattern: components of the pattern; ``**`` stands for any number of folders. By default all files match.
    """
    files, passed = dict[Path, None](), dict[Skipped, None]()
    seen = dict[tuple[object, ...], Path]()
    folders, links = deque([(start, pattern)]), deque[tuple[Path, tuple[str, ...]]]()
    while folders or links:
        folder, (first, *rest) = (folders or links).popleft()
        known = seen.setdefault((*_identity(folder), len(rest), first == ANY_FOLDERS), folder)
        if known is not folder:
            if known != folder:
                passed[Skipped("folder", str(folder), "read already by another path", f"read as {known}")] = None
            continue
        later = tuple(rest)
        if first == ANY_FOLDERS:
            folders.appendleft((folder, later or (ANY_NAME,)))
            first, later = ANY_NAME, (first, *rest)
        names = [first]
        if glob.has_magic(first) and (not first.strip("*?") or not os.path.lexists(folder / first)):
            try:
                names = sorted(os.listdir(folder))  # noqa: PTH208 (names are matched)
            except OSError as error:
                passed[Skipped("folder", str(folder), "not readable", error.strerror or "")] = None
                continue
            hidden = first.startswith(".")
            names = [name for name in names if fnmatchcase(name, first) and (hidden or not name.startswith("."))]
        for child in (folder / name for name in names):
            if later and child.is_dir():
                (links if child.is_symlink() else folders).append((child, later))
            elif not later and os.path.lexists(child) and not child.is_dir():
                files[child] = None
    return list(files), list(passed)


def _stdlib_files() -> list[Path]:
    """Return the Python files of the standard library, without tests and installed packages."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files: list[Path] = []
    for folder, inner, names in os.walk(root):
        # Excluded folders are not entered: site-packages has more files than all the rest.
        inner[:] = [name for name in inner if name not in STDLIB_EXCLUDED]
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    if not files:
        raise UserError("--data", STDLIB, f"globs of your own files: this Python has no source files in {root}")
    return files


def source_file(path: Path) -> SourceFile:
    """Return the source file for a path, with its size and time of modification; zeros if it cannot be read."""
    path = path.absolute()
    try:
        stat = path.stat()
    except OSError:  # reported when it is read
        return SourceFile(str(path), 0, 0)
    return SourceFile(str(path), stat.st_size, stat.st_mtime_ns)
