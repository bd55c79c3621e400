"""``tawpipe train`` around its loop: who checks, who writes the config, and what each process is told."""

from __future__ import annotations

import os
import sys
import types
from pathlib import Path

import pytest

from tawpipe.cli import main
from tawpipe.train.settings.config import TrainConfig, load_config

LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "TAWPIPE_LOCAL_LAUNCHER")


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[TrainConfig, str]]:
    """What the loop was called with, and the rank in its environment; the loop itself does nothing."""
    calls: list[tuple[TrainConfig, str]] = []
    loop = types.ModuleType("tawpipe.train.run")

    def run(config: TrainConfig) -> int:
        calls.append((config, os.environ["RANK"]))
        return 0

    loop.run = run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tawpipe.train.run", loop)
    for name in LAUNCHER_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    return calls


def as_worker(monkeypatch: pytest.MonkeyPatch, rank: int, *, local: bool) -> None:
    for name, value in zip(LAUNCHER_VARIABLES, (rank, 2, rank, 2, 0), strict=False):
        monkeypatch.setenv(name, str(value))
    if local:
        monkeypatch.setenv("TAWPIPE_LOCAL_LAUNCHER", "1")


def test_single_process_runs_the_training_loop_with_its_settings(runs: list[tuple[TrainConfig, str]]) -> None:
    assert main(["train", "--nproc", "1", "--steps", "3", "--device", "cpu"]) == 0
    [(config, rank)] = runs
    assert rank == "0" and config.steps == 3 and "{time}" not in config.output
    assert "RANK" not in os.environ


def test_second_run_is_refused_in_the_folder_of_the_first(runs: list[tuple[TrainConfig, str]]) -> None:
    words = ["train", "--nproc", "1", "--output", "run", "--device", "cpu"]
    assert main(words) == 0
    Path("run").mkdir(exist_ok=True)
    Path("run/metrics.jsonl").touch()  # what the loop leaves behind
    assert main(words) == 2
    assert main([*words, "--resume", "auto"]) == 0
    assert len(runs) == 2


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("local", [True, False])
def test_only_rank_0_checks_the_output_folder_before_the_run(
    monkeypatch: pytest.MonkeyPatch, runs: list[tuple[TrainConfig, str]], rank: int, local: bool
) -> None:
    as_worker(monkeypatch, rank, local=local)
    assert main(["train", "--output", "run", "--device", "cpu"]) == 0
    Path("run").mkdir(exist_ok=True)
    Path("run").mkdir(exist_ok=True)
    Path("run/metrics.jsonl").touch()  # what the loop leaves behind
    again = main(["train", "--output", "run", "--device", "cpu"])
    assert again == (2 if rank == 0 and not local else 0)


def test_workers_start_with_the_user_arguments_and_one_output_folder(
    monkeypatch: pytest.MonkeyPatch, runs: list[tuple[TrainConfig, str]]
) -> None:
    started: list[list[str]] = []

    def launch(command: list[str], shape: object, **rest: object) -> int:
        started.append(command)
        return 0

    monkeypatch.setattr("tawpipe.commands.train.launch", launch)
    words = ["--steps", "3", "--data", "a", "b"]
    assert main(["train", *words, "--device", "cpu"]) == 0
    [command] = started
    assert command[1:4] == ["-m", "tawpipe", "train"] and command[4:9] == words
    told = load_config(command[4:])
    assert told.data == ["a", "b"] and "{time}" not in told.output and runs == []
