"""The checkpoints of one run: names, which are sound, which one to resume from, which to remove.

Random numbers derive from (seed, step, micro-batch, block), so seed and step are the whole random state.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from tawpipe.checkpoint.save import Saved, Saving
from tawpipe.checkpoint.state import PARTIAL, damaged, is_complete, read_record
from tawpipe.errors import RunError, UserError
from tawpipe.runtime.world import World

ABANDONED = ".abandoned"
"""Behind the name of a checkpoint of a history that is not gone on with."""


class Saver(Protocol):
    """A pipeline, as far as its checkpoints know it."""

    def start_saving(
        self, folder: Path, *, run: Mapping[str, Any] | None = None, after: Callable[[], str] | None = None
    ) -> Saving: ...


@dataclass(frozen=True)
class RunState:
    """What a checkpoint of a run holds besides the pipeline's state.

    Args:
        step: steps done.
        samples: rows consumed, counted over epochs: the position in the data.
        fingerprint: of the data, so that a changed corpus can be named.
        data_state: what the dataset needs besides the position.
        plan: that the run followed, empty for none; it is followed again on the same topology.
        topology, versions: for the reader.
    """

    step: int
    samples: int
    seed: int
    fingerprint: str = ""
    data_state: dict[str, Any] = field(default_factory=dict)
    topology: str = ""
    plan: str = ""
    versions: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Found:
    """A checkpoint to go on from.

    Args:
        path: None to start anew.
        passed_over: newer ones that were not taken, and why, in sentences.
    """

    path: Path | None
    passed_over: tuple[str, ...] = ()


class Checkpoints:
    """Folders ``step-00000100`` in one folder.

    Args:
        folder: all ranks must see the same one.
        keep: how many of the newest stay; 0 for all.
        keep_every: those whose step it divides stay besides; 0 for none.
        limit_s: that a save may take before the run ends; None for any time.
    """

    def __init__(
        self, folder: Path, world: World, *, keep: int = 0, keep_every: int = 0, limit_s: float | None = None
    ) -> None:
        self.folder, self.world, self.keep, self.keep_every = folder, world, keep, keep_every
        self.limit_s = limit_s
        self._resumed_step = 0
        self._mine: list[Path] = []
        self._saving: Saving | None = None

    def complete(self) -> list[Path]:
        """The complete checkpoints, oldest first."""
        return complete_checkpoints(self.folder)

    # saving

    def start(self, pipeline: Saver, state: RunState) -> None:
        """Begin to write a checkpoint; call on all ranks, when the one before it has been waited for."""
        assert self._saving is None, "one save at a time"
        path = self.folder / f"step-{state.step:08d}"
        self._mine.append(path)
        after = self._prune if self.world.rank == 0 else None
        self._saving = pipeline.start_saving(path, run=asdict(state), after=after)

    @property
    def under_way(self) -> bool:
        """Whether one has been begun whose end nobody has looked at."""
        return self._saving is not None

    @property
    def ended(self) -> bool:
        """Whether ``wait`` would return at once, on this rank."""
        return self._saving is not None and self._saving.done

    def wait(self) -> Saved | None:
        """What came of the save under way, if there is one; call on all ranks."""
        if self._saving is None:
            return None
        saved, self._saving = self._saving.wait(self.limit_s), None
        return saved

    def _prune(self) -> str:
        """When one is complete, older ones beyond ``keep`` go. So do those that an earlier run has left behind the step
        from which this one went on: they are of another history, and ``auto`` would choose them.

        In the thread that has saved: to remove many gigabytes takes long on some file systems.
        """
        complete = self.complete()
        abandoned = [p for p in complete if step_of(p) > self._resumed_step and p not in self._mine]
        kept = [p for p in complete if p not in abandoned]
        abandoned += self.folder.glob(f"step-*{ABANDONED}")
        try:
            for old in abandoned + superfluous(kept, keep=self.keep, keep_every=self.keep_every):
                remove(old)
        except OSError as error:
            return f"{error.filename} could not be removed: {error.strerror}"
        return ""

    def save(self, pipeline: Saver, state: RunState) -> Path:
        """Write a checkpoint and wait for it; call on all ranks.

        Raises:
            RunError: it could not be written; what was there before is untouched.
        """
        self.start(pipeline, state)
        saved = self.wait()
        assert saved is not None
        if saved.problem:
            raise RunError(f"{saved.folder} could not be written: {saved.problem}")
        return saved.folder

    # resuming

    def find(self, resume: str, *, needed: bool = True) -> Found:
        """The checkpoint that ``--resume`` means: none, auto (the newest that is sound, if any) or a path.

        Call on all ranks, which read the files of a checkpoint by turns; all of them must see what is chosen. If a path
        in this folder is, those in it that are newer are set aside.

        Args:
            needed: whether it is an error if there are checkpoints and none of them is sound.

        Raises:
            UserError: the path holds no sound checkpoint, or not all machines see it; or see ``needed``.
        """
        if resume == "none":
            return Found(None)
        names = [resume]
        if self.world.rank == 0:
            clear_partial(self.folder)
        if resume == "auto":
            listed = "\n".join(str(path) for path in reversed(self.complete())) if self.world.rank == 0 else ""
            names = list(filter(None, self.world.broadcast_text(listed).split("\n")))
        passed_over: list[str] = []
        for name in names:
            path = Path(name)
            problem = self._problem(path)
            if not problem:
                self._resumed_step = read_run(path).step
                self.world.barrier()
                if resume != "auto" and self.world.rank == 0 and path.parent.resolve() == self.folder.resolve():
                    set_aside([one for one in self.complete() if step_of(one) > self._resumed_step])
                self.world.barrier()
                return Found(path, tuple(passed_over))
            if resume != "auto":
                raise UserError("--resume", resume, f"a sound checkpoint that every process can read ({problem})")
            passed_over.append(f"{path.name}: {problem}")
        if passed_over and needed:
            raise UserError("--resume", str(self.folder), f"a sound checkpoint; {'; '.join(passed_over)}")
        return Found(None, tuple(passed_over))

    def _problem(self, path: Path) -> str:
        """Why a checkpoint cannot be resumed from, the same on all ranks; or nothing."""
        world = self.world
        try:
            read_run(path)
            record = read_record(path)
            found = damaged(path, record, range(world.rank, len(record["files"]), world.size))
        except UserError as error:
            found = error.expected
        problems = world.gather_texts(found)
        where = next((rank for rank, problem in enumerate(problems) if problem), None)
        if where is None:
            return ""
        return problems[where] + (f"; rank {where}" if world.size > 1 and not all(problems) else "")


def complete_checkpoints(folder: Path) -> list[Path]:
    """The complete checkpoints in a folder, oldest first."""
    if not folder.is_dir():
        return []
    found = (path for path in folder.glob("step-*") if is_complete(path))
    return sorted((path for path in found if path.name.removeprefix("step-").isdecimal()), key=step_of)


def clear_partial(folder: Path) -> None:
    """Remove what a crash has left half written; put back what was about to be replaced."""
    for path in folder.glob("step-*.replaced"):
        if not path.with_suffix("").exists():
            path.rename(path.with_suffix(""))
    for path in (*folder.glob(f"step-*{PARTIAL}"), *folder.glob("step-*.replaced")):
        shutil.rmtree(path, ignore_errors=True)


def set_aside(newer: Sequence[Path]) -> None:
    """Checkpoints of another history: not chosen any more, and removed when this one has saved."""
    for path in newer:
        shutil.rmtree(path.with_suffix(ABANDONED), ignore_errors=True)
        path.rename(path.with_suffix(ABANDONED))


def superfluous(complete: list[Path], *, keep: int, keep_every: int = 0) -> list[Path]:
    """Of complete checkpoints, oldest first, those that may go.

    >>> [path.name for path in superfluous([Path(f"step-{n}") for n in (10, 20, 30, 40)], keep=2, keep_every=20)]
    ['step-10']
    """
    old = complete[:-keep] if keep else []
    return [path for path in old if not keep_every or step_of(path) % keep_every]


def remove(path: Path) -> None:
    """Under the name of what is not complete, by which a start finds what a crash leaves of it.

    Raises:
        OSError: it may not be removed; it is as it was then.
    """
    going = path if path.suffix == PARTIAL else path.with_name(path.name + PARTIAL)
    shutil.rmtree(going, ignore_errors=True)
    if going != path:
        path.rename(going)
        shutil.rmtree(going, ignore_errors=True)


def step_of(path: Path) -> int:
    """After which step a checkpoint was saved, by its name."""
    return int(path.name.removeprefix("step-"))


def read_run(path: Path) -> RunState:
    """What a checkpoint says of its run.

    Raises:
        UserError: it was not saved by a run, or is damaged.
    """
    return run_state(read_record(path), str(path))


def run_state(record: Mapping[str, Any], where: str) -> RunState:
    """From a record that was read at ``where``.

    Raises:
        UserError: it was not saved by a run, or is damaged.
    """
    try:
        state = RunState(**record["run"])
        kinds = {"step": int, "samples": int, "seed": int, "fingerprint": str, "data_state": dict, "plan": str}
        for name, kind in kinds.items():
            if not isinstance(getattr(state, name), kind):
                raise TypeError(f"{name} is {getattr(state, name)!r}")
    except (KeyError, TypeError) as error:
        raise UserError("--resume", where, f"a checkpoint that tawpipe train has saved ({error!r})") from error
    return state
