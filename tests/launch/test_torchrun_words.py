"""Under torchrun: what is wrong is said once on every machine, at the end of what torchrun prints."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from runs import environment
from tawpipe.cli import main
from tawpipe.errors import RunError
from tawpipe.launch.torchrun import leave_words

MESSAGE = "tawpipe: error: --steps: got 'many'; a whole number at least 0 or null"


@pytest.fixture
def as_worker(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """This process as the first one of a machine under torchrun; the file of its last words."""
    file = tmp_path / "error.json"
    place = {"RANK": 2, "WORLD_SIZE": 4, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 2, "GROUP_RANK": 1}
    for name, value in {**place, "TORCHELASTIC_ERROR_FILE": file, "TORCHELASTIC_MAX_RESTARTS": 0}.items():
        monkeypatch.setenv(name, str(value))
    for name in ("TORCHELASTIC_RESTART_COUNT", "TAWPIPE_LOCAL_LAUNCHER"):
        monkeypatch.delenv(name, raising=False)
    return file


def words_in(file: Path) -> str:
    return json.loads(file.read_text())["message"]["extraInfo"]["py_callstack"]


@pytest.mark.slow
def test_torchrun_ends_with_a_wrong_settings_message(tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    words = ["-m", "tawpipe", "train", "--steps", "many"]
    done = subprocess.run(
        [*torchrun, *words], cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 1 and done.stdout == ""
    *_, last, line = done.stderr.rstrip().splitlines()
    assert last == f"  traceback : {MESSAGE}" and set(line) == {"="}
    assert done.stderr.count(MESSAGE) == 1


def test_the_first_process_of_a_machine_speaks_through_torchrun_alone(
    as_worker: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "--steps", "many"]) == 2
    assert words_in(as_worker) == MESSAGE and capsys.readouterr().err == ""


def test_what_torchrun_starts_again_it_does_not_report(
    as_worker: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "1")
    assert main(["train", "--steps", "many"]) == 2
    assert capsys.readouterr().err == f"{MESSAGE}\n"
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert main(["train", "--steps", "many"]) == 2
    assert capsys.readouterr().err == ""


def test_the_other_processes_speak_if_nobody_has_ended_them(as_worker: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr("tawpipe.launch.torchrun.time.sleep", lambda seconds: waited.append(seconds))
    assert main(["train", "--steps", "many"]) == 2
    assert waited and words_in(as_worker) == MESSAGE


@pytest.mark.parametrize(("error", "code"), [(RunError("the loss is not finite"), 1), (ValueError("ours"), 1)])
def test_a_run_that_fails_says_so_in_both_places(
    as_worker: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: Exception,
    code: int,
) -> None:
    def run(argv: object) -> int:
        raise error

    monkeypatch.setattr("tawpipe.commands.train.run", run)
    assert main(["train"]) == code
    said = capsys.readouterr().err
    assert str(error) in said and words_in(as_worker).strip() == said.strip()
    assert ("Traceback" in said) == isinstance(error, ValueError)


def test_without_torchrun_messages_go_to_the_terminal(
    as_worker: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TAWPIPE_LOCAL_LAUNCHER", "1")
    assert main(["train", "--steps", "many"]) == 2
    assert capsys.readouterr().err == f"{MESSAGE}\n" and not as_worker.exists()


@pytest.mark.parametrize("command", ["doctor", "prove"])
def test_torchrun_has_been_told_how_many_processes_there_are(as_worker: Path, command: str) -> None:
    assert main([command, "--nproc", "2"]) == 2
    assert "--nproc: got 2; unset under torchrun, whose --nproc-per-node sets it" in words_in(as_worker)


def test_words_are_left_where_torchrun_looks_for_them_and_nowhere_else(tmp_path: Path) -> None:
    file = tmp_path / "error.json"
    assert leave_words("steps: got ü", {"TORCHELASTIC_ERROR_FILE": str(file)}) and words_in(file) == "steps: got ü"
    assert not leave_words("x", {}) and not leave_words("x", {"TORCHELASTIC_ERROR_FILE": str(tmp_path / "a" / "b")})
    file.unlink()
    assert not leave_words("x", {"TORCHELASTIC_ERROR_FILE": str(file), "TAWPIPE_LOCAL_LAUNCHER": "1"})
    assert not file.exists()
