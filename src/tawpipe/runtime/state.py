"""State on disk: weights and optimizer state under parameter names, readable by any number of processes.

Imports runtime (storage, optimizer, world) and torch.distributed.checkpoint. A stripe of a matrix is no rectangle of
it, so every parameter and every state of it is saved as a one-dimensional tensor in one-dimensional chunks; shapes
stand beside them. A folder of state is complete when it has its final name and holds ``tawpipe.json``:

* all ranks write chunks and their index into ``NAME.incomplete``;
* rank 0 writes ``tawpipe.json`` last and renames the folder.
"""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_loader import load as load_distributed
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed

from tawpipe.errors import RunError, UserError
from tawpipe.runtime.optimizer import UnitOptimizers
from tawpipe.runtime.storage import Storage
from tawpipe.runtime.world import World

FORMAT = 1
MARKER = "tawpipe.json"


@dataclass(frozen=True)
class StatePiece:
    """A part of one saved tensor that lives on this rank: elements ``start`` and on of ``numel``."""

    name: str
    numel: int
    start: int
    value: Tensor

    @property
    def chunk(self) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(torch.Size([self.start]), torch.Size([self.value.numel()]))

    @property
    def index(self) -> MetadataIndex:
        return MetadataIndex(self.name, torch.Size([self.start]))


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


class _SavePlanner(DefaultSavePlanner):
    """Saves ``StatePiece`` objects as chunks."""

    def __init__(self, pieces: list[StatePiece]) -> None:
        super().__init__(flatten_state_dict=False)
        self._pieces = {piece.index: piece for piece in pieces}

    def set_up_planner(
        self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:  # the state dict is not used: pieces know more
        self.is_coordinator = is_coordinator

    def create_local_plan(self) -> SavePlan:
        items = []
        for index, piece in self._pieces.items():
            data = TensorWriteData(
                chunk=piece.chunk,
                properties=TensorProperties.create_from_tensor(piece.value),
                size=torch.Size([piece.numel]),
            )
            items.append(WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=data))
        self.plan = SavePlan(items)
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self._pieces[MetadataIndex(index.fqn, index.offset)].value


class _LoadPlanner(DefaultLoadPlanner):
    """Reads the parts of saved chunks that this rank's pieces need."""

    def __init__(self, pieces: list[StatePiece]) -> None:
        super().__init__(flatten_state_dict=False)
        self._groups: dict[str, list[StatePiece]] = {}
        for piece in pieces:
            self._groups.setdefault(piece.name, []).append(piece)
        self._pieces = {piece.index: piece for piece in pieces}

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        self.metadata, self.is_coordinator = metadata, is_coordinator

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        items = []
        for name, pieces in self._groups.items():
            saved = self.metadata.state_dict_metadata.get(name)
            if not isinstance(saved, TensorStorageMetadata):
                raise UserError("--resume", name, "a checkpoint of the same model and optimizer; this one lacks it")
            if saved.size.numel() != pieces[0].numel:
                expected = f"{pieces[0].numel} elements, as in this model; the checkpoint has {saved.size.numel()}"
                raise UserError("--resume", name, expected)
            items += create_read_items_for_chunk_list(name, saved, [piece.chunk for piece in pieces])
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self._pieces[MetadataIndex(index.fqn, index.offset)].value


def is_complete(folder: Path) -> bool:
    """Whether a folder holds state that was written to its end."""
    return folder.suffix != ".incomplete" and (folder / MARKER).is_file()


def save_state(
    folder: Path, storage: Storage, optimizers: UnitOptimizers, world: World, *, record: Mapping[str, Any]
) -> None:
    """Write everything that lives on the ranks; call on all of them, with nothing under way.

    Args:
        folder: replaced if it is there; all ranks must see the same one.
        record: goes into ``tawpipe.json`` beside the shapes; JSON values.
    """
    partial = folder.with_name(folder.name + ".incomplete")
    if world.rank == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    world.barrier()
    world.require(partial.is_dir(), "--output", str(folder.parent), "a folder that all machines share")
    pieces = list(state_pieces(storage, optimizers, saving=True))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about a single process, and torch's own deprecations
        save_distributed({}, checkpoint_id=partial, planner=_SavePlanner(pieces), no_dist=world.group is None)
    if world.rank == 0:
        shapes = {slot.name: list(slot.shape) for unit in storage.units for slot in unit.slots}
        with (partial / MARKER).open("w", encoding="utf-8") as file:
            json.dump({"format": FORMAT, "parameters": shapes, **record}, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        replaced = folder.with_name(folder.name + ".replaced")
        shutil.rmtree(replaced, ignore_errors=True)
        if folder.exists():
            folder.rename(replaced)
        partial.rename(folder)
        shutil.rmtree(replaced, ignore_errors=True)
    world.barrier()


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
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UserError("--resume", str(folder), f"a readable {MARKER} ({error!r})") from error
    if found != FORMAT:
        raise UserError("--resume", str(folder), f"format {FORMAT}, not {found}")
    return record


def load_state(folder: Path, storage: Storage, optimizers: UnitOptimizers, world: World) -> dict[str, Any]:
    """Bring homes and optimizer state to what a folder holds, and return its record; call on all ranks.

    Raises:
        UserError: it is of another model or optimizer, or damaged.
    """
    record = read_record(folder)
    own = {slot.name: list(slot.shape) for unit in storage.units for slot in unit.slots}
    _check_same_model(folder, record["parameters"], own)
    optimizers.create_state()
    pieces = list(state_pieces(storage, optimizers, saving=False))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            load_distributed({}, checkpoint_id=folder, planner=_LoadPlanner(pieces), no_dist=world.group is None)
        except CheckpointException as error:
            causes = [cause for cause, _ in error.failures.values()]
            mine = next((cause for cause in causes if isinstance(cause, UserError)), None)
            raise mine or UserError("--resume", str(folder), f"a readable checkpoint ({causes[0]!r})") from error
    for unit in storage.master:
        storage.refresh(unit)
    return record


def _check_same_model(folder: Path, saved: Mapping[str, list[int]], own: Mapping[str, list[int]]) -> None:
    """Raises UserError naming the first parameter in which two models differ."""
    for name in sorted(saved.keys() | own.keys()):
        if saved.get(name) != own.get(name):
            has = f"has {name} of shape {saved[name]}" if name in saved else f"has no {name}"
            wants = f"of shape {own[name]}" if name in own else "not there"
            expected = f"a checkpoint of this model; it {has}, which is {wants} in --model"
            raise UserError("--resume", str(folder), expected)
