"""Checkpoints: weights and optimizer state under parameter names, readable by any number of processes. Imports runtime.

A stripe of a matrix is no rectangle of it, so every parameter and every state of it is saved as a one-dimensional
tensor in one-dimensional chunks (torch.distributed.checkpoint), its shape beside it. A checkpoint is a folder
``step-00000100``:

* the chunks and their index, written by all ranks into ``step-00000100.incomplete``;
* ``tawpipe.json``, written last by rank 0: step, position in the data, seed, shapes. Its presence, under the final name
  that the folder is renamed to, is what makes a checkpoint complete.

Random numbers derive from (seed, step, micro-batch, block), so seed and step are the whole random state.
"""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
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
from tawpipe.pipeline import Pipeline
from tawpipe.runtime.optimizer import UnitOptimizers
from tawpipe.runtime.storage import Storage
from tawpipe.runtime.world import World

FORMAT = 1
MARKER = "tawpipe.json"


@dataclass(frozen=True)
class RunState:
    """What a checkpoint holds besides tensors.

    Args:
        step: steps done.
        samples: rows consumed, counted over epochs: the position in the data.
        data_state: what the dataset needs besides the position.
        fingerprint: of the data, so that a changed corpus can be named.
        parameters: name to shape.
    """

    step: int
    samples: int
    seed: int
    parameters: dict[str, list[int]]
    fingerprint: str = ""
    data_state: dict[str, Any] = field(default_factory=dict)
    topology: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    format: int = FORMAT


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
        saving: give the one-element states (the step count) of a parameter only where its first element lives.
    """
    for unit, pieces in storage.pieces.items():
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


class Checkpoints:
    """The checkpoints of one run.

    Args:
        folder: holds one folder a checkpoint; all ranks must see the same one.
        keep: how many of the newest stay; 0 for all.
    """

    def __init__(self, folder: Path, world: World, *, keep: int = 0) -> None:
        self.folder, self.world, self.keep = folder, world, keep

    def complete(self) -> list[Path]:
        """The complete checkpoints, oldest first."""
        if not self.folder.is_dir():
            return []
        found = (path for path in self.folder.glob("step-*") if (path / MARKER).is_file())
        return sorted(path for path in found if path.name.removeprefix("step-").isdecimal())

    def save(self, pipeline: Pipeline, state: RunState) -> Path:
        """Write a checkpoint; call on all ranks, which have no step under way. Older ones beyond ``keep`` go
        afterwards.
        """
        pipeline.drain()
        final = self.folder / f"step-{state.step:08d}"
        partial = final.with_name(final.name + ".incomplete")
        if self.world.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        self.world.barrier()
        pieces = list(state_pieces(pipeline.storage, pipeline.optimizers, saving=True))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about a single process, and torch's own deprecations
            save_distributed({}, checkpoint_id=partial, planner=_SavePlanner(pieces), no_dist=self.world.group is None)
        if self.world.rank == 0:
            marker = partial / MARKER
            with marker.open("w", encoding="utf-8") as file:
                json.dump(asdict(state), file, indent=1)
                file.flush()
                os.fsync(file.fileno())
            shutil.rmtree(final, ignore_errors=True)
            partial.rename(final)
            self._prune()
        self.world.barrier()
        return final

    def _prune(self) -> None:
        if self.keep:
            for path in self.complete()[: -self.keep]:
                # The marker goes first: a folder that is half removed is not complete.
                (path / MARKER).unlink(missing_ok=True)
                shutil.rmtree(path, ignore_errors=True)

    def find(self, resume: str) -> Path | None:
        """The checkpoint that ``--resume`` means: none, auto (the newest complete one, or None) or a path.

        Raises:
            UserError: the path holds no complete checkpoint.
        """
        if resume == "none":
            return None
        if resume == "auto":
            complete = self.complete()
            return complete[-1] if complete else None
        path = Path(resume)
        if not (path / MARKER).is_file():
            raise UserError("--resume", resume, f"the folder of a complete checkpoint, which holds a {MARKER}")
        return path


def read_state(path: Path) -> RunState:
    """What a checkpoint holds besides tensors.

    Raises:
        UserError: it is of another format, or damaged.
    """
    try:
        values = json.loads((path / MARKER).read_text(encoding="utf-8"))
        if values.get("format") != FORMAT:
            raise UserError("--resume", str(path), f"format {FORMAT}, not {values.get('format')}")
        return RunState(**values)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise UserError("--resume", str(path), f"a readable {MARKER} ({error})") from error


def load(path: Path, pipeline: Pipeline) -> RunState:
    """Bring weights, optimizer state and step number to those of a checkpoint; call on all ranks.

    Raises:
        UserError: it is of another model or optimizer, or damaged.
    """
    state = read_state(path)
    check_same_model(path, state.parameters, parameter_shapes(pipeline))
    pipeline.drain()
    pipeline.optimizers.create_state()
    pieces = list(state_pieces(pipeline.storage, pipeline.optimizers, saving=False))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            load_distributed({}, checkpoint_id=path, planner=_LoadPlanner(pieces), no_dist=pipeline.world.group is None)
        except CheckpointException as error:
            causes = [cause for cause, _ in error.failures.values()]
            mine = next((cause for cause in causes if isinstance(cause, UserError)), None)
            raise mine or UserError("--resume", str(path), f"a readable checkpoint ({causes[0]!r})") from error
    for unit in pipeline.storage.master:
        pipeline.storage.refresh(unit)
    pipeline.step_number = state.step
    return state


def parameter_shapes(pipeline: Pipeline) -> dict[str, list[int]]:
    return {slot.name: list(slot.shape) for unit in pipeline.chain.units for slot in unit.slots}


def check_same_model(path: Path, saved: Mapping[str, list[int]], own: Mapping[str, list[int]]) -> None:
    """Raises UserError naming the first parameter in which two models differ."""
    for name in sorted(saved.keys() | own.keys()):
        if saved.get(name) != own.get(name):
            has = f"has {name} of shape {saved[name]}" if name in saved else f"has no {name}"
            wants = f"of shape {own[name]}" if name in own else "not there"
            raise UserError("--resume", str(path), f"a checkpoint of this model; it {has}, which is {wants} in --model")
