"""Cache folders that several processes may make at once, and that are complete wherever one sees them."""

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
    """The cache folder, made if it is not there."""
    root = Path(cache_dir or os.environ.get("TAWPIPE_CACHE") or "~/.cache/tawpipe").expanduser()
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError("--cache-dir", str(root), f"a folder that can be written ({error.strerror})") from error
    if not os.access(root, os.W_OK):
        raise UserError("--cache-dir", str(root), "a folder that can be written")
    return root


def content_hash(*parts: object) -> str:
    """32 hexadecimal digits that stand for the parts, which are of plain JSON types."""
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def is_complete(folder: Path) -> bool:
    """True if the folder was finished and its files still have the sizes that they had then."""
    try:
        sizes = json.loads((folder / MARKER).read_text())
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError):
        return False


def make_folder(folder: Path, fill: Callable[[Path], None]) -> bool:
    """Make the folder with the files that ``fill`` writes, unless it is complete already.

    ``fill`` writes into another folder, which then takes its name, the marker written last: no reader sees a part. Two
    runs that make the same folder at once both succeed, and one's work is used.

    Returns:
        True if it had to be made.

    Raises:
        RunError: it could not be written; nothing of it is left.
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
            if not is_complete(folder):  # a damaged one is in the way
                shutil.rmtree(folder)
                work.rename(folder)
    except OSError as error:
        reason = error.strerror or error
        raise RunError(f"cannot write {folder}: {reason} (--cache-dir names another folder)") from error
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return True


def _remove_abandoned(folder: Path) -> None:
    """Remove parts of this folder that killed runs have left behind."""
    for path in folder.parent.glob(f"{folder.name}.tmp-*"):
        try:
            if time.time() - path.stat().st_mtime > ABANDONED_S:
                shutil.rmtree(path, ignore_errors=True)
        except OSError:  # its own run has just finished or removed it
            continue


def leader_first(work: Callable[[], T], *, leader: bool, barrier: Callable[[], None], note: Path) -> T:
    """Run ``work`` in the leader, and in the others once it is done there, so that they find its results.

    If the leader's work fails, all fail alike: with the same UserError, left for the others in the file ``note``.
    Every process calls this once, and it calls ``barrier`` once, which has to bear as long as the leader's work takes.
    """
    if leader:
        try:
            note.unlink(missing_ok=True)
            return work()
        except BaseException as error:
            said = [error.setting, error.value, error.expected] if isinstance(error, UserError) else repr(error)
            with contextlib.suppress(OSError):  # on a full disk the others find out by themselves
                note.write_text(json.dumps(said, default=str))
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
