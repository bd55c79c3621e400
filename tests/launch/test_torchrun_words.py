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
def test_torchrun_output_ends_with_the_message_of_a_wrong_setting(tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    words = ["-m", "tawpipe", "train", "--steps", "many"]
    done = subprocess.run(
        [*torchrun, *words], cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 1 and done.stdout == ""
    *_, last, line = done.stderr.rstrip().splitlines()
    assert last == f"  traceback : {MESSAGE}" and set(line) == {"="}
    assert done.stderr.count(MESSAGE) == 1


def test_local_rank_0_reports_only_through_the_torchrun_error_file(
    as_worker: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "--steps", "many"]) == 2
    assert words_in(as_worker) == MESSAGE and capsys.readouterr().err == ""


def test_error_before_a_torchrun_restart_goes_to_stderr_only_once(
    as_worker: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "1")
    assert main(["train", "--steps", "many"]) == 2
    assert capsys.readouterr().err == f"{MESSAGE}\n"
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert main(["train", "--steps", "many"]) == 2
    assert capsys.readouterr().err == ""


def test_other_local_ranks_wait_before_reporting(as_worker: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr("tawpipe.launch.torchrun.time.sleep", lambda seconds: waited.append(seconds))
    assert main(["train", "--steps", "many"]) == 2
    assert waited and words_in(as_worker) == MESSAGE


@pytest.mark.parametrize(("error", "code"), [(RunError("the loss is not finite"), 1), (ValueError("ours"), 1)])
def test_failed_run_reports_to_stderr_and_to_the_torchrun_error_file(
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


def test_errors_without_torchrun_are_printed_to_stderr(
    as_worker: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TAWPIPE_LOCAL_LAUNCHER", "1")
    assert main(["train", "--steps", "many"]) == 2
    assert capsys.readouterr().err == f"{MESSAGE}\n" and not as_worker.exists()


@pytest.mark.parametrize("command", ["doctor", "prove"])
def test_nproc_option_is_refused_under_torchrun(as_worker: Path, command: str) -> None:
    assert main([command, "--nproc", "2"]) == 2
    assert "--nproc: got 2; unset under torchrun, whose --nproc-per-node sets it" in words_in(as_worker)


def test_error_file_is_written_only_for_torchrun(tmp_path: Path) -> None:
    file = tmp_path / "error.json"
    assert leave_words("steps: got ü", {"TORCHELASTIC_ERROR_FILE": str(file)}) and words_in(file) == "steps: got ü"
    assert not leave_words("x", {}) and not leave_words("x", {"TORCHELASTIC_ERROR_FILE": str(tmp_path / "a" / "b")})
    file.unlink()
    assert not leave_words("x", {"TORCHELASTIC_ERROR_FILE": str(file), "TAWPIPE_LOCAL_LAUNCHER": "1"})
    assert not file.exists()
