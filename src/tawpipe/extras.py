"""Version of this package, and the command that installs its optional dependencies (the extras of pyproject.toml)."""

from __future__ import annotations

import shlex
from pathlib import Path

VERSION = "0.1.0"
"""Version of the package, valid also in a source tree that is not installed."""
CLONE = Path(__file__).resolve().parents[2]
"""Root folder of the repository, if the package is used from a clone."""


def install_hint(extra: str) -> str:
    """Return the shell command that installs the optional dependencies ``extra``.

    The command installs from the clone if the package is used from one. Otherwise it installs ``tawpipe[extra]`` by
    name.
    """
    if not (CLONE / "pyproject.toml").is_file():
        return f"pip install 'tawpipe[{extra}]'"
    place = "." if Path.cwd() == CLONE else str(CLONE)
    return "pip install -e " + shlex.quote(f"{place}[{extra}]")
