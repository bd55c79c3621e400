"""Stores of states: a disk that all machines share, or the memory of the machines.

With ``Memory``, the loss of one machine costs the steps since the last state in memory, and no disk is read. Processes
do not outlive a restart, but files in a memory file system do. Every rank writes its file there. It also writes the
file of the rank with its local rank on the previous machine, which is sent over a separate process group while training
continues. After the loss of one machine the others still hold everything. Nodes are machines here, whatever the nodes
of the schedule are. Each node has a folder for a state:

    DIR/node-1/step-00000120/tawpipe.json              # equal on all nodes
    DIR/node-1/step-00000120/state-00002.safetensors   # of the node's own ranks and of the previous node's
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
    """Place for states, seen from one rank.

    Attributes:
        world: the processes, for finding and loading states.
        group: the processes with a process group only for writing; None to use the pipeline's.
        folder: folder in which this rank writes.
        leads: True if this rank creates and names the folders there.
        shared: True if every rank must see every file.
        history: history of the states that are written, see ``resume``.
        injector: causes faults while a state is written; for tests.
    """

    world: World
    group: World | None
    folder: Path
    leads: bool
    shared: bool
    history: str
    injector: Injector | None

    def prepare(self) -> None:
        """Make sure that states can be written here; called by ranks that lead."""

    def spread(self, partial: Path, notes: Sequence[Mapping[str, Any]]) -> None:
        """Copy this rank's new file to its other places; all ranks call it together.

        Args:
            partial: folder of the state that is being written.
            notes: manifest entries of the files of all ranks.
        """

    def tidy(self, name: str) -> None:
        """Remove states that are not needed any more now that the state ``name`` is complete."""

    def states(self) -> dict[int, list[Path]]:
        """Return the folders that this rank sees, by step, of all histories that may be resumed."""
        ...


class Disk:
    """Store of folders ``step-00000100`` in one folder.

    ``resumed_step`` is the step that this run resumed from, or None before it was chosen. ``best`` are steps that each
    had the best validation loss so far; the last of them that still exists is kept in addition.

    Args:
        folder: folder that all ranks see.
        world: the processes.
        keep: number of newest states to keep; 0 for all.
        keep_every: also keep states whose step is a multiple of this; 0 for none.
        injector: causes faults; for tests.
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
        self._saved_names: set[str] = set()

    def clear(self) -> None:
        """Delete partial states that a crash left, and restore states that were about to be replaced."""
        for path in self.folder.glob(f"step-*{REPLACED}"):
            if not path.with_suffix("").exists():
                path.rename(path.with_suffix(""))
        for path in (*self.folder.glob(f"step-*{PARTIAL}"), *self.folder.glob(f"step-*{REPLACED}")):
            shutil.rmtree(path, ignore_errors=True)

    def prepare(self) -> None: ...

    def spread(self, partial: Path, notes: Sequence[Mapping[str, Any]]) -> None: ...  # all ranks see the file

    def tidy(self, name: str) -> None:
        """Remove states beyond the ``keep`` newest, except those that ``keep_every`` or ``best`` keeps.

        All states of an abandoned history are removed, too. ``name`` is the state just saved."""
        self._saved_names.add(name)
        complete, going = complete_states(self.folder), []
        if self.resumed_step is not None:
            going = [p for p in complete if step_of(p) > self.resumed_step and p.name not in self._saved_names]
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
        """Rename states newer than the resumed step, so that they are not chosen.

        They are removed after the next save.
        """
        for path in named_states(self.folder):
            if step_of(path) > (self.resumed_step or 0):
                shutil.rmtree(path.with_suffix(ABANDONED), ignore_errors=True)
                path.rename(path.with_suffix(ABANDONED))


def superfluous(complete: list[Path], *, keep: int, keep_every: int = 0, best: Sequence[int] = ()) -> list[Path]:
    """Return the states that may be removed from ``complete``, which is sorted oldest first.

    Args:
        complete: folders of complete states.
        keep: number of newest states to keep; 0 for all, so that the result is empty.
        keep_every: also keep states whose step is a multiple of this; 0 for none.
        best: steps that each had the best validation loss so far; the last of them that still exists is kept.

    >>> paths = [Path(f"step-{n}") for n in (10, 20, 30, 40, 50)]
    >>> [path.name for path in superfluous(paths, keep=2, keep_every=20, best=[10, 25])]
    ['step-30']
    """
    old = complete[:-keep] if keep else []
    steps = {step_of(path) for path in complete}
    stays = next((step for step in reversed(best) if step in steps), None)
    return [p for p in old if (not keep_every or step_of(p) % keep_every) and step_of(p) != stays]


class Memory:
    """Store of the newest state in the memory of each node and of the next one.

    Args:
        root: folder in a memory file system, of this run only. Its path is equal on all nodes, its content is not.
        world: the processes.
        group: the processes with a process group of their own, which sends files to the next node; see ``Store``.
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
        """Create the root folder, readable only by this user. Remains of a crash are removed with the next state."""
        own_folder(self.root)

    def spread(self, partial: Path, notes: Sequence[Mapping[str, Any]]) -> None:
        """Send this rank's file to the next node, and write the files received from the previous node; waits for both.

        Does nothing on a single node."""
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
                with suppress(OSError):  # nodes on one machine remove the same folders
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
        """Delete all states of the run on this machine, when no restart will need them."""
        shutil.rmtree(self.root, ignore_errors=True)


def memory_root(folder: Path, output: Path) -> Path:
    """Return the folder for states in memory of the run with the output folder ``output``.

    Args:
        folder: folder in a memory file system.
        output: output folder of the run.
    """
    return folder / f"tawpipe-{os.getuid()}-{hashlib.sha256(str(output.absolute()).encode()).hexdigest()[:12]}"


def _neighbour(nodes: Topology, rank: int) -> int | None:
    """Return the rank of the next node that receives the file of ``rank``; None on a single node."""
    if nodes.num_nodes == 1:
        return None
    after = nodes.nodes[(nodes.node_of(rank) + 1) % nodes.num_nodes]
    return after[nodes.local_of(rank) % len(after)]


def own_folder(folder: Path) -> None:
    """Create ``folder`` if it does not exist, and make it readable only by this user.

    Raises:
        OSError: the folder belongs to another user, whose weights could be taken for this run's.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not is_ours(folder):
        raise PermissionError(errno.EACCES, "belongs to another user", str(folder))
    folder.chmod(0o700)


def is_ours(folder: Path) -> bool:
    """Return True if ``folder`` is a real folder (no link) that belongs to this user."""
    return folder.is_dir() and not folder.is_symlink() and folder.stat().st_uid == os.getuid()
