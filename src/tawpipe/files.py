"""Writing files and folders so that a crash leaves them complete."""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path

REPLACED = ".replaced"
"""Suffix of the name of a folder while a new folder replaces it."""


def replace_text(path: Path, text: str) -> None:
    """Write ``text`` to a file so that a crash or a full disk leaves either the old or the new content."""
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
    """Write a file or folder to the disk with ``fsync``.

    An error for a folder is ignored, because some file systems cannot sync folders.
    """
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError:
        if not path.is_dir():
            raise
    finally:
        os.close(handle)


def replace_folder(new: Path, folder: Path) -> None:
    """Rename the complete folder ``new`` to ``folder``, then delete the folder that had this name before.

    If the rename fails, the earlier folder keeps its name. If ``folder`` is a symbolic link, only the link is deleted.
    """
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
    """Delete a folder tree, or only the link if ``folder`` is a symbolic link. Do nothing if it does not exist."""
    if folder.is_symlink():
        folder.unlink()
    else:
        shutil.rmtree(folder, ignore_errors=True)


def checksum(path: Path, *, uncached: bool = False) -> str:
    """Return the SHA-256 checksum of a file in hexadecimal digits, as ``sha256sum`` prints it.

    Args:
        uncached: drop this machine's page cache of the file first, so that the bytes come from the disk or from the
            server of a network file system. Only synced pages are dropped, and only on systems with ``posix_fadvise``.
    """
    with path.open("rb") as file:
        if uncached and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return hashlib.file_digest(file, "sha256").hexdigest()
