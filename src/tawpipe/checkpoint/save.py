"""Writing a state while training continues.

A save has two phases. **Staging** copies the weights and states of this rank to host memory while no step runs;
training stalls for this time. Homes in host memory are not copied, because that would double their memory; training
stalls until they are written. **Writing** happens in a thread of every rank. The threads use their own process group:

1. The leading ranks create ``NAME.incomplete``. Every rank writes and syncs its file there and computes its checksum.
   On a disk it reads the file back without the page cache.
2. The store copies the files to their other places.
3. If all ranks succeeded, the leading ranks write the manifest and rename the folder. If any rank failed, they remove
   the folder, and every rank gets the reason.

So a folder with its final name is complete, whatever happens in between, and a failed save removes no earlier state.
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
"""Size in bytes of each of the two page-locked buffers through which a state is copied from a device."""


@dataclass(frozen=True)
class Saved:
    """Outcome of a save.

    Args:
        folder: folder of the state.
        staged_s: seconds for which training stalled.
        written_s: seconds from then on until the folder was complete.
        problem: reason why the state was not written; ``""`` if it was.
        left: reason why older states could not be removed afterwards; ``""`` if they were.
    """

    folder: Path
    staged_s: float
    written_s: float
    problem: str = ""
    left: str = ""


def stage(pieces: Sequence[StatePiece], *, live: bool = False) -> list[StatePiece]:
    """Check that the numbers in ``pieces`` are finite, and return copies of the pieces in host memory.

    Args:
        pieces: weights and optimizer states of this rank.
        live: do not copy pieces that are in host memory already; they must not change until they are written.

    Raises:
        RunError: a weight or optimizer state is not finite, so runs must not resume from it.
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
    """Copy tensors from a device into pageable memory, through two page-locked buffers in turn.

    One buffer fills while the host empties the other. Page-locked copies of the whole state would stay allocated,
    rounded up to powers of two, and would take seconds per gigabyte to allocate.

    Args:
        values: tensors on a device.
        copies: tensors in host memory of equal sizes, which are overwritten.
    """
    passing = [torch.empty(PINNED_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    under_way: deque[tuple[torch.Event, Tensor, Tensor]] = deque()

    def arrive() -> None:
        """Wait for the oldest transfer and copy it from its buffer to its target."""
        arrived, source, copy = under_way.popleft()
        arrived.synchronize()
        copy.copy_(source)

    number = 0
    for value, copy in zip(values, copies, strict=True):
        size = max(1, PINNED_BYTES // value.element_size())
        for part, target in zip(value.reshape(-1).split(size), copy.view(-1).split(size), strict=True):
            if len(under_way) == len(passing):
                arrive()
            pinned = passing[number % 2][: part.numel() * part.element_size()].view(part.dtype)
            pinned.copy_(part, non_blocking=True)
            under_way.append((torch.cuda.current_stream().record_event(), pinned, target))
            number += 1
    while under_way:
        arrive()


def _finite(value: Tensor) -> Tensor:
    """Return a boolean tensor: True if all elements of ``value`` are finite; always True for integers.

    Needs no temporary tensor of the size of ``value``, which no memory plan has counted.
    """
    if not value.is_floating_point():
        return torch.ones((), dtype=torch.bool, device=value.device)
    return (torch.linalg.vector_norm(value, float("inf")) if value.numel() else value).isfinite().all()


class Saving:
    """One save that runs in a thread, started by the constructor. Call ``wait``, or poll ``done``.

    Args:
        store: place of the state.
        name: name of the folder in the store; an existing folder is replaced.
        pieces: staged weights and states of this rank.
        content: JSON values for the manifest, see ``manifest_of``.
        world: the processes, with a process group that nothing else uses meanwhile.
        staged_s: seconds that staging took, for the report.
        live: the pieces are the tensors that training changes: the caller must ``join`` before the next step.
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
        """True if the thread of this rank has ended."""
        return not self._thread.is_alive()

    def join(self, limit_s: float | None = None) -> None:
        """Wait for the thread to end. Does not report the outcome; see ``wait``.

        Raises:
            RunError: the save has taken longer than ``limit_s`` seconds since it began.
        """
        self._thread.join(None if limit_s is None else max(0.0, self._begin + limit_s - time.perf_counter()))
        if self._thread.is_alive():
            raise RunError(f"saving {self.folder} took longer than {limit_s:.0f} s on rank {self.world.rank}")

    def wait(self, limit_s: float | None = None) -> Saved:
        """Wait until the save has ended on all ranks, including the removal of old states, and return its outcome.

        Raises:
            RunError: the ranks lost their connection, or the save has taken longer than ``limit_s`` seconds since it
                began.
        """
        self.join(limit_s)
        if self._error is not None:
            raise RunError(f"saving {self.folder}: {self._error}") from self._error
        assert self._result is not None
        return self._result

    def _run(self) -> None:
        """Write the state, remove old ones and record the outcome; runs in the thread."""
        try:
            problem, left = self._failure(self._write), ""
            if not problem:
                left = self._failure(self._tidy)
        except BaseException as error:
            self._error = error
            return
        self._pieces.clear()  # frees gigabytes of copies
        written_s = time.perf_counter() - self._begin
        self._result = Saved(self.folder, self._staged_s + written_s * self._live, written_s, problem, left)

    def _failure(self, act: Callable[[], object]) -> str:
        """Call ``act`` and return the message of its RunError, which all ranks share, or ``""``."""
        try:
            act()
        except RunError as error:
            return str(error)
        return ""

    def _tidy(self) -> None:
        """Delete states that are not needed any more, on the leading ranks; call on all ranks."""
        self.world.together(lambda: self._store.tidy(self.folder.name), acts=self._store.leads)

    def _write(self) -> None:
        """Write, copy and name the state together with all ranks; remove the partial folder if any rank fails."""
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
        """Create the empty folder ``partial``; an existing one is deleted first."""
        self._store.prepare()
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)

    def _write_own(self, partial: Path) -> dict[str, Any]:
        """Write and sync the file of this rank in ``partial``, and return its manifest entry.

        In a store that all machines share, the file is read back without the page cache and compared by its SHA-256.

        Raises:
            OSError: the folder is not visible, writing failed, or a shared disk returns other bytes than were written.
        """
        if self._store.injector is not None:
            self._store.injector.before_save(self._content["step"])
        if not partial.is_dir():
            raise OSError(f"{partial.parent} is not a folder that all machines share")
        path = partial / file_name(self.world.rank)
        try:
            save_file({piece.key: piece.value for piece in self._pieces}, path)
        except Exception as error:  # safetensors has its own classes for system errors
            raise OSError(f"{path.name}: {error}") from error
        sync(path)
        note = note_of(path, self._pieces)  # checksum from the page cache
        if self._store.shared and checksum(path, uncached=True) != note["sha256"]:
            raise OSError(f"{path.name}: the bytes read back from the disk differ from the bytes written")
        return note

    def _complete(self, partial: Path, notes: Sequence[Mapping[str, Any]]) -> None:
        """Write the manifest into ``partial`` and give the folder its final name, which may replace an older folder."""
        replace_text(partial / MARKER, json.dumps(manifest_of(notes, self._content), indent=1))
        sync(partial)
        replace_folder(partial, self.folder)
