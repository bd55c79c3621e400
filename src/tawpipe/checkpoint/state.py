"""State on disk: weights and optimizer state under parameter names, readable by any number of processes.

Imports runtime (storage, optimizer). A stripe of a matrix is no rectangle of it, so every
parameter and every state of it is kept as one-dimensional chunks; shapes stand beside them. A folder holds

* ``state-00003.safetensors``: the chunks of rank 3, called ``NAME@START``. Nothing in it can run code.
* ``tawpipe.json``: shapes, which chunk is in which file, size and SHA-256 of every file, what the caller adds, and the
  SHA-256 of all that.

It is complete when it has its final name and holds ``tawpipe.json``, which is written last (see ``saving``). What goes
on from one is ``loading``.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tawpipe.errors import RunError, UserError
from tawpipe.runtime.optimizer import States, UnitOptimizers
from tawpipe.runtime.storage import Storage

FORMAT = 2
MARKER = "tawpipe.json"
PARTIAL = ".incomplete"
STATE = "optimizer."
"""Before the names of the optimizer's state: ``optimizer.KEY.PARAMETER``."""
SEAL = "sha256"
"""Name of a record's own checksum in it."""


@dataclass(frozen=True)
class StatePiece:
    """A part of one saved tensor that lives on this rank: elements ``start`` and on of ``numel``."""

    name: str
    numel: int
    start: int
    value: Tensor

    @property
    def key(self) -> str:
        """In the rank's file."""
        return f"{self.name}@{self.start}"


def state_pieces(
    storage: Storage, optimizers: UnitOptimizers, *, saving: bool, states: States | None = None
) -> Iterator[StatePiece]:
    """Everything on this rank that a checkpoint holds, as views.

    Args:
        saving: leave out what another rank saves: further copies of a home, and the one-element states (the step count)
            of a parameter but where its first element lives.
        states: instead of those that the optimizers hold.
    """
    if states is None:
        states = optimizers.states()
    for unit, pieces in storage.pieces.items():
        if saving and not storage.is_first_copy(unit):
            continue
        for piece, state in zip(pieces, states.get(unit) or [{}] * len(pieces), strict=True):
            yield StatePiece(f"model.{piece.name}", piece.numel, piece.start, piece.value.detach())
            for key, value in state.items():
                name = f"{STATE}{key}.{piece.name}"
                if not isinstance(value, Tensor):
                    raise RunError(
                        f"the optimizer's state {key!r} is a {type(value).__name__}; only tensors can be saved"
                    )
                if value.numel() == piece.value.numel() and value.ndim == 1:
                    yield StatePiece(name, piece.numel, piece.start, value)
                elif value.numel() == 1:
                    if not saving or piece.start == 0:
                        yield StatePiece(name, 1, 0, value.view(1))
                else:
                    raise RunError(f"the optimizer's state {key!r} of {piece.name} has the shape {tuple(value.shape)}")


def chunks_of(pieces: Sequence[StatePiece]) -> list[list[Any]]:
    """What a rank tells of the chunks in its file."""
    return [[one.name, one.numel, str(one.value.dtype), one.start, one.value.numel()] for one in pieces]


def tensors_of(files: Sequence[Sequence[Sequence[Any]]]) -> dict[str, Any]:
    """The record's tensors, from what is told of every file."""
    tensors: dict[str, Any] = {}
    for number, chunks in enumerate(files):
        for name, numel, dtype, start, count in chunks:
            tensor = tensors.setdefault(name, {"numel": numel, "dtype": dtype, "chunks": []})
            tensor["chunks"].append([start, count, number])
    return tensors


def saved_dtype(record: Mapping[str, Any], name: str, otherwise: torch.dtype) -> torch.dtype:
    """Of a tensor in a record; ``otherwise`` in one of an earlier version, which did not say."""
    found = getattr(torch, str(record["tensors"][name].get("dtype")).removeprefix("torch."), None)
    return found if isinstance(found, torch.dtype) else otherwise


def file_name(number: int) -> str:
    """Of the chunks of rank ``number`` of those that saved."""
    return f"state-{number:05}.safetensors"


def sealed(record: Mapping[str, Any]) -> dict[str, Any]:
    """A record with its own checksum, so that a digit that turns over on the disk is no other record."""
    return {**record, SEAL: _seal(record)}


def _seal(record: Mapping[str, Any]) -> str:
    rest = {name: value for name, value in record.items() if name != SEAL}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def is_complete(folder: Path) -> bool:
    """Whether a folder holds state that was written to its end."""
    return folder.suffix != PARTIAL and (folder / MARKER).is_file()


def read_record(folder: Path) -> dict[str, Any]:
    """What ``tawpipe.json`` holds.

    Raises:
        UserError: there is none, it is damaged or of another format.
    """
    if not is_complete(folder):
        raise UserError("--resume", str(folder), f"the folder of a complete checkpoint, which holds a {MARKER}")
    try:
        record = json.loads((folder / MARKER).read_text(encoding="utf-8"))
        found = record["format"]
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise UserError("--resume", str(folder), f"a readable {MARKER} ({error!r})") from error
    if found != FORMAT:
        raise UserError("--resume", str(folder), f"format {FORMAT}, not {found!r}")
    if record.get(SEAL) != _seal(record):
        raise UserError("--resume", str(folder), f"a sound {MARKER} (its checksum is another one)")
    if problem := _malformed(record):
        raise UserError("--resume", str(folder), f"a sound {MARKER} ({problem})")
    return record


def _malformed(record: Mapping[str, Any]) -> str:
    """What is wrong with a record of the right format, or nothing."""
    for name, kind in (("parameters", dict), ("tensors", dict), ("files", list)):
        if not isinstance(record.get(name), kind):
            return f"{name} is not there"
    if not _whole(record.get("step")):
        return f"step is {record.get('step')!r}"
    files = record["files"]
    for entry in files:
        if not isinstance(entry, dict) or not isinstance(entry.get("sha256"), str) or not _whole(entry.get("bytes")):
            return f"{entry!r} among the files"
    for name, shape in record["parameters"].items():
        if not isinstance(shape, list) or not all(map(_whole, shape)):
            return f"the shape of {name}"
    for name, tensor in record["tensors"].items():
        if (
            not isinstance(tensor, dict)
            or not _whole(tensor.get("numel"))
            or not isinstance(tensor.get("chunks"), list)
        ):
            return f"the tensor {name}"
        for chunk in tensor["chunks"]:
            if not isinstance(chunk, list) or len(chunk) != 3 or not all(map(_whole, chunk)) or chunk[2] >= len(files):
                return f"the chunks of {name}"
    return ""


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def damaged(folder: Path, record: Mapping[str, Any], numbers: Sequence[int]) -> str:
    """What is wrong with some of a folder's files, or nothing.

    Args:
        numbers: of the files that are read.
    """
    for number in numbers:
        path, expected = folder / file_name(number), record["files"][number]
        try:
            size = path.stat().st_size
            if size != expected["bytes"]:
                return f"{path.name} has {size} bytes instead of {expected['bytes']}"
            if checksum(path) != expected["sha256"]:
                return f"the checksum of {path.name} is another one"
        except OSError as error:
            return f"{path.name}: {error.strerror or error}"
    return ""


def checksum(path: Path) -> str:
    """SHA-256 of a file, as ``sha256sum`` prints it."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def first(problems: Sequence[str]) -> str:
    """The first that is not empty, if any."""
    return next((one for one in problems if one), "")
