"""A run's hold on its folder: one run at a time, and nothing that a dead process leaves behind is in the way."""

from __future__ import annotations

import fcntl
import json
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tawpipe.errors import UserError
from tawpipe.train import lock
from tawpipe.train.lock import NAME, is_held, running_in

HOLD = "import sys; from pathlib import Path; from tawpipe.train.lock import running_in\n" + (
    "with running_in(Path(sys.argv[1])):\n    print('held', flush=True)\n    sys.stdin.read()"
)


@pytest.fixture
def other(tmp_path):
    """A process that holds the folder."""
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()


def held(folder: Path) -> bool:
    try:
        with running_in(folder):
            return False
    except UserError:
        return True


def test_second_run_in_a_folder_is_refused_until_the_first_ends(tmp_path, other):
    with (
        pytest.raises(UserError, match=f"on {socket.gethostname()} by process {other.pid} since"),
        running_in(tmp_path),
    ):
        pass
    assert is_held(tmp_path)
    assert (tmp_path / NAME).exists()  # a refusal takes nothing away
    other.communicate("")
    assert not is_held(tmp_path)
    assert not (tmp_path / NAME).exists() and not held(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_lock_file_of_a_killed_run_does_not_block(tmp_path, other):
    other.send_signal(signal.SIGKILL)
    other.wait()
    assert not is_held(tmp_path)
    # its number is another process's now
    (tmp_path / NAME).write_text(json.dumps({"host": socket.gethostname(), "process": 1}))
    assert not is_held(tmp_path)
    assert (tmp_path / NAME).exists() and not held(tmp_path)


def test_lock_waits_for_a_process_that_is_about_to_end(tmp_path, other):
    assert other.stdin is not None
    other.stdin.close()
    with running_in(tmp_path, patience_s=60):
        assert json.loads((tmp_path / NAME).read_text())["process"] != other.pid


def test_lock_file_removed_before_locking_is_created_again(tmp_path, monkeypatch):
    """Between opening the file and locking it the run before may have ended and removed it."""
    flock, removed = fcntl.flock, []

    def late(file: int, how: int) -> None:
        if not removed:
            removed.append((tmp_path / NAME).unlink())
        flock(file, how)

    monkeypatch.setattr(lock.fcntl, "flock", late)
    with running_in(tmp_path):
        assert (tmp_path / NAME).exists() and held(tmp_path)


@pytest.mark.parametrize(
    ("holder", "free"),
    [
        ({"host": socket.gethostname(), "process": 2**22 + 1}, True),
        ({"host": socket.gethostname(), "process": 1}, False),
        ({"host": "elsewhere", "process": 1}, False),
        ("damaged", True),
    ],
)
def test_lock_without_flock_checks_for_a_living_process(tmp_path, monkeypatch, holder, free):
    def none(*_: int) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(lock.fcntl, "flock", none)
    (tmp_path / NAME).write_text(json.dumps(holder) if isinstance(holder, dict) else holder)
    here = isinstance(holder, dict) and holder["host"] == socket.gethostname()
    assert is_held(tmp_path) == (here and not free)  # nothing is claimed of other machines
    assert held(tmp_path) is not free
    if not free:
        with pytest.raises(UserError, match=f"if that has ended, remove {tmp_path / NAME}"), running_in(tmp_path):
            pass
