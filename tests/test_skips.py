"""CI refuses skips that are not listed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from skips import LISTED, TESTS, listed

SKIPS = """
import pytest

def test_plain():
    pytest.skip("on a Monday")

@pytest.mark.skipif(True, reason="on a Tuesday")
def test_marked():
    pass

@pytest.mark.xfail
def test_expected_failure():
    assert False
"""


@pytest.mark.parametrize("file", LISTED)
def test_listed_skip_is_in_its_file(file: str) -> None:
    text = (TESTS / file).read_text(encoding="utf-8")
    if "skip(str(error))" not in text and "skip(row.note)" not in text:
        for reason in LISTED[file]:
            assert reason.split(": ")[0] in text


def test_skip_is_listed_by_file_and_beginning_of_its_reason() -> None:
    file = str(TESTS / "lab" / "test_compare.py")
    assert listed(file, "needs root and tc (iproute2) to build a cluster")
    assert not listed(file, "root needs tc")
    assert not listed(str(TESTS / "lab" / "test_deepspeed.py"), "needs root and tc")


@pytest.mark.parametrize("ci", ["true", ""])
def test_unlisted_skip_fails_in_ci_only(tmp_path: Path, ci: str) -> None:
    (tmp_path / "test_plain.py").write_text(SKIPS)
    (tmp_path / "test_module.py").write_text('import pytest\npytest.importorskip("no_such_module")\n')
    words = [sys.executable, "-m", "pytest", "-q", "-n", "1", "-p", "skips", "-p", "no:cacheprovider", str(tmp_path)]
    environment = os.environ | {"CI": ci, "PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run(words, env=environment, cwd=tmp_path, capture_output=True, text=True)
    if not ci:
        assert ended.returncode == 0 and "3 skipped, 1 xfailed" in ended.stdout
        return
    assert ended.returncode != 0 and "1 failed, 1 xfailed, 2 errors" in ended.stdout
    for reason in ("on a Monday", "on a Tuesday", "could not import 'no_such_module'"):
        assert f"skipped, but tests/skips.yaml does not list the reason: {reason}" in ended.stdout
