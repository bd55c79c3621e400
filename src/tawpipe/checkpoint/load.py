"""Loading a state: everything that can be checked is checked on all ranks before anything here changes.

A rank reads the files that it sees; one that does not see a file is sent what it needs by one that does.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open

from tawpipe.checkpoint.format import SEAL, STATE, Manifest, StatePiece, read_manifest, saved_dtype, state_pieces
from tawpipe.checkpoint.frozen import digests_in, refuse_other_frozen
from tawpipe.checkpoint.names import file_name
from tawpipe.errors import RunError, UserError
from tawpipe.model.bits.quantized import NONE
from tawpipe.runtime.homes.optimizer import SHAPES
from tawpipe.runtime.homes.storage import Storage
from tawpipe.runtime.homes.unit_optimizers import States, UnitOptimizers, in_other_groups
from tawpipe.runtime.world import World


@dataclass(frozen=True)
class Source:
    """A whole state that all ranks can go on from together.

    Args:
        where: its folder or folders, for messages.
        folders: of every file, the ranks that see it, and the folder where they do.
    """

    where: Path
    manifest: Manifest
    folders: tuple[Mapping[int, str], ...]

    @classmethod
    def on_disk(cls, folder: Path, world: World) -> Source:
        """The state in a folder that all ranks see.

        Raises:
            UserError: there is none, or its manifest is damaged.
        """
        manifest = read_manifest(folder)
        everyone = dict.fromkeys(range(world.size), str(folder))
        return cls(folder, manifest, (everyone,) * len(manifest["files"]))

    @property
    def step(self) -> int:
        return self.manifest["step"]

    def reader(self, number: int, rank: int) -> int:
        """The rank that reads a file for a rank."""
        seers = self.folders[number]
        return rank if rank in seers else sorted(seers)[number % len(seers)]


@dataclass(frozen=True)
class Incoming:
    """The targets of a load, checked before anything has changed here.

    Args:
        pieces: the targets; their names and places, for what they hold may be replaced by ``begin``.
        without: names of frozen parameters that are not in the state.
        states: for the optimizers, to be filled.
        wide: frozen units whose values come in a dtype that the compute dtype would round.
    """

    storage: Storage
    optimizers: UnitOptimizers
    pieces: tuple[StatePiece, ...]
    without: Collection[str]
    states: States
    wide: tuple[int, ...]

    @classmethod
    def of(cls, source: Source, storage: Storage, optimizers: UnitOptimizers) -> Incoming:
        """Raises UserError or RunError naming what in a state is not as it is here."""
        manifest = source.manifest
        shapes = {slot.name: list(slot.shape) for unit in storage.units for slot in unit.slots}
        check_same_model(str(source.where), manifest["parameters"], shapes)
        if (form := manifest.get("quantize", NONE)) != storage.form:
            expected = f"a state of quantize={storage.form}; its frozen weights were saved with quantize={form}"
            raise UserError("where", str(source.where), expected)
        tensors = manifest["tensors"]
        if manifest.get("optimizer", optimizers.name) != optimizers.name:
            raise RunError(f"saved with {manifest['optimizer']}, loaded into {optimizers.name}")
        # One saved before any update: the optimizers are new then, as they were there.
        fresh = "optimizer" in manifest and not any(name.startswith(STATE) for name in tensors)
        saved = manifest.get("groups", SHAPES)
        others = [] if fresh else in_other_groups(optimizers.factory, saved, storage.units)
        if others:
            expected = (
                f"an optimizer with the parameter groups of this checkpoint: by {saved!r}, not "
                f"{optimizers.rule}, where {len(others)} parameters are in other groups, such as {others[0]} "
                f"(set groups={saved!r} in tawpipe.adamw or tawpipe.muon)"
            )
            raise UserError("groups", optimizers.rule, expected)
        states = {} if fresh else optimizers.full_states()
        without = digests_in(manifest).keys()
        pieces = tuple(state_pieces(storage, optimizers, saving=False, without=without, states=states))
        names = {piece.name: piece for piece in pieces}
        trained = {piece.name for own_pieces in optimizers.pieces.values() for piece in own_pieces}
        surplus = [name for name in tensors if name.startswith(STATE) and name.split(".", 2)[-1] in trained]
        for name in [*names, *surplus]:
            if name not in tensors or name not in names:
                raise RunError(
                    f"{name} is missing in the checkpoint"
                    if name in names
                    else (f"{name} is in the checkpoint, but not in this model")
                )
        for piece in pieces:
            if tensors[piece.name]["numel"] != piece.numel:
                raise RunError(
                    f"{piece.name} has {tensors[piece.name]['numel']} elements in the checkpoint, {piece.numel} here"
                )
        compute = storage.compute_dtype
        wide = [
            unit
            for unit in storage.pieces
            for slot in [slot for slot in storage.units[unit].slots if slot.name not in without][:1]
            if not storage.units[unit].trainable
            and torch.promote_types(saved_dtype(manifest, f"model.{slot.name}"), compute) != compute
        ]
        return cls(storage, optimizers, pieces, without, states, tuple(wide))

    def begin(self) -> list[StatePiece]:
        """The targets, in the order of ``pieces``: from here on the state changes."""
        for unit in self.wide:
            self.storage.widen(unit)
        self.optimizers.adopt(self.states)
        return list(state_pieces(self.storage, self.optimizers, saving=False, without=self.without))

    def end(self, world: World) -> None:
        """Bring up to date what follows from the state; when all has been filled in, on all ranks."""
        for unit in self.storage.master:
            self.storage.refresh(unit)
        self.storage.settle(world.group)


@dataclass(frozen=True)
class TensorPart:
    """Elements ``begin`` to ``end`` of a tensor, which one rank reads for itself or another.

    Args:
        index: of the piece that they fill, among those that ``rank`` wants.
        number: of the file.
        start, length: of the chunk that holds them.
    """

    reader: int
    rank: int
    index: int
    number: int
    name: str
    start: int
    length: int
    begin: int
    end: int

    @property
    def key(self) -> str:
        """The name of the chunk in its file."""
        return f"{self.name}@{self.start}"


def parts_of(source: Source, rank: int, wanted: Sequence[tuple[str, int, int]]) -> Iterator[TensorPart]:
    """The parts of files that fill the pieces (name, start, elements) which a rank wants.

    Raises:
        RunError: no chunk has some element.
    """
    for index, (name, at, count) in enumerate(wanted):
        chunks = sorted(source.manifest["tensors"][name]["chunks"])
        starts = [chunk[0] for chunk in chunks]
        end = at + count
        while at < end:
            place = bisect_right(starts, at) - 1
            start, length, number = chunks[place] if place >= 0 else (0, 0, 0)
            if not start <= at < start + length:
                raise RunError(f"{name} lacks its element {at}")
            stop = min(end, start + length)
            yield TensorPart(source.reader(number, rank), rank, index, number, name, start, length, at, stop)
            at = stop


OTHERWISE = "a readable checkpoint of this model and optimizer ({})"


def load_state(where: Path | Source, storage: Storage, optimizers: UnitOptimizers, world: World) -> Manifest:
    """Bring homes and optimizer state to what a state holds, and return its manifest; call on all ranks.

    Args:
        where: the folder, or the source that ``resume`` has chosen.

    Raises:
        UserError: it is of another model or optimizer, refers to other frozen weights, or is damaged; on all ranks, and
            nothing has changed.
        RunError: reading broke off on some rank; on all ranks, which hold half of a state.
    """
    place = str(where.where if isinstance(where, Source) else where)
    with ExitStack() as stack:
        load = _Load(world, stack)
        try:
            everyone = world.together(lambda: load.look(where, storage, optimizers), otherwise=OTHERWISE)
            if len({seal for seal, _ in everyone}) > 1:
                raise RunError("the same checkpoint on all machines")
            world.together(lambda: load.open([wanted for _, wanted in everyone]), otherwise=OTHERWISE)
        except RunError as error:
            raise UserError("where", place, str(error)) from error
        refuse_other_frozen(load.source.manifest, place, storage.digests, storage.folder)
        digests, without = dict(storage.digests), load.incoming.without
        storage.digests = {name: digest for name, digest in digests.items() if name in without}  # if reading breaks off
        try:
            changed = set(chain(*world.together(load.fill)))
        except RunError as error:
            raise RunError(f"{place} could not be read to its end ({error})") from error
    storage.digests = {name: digest for name, digest in digests.items() if f"model.{name}" not in changed}
    load.incoming.end(world)
    return load.source.manifest


class _Load:
    """One load, on one rank; ``look``, ``open`` and ``fill`` are its steps."""

    source: Source
    incoming: Incoming

    def __init__(self, world: World, stack: ExitStack) -> None:
        self.world, self._stack = world, stack
        self._files: dict[int, Any] = {}
        self._parts: list[TensorPart] = []

    def look(self, where: Path | Source, storage: Storage, optimizers: UnitOptimizers) -> list[Any]:
        """Compare the state with what is here; returns its seal, and what others may have to send."""
        self.source = where if isinstance(where, Source) else Source.on_disk(where, self.world)
        self.incoming = Incoming.of(self.source, storage, optimizers)
        sees_all = all(self.world.rank in seers for seers in self.source.folders)
        return [self.source.manifest[SEAL], [] if sees_all else self._wanted]

    @property
    def _wanted(self) -> list[tuple[str, int, int]]:
        return [(piece.name, piece.start, piece.value.numel()) for piece in self.incoming.pieces]

    def open(self, others: Sequence[Sequence[tuple[str, int, int]]]) -> None:
        """Open the files that this rank reads, for itself and for others, and see that they hold the manifest's chunks.

        Args:
            others: what every rank may have to be sent.
        """
        here = self.world.rank
        for rank, wanted in enumerate(others):
            parts = parts_of(self.source, rank, self._wanted if rank == here else wanted)
            self._parts += [part for part in parts if here in (part.reader, part.rank)]
        for part in self._parts:
            if part.reader == here:
                if part.number not in self._files:
                    folder = Path(self.source.folders[part.number][here])
                    opened = open_file(folder, self.source.manifest, part.number)
                    self._files[part.number] = self._stack.enter_context(opened)
                shape = self._files[part.number].get_slice(part.key).get_shape()
                if shape != [part.length]:
                    raise RunError(f"{part.key} has the shape {shape} in {file_name(part.number)}")

    def fill(self) -> list[str]:
        """Read, send and receive, in an order that all ranks agree on; names of frozen tensors that had other values. A
        rank that cannot read goes on to send, because others wait for it, and raises in the end.
        """
        here, group, pieces = self.world.rank, self.world.group, self.incoming.begin()
        problem: Exception | None = None
        units, changed = self.incoming.storage.units, set[str]()
        frozen = {f"model.{slot.name}" for unit in units if not unit.trainable for slot in unit.slots}
        for part in self._parts:
            piece, count = pieces[part.index] if part.rank == here else None, part.end - part.begin
            values = torch.empty(0)
            if part.reader == here and problem is None:
                try:
                    cut = slice(part.begin - part.start, part.end - part.start)
                    values = self._files[part.number].get_slice(part.key)[cut]
                except Exception as error:
                    problem = error
            if part.reader != here or problem is not None:
                values = torch.empty(count, dtype=saved_dtype(self.source.manifest, part.name))
            if part.reader != here:
                dist.recv(values, part.reader, group=group)
            if piece is None:
                dist.send(values.contiguous(), part.rank, group=group)
            else:
                target = piece.value[part.begin - piece.start :][:count]
                if part.name in frozen and not torch.equal(target.cpu(), values.to(target.dtype)):
                    changed.add(part.name)
                target.copy_(values)
        if problem is not None:
            raise problem
        return sorted(changed)


def open_file(folder: Path, manifest: Manifest, number: int) -> Any:
    """A file of a folder, whose size and header are sound.

    Raises:
        OSError, SafetensorError, RunError: it is not there or another one.
    """
    path, expected = folder / file_name(number), manifest["files"][number]["bytes"]
    if (size := path.stat().st_size) != expected:
        raise RunError(f"{path.name} has {size} bytes instead of {expected}")
    return safe_open(str(path), framework="pt")


def check_same_model(where: str, saved: Mapping[str, list[int]], own: Mapping[str, list[int]]) -> None:
    """Raises UserError naming the first parameter in which two models differ."""
    for name in sorted(saved.keys() | own.keys()):
        if saved.get(name) != own.get(name):
            has = f"has {name} of shape {saved[name]}" if name in saved else f"has no {name}"
            wants = f"of shape {own[name]}" if name in own else "missing"
            expected = f"a checkpoint of this model; it {has}, which is {wants} in --model"
            raise UserError("where", where, expected)
