"""Reading of files as raw rows; a bad row does not affect other rows.

JSON lines are read line by line and not with the JSON reader of ``datasets``, which reads blocks. It cannot tell which
line is corrupt, stops reading the file there, and needs one schema for all files. Tables of comma-separated values are
read by line for the same reasons.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import tee
from pathlib import Path
from typing import Any, BinaryIO

from tawpipe.data.chats.columns import Columns, RawRow
from tawpipe.data.chats.messages import unique_keys
from tawpipe.data.reading.hub import read_hub
from tawpipe.data.reading.sources import REMOTE, SourceFile
from tawpipe.data.report import Skipped

PARQUET_BATCH = 64  # rows in memory at one time; one row may be a book
LONGEST_FIELD = 2**31 - 1  # the default limit of the csv module is 128 KiB

BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class RowReader:
    """Reader of the rows of a file; reports what cannot be read.

    Attributes:
        columns: meaning of columns.
    """

    columns: Columns = field(default_factory=Columns)

    def read(self, file: SourceFile, start: float = 0.0) -> Iterator[RawRow | Skipped]:
        """Yield the rows of a file in order, and a ``Skipped`` for everything that cannot be read.

        Args:
            file: the file.
            start: fraction of the file (0 to 1) to skip without reading it; must be 0 for files that are not seekable.
                With another value, rows are not numbered by their position in the file.
        """
        assert file.seekable or not start
        if not file.wanted:
            yield Skipped("file", file.path, "other than the files of rows in the folder")
            return
        rows = last = None
        try:
            for rows in self._rows(file, start):
                yield rows
                last = rows.where
        except (OSError, EOFError, zlib.error) as error:
            after = f", after {last.removeprefix(file.path).lstrip(', ')}" if last else ""
            reason = getattr(error, "strerror", None) or error
            yield Skipped("file", file.path + after, "not readable", str(reason))
        else:
            if rows is None and not start:
                yield Skipped("file", file.path, "without a row")

    def _rows(self, file: SourceFile, start: float) -> Iterator[RawRow | Skipped]:
        """Yield the rows of a file with the reader for its format.

        Args:
            file: the file.
            start: fraction of the file (0 to 1) to skip, up to the end of the line there; see also ``_parquet``.
        """
        if file.format == "hub":
            yield from read_hub(file, self.columns, self.read)
        elif file.format == "parquet":
            yield from self._parquet(file, start)
        else:
            readers = {"text": self._text, "json": self._json, "jsonl": self._lines}
            with _open(file) as stream:
                if start:
                    stream.seek(int(start * file.size))
                    stream.readline()
                yield from readers.get(file.format, self._table)(file, stream)

    def _text(self, file: SourceFile, stream: BinaryIO) -> Iterator[RawRow | Skipped]:
        """Yield the whole file as one row of text."""
        try:
            yield RawRow(file.path, "text", {"text": stream.read().decode("utf-8-sig")})
        except UnicodeDecodeError as error:
            yield Skipped("file", file.path, "not UTF-8", f"byte {error.start}")

    def _json(self, file: SourceFile, stream: BinaryIO) -> Iterator[RawRow | Skipped]:
        """Yield the objects of a JSON list, or of JSON lines in a file named ``.json``."""
        data = stream.read()
        try:
            content = json.loads(data, object_pairs_hook=unique_keys)
        except (ValueError, RecursionError) as error:
            if data.removeprefix(BYTE_ORDER_MARK).lstrip()[:1] != b"[":
                yield from self._lines(file, io.BytesIO(data))
            else:
                why = "neither a list of JSON objects in UTF-8 nor one on each line"
                yield Skipped("file", file.path, why, str(error))
        else:
            for number, item in enumerate(content if isinstance(content, list) else [content], 1):
                yield self._row(f"{file.path}, row {number}", item)

    def _lines(self, file: SourceFile, stream: BinaryIO) -> Iterator[RawRow | Skipped]:
        """Yield the JSON object on each line."""
        for number, line in enumerate(stream, 1):
            if line.isspace():
                continue
            where = f"{file.path}, line {number}"
            try:
                item = json.loads(line.decode("utf-8-sig"), object_pairs_hook=unique_keys)
            except UnicodeDecodeError as error:
                yield Skipped("row", where, "not UTF-8", f"byte {error.start} of the line")
            except (ValueError, RecursionError) as error:
                yield Skipped("row", where, "not JSON, of which every line holds an object", str(error))
            else:
                yield self._row(where, item)

    def _table(self, file: SourceFile, stream: BinaryIO) -> Iterator[RawRow | Skipped]:
        """Yield rows of a table, with column names from the first line; a quoted field may span several lines."""
        text = io.TextIOWrapper(stream, "utf-8-sig", errors="surrogateescape", newline="")
        table = _records(text, "\t" if file.format == "tsv" else ",")
        _, names = next(table, (1, []))
        if names is None:
            yield Skipped("file", file.path, "with a quote in the first line that is not closed")
            return
        if len(set(names)) < len(names):
            yield Skipped("file", file.path, "with two columns of one name", f"the first line says {names}")
            return
        for line, fields in table:
            where = f"{file.path}, line {line}"
            if fields is None:
                yield Skipped("row", where, "with a quote that is not closed")
            elif not fields:
                continue
            elif len(fields) != len(names):
                detail = f"{len(fields)} instead of {len(names)}"
                yield Skipped("row", where, "another number of fields than the first line has", detail)
            elif any("\udc80" <= letter <= "\udcff" for field in fields if not field.isascii() for letter in field):
                yield Skipped("row", where, "not UTF-8")
            else:
                yield self._row(where, dict(zip(names, fields, strict=True)))

    def _row(self, where: str, item: object) -> RawRow | Skipped:
        """Return the row for a JSON value, or a ``Skipped`` if it is not an object."""
        if not isinstance(item, dict):
            return Skipped("row", where, "JSON, but not an object", f"a {type(item).__name__}")
        return self.columns.row(where, item)

    def _parquet(self, file: SourceFile, start: float) -> Iterator[RawRow | Skipped]:
        """Yield the rows of a parquet file, from the row group at the fraction ``start`` of all row groups on.

        Only useful columns are read."""
        import pyarrow
        import pyarrow.parquet

        number = 0
        try:
            with _open(file) as stream:
                table = pyarrow.parquet.ParquetFile(io.BytesIO(stream.read()) if file.packed else stream)
                names = table.schema_arrow.names
                wanted = self.columns.wanted(file.path, names)
                if isinstance(wanted, Skipped):
                    yield wanted
                    return
                groups = list(range(int(start * table.num_row_groups), table.num_row_groups))
                for batch in table.iter_batches(PARQUET_BATCH, row_groups=groups, columns=wanted[0]):
                    for item in batch.to_pylist(maps_as_pydicts="strict"):
                        number += 1
                        yield self.columns.table_row(f"{file.path}, row {number}", item, wanted[1])
        except (pyarrow.ArrowException, ValueError) as error:
            reason = str(error).partition("\n")[0]
            yield Skipped("file", f"{file.path}, after row {number}", "not readable as parquet", reason)


def _records(text: Iterator[str], delimiter: str) -> Iterator[tuple[int, list[str] | None]]:
    """Yield the first line number and the fields of every record; None for a line with an unclosed quote.

    An unclosed quote would include all lines up to the next quote, which then has text directly after it, or up to the
    end of the file. In this case only the first line is given up, and the lines after it are read again.
    """
    csv.field_size_limit(LONGEST_FIELD)
    number = 1
    while True:
        lines, text = tee(text)
        table = csv.reader(lines, delimiter=delimiter, strict=True)
        try:
            yield number, next(table)
        except StopIteration:
            return
        except csv.Error:
            first = next(text)
            yield number, None if first.count('"') % 2 else next(csv.reader([first], delimiter=delimiter))
            number += 1
        else:
            text, number = lines, number + table.line_num


def _open(file: SourceFile) -> BinaryIO:
    """Open a file for reading its decompressed bytes."""
    stream = _stored(file.path)
    if not file.packed:
        return stream
    if file.packed == "gzip":  # reads a truncated file up to its end
        return gzip.GzipFile(fileobj=stream)  # pyright: ignore[reportReturnType]
    import pyarrow

    return io.BufferedReader(pyarrow.input_stream(stream, compression=file.packed))


def _stored(path: str) -> BinaryIO:
    """Open a file, local or on the Hub, for reading its stored bytes."""
    if not path.startswith(REMOTE):
        return Path(path).open("rb")
    import fsspec

    opened: Any = fsspec.open(path, "rb")
    return opened.open()
