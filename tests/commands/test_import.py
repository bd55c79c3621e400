"""``--import``: strategies of one's own, in every process that a command starts; and what a library user may name."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tawpipe.cli import main
from tawpipe.errors import UserError
from tawpipe.schedule.settings import ScheduleSettings
from tawpipe.schedule.strategies.table import IMPORTS, find, import_strategies, strategy_of
from tawpipe.schedule.strategies.weights import Flat

OWN = '''"""A strategy of one's own."""

from tawpipe.schedule.strategies.table import register
from tawpipe.schedule.strategies.weights import Spread


class Own(Spread):
    name = "own"
    summary = "tawpipe-spread under another name"


register(Own())
'''
NAMES = "from tawpipe.schedule.strategies.table import strategies; print(*strategies())"


def tawpipe(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if name != IMPORTS}
    return subprocess.run(
        [sys.executable, "-m", "tawpipe", *words], cwd=cwd, env=environ, capture_output=True, text=True
    )


@pytest.mark.slow
def test_plan_includes_an_imported_strategy(tmp_path: Path) -> None:
    """A file, before the command."""
    (tmp_path / "own.py").write_text(OWN)
    asked = ["--model", "tiny", "--vocab-size", "500", "--sequence-length", "64", "--global-batch", "8"]
    asked += ["--topology", "2x1@1gbit", "--device", "cpu", "--device-name", "cpu", "--explain", "own"]
    done = tawpipe("--import", "own.py", "plan", *asked, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^own +\d", done.stdout, re.MULTILINE)


def test_help_lists_an_imported_strategy(tmp_path: Path) -> None:
    """A module in the folder, behind the command."""
    (tmp_path / "own.py").write_text(OWN)
    words = ("train", "--import=own", "--schedule.strategy", "own", "--print-config")
    done = tawpipe(*words, cwd=tmp_path)
    assert done.returncode == 0 and "own: tawpipe-spread under another name." in " ".join(done.stdout.split("\n  # "))
    assert "  strategy: own\n" in done.stdout


def test_child_processes_know_an_imported_strategy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_of_a_test.py").write_text(OWN)
    monkeypatch.setattr(sys, "path", [*sys.path])
    import_strategies([str(tmp_path / "own_of_a_test.py")])
    assert find("own").summary == "tawpipe-spread under another name"
    done = subprocess.run([sys.executable, "-c", NAMES], cwd="/", capture_output=True, text=True, check=True)
    assert done.stdout.split()[-1] == "own"


@pytest.mark.parametrize(
    ("word", "content", "reason"),
    [
        ("nowhere.py", None, "ModuleNotFoundError"),
        ("no_such_module", None, "ModuleNotFoundError"),
        ("", None, "ValueError"),
        ("damaged.py", "1 +", "SyntaxError"),
    ],
)
def test_failed_import_is_named(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    word: str,
    content: str | None,
    reason: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    if content is not None:
        (tmp_path / word).write_text(content)
    assert main(["train", "--import", word]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"tawpipe: error: --import: got '{word}'; a module, or a .py file") and reason in said


def test_library_accepts_a_strategy_as_name_object_or_settings() -> None:
    flat = find("flat")
    assert strategy_of("flat") == (flat, ScheduleSettings(strategy="flat"))
    assert strategy_of(Flat()) == (flat, ScheduleSettings(strategy="flat"))
    chosen = ScheduleSettings(strategy="flat", look_ahead=5)
    assert strategy_of(chosen) == (flat, chosen)
    with pytest.raises(UserError, match="schedule: got 3; ScheduleSettings, a Strategy"):
        strategy_of(3)  # type: ignore[arg-type]
