"""Signals: all ranks agree on one, a second one ends the process at once, and it is said how to go on."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from given_time import GivenTime
from states import ALONE
from tawpipe.checkpoint.names import MARKER
from tawpipe.cli import main
from tawpipe.commands import train as commands
from tawpipe.errors import RunError
from tawpipe.train import stopping
from tawpipe.train.going_on import how_to_go_on
from tawpipe.train.settings.config import TrainConfig
from tawpipe.train.stopping import ENDING, STOPPING, StopRequest


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> GivenTime:
    """Time in which signals come."""
    given = GivenTime()
    monkeypatch.setattr(stopping, "time", given)
    return given


def test_signal_is_agreed_on_and_reported_once(clock, capfd):
    with StopRequest(ALONE) as stop:
        assert stop.agreed() is None
        signal.raise_signal(signal.SIGUSR1)
        assert stop.agreed() is signal.SIGUSR1
        clock.now += 0.9
        signal.raise_signal(signal.SIGINT)  # within a second: the same one
        assert stop.agreed() is signal.SIGUSR1
    assert capfd.readouterr().err == f"tawpipe: {STOPPING}\n"


class Ended(BaseException):
    """This process would have ended."""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_second_signal_ends_the_process_at_once(number, clock, monkeypatch, capfd):
    codes = list[int]()

    def end(code: int) -> None:
        codes.append(code)
        raise Ended

    monkeypatch.setattr(os, "_exit", end)
    with StopRequest(ALONE, lambda: "step 4 is saved"):
        for _ in range(2):
            signal.raise_signal(number)
        clock.now += 1.1
        with pytest.raises(Ended):
            signal.raise_signal(number)
    assert codes == [128 + number]
    assert capfd.readouterr().err == f"tawpipe: {STOPPING}\ntawpipe: ended at once; step 4 is saved\n"


def test_a_signal_after_the_last_step_ends_no_step(capfd: pytest.CaptureFixture[str]):
    with StopRequest(ALONE) as stop:
        stop.finish()
        signal.raise_signal(signal.SIGTERM)
    assert capfd.readouterr().err == f"tawpipe: {ENDING}\n"


def test_resume_hint_names_the_newest_checkpoint_and_command(tmp_path: Path):
    config = TrainConfig(output=str(tmp_path / "my run"))
    words = how_to_go_on(config, by_torchrun=False)
    assert words.startswith("no checkpoint was written yet") and words.endswith("the same command with --resume auto")
    for name in ("step-00000002", "step-00000010", "step-00000020.incomplete"):
        (config.output_path / "checkpoints" / name).mkdir(parents=True)
        (config.output_path / "checkpoints" / name / MARKER).touch()
    (config.output_path / "config.yaml").touch()
    saved = f"checkpoint of step 10: {tmp_path}/my run/checkpoints/step-00000010. To resume from there: "
    settings = f"'{tmp_path}/my run/config.yaml'"
    assert how_to_go_on(config, by_torchrun=False) == f"{saved}tawpipe train --config {settings} --resume auto"
    assert how_to_go_on(config, by_torchrun=True) == f"{saved}the same command with --resume auto"


def test_error_without_a_launcher_ends_with_the_resume_hint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    def fail(_: TrainConfig) -> int:
        raise RunError("the loss is not finite")

    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(commands, "_train_here", fail)
    words = ["train", "--device", "cpu", "--nproc", "1", "--output", str(tmp_path / "run")]
    assert main(words) == 1
    first, last = capsys.readouterr().err.splitlines()
    assert first == "tawpipe: error: the loss is not finite"
    assert last.startswith("tawpipe: no checkpoint was written yet. To start again in that folder: ")
