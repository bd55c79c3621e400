"""The checkpoints of one run: names, which are complete, which one to resume from, which to remove. Imports pipeline.

Random numbers derive from (seed, step, micro-batch, block), so seed and step are the whole random state.
"""

from __future__ import annotations

import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tawpipe.errors import UserError
from tawpipe.pipeline import Pipeline
from tawpipe.runtime.state import MARKER, is_complete, read_record
from tawpipe.runtime.world import World


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


class Checkpoints:
    """Folders ``step-00000100`` in one folder.

    Args:
        folder: all ranks must see the same one.
        keep: how many of the newest stay; 0 for all.
    """

    def __init__(self, folder: Path, world: World, *, keep: int = 0) -> None:
        self.folder, self.world, self.keep = folder, world, keep
        self._resumed_step = 0
        self._saved: list[Path] = []

    def complete(self) -> list[Path]:
        """The complete checkpoints, oldest first."""
        if not self.folder.is_dir():
            return []
        found = (path for path in self.folder.glob("step-*") if is_complete(path))
        return sorted(path for path in found if path.name.removeprefix("step-").isdecimal())

    def save(self, pipeline: Pipeline, state: RunState) -> Path:
        """Write a checkpoint; call on all ranks. When it is complete, older ones beyond ``keep`` go.

        So do those that an earlier run has left behind the step from which this one went on: they are of another
        history, and ``auto`` would choose them.
        """
        path = self.folder / f"step-{state.step:08d}"
        pipeline.save(path, run=asdict(state))
        self._saved.append(path)
        if self.world.rank == 0:
            complete = self.complete()
            abandoned = [p for p in complete if _step_of(p) > self._resumed_step and p not in self._saved]
            mine = [p for p in complete if p not in abandoned]
            for old in abandoned + (mine[: -self.keep] if self.keep else []):
                # The marker goes first: a folder that is half removed is not complete.
                (old / MARKER).unlink(missing_ok=True)
                shutil.rmtree(old, ignore_errors=True)
        return path

    def find(self, resume: str) -> Path | None:
        """The checkpoint that ``--resume`` means: none, auto (the newest complete one, or None) or a path.

        Call on all ranks; rank 0 chooses, and all of them must see what it has chosen.

        Raises:
            UserError: the path holds no complete checkpoint, or not all machines see it.
        """
        chosen = ""
        if self.world.rank == 0 and resume != "none":
            complete = self.complete()
            chosen = (str(complete[-1]) if complete else "") if resume == "auto" else resume
        chosen = self.world.broadcast_text(chosen)
        if not chosen:
            return None
        path = Path(chosen)
        self.world.require(is_complete(path), "--resume", chosen, "a complete checkpoint that every process can read")
        self._resumed_step = read_run(path).step
        return path


def _step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def read_run(path: Path) -> RunState:
    """What a checkpoint says of its run.

    Raises:
        UserError: it was not saved by a run, or is damaged.
    """
    record = read_record(path)
    try:
        return RunState(**record["run"])
    except (KeyError, TypeError) as error:
        raise UserError("--resume", str(path), f"a checkpoint that tawpipe train has saved ({error!r})") from error
