"""A run that is gone on with keeps its settings, but for what is given anew."""

from __future__ import annotations

from pathlib import Path

import pytest

from tawpipe.environment import LOCAL_LAUNCHER
from tawpipe.options import Open
from tawpipe.train.settings.config import changes_of_the_run, config_text, load_config

RUN = [
    "--sequence-length",
    "64",
    "--learning-rate",
    "1e-3",
    "--schedule.strategy",
    "flat",
    "--nproc",
    "2",
    "--steps",
    "9",
]


@pytest.fixture
def words(tmp_path, monkeypatch) -> list[str]:
    """The words that go on with a run in its folder."""
    monkeypatch.delenv("RANK", raising=False)
    folder = tmp_path / "run"
    (folder / "checkpoints" / "step-00000003").mkdir(parents=True)
    given = load_config([*RUN, "--inject", "rank=0,step=1,at=norm,kind=kill", "--output", str(folder)])
    (folder / "config.yaml").write_text(config_text(given))
    return ["--output", str(folder), "--resume", "auto"]


def test_saved_settings_apply_where_nothing_is_given(words):
    config = load_config(words)
    assert (config.sequence_length, config.learning_rate, config.schedule.strategy) == (64, 1e-3, "flat")
    assert (config.steps, config.nproc, config.resume, config.inject) == (9, 2, "auto", "")
    assert changes_of_the_run(config) == []


def test_checkpoint_path_finds_the_settings_of_its_run(words, monkeypatch):
    path = Path(words[1]) / "checkpoints" / "step-00000003"
    config = load_config(["--resume", str(path)])
    assert (config.sequence_length, config.output, config.resume) == (64, words[1], str(path))
    monkeypatch.chdir(path.parent)
    assert load_config(["--resume", path.name]).sequence_length == 64


def test_given_settings_override_saved_ones_and_are_reported(words, tmp_path):
    more = tmp_path / "more.yaml"
    more.write_text("seed: 5\nsequence_length: 32\n")
    config = load_config([*words, "--config", str(more), "--schedule.strategy", "hsdp", "--nproc", "4"])
    assert (config.sequence_length, config.seed, config.schedule.strategy, config.nproc) == (32, 5, "hsdp", 4)
    assert config.learning_rate == 1e-3
    changes = [("--sequence-length", 64, 32), ("--seed", 0, 5), ("--schedule.strategy", "flat", "hsdp")]
    assert changes_of_the_run(config) == changes


def test_epochs_replace_saved_steps(words):
    config = load_config([*words, "--epochs", "3"])
    assert config.epochs == 3 and isinstance(config.steps, Open)


def test_launcher_environment_overrides_saved_process_counts(words, monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "GROUP_RANK"):
        monkeypatch.setenv(name, "0")
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "3")
    config = load_config(words)
    assert config.nproc is None and config.sequence_length == 64
    monkeypatch.setenv(LOCAL_LAUNCHER, "1")
    assert load_config(words).nproc == 2  # the command's own launcher has taken them from there


def test_moved_run_uses_its_new_folder_as_output(words, tmp_path):
    moved = Path(words[1]).rename(tmp_path / "moved")
    config = load_config(["--resume", str(moved / "checkpoints" / "step-00000003")])
    assert config.output == str(moved)


def test_new_run_reads_no_saved_settings(words):
    assert load_config(["--output", words[1]]).sequence_length == 512
    assert load_config(["--output", words[1] + "-other", "--resume", "auto"]).sequence_length == 512
