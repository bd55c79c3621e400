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
        topology, versions: for the reader.
    """

    step: int
    samples: int
    seed: int
    fingerprint: str = ""
    data_state: dict[str, Any] = field(default_factory=dict)
    topology: str = ""
    versions: dict[str, str] = field(default_factory=dict)


class Checkpoints:
    """Folders ``step-00000100`` in one folder.

    Args:
        folder: all ranks must see the same one.
        keep: how many of the newest stay; 0 for all.
    """

    def __init__(self, folder: Path, world: World, *, keep: int = 0) -> None:
        self.folder, self.world, self.keep = folder, world, keep

    def complete(self) -> list[Path]:
        """The complete checkpoints, oldest first."""
        if not self.folder.is_dir():
            return []
        found = (path for path in self.folder.glob("step-*") if is_complete(path))
        return sorted(path for path in found if path.name.removeprefix("step-").isdecimal())

    def save(self, pipeline: Pipeline, state: RunState) -> Path:
        """Write a checkpoint; call on all ranks. Older ones beyond ``keep`` go when it is complete."""
        path = self.folder / f"step-{state.step:08d}"
        pipeline.save(path, run=asdict(state))
        if self.world.rank == 0 and self.keep:
            for old in self.complete()[: -self.keep]:
                # The marker goes first: a folder that is half removed is not complete.
                (old / MARKER).unlink(missing_ok=True)
                shutil.rmtree(old, ignore_errors=True)
        return path

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
        read_record(Path(resume))
        return Path(resume)


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
