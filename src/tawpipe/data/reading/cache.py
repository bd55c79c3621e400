"""Cache folders that several processes may create at one time, and that are complete whenever they are visible."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from tawpipe.errors import RunError, UserError

T = TypeVar("T")

MARKER = "COMPLETE"
ABANDONED_S = 24 * 3600.0


def cache_root(cache_dir: str | None) -> Path:
    """Return the cache folder; creates it if needed.

    Raises:
        UserError: the folder cannot be written.
    """
    root = Path(cache_dir or os.environ.get("TAWPIPE_CACHE") or "~/.cache/tawpipe").expanduser()
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError("--cache-dir", str(root), f"a folder that can be written ({error.strerror})") from error
    if not os.access(root, os.W_OK):
        raise UserError("--cache-dir", str(root), "a folder that can be written")
    return root


def content_hash(*parts: object) -> str:
    """Return 32 hexadecimal digits that identify ``parts``, which are of plain JSON types."""
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def is_complete(folder: Path) -> bool:
    """Return True if the folder was finished and its files still have the recorded sizes."""
    try:
        sizes = json.loads((folder / MARKER).read_text())
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError):
        return False


def make_folder(folder: Path, fill: Callable[[Path], None]) -> bool:
    """Create ``folder`` with the files that ``fill`` writes, unless it is complete already.

    ``fill`` writes into a temporary folder, which is renamed after its marker was written, so that no reader sees a
    part of it. If two runs make one folder at the same time, both succeed, and the result of one is used.

    Returns:
        True if the folder had to be made.

    Raises:
        RunError: the folder could not be written; nothing of it is left.
    """
    if is_complete(folder):
        return False
    work = folder.with_name(f"{folder.name}.tmp-{secrets.token_hex(4)}")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(folder)
        work.mkdir()
        fill(work)
        sizes = {path.name: path.stat().st_size for path in work.iterdir()}
        (work / MARKER).write_text(json.dumps(sizes))
        try:
            work.rename(folder)
        except OSError:
            if not is_complete(folder):  # a damaged folder has this name
                shutil.rmtree(folder)
                work.rename(folder)
    except OSError as error:
        reason = error.strerror or error
        raise RunError(f"cannot write {folder}: {reason} (--cache-dir names another folder)") from error
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return True


def _remove_abandoned(folder: Path) -> None:
    """Delete temporary folders for ``folder`` that killed runs have left more than a day ago."""
    for path in folder.parent.glob(f"{folder.name}.tmp-*"):
        try:
            if time.time() - path.stat().st_mtime > ABANDONED_S:
                shutil.rmtree(path, ignore_errors=True)
        except OSError:  # its run has just finished or removed it
            continue


def leader_first(work: Callable[[], T], *, leader: bool, barrier: Callable[[], None], note: Path) -> T:
    """Run ``work`` in the leader first, then in the other processes, which find its results; return the result.

    Every process calls this once, and it calls ``barrier`` once.

    Args:
        work: the work.
        leader: True in one process.
        barrier: waits for the other processes; it must allow for the time of the leader's work.
        note: file in which the leader leaves its error for the other processes.

    Raises:
        UserError: the leader's work raised it; in all processes.
        RunError: the leader's work failed otherwise; in the other processes.
    """
    if leader:
        try:
            note.unlink(missing_ok=True)
            return work()
        except BaseException as error:
            failure = [error.setting, error.value, error.expected] if isinstance(error, UserError) else repr(error)
            with contextlib.suppress(OSError):  # on a full disk the others fail themselves
                note.write_text(json.dumps(failure, default=str))
            raise
        finally:
            barrier()
    barrier()
    if note.exists():
        reason = json.loads(note.read_text())
        if isinstance(reason, list):
            raise UserError(*reason)
        raise RunError(f"the process that prepares the data failed: {reason}")
    return work()
