"""The launcher when workers fail or a signal comes: restarts, what is passed on, and how long it waits."""

from __future__ import annotations

import io
import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from tawpipe.launch.launcher import Shape, launch


def launched(code: str, **settings) -> tuple[int, str]:
    errors = io.StringIO()
    head = "import os, sys, time, signal\nrank = int(os.environ['RANK'])\n"
    head += "restart = os.environ['TORCHELASTIC_RESTART_COUNT']\n"
    return launch([sys.executable, "-c", head + code], Shape(1, 2), errors=errors, **settings), errors.getvalue()


def test_dead_workers_are_restarted(tmp_path):
    code = f"open('{tmp_path}/' + restart + '-' + str(rank), 'w')\nsys.exit(3 if restart == '0' and rank == 1 else 0)"
    status, said = launched(code, max_restarts=2)
    assert status == 0 and "restart 1 of at most 2" in said and "rank 1" in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0-0", "0-1", "1-0", "1-1"]


def test_restart_works_if_stderr_is_closed(tmp_path):
    reading, writing = os.pipe()
    os.close(reading)
    errors = os.fdopen(writing, "w", buffering=1)
    code = "import os, sys; print('a warning', file=sys.stderr, flush=True)\n"
    code += "sys.exit(os.environ['TORCHELASTIC_RESTART_COUNT'] == '0')"
    assert launch([sys.executable, "-c", code], Shape(1, 1), errors=errors, max_restarts=1) == 0
    with pytest.raises(BrokenPipeError):
        errors.close()


def test_restarts_stop_at_their_limit(tmp_path):
    status, said = launched("sys.exit(3)", max_restarts=1, last_words=lambda: "step 4 is left")
    assert status == 3 and said.count("ended with exit code 3") == 2
    assert said.count("step 4 is left") == 1 and said.endswith("tawpipe: step 4 is left\n")


def test_wrong_setting_is_not_retried():
    code = "print('tawpipe: error: no', file=sys.stderr); sys.exit(2)"
    status, said = launched(code, max_restarts=3, last_words=lambda: "left")
    assert (status, said) == (2, "tawpipe: error: no\n")


READY = "open(os.path.join(READY, str(rank)), 'w').close()\n"


def launched_and_told(folder: Path, numbers: list[int], code: str, **settings) -> tuple[int, str]:
    """Signals to the launcher when all workers are ready."""

    def tell() -> None:
        while len(list(folder.iterdir())) < 2:
            time.sleep(0.02)
        for number in numbers:
            os.kill(os.getpid(), number)
            time.sleep(0.1)

    threading.Thread(target=tell).start()
    return launched(f"READY = {str(folder)!r}\n" + code, **settings)


NOTES = "done = []\nfor s in (15, 10): signal.signal(s, lambda *_: done.append(1))\n" + READY


WAITS = "while not done: time.sleep(0.02)\n"


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        ([signal.SIGTERM], 0),
        ([signal.SIGUSR1], 0),
        ([signal.SIGTERM, signal.SIGTERM], 0),  # two within a second are one
        ([signal.SIGINT], 128 + signal.SIGINT),  # whoever pressed ctrl-C wants nothing that comes after this command
    ],
)
def test_signal_is_passed_on_to_workers_and_their_end_is_awaited(tmp_path, numbers, expected):
    code = NOTES + WAITS + "time.sleep(0.5)\nsys.exit(0)"
    assert launched_and_told(tmp_path, numbers, code, patience_s=20, last_words=lambda: "left") == (expected, "")


def test_failure_after_a_signal_is_reported(tmp_path):
    code = NOTES + WAITS + "raise SystemExit('no space left' if rank else 0)"
    status, said = launched_and_told(tmp_path, [signal.SIGTERM], code, patience_s=20)
    assert status == 1 and "rank 1" in said and "no space left" in said


def test_end_by_a_signal_is_not_reported_as_a_failure(tmp_path):
    for folder, number, words in (("a", signal.SIGTERM, "received SIGTERM"), ("b", signal.SIGINT, "interrupted")):
        (tmp_path / folder).mkdir()
        status, said = launched_and_told(
            tmp_path / folder, [number], READY + "time.sleep(60)", patience_s=20, last_words=lambda: "left"
        )
        assert (status, said) == (128 + number, f"tawpipe: {words}\ntawpipe: left\n")


def test_workers_are_killed_after_the_patience_time(tmp_path):
    code = NOTES + "time.sleep(60)\nopen(os.path.join(READY, 'late'), 'w')"
    status, said = launched_and_told(tmp_path, [signal.SIGTERM], code, patience_s=0.5, grace_s=0.5)
    assert status == 128 + signal.SIGTERM and "SIGTERM" in said and not (tmp_path / "late").exists()
