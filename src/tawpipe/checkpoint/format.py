"""The format of a state: a folder of flat tensors with one manifest.

A stripe of a matrix is no rectangle of it, so every parameter and every optimizer state of it is kept as
one-dimensional chunks; shapes stand beside them. A folder ``step-00000120`` holds

* ``state-00003.safetensors``: the chunks of rank 3, called ``NAME@START``. Nothing in it can run code.
* ``tawpipe.json``, the manifest: shapes, which chunk is in which file, size and SHA-256 of every file, what the caller
  adds, and the SHA-256 of all that. It is written last.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tawpipe.checkpoint.names import MARKER, file_name, is_complete
from tawpipe.errors import RunError, UserError
from tawpipe.files import checksum
from tawpipe.runtime.homes.storage import HomePiece, Storage
from tawpipe.runtime.homes.unit_optimizers import States, UnitOptimizers

FORMAT = 2
STATE = "optimizer."
"""Before the names of the optimizer's state: ``optimizer.KEY.PARAMETER``."""
SEAL = "sha256"
"""Name of a manifest's own checksum in it."""

Manifest = Mapping[str, Any]


# pieces


@dataclass(frozen=True)
class StatePiece:
    """A part of one saved tensor that lives on this rank: elements ``start`` and on of ``numel``."""

    name: str
    numel: int
    start: int
    value: Tensor

    @property
    def key(self) -> str:
        """Its name in the rank's file."""
        return f"{self.name}@{self.start}"


def state_pieces(
    storage: Storage,
    optimizers: UnitOptimizers,
    *,
    saving: bool,
    without: Collection[str] = (),
    states: States | None = None,
) -> Iterator[StatePiece]:
    """Everything on this rank that a state holds, as views.

    Args:
        saving: leave out what another rank saves: further copies of a home, and the one-element states (the step count)
            of a parameter but where its first element lives.
        without: names of frozen parameters that are left out.
        states: instead of those that the optimizers hold.
    """
    if states is None:
        states = optimizers.states()
    for unit, pieces in storage.pieces.items():
        if saving and not storage.is_first_copy(unit):
            continue
        for piece in pieces:
            if piece.name in without:
                continue
            yield StatePiece(f"model.{piece.name}", piece.numel, piece.start, piece.value.detach())
        of_unit = optimizers.pieces.get(unit, ())
        for piece, state in zip(of_unit, states.get(unit) or [{}] * len(of_unit), strict=True):
            for key, value in state.items():
                if (state_piece := _state_piece(piece, key, value)).numel > 1 or not saving or piece.start == 0:
                    yield state_piece


def _state_piece(piece: HomePiece, key: str, value: Any) -> StatePiece:
    """An optimizer's state of a piece: as large as it, one number for all of its parameter, or, of a whole matrix, of
    any size, which follows that of the matrix before it.
    """
    name = f"{STATE}{key}.{piece.name}"
    if not isinstance(value, Tensor):
        raise RunError(f"the optimizer's state {key!r} is a {type(value).__name__}; only tensors can be saved")
    if value.ndim == 0 or (value.numel() == 1 and piece.numel > 1):
        return StatePiece(name, 1, 0, value.view(1))
    if value.numel() == piece.value.numel() and value.is_contiguous() and value.ndim == piece.value.ndim:
        return StatePiece(name, piece.numel, piece.start, value.view(-1))
    matrices, rest = divmod(piece.numel, piece.value.numel())
    if piece.value.ndim < 2 or rest or not value.is_contiguous():
        raise RunError(f"the optimizer's state {key!r} of {piece.name} has the shape {tuple(value.shape)}")
    number = piece.start // piece.value.numel()
    return StatePiece(name, matrices * value.numel(), number * value.numel(), value.view(-1))


# the manifest


def note_of(path: Path, pieces: Iterable[StatePiece]) -> dict[str, Any]:
    """Entry for the manifest of the file that a rank has written: size, checksum, chunks."""
    chunks = [[piece.name, piece.numel, str(piece.value.dtype), piece.start, piece.value.numel()] for piece in pieces]
    return {"bytes": path.stat().st_size, "sha256": checksum(path), "chunks": chunks}


