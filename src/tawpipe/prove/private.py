"""Removal of names of hosts, users, addresses and paths from results that people send to others."""

from __future__ import annotations

import getpass
import os
import platform
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

REMOVED = "…"
"""Text in the place of what was removed."""
PATHS = r"(?<![\w/.])(?:~|\.{1,2})?(?:/[^\s/'\",;:()\[\]{}<>]+)+/?"
ADDRESSES = (
    r"\b\d{1,3}(?:\.\d{1,3}){3}(?::\d+)?\b"
    r"|(?<![\w:])(?:(?:[0-9a-fA-F]{1,4}:){3,7}:?[0-9a-fA-F]{1,4}|[0-9a-fA-F:]*::[0-9a-fA-F:]+)(?!\w)"  # not aten::add
)
VARIABLES = "USER", "LOGNAME", "HOSTNAME", "MASTER_ADDR", "SLURMD_NODENAME", "NCCL_HOSTID", "NCCL_COMM_ID"
"""Environment variables with names of users and hosts."""


def local_names() -> list[str]:
    """Return the names of this host and of its user, without asking a network."""
    names = {platform.node(), platform.node().partition(".")[0], Path.home().name}
    names |= {os.environ.get(name, "") for name in VARIABLES}
    with suppress(OSError, KeyError, ImportError):  # a user without a name
        names.add(getpass.getuser())
    return sorted(name for name in names if len(name) > 1)


def option_names(words: Sequence[str]) -> str:
    """Return the names of the options in a command line, without values and files.

    >>> option_names(["prove", "--only", "exact", "--out=/home/name/file.json"])
    '--only --out'
    """
    return " ".join(match[0] for word in words if (match := re.match(r"--[a-z][a-z-]*(?==|$)", word)))


def scrub(value: Any, names: Iterable[str]) -> Any:
    """Return plain data without paths, addresses and ``names`` in its texts and keys.

    >>> scrub({"note": ["at /home/me/x of me", "1.5 GB/s", "10.0.0.1:80 fe80::a", "aten::add"]}, ["me"])
    {'note': ['at … of …', '1.5 GB/s', '… …', 'aten::add']}
    """
    hidden = "|".join(rf"(?<!\w){re.escape(name)}(?!\w)" for name in sorted(names, key=len, reverse=True))
    pattern = re.compile("|".join(filter(None, (PATHS, ADDRESSES, hidden))))

    def clean(part: Any) -> Any:
        if isinstance(part, str):
            return pattern.sub(REMOVED, part)
        if isinstance(part, dict):
            return {clean(key): clean(entry) for key, entry in part.items()}
        return [clean(entry) for entry in part] if isinstance(part, list | tuple) else part

    return clean(value)
