"""Signals: all ranks agree on one, a second one ends the process at once, and it is said how to go on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from states import ALONE
from tawpipe.checkpoint.names import MARKER
from tawpipe.cli import main
from tawpipe.commands import train as commands
from tawpipe.errors import RunError
from tawpipe.train.config import TrainConfig
from tawpipe.train.going_on import how_to_go_on
from tawpipe.train.stopping import STOPPING, StopRequest


def test_a_signal_is_agreed_on_and_said_once(capfd):
    with StopRequest(ALONE) as stop:
        assert stop.agreed() is None
        os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(0.01)
        assert stop.agreed() is signal.SIGUSR1
        os.kill(os.getpid(), signal.SIGINT)  # within a second: the same one
        assert stop.agreed() is signal.SIGUSR1
    assert capfd.readouterr().err == f"tawpipe: {STOPPING}\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_second_signal_ends_at_once(number):
    child = "import os, time; from tawpipe.train.stopping import StopRequest\n"
    child += "from states import ALONE\n"
    child += f"with StopRequest(ALONE, lambda: 'step 4 is saved'):\n    os.kill(os.getpid(), {int(number)})\n"
    child += f"    os.kill(os.getpid(), {int(number)})\n    time.sleep(1.1)\n"
    child += f"    os.kill(os.getpid(), {int(number)})\n    time.sleep(9)\n"
    support = Path(__file__).parents[1] / "support"
    done = subprocess.run([sys.executable, "-c", child], cwd=support, timeout=60, capture_output=True, text=True)
    assert done.returncode == 128 + number
    assert done.stderr == f"tawpipe: {STOPPING}\ntawpipe: ended at once; step 4 is saved\n"


def test_how_to_go_on_is_said_from_what_is_there(tmp_path: Path):
    config = TrainConfig(output=str(tmp_path / "my run"))
    words = how_to_go_on(config, by_torchrun=False)
    assert words.startswith("no checkpoint was written yet") and words.endswith("the same command with --resume auto")
    for name in ("step-00000002", "step-00000010", "step-00000020.incomplete"):
        (config.output_path / "checkpoints" / name).mkdir(parents=True)
        (config.output_path / "checkpoints" / name / MARKER).touch()
    (config.output_path / "config.yaml").touch()
    saved = f"step 10 is saved in {tmp_path}/my run/checkpoints/step-00000010. To go on from there: "
    settings = f"'{tmp_path}/my run/config.yaml'"
    assert how_to_go_on(config, by_torchrun=False) == f"{saved}tawpipe train --config {settings} --resume auto"
    assert how_to_go_on(config, by_torchrun=True) == f"{saved}the same command with --resume auto"


def test_an_error_in_a_process_that_nobody_watches_ends_with_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
):
    def fail(_: TrainConfig) -> int:
        raise RunError("the loss is not finite")

    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(commands, "_train_here", fail)
    words = ["train", "--device", "cpu", "--nproc", "1", "--output", str(tmp_path / "run")]
    assert main(words) == 1
    first, last = capsys.readouterr().err.splitlines()
    assert first == "tawpipe: error: the loss is not finite"
    assert last.startswith("tawpipe: no checkpoint was written yet. To start anew in that folder: ")
