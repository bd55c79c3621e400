"""Files that a crash leaves whole."""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path

REPLACED = ".replaced"
"""Behind the name of a folder that a new one is about to replace."""


def replace_text(path: Path, text: str) -> None:
    """Write a file so that a crash, or a disk that is full, leaves the old one or the new one."""
    new = path.with_name(path.name + ".new")
    try:
        with new.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Bring a file or folder onto the disk. A file system that cannot sync folders is not asked again."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError:
        if not path.is_dir():
            raise
    finally:
        os.close(handle)


def replace_folder(new: Path, folder: Path) -> None:
    """Give a complete folder its name; what had that name goes, unless this fails. Of a link only the link goes."""
    replaced = folder.with_name(f"{folder.name}{REPLACED}")
    _remove(replaced)
    if os.path.lexists(folder):
        folder.rename(replaced)
    try:
        new.rename(folder)
    except OSError:
        if os.path.lexists(replaced):
            replaced.rename(folder)
        raise
    sync(folder.parent)
    _remove(replaced)


def _remove(folder: Path) -> None:
    if folder.is_symlink():
        folder.unlink()
    else:
        shutil.rmtree(folder, ignore_errors=True)


def checksum(path: Path, *, uncached: bool = False) -> str:
    """SHA-256 of a file, as ``sha256sum`` prints it.

    Args:
        uncached: of what the disk, or the server of a network file system, gives: this machine's copy in its page cache
            is dropped first, as far as it was synced and the system can (POSIX).
    """
    with path.open("rb") as file:
        if uncached and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return hashlib.file_digest(file, "sha256").hexdigest()
