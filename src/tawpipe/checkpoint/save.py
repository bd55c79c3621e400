"""Writing a state while training goes on.

A save has two halves. **Staging** copies what lives on this rank, with nothing under way: that is how long training
stands still. Homes in the host's memory are not copied, which would take as much memory again: training stands still
until they are written. **Writing** happens in a thread of every rank, which talk over a process group of their own:

1. the ranks that lead make ``NAME.incomplete``, every rank writes and syncs its file there, computes its checksum, and
   on a disk reads it back past the page cache;
2. the store brings the files to wherever else they are kept;
3. if all have managed, the leading ranks write the manifest and give the folder its name; if any has not, they remove
   it, and every rank knows why.

So a folder with its final name is whole, whatever happens in between, and a save that fails takes nothing with it.
"""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tawpipe.checkpoint.format import StatePiece, manifest_of, note_of
from tawpipe.checkpoint.names import MARKER, PARTIAL, beside, file_name
from tawpipe.checkpoint.store import Store
from tawpipe.errors import RunError
from tawpipe.files import checksum, replace_folder, replace_text, sync
from tawpipe.runtime.world import World

PINNED_BYTES = 1 << 26
"""Of page-locked memory that a state goes through on its way from a device, twice."""


@dataclass(frozen=True)
class Saved:
    """The outcome of a save.

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


def stage(pieces: Sequence[StatePiece], *, live: bool = False) -> list[StatePiece]:
    """Copies in the host's memory that nothing changes afterwards.

    Args:
        live: what is in the host's memory stays what it is, and must not change until it is written.

    Raises:
        RunError: a weight or a state is not finite: whatever happened, it must not become what runs go on from.
    """
    sound: dict[torch.device, list[Tensor]] = {}
    for piece in pieces:
        sound.setdefault(piece.value.device, []).append(_finite(piece.value))
    if not all(bool(torch.stack(flags).all()) for flags in sound.values()):
        name = next(piece.name for piece in pieces if not bool(_finite(piece.value)))
        raise RunError(f"{name} has values that are not finite; not saved")
    if live:
        return [StatePiece(piece.name, piece.numel, piece.start, piece.value.to("cpu")) for piece in pieces]
    copies = [torch.empty(piece.value.shape, dtype=piece.value.dtype, device="cpu") for piece in pieces]
    if any(piece.value.device.type == "cuda" for piece in pieces):
        _through_pinned([piece.value for piece in pieces], copies)
    else:
        for piece, copy in zip(pieces, copies, strict=True):
            copy.copy_(piece.value)
    return [StatePiece(piece.name, piece.numel, piece.start, copy) for piece, copy in zip(pieces, copies, strict=True)]


def _through_pinned(values: Sequence[Tensor], copies: Sequence[Tensor]) -> None:
    """Copy from a device into plain memory by way of two pieces of page-locked memory in turn: one fills while the host
    empties the other. Page-locked copies of the whole state would stay as they are for good, each as large as the next
    power of two, and take seconds for every gigabyte to make.
    """
    passing = [torch.empty(PINNED_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    under_way: deque[tuple[torch.Event, Tensor, Tensor]] = deque()

    def arrive() -> None:
        arrived, there, copy = under_way.popleft()
        arrived.synchronize()
        copy.copy_(there)

    number = 0
    for value, copy in zip(values, copies, strict=True):
        size = max(1, PINNED_BYTES // value.element_size())
        for part, target in zip(value.reshape(-1).split(size), copy.view(-1).split(size), strict=True):
            if len(under_way) == len(passing):
                arrive()
            there = passing[number % 2][: part.numel() * part.element_size()].view(part.dtype)
            there.copy_(part, non_blocking=True)
            under_way.append((torch.cuda.current_stream().record_event(), there, target))
            number += 1
    while under_way:
        arrive()


def _finite(value: Tensor) -> Tensor:
    """True if every element is finite, as all bytes are. Allocates no temporary of the tensor's size, which no plan has
    counted.
    """
    if not value.is_floating_point():
        return torch.ones((), dtype=torch.bool, device=value.device)
    return (torch.linalg.vector_norm(value, float("inf")) if value.numel() else value).isfinite().all()


class Saving:
    """One save, under way in a thread. ``wait`` until it is done, or look at ``done`` now and then.

    Args:
        name: of the folder in the store; replaced if it is there.
        pieces: of this rank, staged.
        content: goes into the manifest; JSON values.
        world: whose group nothing else uses in the meantime.
        staged_s: how long staging took, for the report.
        live: the pieces are what training changes: who makes it has to ``join`` it before the next step.
    """

    def __init__(
        self,
        store: Store,
        name: str,
        pieces: Sequence[StatePiece],
        *,
        content: Mapping[str, Any],
        world: World,
        staged_s: float = 0.0,
        live: bool = False,
    ) -> None:
        self.folder, self.world = store.folder / name, world
        self._store, self._pieces, self._content, self._staged_s = store, list(pieces), dict(content), staged_s
        self._live, self._begin = live, time.perf_counter()
        self._result: Saved | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"save {self.folder}", daemon=True)
        self._thread.start()

    @property
    def done(self) -> bool:
        """True if this rank has nothing left to do."""
        return not self._thread.is_alive()

    def join(self, limit_s: float | None = None) -> None:
        """Wait until the thread has ended, whatever came of it.

        Raises:
            RunError: it has taken longer than ``limit_s`` since it began.
        """
        self._thread.join(None if limit_s is None else max(0.0, self._begin + limit_s - time.perf_counter()))
        if self._thread.is_alive():
            raise RunError(f"saving {self.folder} took longer than {limit_s:.0f} s on rank {self.world.rank}")

    def wait(self, limit_s: float | None = None) -> Saved:
        """The outcome, when the save has ended on all ranks: none goes on to wait in a step for one that still removes
        old states.

        Raises:
            RunError: the ranks have lost one another, or it has taken longer than ``limit_s`` since it began.
        """
        self.join(limit_s)
        if self._error is not None:
            raise RunError(f"saving {self.folder}: {self._error}") from self._error
        assert self._result is not None
        return self._result

    def _run(self) -> None:
        try:
            problem, left = self._failure(self._write), ""
            if not problem:
                left = self._failure(self._tidy)
        except BaseException as error:
            self._error = error
            return
        self._pieces.clear()  # the copies are many gigabytes
        written_s = time.perf_counter() - self._begin
        self._result = Saved(self.folder, self._staged_s + written_s * self._live, written_s, problem, left)

    def _failure(self, act: Callable[[], object]) -> str:
        """The failure that all ranks agree on, in words; empty if there is none."""
        try:
            act()
        except RunError as error:
            return str(error)
        return ""

    def _tidy(self) -> None:
        self.world.together(lambda: self._store.tidy(self.folder.name), acts=self._store.leads)

    def _write(self) -> None:
        together, leads, partial = self.world.together, self._store.leads, beside(self.folder, PARTIAL)
        try:
            together(lambda: self._make(partial), acts=leads)
            notes = together(lambda: self._write_own(partial))
            together(lambda: self._store.spread(partial, notes))
            together(lambda: self._complete(partial, notes), acts=leads)
        except RunError:
            if leads:
                shutil.rmtree(partial, ignore_errors=True)
            raise
        if self._store.injector is not None:
            self._store.injector.after_save(self._content["step"], self.folder / file_name(self.world.rank))

    def _make(self, partial: Path) -> None:
        self._store.prepare()
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)

    def _write_own(self, partial: Path) -> dict[str, Any]:
        if self._store.injector is not None:
            self._store.injector.before_save(self._content["step"])
        if not partial.is_dir():
            raise OSError(f"{partial.parent} is not a folder that all machines share")
        path = partial / file_name(self.world.rank)
        try:
            save_file({piece.key: piece.value for piece in self._pieces}, path)
        except Exception as error:  # safetensors has its own errors for what the system says
            raise OSError(f"{path.name}: {error}") from error
        sync(path)
        note = note_of(path, self._pieces)  # of what was written, which is still in the page cache
        if self._store.shared and checksum(path, uncached=True) != note["sha256"]:
            raise OSError(f"{path.name}: the bytes read back from the disk differ from the bytes written")
        return note

    def _complete(self, partial: Path, notes: Sequence[Mapping[str, Any]]) -> None:
        replace_text(partial / MARKER, json.dumps(manifest_of(notes, self._content), indent=1))
        sync(partial)
        replace_folder(partial, self.folder)
