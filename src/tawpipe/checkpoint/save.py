"""Writing state while training goes on. Imports runtime (state, world), faults and safetensors.

A save has two halves. **Staging** copies what lives on this rank, with nothing under way: that is how long training
stands still. **Writing** happens in a thread of every rank, which talk over a process group of their own:

1. rank 0 makes ``NAME.incomplete``, every rank writes and syncs its file there and computes its checksum;
2. if all have managed, rank 0 writes ``tawpipe.json`` and gives the folder its name; if any has not, it removes the
   folder, and every rank knows why.

So a folder with its final name is whole, whatever happens in between, and a save that fails takes nothing with it.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tawpipe.checkpoint.state import (
    FORMAT,
    MARKER,
    PARTIAL,
    StatePiece,
    checksum,
    chunks_of,
    file_name,
    first,
    sealed,
    tensors_of,
)
from tawpipe.errors import RunError
from tawpipe.runtime.world import World


@dataclass(frozen=True)
class Saved:
    """What came of a save.

    Args:
        staged_s: for which training stood still.
        written_s: from then on until the folder was complete.
        problem: why it is not there; empty if it is.
        left: what could not be done after it.
    """

    folder: Path
    staged_s: float
    written_s: float
    problem: str = ""
    left: str = ""


def stage(pieces: Sequence[StatePiece]) -> list[StatePiece]:
    """Copies in the host's memory that nothing changes afterwards.

    Raises:
        RunError: a weight or a state is not finite: whatever happened, it must not become what runs go on from.
    """
    sound: dict[torch.device, list[Tensor]] = {}
    for piece in pieces:
        sound.setdefault(piece.value.device, []).append(_finite(piece.value))
    if not all(bool(torch.stack(flags).all()) for flags in sound.values()):
        name = next(piece.name for piece in pieces if not bool(_finite(piece.value)))
        raise RunError(f"{name} holds numbers that are not finite; it is not saved")
    on_device = any(piece.value.is_cuda for piece in pieces)
    copies = []
    for piece in pieces:
        copy = torch.empty(piece.value.shape, dtype=piece.value.dtype, pin_memory=on_device)
        copies.append(copy.copy_(piece.value, non_blocking=on_device))
    if on_device:
        torch.cuda.synchronize()
    return [StatePiece(one.name, one.numel, one.start, copy) for one, copy in zip(pieces, copies, strict=True)]


def _finite(value: Tensor) -> Tensor:
    """Whether all numbers are; without temporaries of the tensor's size, which no plan has counted."""
    return (torch.linalg.vector_norm(value, float("inf")) if value.numel() else value).isfinite().all()


