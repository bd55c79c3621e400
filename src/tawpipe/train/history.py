"""The name of the history that an output folder holds, so that what is left of another one is never gone on with.

A run that starts anew, or goes back to an earlier checkpoint, begins another history in its folder; one that is resumed
goes on with that of before. The file says besides which start has chosen what to go on from: one that died before
leaves that to the next start.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from tawpipe.environment import LAUNCH
from tawpipe.errors import RunError
from tawpipe.train.metrics import replace_text

NAME = "history.json"
FIELDS = ("history", "resume", "launch")


@dataclass(frozen=True)
class Mark:
    """The content of the file; empty where there is none.

    Args:
        history: a random name.
        resume: what ``--resume`` said.
        launch: see ``launch_name``.
    """

    history: str = ""
    resume: str = ""
    launch: str = ""

    @property
    def text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def of(cls, text: str) -> Mark:
        """The mark in a file's text; an empty one if the text is damaged."""
        try:
            values = json.loads(text)
            return cls(*(str(values[name]) for name in FIELDS))
        except (ValueError, KeyError, TypeError):
            return cls()


def launch_name(environ: Mapping[str, str] = os.environ) -> str:
    """A name that all starts of one launch share."""
    return environ.get(LAUNCH) or environ.get("TORCHELASTIC_RUN_ID", "")


def read_mark(output: Path) -> Mark:
    path = output / NAME
    try:
        return Mark.of(path.read_text(encoding="utf-8"))
    except OSError:
        return Mark()


def write_mark(output: Path, mark: Mark) -> None:
    """Call when everything is found that is gone on from, and what must not be is set aside.

    Raises:
        RunError: it cannot be written, and without it a restart would not know what this start has chosen.
    """
    try:
        output.mkdir(parents=True, exist_ok=True)
        replace_text(output / NAME, mark.text)
    except OSError as error:
        raise RunError(f"{output / NAME} could not be written: {error.strerror or error}") from error
