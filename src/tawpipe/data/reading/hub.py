"""Data sets of the Hub, or of a folder that ``datasets`` can load: downloaded, or streamed in parts."""

from __future__ import annotations

import glob
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tawpipe.data.chats.columns import SHOWS, Columns, RawRow
from tawpipe.data.reading.sources import HUB, REMOTE, SourceFile, source_file, stamps
from tawpipe.data.report import Skipped
from tawpipe.errors import UserError

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

NAME = re.compile(r"hf:(?P<path>[^:#]+)(:(?P<config>[^:\[\]#]+)(?=:))?(:(?P<split>[^:\[\]#]+(\[[^\]]*\])?))?")
"""hf:NAME, hf:NAME:SPLIT or hf:NAME:CONFIG:SPLIT."""

DECODED = re.compile(r"((List|LargeList|Sequence)\((feature=)?)?(Image|Audio|Video|Pdf)\(")
"""Features whose values ``datasets`` decodes."""
UNTYPED = {"csv", "tsv", "json", "jsonl"}
"""Formats read without ``datasets``, which would guess types: a number for ``007``, a date for a text."""
OF_ANY_SET = ("name", "version", "data_dir", "data_files", "description")
"""Fields of a data set's configuration that do not affect how its files are read."""

UNKNOWN_SIZE = 1 << 30
"""Assumed bytes of a streamed data set that does not report its size."""


