"""State in the memory of the nodes, so that the loss of one of them costs steps since then and no reading of a disk.

Imports runtime (state, world) and safetensors. Processes do not outlive a restart, files in a memory file system do:
every rank writes its stripes there, and those of the rank with its number on the machine before, which sends them over
a process group of its own while training goes on. After the loss of one machine the others still hold everything. Nodes
are machines here, however schedules group their processes. A copy is a folder of each node,

    DIR/node-1/step-00000120/tawpipe.json              # as of a checkpoint, the same on all nodes
    DIR/node-1/step-00000120/state-00002.safetensors   # of the node's own ranks, and of those before it

and has its name when every rank has written. At a start the ranks say which files they see; the newest step of which
every file is somewhere and sound is gone on from, and a rank that holds a file sends the others what they need of it.
Copies of another history (another run in this output folder, or one that was gone back behind) are never looked at.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import threading
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load as load_bytes
from safetensors.torch import save as save_bytes
from torch import Tensor

from tawpipe.checkpoint.load import Incoming, open_file, parts_of
from tawpipe.checkpoint.state import (
    FORMAT,
    MARKER,
    PARTIAL,
    StatePiece,
    checksum,
    chunks_of,
    file_name,
    first,
    read_record,
    saved_dtype,
    sealed,
    tensors_of,
)
from tawpipe.errors import RunError, UserError
from tawpipe.runtime.optimizer import UnitOptimizers
from tawpipe.runtime.storage import Storage
from tawpipe.runtime.world import World
from tawpipe.topology import Topology


@dataclass(frozen=True)
class Copy:
    """A copy that the ranks hold together.

    Args:
        record: what its ``tawpipe.json`` says.
        holders: of every file, a rank that sees it, and the folder there.
    """

    step: int
    record: Mapping[str, Any]
    holders: tuple[tuple[int, str], ...]


class SecondCopies:
    """The copies of one run.

    Args:
        folder: in a memory file system, of this run alone; the same on all nodes, which do not share it.
        world: the processes, for finding and loading.
        copying: the same with a group that nothing else uses, for making copies.

    ``history`` tells the copies of one run from those of others in the same folder; set before the first copy.
    """

    def __init__(self, folder: Path, world: World, copying: World) -> None:
        self._world, self._copying, self.folder = world, copying, folder
        self.history = ""
        nodes = world.hosts
        node, local = nodes.node_of(world.rank), nodes.local_of(world.rank)
        self._own = folder / f"node-{node}"
        self._leads = local == 0
        self._to = _neighbour(nodes, world.rank)
        self._from = [rank for rank in range(world.size) if _neighbour(nodes, rank) == world.rank]
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self.problem = ""
        """Why the last copy is not there."""
        self.seconds = 0.0
        """That the last one took."""

    # making one

    def start(self, pieces: Sequence[StatePiece], *, shapes: Mapping[str, Any], record: Mapping[str, Any]) -> None:
        """Make a copy of staged pieces in a thread; call on all ranks, when the one before it has ended.

        Args:
            record: goes into ``tawpipe.json``, as for ``Saving``.
        """
        self.wait()
        content = {"format": FORMAT, "parameters": shapes, "history": self.history, **record}
        self._thread = threading.Thread(target=self._run, args=(list(pieces), content), name="second copy", daemon=True)
        self._thread.start()

    def wait(self, limit_s: float | None = None) -> None:
        """Until the copy under way has ended.

        Raises:
            RunError: the ranks have lost one another, or it takes longer than ``limit_s``.
        """
        if self._thread is not None:
            self._thread.join(limit_s)
            if self._thread.is_alive():
                raise RunError(f"the copy in memory has taken longer than {limit_s:.0f} s on rank {self._world.rank}")
            self._thread = None
        if self._error is not None:
            raise RunError(f"the copy in memory: {self._error}") from self._error

    def remove(self) -> None:
        """All of them on this machine; when the run has ended and nobody will go on from them."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _run(self, pieces: list[StatePiece], content: dict[str, Any]) -> None:
        begin = time.perf_counter()
        try:
            self.problem = self._make(pieces, content)
        except BaseException as error:
            self._error = error
        self.seconds = time.perf_counter() - begin

    def _make(self, pieces: Sequence[StatePiece], content: dict[str, Any]) -> str:
        world, name = self._copying, f"step-{content['step']:08d}"
        partial = self._own / (name + PARTIAL)
        mine = save_bytes({piece.key: piece.value for piece in pieces})
        theirs = self._swap(mine, world)
        note: dict[str, Any] = {"problem": "", "bytes": len(mine), "sha256": hashlib.sha256(mine).hexdigest()}
        note["content"] = content if world.rank == 0 else None
        note["chunks"] = chunks_of(pieces)
        try:
            own_folder(self.folder)
            partial.mkdir(parents=True, exist_ok=True)
            (partial / file_name(world.rank)).write_bytes(mine)
            for rank, their in theirs.items():
                (partial / file_name(rank)).write_bytes(their)
        except Exception as error:  # whatever it is, this rank goes on to tell the others
            note = {"problem": f"rank {world.rank}: {error} ({self.folder})"}
        notes = [json.loads(text) for text in world.gather_texts(json.dumps(note))]
        problem = first([one["problem"] for one in notes])
        if not problem and self._leads:
            files = [{"bytes": one["bytes"], "sha256": one["sha256"]} for one in notes]
            tensors = tensors_of([one["chunks"] for one in notes])
            text = json.dumps(sealed({**notes[0]["content"], "tensors": tensors, "files": files}))
            try:
                (partial / MARKER).write_text(text, encoding="utf-8")
                shutil.rmtree(self._own / name, ignore_errors=True)
                partial.rename(self._own / name)
            except OSError as error:
                problem = f"rank {world.rank}: {error.strerror or error} ({self.folder})"
        older = [path for path in self.folder.glob("node-*/step-*") if path.name != name]  # before others may go on
        problem = first(world.gather_texts(problem))
        if self._leads:
            for path in [partial, *([] if problem else older)]:  # every node has the new one now
                shutil.rmtree(path, ignore_errors=True)
        return problem

    def _swap(self, mine: bytes, world: World) -> dict[int, memoryview]:
        """Send to the node after this one, receive from ranks of the node before it."""
        if self._to is None:
            return {}
        sizes = world.gather_numbers(float(len(mine)))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # nobody writes into it
            leaving = torch.frombuffer(mine, dtype=torch.uint8)
        arriving = {rank: torch.empty(int(sizes[rank]), dtype=torch.uint8) for rank in self._from}
        works = [dist.isend(leaving, self._to, group=world.group)]
        works += [dist.irecv(buffer, rank, group=world.group) for rank, buffer in arriving.items()]
        for work in works:
            assert work is not None
            work.wait()
        return {rank: memoryview(buffer.numpy().data) for rank, buffer in arriving.items()}

    # going on from one

    def find(self) -> Copy | None:
        """The newest copy that is sound and of which every file is somewhere; call on all ranks."""
        world = self._world
        everyone = [json.loads(text) for text in world.gather_texts(json.dumps(self._seen()))]
        for step in sorted({int(step) for seen in everyone for step in seen}, reverse=True):
            markers = {seen[str(step)][0] for seen in everyone if str(step) in seen}
            if len(markers) > 1:
                continue
            seers: dict[tuple[int, str], list[int]] = {}
            for rank, seen in enumerate(everyone):
                for number, folder in seen.get(str(step), ("", []))[1]:
                    seers.setdefault((number, folder), []).append(rank)
            if not seers:
                continue
            (_, place), (teller, *_) = min(seers.items(), key=lambda pair: pair[1])
            text = self._text_of(Path(place) if world.rank == teller else None, teller)
            record = json.loads(text) if text else {}
            files = record.get("files", [])
            # Ranks of one node see the same files: each reads some of them, and is who sends those.
            readers = {file: ranks[file[0] % len(ranks)] for file, ranks in sorted(seers.items())}
            sound = [
                [number, folder]
                for (number, folder), rank in readers.items()
                if rank == world.rank and number < len(files) and _is_sound(folder, number, files[number]["sha256"])
            ]
            holders: dict[int, tuple[int, str]] = {}
            for rank, own in enumerate(world.gather_texts(json.dumps(sound))):
                for number, folder in json.loads(own):
                    holders.setdefault(number, (rank, folder))
            if files and set(holders) == set(range(len(files))):
                return Copy(step, record, tuple(holders[number] for number in range(len(files))))
        return None

    def _seen(self) -> dict[str, tuple[str, list[tuple[int, str]]]]:
        """Step to the checksum of its record, and the files that are here."""
        found: dict[str, tuple[str, list[tuple[int, str]]]] = {}
        for path in sorted(self.folder.glob("node-*/step-*")) if is_ours(self.folder) else ():
            try:
                record = read_record(path)
                if record.get("history") != self.history:
                    continue
                files = [
                    (number, str(path))
                    for number, entry in enumerate(record["files"])
                    if (path / file_name(number)).is_file()
                    and (path / file_name(number)).stat().st_size == entry["bytes"]
                ]
                marker = checksum(path / MARKER)
            except (UserError, OSError):
                continue
            before = found.get(str(record["step"]), (marker, []))
            if before[0] == marker:
                found[str(record["step"])] = (marker, before[1] + files)
        return found

    def _text_of(self, folder: Path | None, teller: int) -> str:
        """The record in ``folder`` of rank ``teller``, on all ranks."""
        text = (folder / MARKER).read_text(encoding="utf-8") if folder is not None else ""
        return self._world.gather_texts(text)[teller]

    def load(self, copy: Copy, storage: Storage, optimizers: UnitOptimizers) -> None:
        """Bring homes and optimizer state to what a copy holds; call on all ranks.

        Raises:
            UserError: it is of another model, optimizer or type; on all ranks, and nothing has changed.
            RunError: a file could not be read after all; on all ranks, which hold half of a state.
        """
        world = self._world
        problem, incoming = "", None
        try:
            incoming = Incoming.of(str(self.folder), copy.record, storage, optimizers)
            self._check(copy, incoming)
        except UserError as error:
            problem = error.expected
        except Exception as error:  # whatever it is, this rank goes on to tell the others
            expected = "a copy of this model and optimizer, or none: remove that folder on all nodes"
            problem = f"{expected} ({type(error).__name__}: {error})"
        if found := first(world.gather_texts(problem)):
            raise UserError("--resume", str(self.folder), found)
        assert incoming is not None
        wanted = [[piece.name, piece.start, piece.value.numel()] for piece in incoming.pieces]
        everyone = [json.loads(text) for text in world.gather_texts(json.dumps(wanted))]
        needs: dict[str, list[tuple[int, int, int]]] = {}
        for rank, ranges in enumerate(everyone):
            for name, start, count in ranges:
                needs.setdefault(name, []).append((rank, start, start + count))
        mine: dict[str, list[StatePiece]] = {}
        for piece in incoming.begin():
            mine.setdefault(piece.name, []).append(piece)
        for number, (holder, folder) in enumerate(copy.holders):
            held: dict[str, Tensor] = {}
            try:
                if holder == world.rank:
                    held = load_bytes((Path(folder) / file_name(number)).read_bytes())
            except Exception as error:
                problem = f"rank {world.rank}: {type(error).__name__}: {error}"
            if found := first(world.gather_texts(problem)):
                raise RunError(f"the copy in memory could not be read to its end ({found})")
            for name, start, rank, begin, end in _transfers(copy.record, number, needs):
                if holder == world.rank:
                    part = held[f"{name}@{start}"][begin - start : end - start]
                    if rank == world.rank:
                        _place(mine[name], begin, part)
                    else:
                        dist.send(part.contiguous(), rank, group=world.group)
                elif rank == world.rank:
                    part = torch.empty(end - begin, dtype=saved_dtype(copy.record, name, torch.float32))
                    dist.recv(part, holder, group=world.group)
                    _place(mine[name], begin, part)
        incoming.end(world)

    def _check(self, copy: Copy, incoming: Incoming) -> None:
        """Raises OSError or RunError for what cannot be read here, or is of another type."""
        frozen = {slot.name for unit in incoming.storage.units if not unit.trainable for slot in unit.slots}
        for piece in incoming.pieces:
            dtype = copy.record["tensors"][piece.name]["dtype"]
            if dtype != str(piece.value.dtype) and piece.name.removeprefix("model.") not in frozen:
                raise RunError(f"{piece.name} is {dtype} in it, {piece.value.dtype} here")
            for _ in parts_of(copy.record, piece):
                pass
        for number, (holder, folder) in enumerate(copy.holders):
            if holder == self._world.rank:
                with open_file(Path(folder), copy.record, number) as file:
                    missing = {
                        f"{name}@{start}"
                        for name, tensor in copy.record["tensors"].items()
                        for start, _, file_of in tensor["chunks"]
                        if file_of == number
                    } - set(file.keys())
                if missing:
                    raise RunError(f"{file_name(number)} has no {min(missing)}")


