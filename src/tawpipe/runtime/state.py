"""State on disk: weights and optimizer state under parameter names, readable by any number of processes.

Imports runtime (storage, optimizer, world) and safetensors. A stripe of a matrix is no rectangle of it, so every
parameter and every state of it is kept as one-dimensional chunks; shapes stand beside them. A folder holds

* ``state-00003.safetensors``: the chunks of rank 3, called ``NAME@START``. Nothing in it can run code.
* ``tawpipe.json``: shapes, which chunk is in which file, size and SHA-256 of every file, what the caller adds, and the
  SHA-256 of all that.

It is complete when it has its final name and holds ``tawpipe.json``, which is written last (see ``saving``).
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from tawpipe.errors import RunError, UserError
from tawpipe.runtime.optimizer import UnitOptimizers
from tawpipe.runtime.storage import Storage
from tawpipe.runtime.world import World

FORMAT = 2
MARKER = "tawpipe.json"
PARTIAL = ".incomplete"
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


def state_pieces(storage: Storage, optimizers: UnitOptimizers, *, saving: bool) -> Iterator[StatePiece]:
    """Everything on this rank that a checkpoint holds, as views.

    Args:
        saving: leave out what another rank saves: further copies of a home, and the one-element states (the step count)
            of a parameter but where its first element lives.
    """
    for unit, pieces in storage.pieces.items():
        if saving and not storage.is_first_copy(unit):
            continue
        optimizer = optimizers.optimizers.get(unit)
        for piece in pieces:
            yield StatePiece(f"model.{piece.name}", piece.numel, piece.start, piece.value.detach())
            if optimizer is None:
                continue
            for key, value in optimizer.state[piece.value].items():
                name = f"optimizer.{key}.{piece.name}"
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


def load_state(folder: Path, storage: Storage, optimizers: UnitOptimizers, world: World) -> dict[str, Any]:
    """Bring homes and optimizer state to what a folder holds, and return its record; call on all ranks.

    Raises:
        UserError: it is of another model or optimizer, or damaged; on all ranks.
    """
    record = read_record(folder)
    own = {slot.name: list(slot.shape) for unit in storage.units for slot in unit.slots}
    check_same_model(folder, record["parameters"], own)
    optimizers.create_state()
    problem = ""
    try:
        _read(folder, record, list(state_pieces(storage, optimizers, saving=False)))
    except (OSError, SafetensorError, RunError) as error:
        problem = f"{type(error).__name__}: {error}"
    found = [one for one in world.gather_texts(problem) if one]
    if found:
        raise UserError("--resume", str(folder), f"a readable checkpoint of this model and optimizer ({found[0]})")
    for unit in storage.master:
        storage.refresh(unit)
    return record


def _read(folder: Path, record: Mapping[str, Any], pieces: Sequence[StatePiece]) -> None:
    """Fill the pieces from the chunks that they overlap."""
    with ExitStack() as stack:
        files: dict[int, Any] = {}
        for piece in pieces:
            saved = record["tensors"].get(piece.name)
            if saved is None:
                raise RunError(f"{piece.name} is not in it")
            if saved["numel"] != piece.numel:
                raise RunError(f"{piece.name} has {saved['numel']} elements in it and {piece.numel} here")
            chunks = sorted(saved["chunks"])
            at, end = piece.start, piece.start + piece.value.numel()
            while at < end:
                place = bisect_right([chunk[0] for chunk in chunks], at) - 1
                start, count, number = chunks[place] if place >= 0 else (0, 0, 0)
                if not start <= at < start + count:
                    raise RunError(f"{piece.name} lacks its element {at}")
                if number not in files:
                    path = str(folder / file_name(number))
                    files[number] = stack.enter_context(safe_open(path, framework="pt"))
                stop = min(end, start + count)
                part = files[number].get_slice(f"{piece.name}@{start}")[at - start : stop - start]
                piece.value[at - piece.start : stop - piece.start].copy_(part)
                at = stop


def check_same_model(folder: Path, saved: Mapping[str, list[int]], own: Mapping[str, list[int]]) -> None:
    """Raises UserError naming the first parameter in which two models differ."""
    for name in sorted(saved.keys() | own.keys()):
        if saved.get(name) != own.get(name):
            has = f"has {name} of shape {saved[name]}" if name in saved else f"has no {name}"
            wants = f"of shape {own[name]}" if name in own else "not there"
            expected = f"a checkpoint of this model; it {has}, which is {wants} in --model"
            raise UserError("--resume", str(folder), expected)
