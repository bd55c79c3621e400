"""A run's hold on its output folder, so that no other run writes there at the same time.

The file ``.running`` in the folder is locked (``flock``) by the process that looks after the run, and says who that is.
The system lets go of the lock when the process has ended, however that was, also on another machine where the file
system knows of locks there (NFS from version 4 on does). Where it knows of none at all, a file of this machine counts
as long as its process is alive, and one of another machine until somebody removes it.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tawpipe.errors import UserError

NAME = ".running"


@contextmanager
def running_in(folder: Path, *, patience_s: float = 0.0, setting: str = "--output") -> Iterator[None]:
    """Hold a run's output folder.

    Args:
        folder: that there is.
        patience_s: seconds to wait for a process of the same run that is about to end.
        setting: that names the folder.

    Raises:
        UserError: another run is going on there; it says which.
    """
    path, until = folder / NAME, time.monotonic() + patience_s
    while (file := _taken(path)) is None:
        if time.monotonic() >= until:
            raise UserError(setting, str(folder), f"a folder that no other run is using: {_holder(path)}")
        time.sleep(0.1)
    try:
        os.ftruncate(file, 0)
        holder = {"host": socket.gethostname(), "process": os.getpid(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
        os.pwrite(file, json.dumps(holder).encode(), 0)
        yield
    finally:
        with suppress(OSError):  # while it is held, so that it is no other run's
            path.unlink()
        os.close(file)


def _taken(path: Path) -> int | None:
    """The file, locked; None while another process has it."""
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
            return None
        except OSError:  # a file system without locks
            if (holder := _read(path)) and _alive(holder):
                os.close(file)
                return None
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file), path.stat()):
                return file
        os.close(file)  # removed by the run before, after it was opened here


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _alive(holder: dict[str, Any]) -> bool:
    """Whether a process is there, as far as can be known from here."""
    if holder.get("host") != socket.gethostname():
        return True
    try:
        os.kill(int(holder.get("process", 0)), 0)
    except (ProcessLookupError, ValueError, TypeError):
        return False
    except PermissionError:
        pass
    return True


def _holder(path: Path) -> str:
    """The holder, in words, and what to do if it is no more."""
    holder = _read(path)
    if not holder:
        return "another run has just started there"
    where = f"on {holder.get('host')} by process {holder.get('process')} since {holder.get('since')}"
    return f"this one is written to {where}; if that has ended, remove {path}"
