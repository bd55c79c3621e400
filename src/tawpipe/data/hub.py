"""Data sets of the Hub, or of a folder that ``datasets`` can load: downloaded, or streamed part by part."""

from __future__ import annotations

import glob
import re
import zlib
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tawpipe.data.columns import SHOWS, Columns, RawRow
from tawpipe.data.report import Skipped
from tawpipe.data.sources import HUB, SourceFile
from tawpipe.errors import UserError

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

NAME = re.compile(r"hf:(?P<path>[^:#]+)(:(?P<config>[^:\[\]#]+)(?=:))?(:(?P<split>[^:\[\]#]+(\[[^\]]*\])?))?")
"""hf:NAME, hf:NAME:SPLIT or hf:NAME:CONFIG:SPLIT."""

DECODED = re.compile(r"((List|LargeList|Sequence)\((feature=)?)?(Image|Audio|Video|Pdf)\(")
"""Features whose values ``datasets`` decodes."""

UNKNOWN_SIZE = 1 << 30
"""Bytes that a streamed data set is taken to have where it does not say so."""


def opened(files: Sequence[SourceFile], *, streaming: bool, setting: str) -> list[SourceFile]:
    """The files, where those that are data sets of the Hub are parts of a known size, downloaded unless streamed.

    Raises:
        UserError: a data set that is not there, cannot be reached or has no such configuration or split.
    """
    sources: list[SourceFile] = []
    for file in files:
        if file.format != "hub":
            sources.append(file)
            continue
        data = load(file.path, streaming, setting)
        if streaming:
            parts, size = data.num_shards, data.info.dataset_size or UNKNOWN_SIZE
        else:
            parts, size = 1, data.data.nbytes
        version = zlib.crc32(
            f"{data.info.version} {data.info.dataset_size} {getattr(data, '_fingerprint', '')}".encode()
        )
        mode = "~" if streaming else ""
        sources += [SourceFile(f"{file.path}#{mode}{part}/{parts}", size // parts, version) for part in range(parts)]
    return sources


def read_hub(file: SourceFile, columns: Columns) -> Iterator[RawRow | Skipped]:
    """The rows of a part that ``opened`` has made."""
    name, _, place = file.path.rpartition("#")
    streaming = place.startswith("~")
    part, parts = map(int, place.lstrip("~").split("/"))
    data = load(name, streaming, "--data")
    names, others = data.column_names, ()
    if names is not None:
        wanted = columns.wanted(name, names)
        if isinstance(wanted, Skipped):
            yield wanted
            return
        data, others = data.select_columns(wanted[0]), wanted[1]
        shown = [column for column, kind in (data.features or {}).items() if DECODED.match(repr(kind))]
        if shown:  # reading a row would decode them
            raise columns.untrainable(f"{name}, {shown[0]}: {data.features[shown[0]]}", names, shown, SHOWS)
    where = name
    if streaming and parts > 1:
        data, where = data.shard(parts, part), f"{name}, part {part + 1} of {parts}"
    for number, item in enumerate(data, 1):
        yield columns.table_row(f"{where}, row {number}", item, others)


@lru_cache(maxsize=16)
def load(name: str, streaming: bool, setting: str) -> Any:
    """One split of a data set.

    Raises:
        UserError: see ``opened``.
    """
    import datasets
    from datasets.exceptions import DatasetsError

    parts = NAME.fullmatch(name)
    if parts is None:
        raise UserError(setting, name, "hf:NAME, hf:NAME:SPLIT or hf:NAME:CONFIG:SPLIT")
    path, config, split = parts["path"], parts["config"], parts["split"]
    if Path(path).is_dir() and glob.has_magic(folder := str(Path(path).resolve())):
        expected = f"no * ? [ in the folder's path, as datasets takes {folder} for a pattern"
        raise UserError(setting, name, f"{expected}; {setting} {path} reads it without {HUB}")
    if streaming and split and "[" in split:
        raise UserError(setting, name, "a whole split with --streaming, without [...]")
    try:
        loaded: Dataset | IterableDataset | dict = datasets.load_dataset(path, config, split=split, streaming=streaming)
    except (OSError, ValueError, DatasetsError) as error:
        reason = " ".join(str(error).split()).rstrip(".")
        hint = ""
        if "gated" in reason:
            hint = "; ask for access on its page, then log in with `hf auth login`"
        elif isinstance(error, ConnectionError):
            hint = "; what was downloaded before is found without a connection, under the same name"
        elif "config" in reason.lower():
            hint = f"; {HUB}{path}:CONFIG:SPLIT names one"
        raise UserError(setting, name, f"a data set that can be loaded ({reason}{hint})") from error
    if isinstance(loaded, dict):
        if split is None and len(loaded) > 1 and "train" not in loaded:
            raise UserError(setting, name, f"{name}:SPLIT with one of its splits: {', '.join(loaded)}")
        return loaded["train"] if "train" in loaded else next(iter(loaded.values()))
    return loaded
