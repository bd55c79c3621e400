"""Loading a state: all checks are done on all ranks before any weight changes.

A rank reads the files that it sees. It receives parts of other files from a rank that sees them.
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
    """A complete state that all ranks can load together.

    Args:
        where: folder of the state, for messages; of states in memory the folder above.
        manifest: manifest of the state.
        folders: for each file a mapping from the ranks that see it to the folder in which they do.
    """

    where: Path
    manifest: Manifest
    folders: tuple[Mapping[int, str], ...]

    @classmethod
    def on_disk(cls, folder: Path, world: World) -> Source:
        """Return the state in a folder that all ranks see.

        Raises:
            UserError: there is no state, or its manifest is damaged.
        """
        manifest = read_manifest(folder)
        everyone = dict.fromkeys(range(world.size), str(folder))
        return cls(folder, manifest, (everyone,) * len(manifest["files"]))

    @property
    def step(self) -> int:
        """Step after which the state was saved."""
        return self.manifest["step"]

    def reader(self, number: int, rank: int) -> int:
        """Return the rank that reads file ``number`` for ``rank``: ``rank`` itself if it sees the file.

        Otherwise it is one of the ranks that see the file."""
        seers = self.folders[number]
        return rank if rank in seers else sorted(seers)[number % len(seers)]


@dataclass(frozen=True)
class Incoming:
    """Tensors to be loaded, checked before any of them changes.

    Args:
        storage: homes of this rank.
        optimizers: optimizers of this rank.
        pieces: names and positions of the tensors to fill; ``begin`` may replace the tensors themselves.
        without: names of frozen parameters that are not in the state.
        states: new optimizer states, to be filled.
        wide: frozen units that were saved in a dtype that the compute dtype would round.
    """

    storage: Storage
    optimizers: UnitOptimizers
    pieces: tuple[StatePiece, ...]
    without: Collection[str]
    states: States
    wide: tuple[int, ...]

    @classmethod
    def of(cls, source: Source, storage: Storage, optimizers: UnitOptimizers) -> Incoming:
        """Compare the state with this model and optimizer and list the tensors to fill; changes nothing.

        Raises:
            UserError: the state belongs to another model, quantisation or parameter grouping.
            RunError: the state belongs to another optimizer, or lacks or exceeds what is needed here.
        """
        manifest = source.manifest
        shapes = {slot.name: list(slot.shape) for unit in storage.units for slot in unit.slots}
        check_same_model(str(source.where), manifest["parameters"], shapes)
        if (form := manifest.get("quantize", NONE)) != storage.form:
            expected = f"a state of quantize={storage.form}; its frozen weights were saved with quantize={form}"
            raise UserError("where", str(source.where), expected)
        tensors = manifest["tensors"]
        if manifest.get("optimizer", optimizers.name) != optimizers.name:
            raise RunError(f"saved with {manifest['optimizer']}, loaded into {optimizers.name}")
        # A state saved before the first update has no optimizer states.
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
        """Install the new optimizer states, and return the tensors to fill, in the order of ``pieces``.

        Frozen units in ``wide`` get master values in CPU memory first. The values of the earlier optimizer states are
        lost: a load that fails after this call leaves a partial state."""
        for unit in self.wide:
            self.storage.widen(unit)
        self.optimizers.adopt(self.states)
        return list(state_pieces(self.storage, self.optimizers, saving=False, without=self.without))

    def end(self, world: World) -> None:
        """Update the copies of weights that derive from the loaded masters; call on all ranks after filling."""
        for unit in self.storage.master:
            self.storage.refresh(unit)
        self.storage.settle(world.group)


@dataclass(frozen=True)
class TensorPart:
    """Elements ``begin`` to ``end`` of a saved tensor, which one rank reads for itself or for another rank.

    Args:
        reader: rank that reads the part.
        rank: rank that needs the part.
        index: index of the piece that the part fills, among the pieces that ``rank`` needs.
        number: number of the file.
        name: name of the tensor.
        start: first element of the chunk that holds the part.
        length: elements of that chunk.
        begin: first element of the part in the tensor.
        end: element after the last one of the part.
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
        """Name of the chunk in its file."""
        return f"{self.name}@{self.start}"


