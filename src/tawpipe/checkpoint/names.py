"""Names of a state's folder and files. Without torch, so that a launcher can tell what was saved."""

from __future__ import annotations

import shutil
from pathlib import Path

MARKER = "tawpipe.json"
"""The manifest, which is written last."""
PARTIAL, ABANDONED = ".incomplete", ".abandoned"
"""Behind the name of a folder that is being written or removed; of another history."""


def file_name(number: int) -> str:
    """The file with the chunks of rank ``number`` of those that saved."""
    return f"state-{number:05}.safetensors"


def step_name(step: int) -> str:
    """The folder of the state after a step."""
    return f"step-{step:08}"


def step_of(folder: Path) -> int:
    """The step after which a state was saved, by the name of its folder."""
    return int(folder.name.removeprefix("step-"))


def beside(folder: Path, suffix: str) -> Path:
    return folder.with_name(folder.name + suffix)


def is_complete(folder: Path) -> bool:
    """True if a folder holds a state that was written to its end."""
    return folder.suffix != PARTIAL and (folder / MARKER).is_file()


def named_states(folder: Path) -> list[Path]:
    """The folders in ``folder`` whose names are those of states, oldest first; some may be without their manifest."""
    named = (path for path in folder.glob("step-*") if path.name.removeprefix("step-").isdecimal() and path.is_dir())
    return sorted(named, key=step_of)


def complete_states(folder: Path) -> list[Path]:
    """The complete states in a folder, oldest first."""
    return [path for path in named_states(folder) if is_complete(path)]


def state_to_resume(output: Path, resume: str) -> Path | None:
    """The folder of the state that ``--resume`` means if it is sound; None without one.

    Args:
        output: of the run.
    """
    if resume == "auto":
        return next(reversed(complete_states(output / "checkpoints")), None)
    return None if resume == "none" else Path(resume)


def passed_over(folder: Path, step: int = 0) -> tuple[str, ...]:
    """Sentences about the states in ``folder`` after ``step`` that lack their manifest, newest first."""
    newer = [path for path in reversed(named_states(folder)) if step_of(path) > step and not is_complete(path)]
    return tuple(f"{path.name}: it holds no {MARKER}" for path in newer)


def remove(folder: Path) -> None:
    """Remove a state under the name of what is not complete, by which a start finds what a crash leaves of it.

    Raises:
        OSError: it may not be removed; it is as it was then.
    """
    going = folder if folder.suffix == PARTIAL else beside(folder, PARTIAL)
    shutil.rmtree(going, ignore_errors=True)
    if going != folder:
        folder.rename(going)
        shutil.rmtree(going, ignore_errors=True)
