"""Globs to files, and files to raw rows, where a bad row costs itself and no other.

JSON lines are read line by line and not with ``datasets``' JSON reader, which reads blocks: it cannot say which line is
corrupt, gives up the file there, and wants one schema for all files.
"""

from __future__ import annotations

import glob
import json
import sysconfig
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

from tawpipe.data.report import Skipped
from tawpipe.data.settings import Rows
from tawpipe.errors import UserError

STDLIB = "stdlib"
STDLIB_EXCLUDED = frozenset({"site-packages", "dist-packages", "test", "tests", "idlelib", "idle_test", "__pycache__"})

PARQUET_BATCH = 64  # rows in memory at once; a row may be a book

CHAT_COLUMNS = ("messages",)
INSTRUCTION_COLUMNS = (("prompt", "completion"), ("instruction", "output"))
OPTIONAL_COLUMNS = ("input",)

RowKind = Literal["text", "chat", "instruction"]


@dataclass(frozen=True, order=True)
class SourceFile:
    """A file of the corpus, and what tells it from another version of itself."""

    path: str
    size: int
    mtime_ns: int

    @property
    def format(self) -> Literal["text", "json", "jsonl", "parquet"]:
        match Path(self.path).suffix.lower():
            case ".jsonl" | ".ndjson":
                return "jsonl"
            case ".json":
                return "json"
            case ".parquet":
                return "parquet"
            case _:
                return "text"


@dataclass(frozen=True)
class RawRow:
    """The columns of one document that are of use, as the file has them."""

    where: str
    kind: RowKind
    columns: dict[str, Any]


def find_files(patterns: Iterable[str], setting: str = "--data") -> list[SourceFile]:
    """Files that the globs match, sorted by path, each once.

    Raises:
        UserError: a glob matches no file.
    """
    files: dict[str, SourceFile] = {}
    for pattern in patterns:
        if pattern == STDLIB:
            paths = _stdlib_files()
        else:
            matches = glob.glob(str(Path(pattern).expanduser()), recursive=True)  # noqa: PTH207 (absolute patterns)
            paths = [Path(match) for match in matches if not Path(match).is_dir()]
            if not paths:
                hint = f"; this is a folder, write {pattern.rstrip('/')}/**/*" if Path(pattern).is_dir() else ""
                raise UserError(setting, pattern, f"globs that match at least one file each, or {STDLIB}{hint}")
        for path in paths:
            files[str(path.absolute())] = _source_file(path.absolute())
    return sorted(files.values())


def name_files(files: Sequence[SourceFile]) -> str:
    """The first file, and how many more there are."""
    return files[0].path + (f" and {len(files) - 1} more files" if len(files) > 1 else "")


def _stdlib_files() -> list[Path]:
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [p for p in root.rglob("*.py") if STDLIB_EXCLUDED.isdisjoint(p.relative_to(root).parts)]
    if not files:
        raise UserError("--data", STDLIB, f"globs of your own files: this Python has no source files in {root}")
    return files


def _source_file(path: Path) -> SourceFile:
    try:
        stat = path.stat()
    except OSError:  # named and counted when it is read
        return SourceFile(str(path), 0, 0)
    return SourceFile(str(path), stat.st_size, stat.st_mtime_ns)


def row_kind(names: Collection[str], rows: Rows, text_column: str) -> RowKind | None:
    """Kind of a row with these columns; None if it lacks those that ``rows`` asks for."""
    is_instruction = any(all(name in names for name in group) for group in INSTRUCTION_COLUMNS)
    is_chat = all(name in names for name in CHAT_COLUMNS)
    is_text = text_column in names
    if is_text and (rows == "text" or (rows == "auto" and text_column != "text")):
        return "text"
    if is_chat and rows in ("auto", "chat"):
        return "chat"
    if is_instruction and rows in ("auto", "instruction"):
        return "instruction"
    return "text" if is_text and rows == "auto" else None


def lacks_columns(
    kind: Literal["file", "row"], where: str, names: Collection[str], rows: Rows, text_column: str
) -> Skipped:
    """A row, or a file whose rows are alike, that is of no kind; says which columns there are."""
    wanted = {
        "text": [f"{text_column!r} (--text-column)"],
        "chat": ["'messages'"],
        "instruction": ["'prompt' and 'completion'", "'instruction' and 'output'"],
    }
    ways = [way for kind, options in wanted.items() if rows in ("auto", kind) for way in options]
    return Skipped(kind, where, f"lacks the columns {', or '.join(ways)}; this one has {sorted(names)}")