def parts_of(source: Source, rank: int, wanted: Sequence[tuple[str, int, int]]) -> Iterator[TensorPart]:
    """Yield the parts of files that fill the pieces that ``rank`` needs.

    Args:
        source: the state.
        rank: rank that needs the pieces.
        wanted: (name, first element, number of elements) of each piece.

    Raises:
        RunError: no chunk holds some element.
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
    """Load a state into homes and optimizers and return its manifest; call on all ranks.

    Args:
        where: folder of the state, or the source that ``resume`` has chosen.
        storage: homes of this rank.
        optimizers: optimizers of this rank.
        world: all processes.

    Raises:
        UserError: the state is damaged, belongs to another model or optimizer, or refers to other frozen weights; on
            all ranks, and nothing has changed.
        RunError: reading failed midway on some rank; on all ranks, which now hold a partial state.
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
        storage.digests = {name: digest for name, digest in digests.items() if name in without}  # for a failure midway
        try:
            changed = set(chain(*world.together(load.fill)))
        except RunError as error:
            raise RunError(f"{place} could not be read to its end ({error})") from error
    storage.digests = {name: digest for name, digest in digests.items() if f"model.{name}" not in changed}
    load.incoming.end(world)
    return load.source.manifest


class _Load:
    """One load on one rank. Call ``look``, ``open`` and ``fill`` in this order."""

    source: Source
    incoming: Incoming

    def __init__(self, world: World, stack: ExitStack) -> None:
        self.world, self._stack = world, stack
        self._files: dict[int, Any] = {}
        self._parts: list[TensorPart] = []

    def look(self, where: Path | Source, storage: Storage, optimizers: UnitOptimizers) -> list[Any]:
        """Compare the state with this model; return its checksum and the pieces that this rank may have to receive.

        Sets ``source`` and ``incoming``. No weight changes. The list of pieces is empty if this rank sees all files."""
        self.source = where if isinstance(where, Source) else Source.on_disk(where, self.world)
        self.incoming = Incoming.of(self.source, storage, optimizers)
        sees_all = all(self.world.rank in seers for seers in self.source.folders)
        return [self.source.manifest[SEAL], [] if sees_all else self._wanted]

    @property
    def _wanted(self) -> list[tuple[str, int, int]]:
        """Name, first element and number of elements of every piece of this rank."""
        return [(piece.name, piece.start, piece.value.numel()) for piece in self.incoming.pieces]

    def open(self, others: Sequence[Sequence[tuple[str, int, int]]]) -> None:
        """Open the files that this rank reads, for itself and for other ranks, and check the shapes of their chunks.

        Args:
            others: for every rank the pieces that it may have to receive.

        Raises:
            RunError: a file or chunk is not as the manifest says.
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
        """Copy all pieces of this rank from the files into its homes, and send parts that other ranks cannot read.

        A part that this rank cannot read itself is received from its reader. All ranks take the parts in one order. A
        rank whose reading fails still sends (undefined values), because others wait for it, and raises its error at the
        end.

        Returns:
            Names (``model.NAME``) of frozen tensors of this rank whose values have changed, sorted.
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
    """Open file ``number`` of a state after checking its size.

    Raises:
        OSError: the file cannot be read.
        SafetensorError: its header is damaged.
        RunError: its size is not the one in the manifest.
    """
    path, expected = folder / file_name(number), manifest["files"][number]["bytes"]
    if (size := path.stat().st_size) != expected:
        raise RunError(f"{path.name} has {size} bytes instead of {expected}")
    return safe_open(str(path), framework="pt")


def check_same_model(where: str, saved: Mapping[str, list[int]], own: Mapping[str, list[int]]) -> None:
    """Raise UserError if names or shapes of parameters differ; the message names the first different parameter.

    Args:
        where: folder of the state, for the message.
        saved: shape of each parameter in the state.
        own: shape of each parameter of this model.
    """
    for name in sorted(saved.keys() | own.keys()):
        if saved.get(name) != own.get(name):
            has = f"has {name} of shape {saved[name]}" if name in saved else f"has no {name}"
            wants = f"of shape {own[name]}" if name in own else "missing"
            expected = f"a checkpoint of this model; it {has}, which is {wants} in --model"
            raise UserError("where", where, expected)