def _neighbour(nodes: Topology, rank: int) -> int | None:
    """Which rank of the next node gets a rank's copy; None on a single node."""
    if nodes.num_nodes == 1:
        return None
    after = nodes.nodes[(nodes.node_of(rank) + 1) % nodes.num_nodes]
    return after[nodes.local_of(rank) % len(after)]


def own_folder(folder: Path) -> None:
    """Make a folder that nobody else can read.

    Raises:
        OSError: it belongs to somebody else, whose weights would be taken for ours.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not is_ours(folder):
        raise PermissionError(errno.EACCES, "belongs to another user", str(folder))
    folder.chmod(0o700)


def is_ours(folder: Path) -> bool:
    return folder.is_dir() and not folder.is_symlink() and folder.stat().st_uid == os.getuid()


def _is_sound(folder: str, number: int, expected: str) -> bool:
    try:
        return checksum(Path(folder) / file_name(number)) == expected
    except OSError:
        return False


def _transfers(
    record: Mapping[str, Any], number: int, needs: Mapping[str, Sequence[tuple[int, int, int]]]
) -> Iterator[tuple[str, int, int, int, int]]:
    """What of a file goes where, in an order that all ranks agree on: name, start of the chunk, rank, begin, end."""
    for name in sorted(needs):
        for start, count, file in record["tensors"][name]["chunks"]:
            if file == number:
                for rank, first, last in needs[name]:
                    begin, end = max(start, first), min(start + count, last)
                    if begin < end:
                        yield name, start, rank, begin, end


def _place(pieces: Sequence[StatePiece], begin: int, part: Tensor) -> None:
    """Into the piece that holds element ``begin``."""
    for piece in pieces:
        if piece.start <= begin < piece.start + piece.value.numel():
            with torch.no_grad():
                piece.value[begin - piece.start : begin - piece.start + part.numel()].copy_(part)
            return
    raise AssertionError(begin)