def useful_columns(kind: RowKind, text_column: str) -> tuple[str, ...]:
    """The columns that a row of this kind may need."""
    match kind:
        case "text":
            return (text_column,)
        case "chat":
            return CHAT_COLUMNS
        case "instruction":
            return (*(name for group in INSTRUCTION_COLUMNS for name in group), *OPTIONAL_COLUMNS)


@dataclass(frozen=True)
class RowReader:
    """Reader of the rows of a file, which names what cannot be read.

    Attributes:
        rows, text_column: the settings of these names.
    """

    rows: Rows
    text_column: str

    def read(self, file: SourceFile, start: float = 0.0) -> Iterator[RawRow | Skipped]:
        """The file's documents in its order.

        Args:
            start: begin about this share of the file (0 to 1) further on, without reading what is before; of no
                effect on formats that are read as a whole. Rows are then not numbered by their place in the file.
        """
        try:
            match file.format:
                case "text":
                    yield self._text(file)
                case "json":
                    yield from self._json(file)
                case "jsonl":
                    yield from self._json_lines(file, start)
                case "parquet":
                    yield from self._parquet(file, start)
        except OSError as error:
            yield Skipped("file", file.path, f"cannot be read ({error.strerror or error})")

    def _text(self, file: SourceFile) -> RawRow | Skipped:
        try:
            text = Path(file.path).read_bytes().decode("utf-8-sig")
        except UnicodeDecodeError as error:
            return Skipped("file", file.path, f"is not UTF-8 (byte {error.start})")
        return RawRow(file.path, "text", {self.text_column: text})

    def _json(self, file: SourceFile) -> Iterator[RawRow | Skipped]:
        """A list of objects, or else JSON lines under another name."""
        try:
            content = json.loads(Path(file.path).read_bytes())
        except (ValueError, RecursionError):
            yield from self._json_lines(file, 0.0)
            return
        for number, item in enumerate(content if isinstance(content, list) else [content], 1):
            yield self._row(f"{file.path}, row {number}", item)

    def _json_lines(self, file: SourceFile, start: float) -> Iterator[RawRow | Skipped]:
        with Path(file.path).open("rb") as stream:
            if start:
                stream.seek(int(start * file.size))
                stream.readline()
            yield from self._lines(file, stream)

    def _lines(self, file: SourceFile, stream: BinaryIO) -> Iterator[RawRow | Skipped]:
        for number, line in enumerate(stream, 1):
            if line.isspace():
                continue
            where = f"{file.path}, line {number}"
            try:
                item = json.loads(line.decode("utf-8-sig"))
            except (ValueError, RecursionError) as error:
                yield Skipped("row", where, f"is not JSON in UTF-8 ({error})")
                continue
            yield self._row(where, item)

    def _row(self, where: str, item: object) -> RawRow | Skipped:
        if not isinstance(item, dict):
            return Skipped("row", where, f"is a JSON {type(item).__name__}, not an object")
        kind = row_kind(item.keys(), self.rows, self.text_column)
        if kind is None:
            return lacks_columns("row", where, item.keys(), self.rows, self.text_column)
        names = useful_columns(kind, self.text_column)
        return RawRow(where, kind, {name: item[name] for name in names if name in item})

    def _parquet(self, file: SourceFile, start: float) -> Iterator[RawRow | Skipped]:
        import pyarrow
        import pyarrow.parquet

        number = 0
        try:
            with pyarrow.parquet.ParquetFile(file.path) as table:
                names = table.schema_arrow.names
                kind = row_kind(names, self.rows, self.text_column)
                if kind is None:
                    yield lacks_columns("file", file.path, names, self.rows, self.text_column)
                    return
                wanted = [name for name in useful_columns(kind, self.text_column) if name in names]
                groups = list(range(int(start * table.num_row_groups), table.num_row_groups))
                for batch in table.iter_batches(PARQUET_BATCH, row_groups=groups, columns=wanted):
                    for columns in batch.to_pylist():
                        number += 1
                        yield RawRow(f"{file.path}, row {number}", kind, columns)
        except (pyarrow.ArrowException, ValueError) as error:
            reason = str(error).partition("\n")[0]
            yield Skipped("file", file.path, f"is not readable parquet after row {number} ({reason})")