def opened(files: Sequence[SourceFile], *, streaming: bool, setting: str) -> list[SourceFile]:
    """Return the files, with each Hub data set replaced by its files or parts; downloads them unless streaming.

    Args:
        files: files and Hub data sets.
        streaming: True to read during training.
        setting: setting that names the files, for errors.

    Raises:
        UserError: a data set does not exist, cannot be reached, or has no such configuration or split.
    """
    sources: list[SourceFile] = []
    for file in files:
        if file.format != "hub":
            sources.append(file)
            continue
        if by_split := _plain_files(file.path, streaming, setting):
            plain = list(chain.from_iterable(by_split.values()))
            if "[" in file.path:  # a slice of a split
                version = zlib.crc32(repr(stamps(plain)).encode())
                plain = [SourceFile(f"{file.path}#0/1", sum(each.size for each in plain), version)]
            sources += plain
            continue
        data = load(file.path, streaming, setting)
        info = data.info
        parts, size = (data.num_shards, info.dataset_size or UNKNOWN_SIZE) if streaming else (1, data.data.nbytes)
        version = zlib.crc32(f"{info.version} {info.dataset_size} {getattr(data, '_fingerprint', '')}".encode())
        mode = "~" if streaming else ""
        sources += [SourceFile(f"{file.path}#{mode}{part}/{parts}", size // parts, version) for part in range(parts)]
    return sources


def read_hub(
    file: SourceFile, columns: Columns, read: Callable[[SourceFile], Iterator[RawRow | Skipped]]
) -> Iterator[RawRow | Skipped]:
    """Yield the rows of a part of a Hub data set that ``opened`` has made.

    Args:
        file: the part.
        columns: meaning of columns.
        read: reads the rows of a plain file.

    Raises:
        UserError: the slice is not valid, or a column holds images, audio or video.
    """
    name, _, place = file.path.rpartition("#")
    streaming = place.startswith("~")
    part, parts = map(int, place.lstrip("~").split("/"))
    if by_split := _plain_files(name, streaming, "--data"):
        from datasets import ReadInstruction

        # A slice in percent needs the number of rows.
        rows = {split: [row for each in plain for row in read(each)] for split, plain in by_split.items()}
        try:
            instruction = ReadInstruction.from_spec(_parts(name, "--data")[2] or next(iter(rows)))
            spans = instruction.to_absolute({split: len(some) for split, some in rows.items()})
        except ValueError as error:
            raise UserError("--data", name, f"a slice that datasets takes ({error})") from error
        for span in spans:
            yield from rows[span.splitname][span.from_ : span.to]
        return
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


def _parts(name: str, setting: str) -> tuple[str, str | None, str | None]:
    """Return path, configuration and split of a name such as hf:NAME:CONFIG:SPLIT; None for missing ones.

    Raises:
        UserError: the name has another form, or names a folder that ``datasets`` cannot read.
    """
    parts = NAME.fullmatch(name)
    if parts is None:
        raise UserError(setting, name, "hf:NAME, hf:NAME:SPLIT or hf:NAME:CONFIG:SPLIT")
    path = parts["path"]
    if Path(path).is_dir() and glob.has_magic(folder := str(Path(path).resolve())):
        expected = f"no * ? [ in the folder's path, as datasets takes {folder} for a pattern"
        raise UserError(setting, name, f"{expected}; {setting} {path} reads it without {HUB}")
    return parts["path"], parts["config"], parts["split"]


@lru_cache(maxsize=16)
def _builder(path: str, config: str | None) -> Any:
    """Return the builder of ``datasets`` for a data set; None if ``load`` would refuse it.

    Without a connection, the downloaded data set is used.
    """
    import datasets
    from datasets.exceptions import DatasetsError
    from huggingface_hub import snapshot_download

    try:
        try:
            return datasets.load_dataset_builder(path, config)
        except ConnectionError:
            here = snapshot_download(path, repo_type="dataset", local_files_only=True)
            return datasets.load_dataset_builder(here, config)
    except (OSError, ValueError, DatasetsError):
        return None


def _plain_files(name: str, streaming: bool, setting: str) -> dict[str, list[SourceFile]]:
    """Return the files of each requested split if they hold text or JSON fields; empty for other data sets.

    ``datasets`` would guess the types of these fields. Files of the Hub are downloaded unless streamed.
    """
    path, config, split = _parts(name, setting)
    options = getattr(_builder(path, config), "config", None)
    if options is None:
        return {}
    by_split = {str(key): list(files) for key, files in (options.data_files or {}).items()}
    usual = "train" if len(by_split) > 1 else "".join(by_split)
    asked = [part.partition("[")[0].strip() for part in (split or usual).split("+")]
    asked = [*by_split] if asked == ["all"] else asked
    if not by_split.keys() >= {*asked}:  # `load` raises the error
        return {}
    names = [file for part in asked for file in by_split[part]]
    if streaming and "[" in (split or "") and any(file.startswith(REMOTE) for file in names):
        return {}
    formats = {SourceFile(file, 0, 0).format for file in names}
    default = {**vars(type(options)()), **{key: getattr(options, key) for key in OF_ANY_SET}}
    if formats == {"tsv"}:
        default["sep"] = "\t"
    if not formats or not formats <= UNTYPED or vars(options) != default:
        return {}
    return {part: [_file_of_set(file, streaming) for file in by_split[part]] for part in asked}


def _file_of_set(name: str, streaming: bool) -> SourceFile:
    """Return the source file for a file of a data set; downloads a file of the Hub unless streaming."""
    if not name.startswith(REMOTE):
        return source_file(Path(name))
    from huggingface_hub import HfFileSystem, hf_hub_download

    system = HfFileSystem()
    if streaming:
        return SourceFile(name, system.info(name)["size"], 0)
    at: Any = system.resolve_path(name)
    local = hf_hub_download(at.repo_id, at.path_in_repo, repo_type="dataset", revision=at.revision)
    return source_file(Path(local))


@lru_cache(maxsize=16)
def load(name: str, streaming: bool, setting: str) -> Any:
    """Load one split of a data set with ``datasets`` and return it; the last 16 results are cached.

    A name without a split stands for the split ``train``, or for the only one. All fields of a CSV data set are loaded
    as text.

    Args:
        name: hf:NAME, hf:NAME:SPLIT or hf:NAME:CONFIG:SPLIT.
        streaming: True to read rows later instead of downloading the data set.
        setting: setting that names the data set, for errors.

    Raises:
        UserError: the data set does not exist, cannot be reached, or has no such configuration or split; or a slice of
            a split is to be streamed.
    """
    import datasets
    from datasets.exceptions import DatasetsError

    path, config, split = _parts(name, setting)
    if streaming and split and "[" in split:
        raise UserError(setting, name, "a whole split with --streaming, without [...]")
    try:
        loaded: Dataset | IterableDataset | dict = datasets.load_dataset(path, config, split=split, streaming=streaming)
        if type(getattr(_builder(path, config), "config", None)).__name__ == "CsvConfig":
            # A CSV set with its own options is loaded again with all fields as text.
            names = list(next(iter(_first(loaded)), {}))
            texts = datasets.Features(dict.fromkeys(names, datasets.Value("string")))
            unguessed = {"features": texts, "keep_default_na": False, "na_filter": False}
            loaded = datasets.load_dataset(path, config, split=split, streaming=streaming, **unguessed)
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
    if isinstance(loaded, dict) and split is None and len(loaded) > 1 and "train" not in loaded:
        raise UserError(setting, name, f"{name}:SPLIT with one of its splits: {', '.join(map(str, loaded))}")
    return _first(loaded)


def _first(loaded: Any) -> Any:
    """Return ``loaded`` if it is one split; from several splits return ``train``, or else the first one."""
    if not isinstance(loaded, dict):
        return loaded
    return loaded["train"] if "train" in loaded else next(iter(loaded.values()))
