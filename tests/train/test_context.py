"""A run on rows longer than the model was made for: rotary positions from settings, loss over positions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from runs import command
from small import make_small
from tawpipe.cli import main

YARN = ("--rope.scaling", "yarn", "--rope.factor", "2")


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """A small corpus, and a model's config with half as many positions as a row has tokens."""
    folder = tmp_path_factory.mktemp("context")
    make_small(folder, files=60, layers=2, positions=32)
    return folder


def alone(home: Path, output: str, *words: str) -> int:
    """A run of one process, in this one."""
    quiet = ("--nproc", "1", "--device", "cpu", "--log.tensorboard", "false", "--sample.tokens", "0")
    return main([*command(home, output, *quiet, *words)[2:]])


def test_a_context_is_extended_in_phases(home, capsys):
    assert alone(home, "short") == 2
    assert "--rope.scaling" in capsys.readouterr().err
    assert alone(home, "first", *YARN, "--steps", "2", "--plan", "auto") == 0
    said = capsys.readouterr().out
    assert "rotary positions" in said and "rope_type yarn" in said and "up to 64 tokens" in said
    assert "plan: measured and chosen in" in said
    config = json.loads((home / "first" / "model" / "config.json").read_text())
    assert config["rope_parameters"]["factor"] == 2 and config["max_position_embeddings"] == 64

    for words, named in (((*YARN, "--rope.theta", "5e4"), "--rope.theta"), (("--rope.theta", "5e4"), "--rope.scaling")):
        assert alone(home, "first", *words, "--steps", "3", "--resume", "auto") == 2
        said = capsys.readouterr().err
        assert named in said and "as in the checkpoint" in said and "--model" in said
    assert alone(home, "first", *YARN, "--steps", "3", "--resume", "auto") == 0

    trained = ("--model", str(home / "first" / "model"), "--steps", "1", "--sequence-length", "128")
    assert alone(home, "second", *trained, *YARN) == 2
    assert "--rope.factor: got 2.0; at least 4" in capsys.readouterr().err
    assert alone(home, "second", *trained, "--rope.scaling", "yarn", "--rope.factor", "4") == 0
    config = json.loads((home / "second" / "model" / "config.json").read_text())
    assert config["rope_parameters"]["original_max_position_embeddings"] == 32
    assert config["max_position_embeddings"] == 128
