"""Stores of states: a disk that all machines share, or the memory of the machines.

``Memory`` is there so that the loss of one machine costs steps since then and no reading of a disk. Processes do not
outlive a restart, files in a memory file system do: every rank writes its file there, and that of the rank with its
number on the machine before, which sends it over a process group of its own while training goes on. After the loss of
one machine the others still hold everything. Nodes are machines here, however schedules group their processes. A state
is a folder of each node:

    DIR/node-1/step-00000120/tawpipe.json              # the same on all nodes
    DIR/node-1/step-00000120/state-00002.safetensors   # of the node's own ranks, and of those before it
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from tawpipe.checkpoint.format import read_manifest
from tawpipe.checkpoint.names import ABANDONED, PARTIAL, complete_states, file_name, named_states, remove, step_of
from tawpipe.errors import RunError, UserError
from tawpipe.files import REPLACED
from tawpipe.runtime.watch.faults import Injector
from tawpipe.runtime.world import World
from tawpipe.topology import Topology


class Store(Protocol):
    """A place for states, seen from one rank.

    Attributes:
        world: the processes, for finding and loading.
        group: the same with a group that nothing else uses, for writing; None where the pipeline's will do.
        folder: in which this rank writes.
        leads: whether this rank makes and names the folders there.
        shared: whether every rank must see every file.
        history: of the states that are written, see ``resume``.
        injector: makes faults happen while a state is written; for tests.
    """

    world: World
    group: World | None
    folder: Path
    leads: bool
    shared: bool
    history: str
    injector: Injector | None

    def prepare(self) -> None:
        """Make sure that states may be written here; called by ranks that lead."""

    def spread(self, partial: Path, notes: Sequence[Mapping[str, Any]]) -> None:
        """Bring this rank's new file to wherever else it is kept; all ranks call it together.

        Args:
            notes: what every rank tells of its file.
        """

    def tidy(self, name: str) -> None:
        """Remove what is superfluous now that the state ``name`` is complete."""

    def states(self) -> dict[int, list[Path]]:
        """Folders that this rank sees by their step, of all histories that may be resumed."""
        ...


class Disk:
    """Folders ``step-00000100`` in one folder.

    Args:
        folder: all ranks must see the same one.
        keep: how many of the newest stay; 0 for all.
        keep_every: those whose step it divides stay besides; 0 for none.

    ``resumed_step`` is what this run has gone on from, None as long as that has not been asked. ``best`` are steps each
    of which was the best of those before: the last of them that is there stays besides.
    """

    group: World | None = None
    shared = True
    history = ""

    def __init__(
        self, folder: Path, world: World, *, keep: int = 0, keep_every: int = 0, injector: Injector | None = None
    ) -> None:
        self.folder, self.world, self.keep, self.keep_every, self.injector = folder, world, keep, keep_every, injector
        self.leads = world.rank == 0
        self.resumed_step: int | None = None
        self.best: list[int] = []
        self._mine: set[str] = set()

    def clear(self) -> None:
        """Remove what a crash has left half written; put back what was about to be replaced."""
        for path in self.folder.glob(f"step-*{REPLACED}"):
            if not path.with_suffix("").exists():
                path.rename(path.with_suffix(""))
        for path in (*self.folder.glob(f"step-*{PARTIAL}"), *self.folder.glob(f"step-*{REPLACED}")):
            shutil.rmtree(path, ignore_errors=True)

    def prepare(self) -> None: ...

    def spread(self, partial: Path, notes: Sequence[Mapping[str, Any]]) -> None: ...  # all ranks see the file

    def tidy(self, name: str) -> None:
        """Remove older states beyond ``keep``. So those that an earlier run has left behind the step from which this
        one went on: they are of another history, and ``auto`` would choose them.

        In the thread that has saved: to remove many gigabytes takes long on some file systems.
        """
        self._mine.add(name)
        complete, going = complete_states(self.folder), []
        if self.resumed_step is not None:
            going = [p for p in complete if step_of(p) > self.resumed_step and p.name not in self._mine]
            complete = [path for path in complete if path not in going]
            going += self.folder.glob(f"step-*{ABANDONED}")
        try:
            for old in going + superfluous(complete, keep=self.keep, keep_every=self.keep_every, best=self.best):
                remove(old)
        except OSError as error:
            raise RunError(f"{error.filename} could not be removed: {error.strerror}") from error

    def states(self) -> dict[int, list[Path]]:
        return {step_of(path): [path] for path in named_states(self.folder)}

    def set_aside_newer(self) -> None:
        """Rename what is newer than what the run goes on from: it is not chosen any more, and removed when this history
        has saved.
        """
        for path in named_states(self.folder):
            if step_of(path) > (self.resumed_step or 0):
                shutil.rmtree(path.with_suffix(ABANDONED), ignore_errors=True)
                path.rename(path.with_suffix(ABANDONED))


def superfluous(complete: list[Path], *, keep: int, keep_every: int = 0, best: Sequence[int] = ()) -> list[Path]:
    """The ones that may go of complete states, oldest first.

    Args:
        best: steps each of which was the best of those before; the last of them that is there stays.

    >>> paths = [Path(f"step-{n}") for n in (10, 20, 30, 40, 50)]
    >>> [path.name for path in superfluous(paths, keep=2, keep_every=20, best=[10, 25])]
    ['step-30']
    """
    old = complete[:-keep] if keep else []
    steps = {step_of(path) for path in complete}
    stays = next((step for step in reversed(best) if step in steps), None)
    return [p for p in old if (not keep_every or step_of(p) % keep_every) and step_of(p) != stays]


class Memory:
    """The newest state, in the memory of each node and of the next one.

    Args:
        root: in a memory file system, of this run alone; the same on all nodes, which do not share it.
        group: see ``Store``; it moves what is sent to the next node.
    """

    shared = False
    history = ""
    injector: Injector | None = None

    def __init__(self, root: Path, world: World, group: World) -> None:
        self.root, self.world, self._connections = root, world, group.group
        self.group: World | None = group
        nodes, rank = world.machines, world.rank
        self.folder = root / f"node-{nodes.node_of(rank)}"
        self.leads = nodes.local_of(rank) == 0
        self._to = _neighbour(nodes, rank)
        self._from = [other for other in range(world.size) if _neighbour(nodes, other) == rank]

    def prepare(self) -> None:
        """Make the root one that nobody else can read. What a crash has left there goes with the next state."""
        own_folder(self.root)

    def spread(self, partial: Path, notes: Sequence[Mapping[str, Any]]) -> None:
        """Send this rank's file to the node after this one, and write those of ranks of the node before it."""
        if self._to is None:
            return
        rank, group = self.world.rank, self._connections
        leaving = torch.from_file(str(partial / file_name(rank)), size=notes[rank]["bytes"], dtype=torch.uint8)
        arriving = {other: torch.empty(notes[other]["bytes"], dtype=torch.uint8) for other in self._from}
        works = [dist.isend(leaving, self._to, group=group)]
        works += [dist.irecv(buffer, other, group=group) for other, buffer in arriving.items()]
        for work in works:
            assert work is not None
            work.wait()
        for other, buffer in arriving.items():
            (partial / file_name(other)).write_bytes(buffer.numpy().data)

    def tidy(self, name: str) -> None:
        for path in self.root.glob("node-*/step-*"):
            if path.name != name:
                with suppress(OSError):  # nodes on one machine remove the same ones
                    remove(path)

    def states(self) -> dict[int, list[Path]]:
        states: dict[int, list[Path]] = {}
        for node in sorted(self.root.glob("node-*")) if is_ours(self.root) else ():
            for path in complete_states(node):
                with suppress(UserError):
                    if read_manifest(path).get("history") == self.history:
                        states.setdefault(step_of(path), []).append(path)
        return states

    def remove(self) -> None:
        """Remove all on this machine; when the run has ended and nobody will go on from it."""
        shutil.rmtree(self.root, ignore_errors=True)


def memory_root(folder: Path, output: Path) -> Path:
    """The root of the states in memory of the run with this output folder.

    Args:
        folder: of a memory file system.
    """
    return folder / f"tawpipe-{os.getuid()}-{hashlib.sha256(str(output.absolute()).encode()).hexdigest()[:12]}"


def _neighbour(nodes: Topology, rank: int) -> int | None:
    """The rank of the next node that gets a rank's file; None on a single node."""
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
