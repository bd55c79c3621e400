"""Loading state: everything that can be checked is checked on all ranks before anything here changes. Imports runtime
(state, storage, optimizer, world) and safetensors.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from tawpipe.checkpoint.state import SEAL, STATE, StatePiece, file_name, first, read_record, saved_dtype, state_pieces
from tawpipe.errors import RunError, UserError
from tawpipe.runtime.optimizer import States, UnitOptimizers
from tawpipe.runtime.storage import Storage
from tawpipe.runtime.world import World


@dataclass(frozen=True)
class Incoming:
    """What a load will fill, found out and checked before anything has changed here.

    Args:
        pieces: the targets; their names and places, for what they hold may be replaced by ``begin``.
        states: for the optimizers, to be filled.
        wide: frozen units whose values come in a dtype that the compute dtype would round.
    """

    storage: Storage
    optimizers: UnitOptimizers
    pieces: tuple[StatePiece, ...]
    states: States
    wide: tuple[int, ...]

    @classmethod
    def of(cls, where: str, record: Mapping[str, Any], storage: Storage, optimizers: UnitOptimizers) -> Incoming:
        """Raises UserError or RunError naming what in a record is not as it is here."""
        own = {slot.name: list(slot.shape) for unit in storage.units for slot in unit.slots}
        check_same_model(where, record["parameters"], own)
        tensors = record["tensors"]
        # One saved before any update: the optimizers are new then, as they were there.
        fresh = record.get("optimizer") == optimizers.name and not any(name.startswith(STATE) for name in tensors)
        states = {} if fresh else optimizers.full_states()
        pieces = tuple(state_pieces(storage, optimizers, saving=False, states=states))
        names = {piece.name: piece for piece in pieces}
        trained = {piece.name for found in optimizers.pieces.values() for piece in found}
        surplus = [one for one in tensors if one.startswith(STATE) and one.split(".", 2)[-1] in trained]
        whose = f"saved with {record['optimizer']}, here it is {optimizers.name}" if "optimizer" in record else ""
        for name in [*names, *surplus]:
            if name not in tensors or name not in names:
                problem = f"{name} is not in it" if name in names else f"it has {name}, which is not here"
                raise RunError(problem + (f"; it was {whose}" if whose and name.startswith(STATE) else ""))
        for piece in pieces:
            if tensors[piece.name]["numel"] != piece.numel:
                raise RunError(f"{piece.name} has {tensors[piece.name]['numel']} elements in it, {piece.numel} here")
        compute = storage.compute_dtype
        wide = [
            unit
            for unit in storage.pieces
            for slot in storage.units[unit].slots[:1]
            if not storage.units[unit].trainable
            and torch.promote_types(saved_dtype(record, f"model.{slot.name}", compute), compute) != compute
        ]
        return cls(storage, optimizers, pieces, states, tuple(wide))

    def begin(self) -> list[StatePiece]:
        """From here on the state changes; where to."""
        for unit in self.wide:
            self.storage.widen(unit)
        self.optimizers.adopt(self.states)
        return list(state_pieces(self.storage, self.optimizers, saving=False))

    def end(self, world: World) -> None:
        """When all has been filled in, on all ranks."""
        for unit in self.storage.master:
            self.storage.refresh(unit)
        self.storage.settle(world.group)


def load_state(folder: Path, storage: Storage, optimizers: UnitOptimizers, world: World) -> dict[str, Any]:
    """Bring homes and optimizer state to what a folder holds, and return its record; call on all ranks.

    Raises:
        UserError: it is of another model or optimizer, or damaged; on all ranks, and nothing has changed.
        RunError: reading broke off on some rank; on all ranks, which hold half of a state.
    """
    with ExitStack() as stack:
        record, seal, incoming, files = {}, "", None, {}
        try:
            record = read_record(folder)
            seal = record[SEAL]
            incoming = Incoming.of(str(folder), record, storage, optimizers)
            files = _open(folder, record, incoming.pieces, stack)
            problem = ""
        except UserError as error:
            problem = error.expected
        except Exception as error:  # whatever it is, this rank goes on to tell the others
            problem = f"a readable checkpoint of this model and optimizer ({_words(error)})"
        if found := first(world.gather_texts(problem)):
            raise UserError("--resume", str(folder), found)
        if len(set(world.gather_texts(seal))) > 1:
            raise UserError("--resume", str(folder), "the same checkpoint on all machines")
        assert incoming is not None
        try:
            for piece in incoming.begin():
                for number, start, begin, end in parts_of(record, piece):
                    part = files[number].get_slice(f"{piece.name}@{start}")[begin - start : end - start]
                    piece.value[begin - piece.start : end - piece.start].copy_(part)
        except Exception as error:
            problem = _words(error)
    if found := first(world.gather_texts(problem)):
        raise RunError(f"{folder} could not be read to its end ({found})")
    incoming.end(world)
    return record


def _words(error: Exception) -> str:
    return str(error) if isinstance(error, RunError) else f"{type(error).__name__}: {error}"


def parts_of(record: Mapping[str, Any], piece: StatePiece) -> Iterator[tuple[int, int, int, int]]:
    """From which chunks a piece is filled: number of the file, start of the chunk, begin and end of what is taken.

    Raises:
        RunError: no chunk has some element.
    """
    chunks = sorted(record["tensors"][piece.name]["chunks"])
    starts = [chunk[0] for chunk in chunks]
    at, end = piece.start, piece.start + piece.value.numel()
    while at < end:
        place = bisect_right(starts, at) - 1
        start, count, number = chunks[place] if place >= 0 else (0, 0, 0)
        if not start <= at < start + count:
            raise RunError(f"{piece.name} lacks its element {at}")
        stop = min(end, start + count)
        yield number, start, at, stop
        at = stop


def _open(folder: Path, record: Mapping[str, Any], pieces: Sequence[StatePiece], stack: ExitStack) -> dict[int, Any]:
    """The files that the pieces need, by number, open and with the chunks that the record says."""
    counts = {(name, start): count for name, one in record["tensors"].items() for start, count, _ in one["chunks"]}
    files: dict[int, Any] = {}
    for piece in pieces:
        for number, start, _, _ in parts_of(record, piece):
            if number not in files:
                files[number] = stack.enter_context(open_file(folder, record, number))
            shape = files[number].get_slice(f"{piece.name}@{start}").get_shape()
            if shape != [counts[piece.name, start]]:
                raise RunError(f"{piece.name}@{start} has the shape {shape} in {file_name(number)}")
    return files


def open_file(folder: Path, record: Mapping[str, Any], number: int) -> Any:
    """A file of a folder, whose size and header are sound.

    Raises:
        OSError, SafetensorError, RunError: it is not there or another one.
    """
    path, expected = folder / file_name(number), record["files"][number]["bytes"]
    if (size := path.stat().st_size) != expected:
        raise RunError(f"{path.name} has {size} bytes instead of {expected}")
    return safe_open(str(path), framework="pt")


def check_same_model(where: str, saved: Mapping[str, list[int]], own: Mapping[str, list[int]]) -> None:
    """Raises UserError naming the first parameter in which two models differ."""
    for name in sorted(saved.keys() | own.keys()):
        if saved.get(name) != own.get(name):
            has = f"has {name} of shape {saved[name]}" if name in saved else f"has no {name}"
            wants = f"of shape {own[name]}" if name in own else "not there"
            expected = f"a checkpoint of this model; it {has}, which is {wants} in --model"
            raise UserError("--resume", where, expected)