def manifest_of(notes: Sequence[Mapping[str, Any]], content: Mapping[str, Any]) -> dict[str, Any]:
    """The manifest of a state.

    Args:
        notes: of all ranks, in their order.
        content: ``parameters`` (name to shape), ``step``, ``run``, ``optimizer``, ``groups`` (the rule that made the
            optimizer's, ``own`` for a factory of the user's), ``history``, where frozen weights are kept in 4 or 8
            bits ``quantize``, their form, and where they are left out ``frozen``: their ``folder``, and ``parameters``,
            the digest of each by name.
    """
    tensors: dict[str, Any] = {}
    for number, note in enumerate(notes):
        for name, numel, dtype, start, count in note["chunks"]:
            tensor = tensors.setdefault(name, {"numel": numel, "dtype": dtype, "chunks": []})
            tensor["chunks"].append([start, count, number])
    files = [{"bytes": note["bytes"], "sha256": note["sha256"]} for note in notes]
    return sealed({"format": FORMAT, **content, "tensors": tensors, "files": files})


def sealed(manifest: Manifest) -> dict[str, Any]:
    """A manifest with its own checksum, so that a digit that turns over on the disk is no other manifest."""
    return {**manifest, SEAL: _seal(manifest)}


def _seal(manifest: Manifest) -> str:
    rest = {name: value for name, value in manifest.items() if name != SEAL}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def read_manifest(folder: Path) -> dict[str, Any]:
    """The content of ``tawpipe.json``.

    Raises:
        UserError: there is none, it is damaged or of another format.
    """
    if not is_complete(folder):
        raise UserError("where", str(folder), f"the folder of a complete checkpoint (it holds no {MARKER})")
    try:
        manifest = json.loads((folder / MARKER).read_text(encoding="utf-8"))
        version = manifest["format"]
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise UserError("where", str(folder), f"a readable {MARKER} ({error!r})") from error
    if version != FORMAT:
        raise UserError("where", str(folder), f"format {FORMAT}, not {version!r}")
    if manifest.get(SEAL) != _seal(manifest):
        raise UserError("where", str(folder), f"the checksum of {MARKER} differs; expected a sound one")
    if problem := _malformed(manifest):
        raise UserError("where", str(folder), f"a sound {MARKER} ({problem})")
    return manifest


def _malformed(manifest: Manifest) -> str:
    """The flaw of a manifest of the right format, in words; empty if there is none."""
    for name, kind in (("parameters", dict), ("tensors", dict), ("files", list)):
        if not isinstance(manifest.get(name), kind):
            return f"{name} is missing"
    if not _whole(manifest.get("step")):
        return f"step is {manifest.get('step')!r}"
    frozen = manifest.get("frozen", {"folder": "", "parameters": {}})
    for name, kind in (("folder", str), ("parameters", dict)):
        if not isinstance(frozen, dict) or not isinstance(frozen.get(name), kind):
            return f"the {name} of frozen weights"
    files = manifest["files"]
    for entry in files:
        if not isinstance(entry, dict) or not isinstance(entry.get("sha256"), str) or not _whole(entry.get("bytes")):
            return f"{entry!r} among the files"
    for name, shape in manifest["parameters"].items():
        if not isinstance(shape, list) or not all(map(_whole, shape)):
            return f"the shape of {name}"
    for name, tensor in manifest["tensors"].items():
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


def damage(folder: Path, manifest: Manifest, numbers: Iterable[int]) -> str:
    """The first damage in some of a folder's files, in words; empty if there is none.

    Args:
        numbers: of the files that are read.
    """
    for number in numbers:
        path, expected = folder / file_name(number), manifest["files"][number]
        try:
            if (size := path.stat().st_size) != expected["bytes"]:
                return f"{path.name} has {size} bytes instead of {expected['bytes']}"
            if checksum(path, uncached=True) != expected["sha256"]:
                return f"the checksum of {path.name} differs"
        except OSError as error:
            return f"{path.name}: {error.strerror or error}"
    return ""


def saved_dtype(manifest: Manifest, name: str) -> torch.dtype:
    """Return the dtype of a tensor of the state."""
    return getattr(torch, manifest["tensors"][name]["dtype"].removeprefix("torch."))
