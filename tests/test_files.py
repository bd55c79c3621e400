"""Files that a crash leaves whole, and how often Python collects: what was there before comes back after an error."""

from __future__ import annotations

import gc
import hashlib
from pathlib import Path
from types import SimpleNamespace

import pytest

from tawpipe import garbage
from tawpipe.files import REPLACED, checksum, replace_folder, replace_text, sync
from tawpipe.garbage import RARELY, leave_imports_alone, rarely_collected


def test_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch) -> None:
    file = tmp_path / "state.json"
    replace_text(file, "old")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched, pytest.raises(OSError, match="No space"):
        patched.setattr("os.fsync", full)
        replace_text(file, "new")
    assert file.read_text() == "old" and list(tmp_path.iterdir()) == [file]
    replace_text(file, "newer ü")
    assert file.read_text(encoding="utf-8") == "newer ü" and list(tmp_path.iterdir()) == [file]


def folder_with(path: Path, text: str) -> Path:
    path.mkdir()
    (path / "content").write_text(text)
    return path


def test_replace_folder_replaces_an_existing_folder(tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "best", "old")
    replace_folder(folder_with(tmp_path / "new", "new"), folder)
    assert (folder / "content").read_text() == "new" and list(tmp_path.iterdir()) == [folder]


@pytest.mark.parametrize("dangling", [False, True])
def test_replace_folder_replaces_a_link_and_keeps_its_target(tmp_path: Path, dangling: bool) -> None:
    folder, elsewhere = tmp_path / "best", tmp_path / "elsewhere"
    folder.symlink_to(tmp_path / "nowhere" if dangling else folder_with(elsewhere, "linked"))
    for text in ("new", "newer"):
        replace_folder(folder_with(tmp_path / "made", text), folder)
        assert (folder / "content").read_text() == text and not folder.is_symlink()
    assert sorted(tmp_path.iterdir()) == ([folder] if dangling else [folder, elsewhere])
    assert dangling or (elsewhere / "content").read_text() == "linked"


def test_replace_folder_removes_a_link_left_by_a_crash(tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "best", "old")
    (tmp_path / f"best{REPLACED}").symlink_to(tmp_path)
    replace_folder(folder_with(tmp_path / "made", "new"), folder)
    assert (folder / "content").read_text() == "new" and list(tmp_path.iterdir()) == [folder]


def test_failed_rename_leaves_the_former_folder(tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "best", "old")
    folder_with(tmp_path / f"best{REPLACED}", "left by a crash")
    with pytest.raises(OSError):
        replace_folder(tmp_path / "missing", folder)
    assert (folder / "content").read_text() == "old" and list(tmp_path.iterdir()) == [folder]


def test_checksum_covers_all_bytes_cached_or_not(tmp_path: Path) -> None:
    file = tmp_path / "large"
    content = bytes(range(256)) * 3000
    file.write_bytes(content)
    sync(file)
    sync(tmp_path)
    assert checksum(file) == checksum(file, uncached=True) == hashlib.sha256(content).hexdigest()
    file.write_bytes(content[:-1] + b"!")
    assert checksum(file) != hashlib.sha256(content).hexdigest()
    with pytest.raises(FileNotFoundError):
        sync(tmp_path / "missing")


def test_collection_thresholds_are_restored_after_an_error() -> None:
    before = gc.get_threshold()
    with pytest.raises(RuntimeError), rarely_collected():
        assert gc.get_threshold() == RARELY
        with rarely_collected():
            pass
        assert gc.get_threshold() == RARELY  # of the outer one
        raise RuntimeError
    assert gc.get_threshold() == before


def test_imports_are_frozen_from_collection_only_once(monkeypatch) -> None:
    """Later there may be pipelines among what would be kept for ever."""
    frozen: list[bool] = []
    monkeypatch.setattr(garbage, "gc", SimpleNamespace(freeze=lambda: frozen.append(True)))
    leave_imports_alone.cache_clear()
    leave_imports_alone()
    leave_imports_alone()
    assert frozen == [True]
