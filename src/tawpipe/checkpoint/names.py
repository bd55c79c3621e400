"""Names of the folder and the files of a state. Needs no torch, so that a launcher can find saved states."""

from __future__ import annotations

import shutil
from pathlib import Path

MARKER = "tawpipe.json"
"""Name of the manifest, which is written last."""
PARTIAL, ABANDONED = ".incomplete", ".abandoned"
"""Suffixes of folder names: of a state that is being written or removed, and of a state of an abandoned history."""


def file_name(number: int) -> str:
    """Return the name of the file with the chunks of rank ``number`` among the ranks that saved."""
    return f"state-{number:05}.safetensors"


def step_name(step: int) -> str:
    """Return the name of the folder of the state after step ``step``."""
    return f"step-{step:08}"


def step_of(folder: Path) -> int:
    """Return the step number in the name of a state's folder."""
    return int(folder.name.removeprefix("step-"))


def beside(folder: Path, suffix: str) -> Path:
    """Return the path of ``folder`` with ``suffix`` appended to its name."""
    return folder.with_name(folder.name + suffix)


def is_complete(folder: Path) -> bool:
    """Return True if ``folder`` holds a completely written state: it has a manifest and no suffix of a partial one."""
    return folder.suffix != PARTIAL and (folder / MARKER).is_file()


def named_states(folder: Path) -> list[Path]:
    """Return the folders in ``folder`` that are named like states, oldest first; some may lack their manifest."""
    named = (path for path in folder.glob("step-*") if path.name.removeprefix("step-").isdecimal() and path.is_dir())
    return sorted(named, key=step_of)


def complete_states(folder: Path) -> list[Path]:
    """Return the folders of complete states in ``folder``, oldest first."""
    return [path for path in named_states(folder) if is_complete(path)]


def state_to_resume(output: Path, resume: str) -> Path | None:
    """Return the folder of the state that ``--resume`` selects, or None for a new start; files are not checked.

    Args:
        output: output folder of the run.
        resume: ``none``, ``auto`` (the newest complete state) or a path.
    """
    if resume == "auto":
        return next(reversed(complete_states(output / "checkpoints")), None)
    return None if resume == "none" else Path(resume)


def passed_over(folder: Path, step: int = 0) -> tuple[str, ...]:
    """Return a sentence for each state in ``folder`` after step ``step`` that lacks its manifest, newest first."""
    newer = [path for path in reversed(named_states(folder)) if step_of(path) > step and not is_complete(path)]
    return tuple(f"{path.name}: it holds no {MARKER}" for path in newer)


def remove(folder: Path) -> None:
    """Delete the folder of a state: first rename it with the suffix of partial states, then delete its files.

    A crash in the middle therefore leaves a folder that the next start recognises as partial. Files that cannot be
    deleted stay in the renamed folder, without an error.

    Raises:
        OSError: renaming is not permitted; the state is then unchanged.
    """
    going = folder if folder.suffix == PARTIAL else beside(folder, PARTIAL)
    shutil.rmtree(going, ignore_errors=True)
    if going != folder:
        folder.rename(going)
        shutil.rmtree(going, ignore_errors=True)
