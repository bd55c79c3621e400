"""Format of a state: a folder of flat tensors with one manifest.

A shard of a matrix need not be a rectangle of it. Every parameter and its optimizer states are therefore stored as
one-dimensional chunks, and shapes are stored separately. A folder ``step-00000120`` holds

* ``state-00003.safetensors``: the chunks of rank 3, named ``NAME@START``. Nothing in it can run code.
* ``tawpipe.json``, the manifest: shapes, the file of each chunk, size and SHA-256 of every file, values of the caller,
  and a SHA-256 of all this. It is written last.
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
"""Prefix of names of optimizer states: ``optimizer.KEY.PARAMETER``."""
SEAL = "sha256"
"""Key of the manifest's own checksum in it."""

Manifest = Mapping[str, Any]


# pieces


@dataclass(frozen=True)
class StatePiece:
    """Part of one saved tensor that lives on this rank.

    Args:
        name: name of the saved tensor.
        numel: elements of the whole saved tensor.
        start: first element of this part.
        value: the part, flat.
    """

    name: str
    numel: int
    start: int
    value: Tensor

    @property
    def key(self) -> str:
        """Name of the part in the file of its rank."""
        return f"{self.name}@{self.start}"


def state_pieces(
    storage: Storage,
    optimizers: UnitOptimizers,
    *,
    saving: bool,
    without: Collection[str] = (),
    states: States | None = None,
) -> Iterator[StatePiece]:
    """Yield views of all weights and optimizer states on this rank that belong to a state.

    Args:
        storage: homes of this rank.
        optimizers: optimizers of this rank.
        saving: leave out what another rank saves: further copies of a home, and one-element states (such as the step
            count) except on the rank with the parameter's first element.
        without: names of frozen parameters to leave out.
        states: optimizer states to use instead of the optimizers' own.
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
    """Return an optimizer state of a piece of a parameter as a ``StatePiece``.

    The state has the size of the piece, is one number for the whole parameter, or, for whole matrices, has any size,
    which is then equal for all matrices of the parameter.

    Raises:
        RunError: the state is not a tensor, or has another shape.
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
    """Read the file ``path`` that a rank has written, and return its manifest entry: size, SHA-256 and chunks."""
    chunks = [[piece.name, piece.numel, str(piece.value.dtype), piece.start, piece.value.numel()] for piece in pieces]
    return {"bytes": path.stat().st_size, "sha256": checksum(path), "chunks": chunks}


def manifest_of(notes: Sequence[Mapping[str, Any]], content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the manifest of a state, sealed with its own checksum.

    Args:
        notes: entries of the files of all ranks (``note_of``), in rank order.
        content: ``parameters`` (name to shape), ``step``, ``run``, ``optimizer``, ``groups`` (the rule that made its
            parameter groups, ``own`` for a factory of the user) and ``history``. If frozen weights are kept in 4 or 8
            bits also ``quantize``, their form. If they are left out also ``frozen``: their ``folder``, and in
            ``parameters`` the digest of each by name.
    """
    tensors: dict[str, Any] = {}
    for number, note in enumerate(notes):
        for name, numel, dtype, start, count in note["chunks"]:
            tensor = tensors.setdefault(name, {"numel": numel, "dtype": dtype, "chunks": []})
            tensor["chunks"].append([start, count, number])
    files = [{"bytes": note["bytes"], "sha256": note["sha256"]} for note in notes]
    return sealed({"format": FORMAT, **content, "tensors": tensors, "files": files})


def sealed(manifest: Manifest) -> dict[str, Any]:
    """Return a copy of ``manifest`` with its own SHA-256 under the key ``sha256``.

    ``read_manifest`` compares this checksum, and so detects a bit error on the disk."""
    return {**manifest, SEAL: _seal(manifest)}


def _seal(manifest: Manifest) -> str:
    """Return the SHA-256 of a manifest without its own checksum."""
    rest = {name: value for name, value in manifest.items() if name != SEAL}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the content of ``tawpipe.json`` in ``folder`` after checking its checksum and its structure.

    Raises:
        UserError: the file is missing, damaged or of another format.
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
    """Return a description of the first flaw in a manifest's structure, or ``""``."""
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
    """Return True if ``value`` is an integer (not a bool) and at least 0."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def damage(folder: Path, manifest: Manifest, numbers: Iterable[int]) -> str:
    """Return a description of the first damaged or unreadable file, or ``""`` if all files are sound.

    Every file is read completely, without the page cache. Its size and its SHA-256 are compared with the manifest.

    Args:
        folder: folder of the state.
        manifest: its manifest.
        numbers: ranks whose files are read.
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
    """Return the dtype in which the tensor ``name`` was saved."""
    return getattr(torch, manifest["tensors"][name]["dtype"].removeprefix("torch."))
