"""Lock on a run's output folder, so that no other run writes there at the same time.

The process that supervises the run locks the file ``.running`` in the folder (``flock``) and writes its host and
process id into it. The operating system releases the lock when the process ends, for any reason. This also works across
machines if the file system supports locks between them (NFS from version 4 on). On a file system without locks, a file
of this machine counts as locked while its process is alive, and a file of another machine until a user removes it.
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
    """Return a context that holds the lock on a run's output folder.

    The file ``.running`` is written on entry and removed on exit.

    Args:
        folder: existing output folder.
        patience_s: seconds to wait for a process of the same run that is about to end.
        setting: name of the setting for the folder, for the message.

    Raises:
        UserError: another run holds the lock. The message names its host and process.
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
        with suppress(OSError):  # remove before closing: after that the file could be another run's
            path.unlink()
        os.close(file)


def is_held(folder: Path) -> bool:
    """Return True if a living process holds the lock on a run's output folder. Writes nothing.

    On a file system without locks, True is returned for a process of this machine only: others cannot be asked.
    """
    path = folder / NAME
    holder = _read(path)
    if not holder or not _alive(holder):  # known without the shared lock below, which would refuse a run that starts
        return False
    try:
        with path.open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return path.exists() and holder.get("host") == socket.gethostname()
    return False


def _taken(path: Path) -> int | None:
    """Open and lock the file at ``path``, and return its descriptor; None while another process holds it."""
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
            return None
        except OSError:  # the file system has no locks
            if (holder := _read(path)) and _alive(holder):
                os.close(file)
                return None
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file), path.stat()):
                return file
        os.close(file)  # the earlier run removed it after this open: try again


def _read(path: Path) -> dict[str, Any]:
    """Return the content of the lock file; an empty dict if it cannot be read or is no JSON object."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _alive(holder: dict[str, Any]) -> bool:
    """Return False if the holder's process on this machine has ended; True if it is alive or on another machine."""
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
    """Return words about the run that holds the lock, and how to remove the lock if that run has ended."""
    holder = _read(path)
    if not holder:
        return "another run has just started there"
    where = f"on {holder.get('host')} by process {holder.get('process')} since {holder.get('since')}"
    return f"this one is written to {where}; if that has ended, remove {path}"
