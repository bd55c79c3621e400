"""The version of this package; what can be installed besides (the extras of pyproject.toml), and the command for it."""

from __future__ import annotations

import shlex
from pathlib import Path

VERSION = "0.1.0"
"""Also of a source tree that is not installed."""
CLONE = Path(__file__).resolve().parents[2]
"""The repository, where the package is used from one."""


def install_hint(extra: str) -> str:
    """The command that installs an extra: from the clone that this package is used from, or else by its name, which
    pip finds installed.
    """
    if not (CLONE / "pyproject.toml").is_file():
        return f"pip install 'tawpipe[{extra}]'"
    place = "." if Path.cwd() == CLONE else str(CLONE)
    return "pip install -e " + shlex.quote(f"{place}[{extra}]")
