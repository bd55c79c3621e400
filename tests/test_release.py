"""A release is refused before anything is built, unless the tree, the version and the changelog agree."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A repository with the script, a version and a changelog; its ``make`` and ``twine`` only record their words."""
    folder = tmp_path / "copy"
    for name in (".ci", ".venv/bin", "bin"):
        (folder / name).mkdir(parents=True)
    shutil.copy(ROOT / ".ci" / "release", folder / ".ci")
    (folder / "pyproject.toml").write_text('[project]\nversion = "1.2.0"\n')
    (folder / "CHANGELOG.md").write_text("## [1.2.0] - 2026-01-31\n")
    (folder / ".gitignore").write_text(".venv\n")
    for program in ("bin/make", ".venv/bin/twine"):
        (folder / program).write_text(f'#!/bin/sh\necho {Path(program).name} "$@" "$TWINE_USERNAME" >> ../called\n')
        (folder / program).chmod(0o755)
    git(folder, "init", "--quiet")
    commit(folder)
    return folder


def git(folder: Path, *words: str) -> str:
    identity = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false", "-c", "tag.gpgsign=false")
    return subprocess.run(["git", *identity, *words], cwd=folder, check=True, capture_output=True, text=True).stdout


def commit(folder: Path) -> None:
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message", "a")


def release(folder: Path, key: str = "a key") -> tuple[int, str, list[str]]:
    """Exit code, error text, and the commands that were called."""
    variables = {**os.environ, "PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "TWINE_PASSWORD": key}
    variables.pop("TWINE_USERNAME", None)
    done = subprocess.run([folder / ".ci" / "release"], env=variables, capture_output=True, text=True)
    called = folder.parent / "called"
    return done.returncode, done.stderr, called.read_text().splitlines() if called.exists() else []


def test_release_is_checked_uploaded_and_tagged(copy: Path) -> None:
    code, error, called = release(copy)
    assert (code, error) == (0, "")
    assert [line.split()[0] for line in called] == ["make", "twine"]
    assert "try-wheel" in called[0] and called[1].endswith("__token__")
    assert git(copy, "tag").split() == ["v1.2.0"]


@pytest.mark.parametrize(
    ("changelog", "dirty", "tag", "key", "expected"),
    [
        ("## [1.2.0] - unreleased\n", False, False, "a key", "expected '## [1.2.0] - YYYY-MM-DD'"),
        ("## [1.2.01] - 2026-01-31\n", False, False, "a key", "got no dated heading for 1.2.0"),
        ("", True, False, "a key", "expected a clean tree"),
        ("", False, True, "a key", "tag v1.2.0, which exists"),
        ("", False, False, "", "TWINE_PASSWORD: got nothing"),
    ],
)
def test_release_is_refused(copy: Path, changelog: str, dirty: bool, tag: bool, key: str, expected: str) -> None:
    if changelog:
        (copy / "CHANGELOG.md").write_text(changelog)
        commit(copy)
    if dirty:
        (copy / "new.py").write_text("")
    if tag:
        git(copy, "tag", "v1.2.0")
    code, error, called = release(copy, key)
    assert code == 2 and expected in error and called == []


def test_changelog_names_no_install_from_the_index_before_the_first_release() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert "- unreleased" not in text.partition("## [0.1.0]")[2].partition("\n")[0] or "pip install tawpipe" not in text