class Saving:
    """One save. ``wait`` until it is done, or look at ``done`` now and then.

    Args:
        folder: replaced if it is there; all ranks must see the same one.
        pieces: of this rank, staged.
        shapes: of all parameters.
        record: goes into ``tawpipe.json``; JSON values.
        world: whose group nothing else uses in the meantime.
        staged_s: how long staging took, for the report.
        before_write, spoil: called by the thread before it writes, and with the complete folder; for tests.
        after: called by the thread when the folder is complete; returns what went wrong. The save has ended when it has
            on all ranks, so that none goes on to wait in a step for one that still removes old checkpoints.
    """

    def __init__(
        self,
        folder: Path,
        pieces: Sequence[StatePiece],
        *,
        shapes: Mapping[str, list[int]],
        record: Mapping[str, Any],
        world: World,
        staged_s: float = 0.0,
        before_write: Callable[[], object] | None = None,
        spoil: Callable[[Path], object] | None = None,
        after: Callable[[], str] | None = None,
    ) -> None:
        self.folder, self._pieces, self._world = folder, list(pieces), world
        self._shapes, self._record, self._staged_s = shapes, record, staged_s
        self._before_write, self._spoil, self._after = before_write, spoil, after
        self._begin = time.perf_counter()
        self._result: Saved | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"save {folder.name}", daemon=True)

    def start(self) -> Saving:
        """Write in a thread from now on."""
        self._thread.start()
        return self

    @property
    def done(self) -> bool:
        """Whether this rank has nothing left to do."""
        return not self._thread.is_alive()

    def join(self) -> None:
        """Until the thread has ended, whatever came of it."""
        self._thread.join()

    def wait(self, limit_s: float | None = None) -> Saved:
        """What came of it, when it has ended.

        Raises:
            RunError: the ranks have lost one another, or it has taken longer than ``limit_s`` since it began.
        """
        self._thread.join(None if limit_s is None else max(0.0, self._begin + limit_s - time.perf_counter()))
        if self._thread.is_alive():
            raise RunError(f"saving {self.folder} has taken longer than {limit_s:.0f} s on rank {self._world.rank}")
        if self._error is not None:
            raise RunError(f"saving {self.folder}: {self._error}") from self._error
        assert self._result is not None
        return self._result

    def _run(self) -> None:
        try:
            problem, left = self._write(), ""
            if not problem and self._spoil is not None:
                self._spoil(self.folder)
            if not problem:
                left = first(self._world.gather_texts(self._look_after()))
        except BaseException as error:
            self._error = error
            return
        self._pieces.clear()  # the copies are many gigabytes
        self._result = Saved(self.folder, self._staged_s, time.perf_counter() - self._begin, problem, left)

    def _look_after(self) -> str:
        if self._after is None:
            return ""
        said: list[str] = []
        after = self._after
        return self._attempt(lambda: said.append(after())) or said[0]

    def _write(self) -> str:
        partial, world = self.folder.with_name(self.folder.name + PARTIAL), self._world
        problem = self._attempt(lambda: _make_empty(partial)) if world.rank == 0 else ""
        if found := first(world.gather_texts(problem)):
            return found
        if found := first(world.gather_texts(self._attempt(lambda: self._write_own(partial)))):
            if world.rank == 0:
                shutil.rmtree(partial, ignore_errors=True)
            return found
        problem = self._attempt(lambda: self._complete(partial)) if world.rank == 0 else ""
        found = first(world.gather_texts(problem))
        if found and world.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
        return found

    def _attempt(self, act: Callable[[], object]) -> str:
        """What went wrong, in words, or nothing. Whatever it is, this rank goes on to tell the others."""
        where = f"rank {self._world.rank}: " if self._world.size > 1 else ""
        try:
            act()
        except OSError as error:
            return f"{where}{error.strerror or error}" + (f" ({error.filename})" if error.filename else "")
        except Exception as error:
            return f"{where}{type(error).__name__}: {error}"
        return ""

    def _write_own(self, partial: Path) -> None:
        if self._before_write is not None:
            self._before_write()
        if not partial.is_dir():
            raise OSError(f"{partial.parent} is not a folder that all machines share")
        path = partial / file_name(self._world.rank)
        try:
            save_file({piece.key: piece.value for piece in self._pieces}, path)
        except Exception as error:  # safetensors has its own errors for what the system says
            raise OSError(f"{path.name}: {error}") from error
        _sync(path)
        note = {"bytes": path.stat().st_size, "sha256": checksum(path), "chunks": chunks_of(self._pieces)}
        _write_text(path.with_suffix(".json"), json.dumps(note))

    def _complete(self, partial: Path) -> None:
        """Rank 0, when all files are there."""
        paths = [(partial / file_name(number)).with_suffix(".json") for number in range(self._world.size)]
        notes = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
        files = [{"bytes": note["bytes"], "sha256": note["sha256"]} for note in notes]
        tensors = tensors_of([note["chunks"] for note in notes])
        for path in paths:
            path.unlink()
        content = {"format": FORMAT, "parameters": self._shapes, "tensors": tensors, "files": files, **self._record}
        _write_text(partial / MARKER, json.dumps(sealed(content), indent=1))
        _sync(partial)
        replaced = self.folder.with_name(self.folder.name + ".replaced")
        shutil.rmtree(replaced, ignore_errors=True)
        if self.folder.exists():
            self.folder.rename(replaced)
        partial.rename(self.folder)
        _sync(self.folder.parent)
        shutil.rmtree(replaced, ignore_errors=True)


def _make_empty(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def _write_text(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync(path: Path) -> None:
    """Onto the disk. A file system that cannot sync folders is not asked again."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError:
        if not path.is_dir():
            raise
    finally:
        os.close(handle)
