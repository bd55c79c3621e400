"""What a run chooses by what it starts from; optimizers and schedules by name, from end to end in one process."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from runs import command, rows
from small import make_small
from tawpipe.cli import main
from tawpipe.errors import UserError
from tawpipe.options import Open
from tawpipe.runtime.homes.named_optimizers import BY_NAME
from tawpipe.train.settings.checks import validate
from tawpipe.train.settings.config import TAKES, TrainConfig, load_config
from tawpipe.train.settings.recipe import OPEN, RECIPES, settle, settled
from tawpipe.train.start import start_of

PASS = 50
"""Steps in which the data is seen once."""


def settled_from(start: str, *words: str, earlier: Mapping[str, Any] | None = None) -> tuple[dict[str, Any], str]:
    config, line = settle(load_config(words), start, lambda epochs: epochs * PASS, earlier)
    assert not any(isinstance(value, Open) for value in settled(config).values())
    assert config.epochs is None and config.optimizer.warmup_ratio is None
    return settled(config), line


@pytest.mark.parametrize(
    ("start", "words", "values", "line"),
    [
        (
            "random",
            (),
            (2e-3, 60, 10, 0.1),
            "learning rate 0.002, 60 steps, warm-up 10 steps, weight decay 0.1: training",
        ),
        ("weights", (), (1e-5, 100, 3, 0.0), "learning rate 1e-5, 2 epochs = 100 steps, warm-up 3 steps"),
        (
            "adapter",
            (),
            (2e-4, 150, 4, 0.0),
            "3 epochs = 150 steps, warm-up 4 steps, weight decay 0: training of an ad",
        ),
        ("weights", ("--epochs", "1", "--learning-rate", "2e-5"), (2e-5, 50, 2, 0.0), "1 epoch = 50 steps, warm-up 2"),
        ("random", ("--epochs", "3"), (2e-3, 150, 10, 0.1), "3 epochs = 150 steps"),
        ("weights", ("--optimizer.name", "adafactor"), (1e-3, 100, 3, 0.0), "learning rate 0.001"),
        ("random", ("--optimizer.name", "adam"), (2e-3, 60, 10, 0.0), "weight decay 0: training from random weights"),
        ("weights", ("--steps", "7", "--optimizer.warmup-ratio", "0.5"), (1e-5, 7, 4, 0.0), "warm-up 4 steps"),
    ],
)
def test_open_settings_follow_from_the_starting_weights(start, words, values, line):
    chosen, said = settled_from(start, *words)
    assert tuple(chosen[name] for name in OPEN) == values
    assert line in said and said.endswith(RECIPES[start].words)


def test_kind_of_start_is_read_from_the_settings(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert start_of(load_config(["--model", str(tmp_path)])) == "random"
    (tmp_path / "model.safetensors").touch()
    assert start_of(load_config(["--model", str(tmp_path)])) == "weights"
    assert start_of(load_config(["--model", str(tmp_path), "--lora.rank", "4"])) == "adapter"


def test_settings_of_the_user_override_the_recipe_silently():
    words = (
        "--learning-rate",
        "0.5",
        "--steps",
        "9",
        "--optimizer.warmup-steps",
        "1",
        "--optimizer.weight-decay",
        "0.3",
    )
    for start in RECIPES:
        assert settled_from(start, *words) == (dict(zip(OPEN, (0.5, 9, 1, 0.3), strict=True)), "")


def test_resumed_run_keeps_its_settled_values_unless_set():
    had: dict[str, Any] = dict(zip(OPEN, (0.5, 9, 1, 0.3), strict=True))
    assert settled_from("weights", earlier=had) == (had, "")
    assert settled_from("weights", "--steps", "20", earlier=had)[0] == had | {"steps": 20}
    assert settled_from("weights", "--epochs", "1", earlier=had)[0] == had | {"steps": PASS}
    ratio = settled_from("weights", "--optimizer.warmup-ratio", "0.5", "--steps", "20", earlier=had)[0]
    assert ratio["optimizer.warmup_steps"] == 10


def test_saved_settings_are_the_chosen_values():
    given = load_config(["--epochs", "2", "--optimizer.warmup-ratio", "0.1"])
    saved, _ = settle(given, "adapter", lambda epochs: epochs * PASS)
    assert saved.epochs is None and saved.optimizer.warmup_ratio is None
    assert settle(saved, "random", lambda epochs: None) == (saved, "")


def test_stream_has_steps_and_refuses_epochs():
    config, line = settle(TrainConfig(), "weights", lambda epochs: None)
    assert config.steps == 60 and "60 steps (the length of a stream is unknown)" in line
    with pytest.raises(UserError, match="--steps"):
        settle(load_config(["--epochs", "2"]), "weights", lambda epochs: None)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--epochs 2 --steps 5", "--epochs: got 2; unset with --steps"),
        ("--epochs 2 --streaming", "--epochs: got 2; --steps with --streaming"),
        ("--optimizer.warmup-ratio 0.1 --optimizer.warmup-steps 3", "--optimizer.warmup-ratio: got 0.1"),
        ("--optimizer.name sgd", "--learning-rate: got 'null'; a number under --optimizer.name sgd"),
        ("--optimizer.name adafactor --optimizer.beta1 0.5", "adamw, adam, muon have it"),
        ("--optimizer.momentum 0.5", "unset under --optimizer.name adamw; only sgd, rmsprop, muon have it"),
        ("--optimizer.decay-steps 5", "unset under --optimizer.schedule cosine; only wsd has it"),
        (
            "--steps 9 --optimizer.schedule wsd --optimizer.decay-steps 5 --optimizer.warmup-steps 5",
            "--steps without the",
        ),
        ("--optimizer.name lion", "one of adamw, adam"),
    ],
)
def test_contradicting_settings_are_refused(words, message):
    with pytest.raises(UserError, match=re.escape(message)):
        validate(load_config(words.split()))


def test_every_named_optimizer_can_be_made():
    assert BY_NAME.keys() == TAKES.keys()


# from end to end

WORDS = ("--nproc", "1", "--device", "cpu", "--log.trackers", "none", "--sample.tokens", "0")


def alone(home: Path, output: str, *words: str) -> int:
    """A run of one process, in this one; steps are left open unless ``words`` have them."""
    given = command(home, output, *WORDS, "--evaluation.every", "0", *words)[2:]
    at = given.index("--steps")
    return main(given[:at] + given[at + 2 :])


@pytest.mark.slow
def test_muon_run_resumes_bit_by_bit_and_fine_tuning_starts_anew(tmp_path, capsys):
    make_small(tmp_path, files=60, layers=2, positions=64)
    scratch = ("--optimizer.name", "muon", "--optimizer.schedule", "wsd", "--steps", "4", "--learning-rate", "1e-2")
    assert alone(tmp_path, "first", *scratch) == 0
    losses = [row["loss"] for row in rows(tmp_path, "first")]
    half = str(tmp_path / "first" / "checkpoints" / "step-00000002")
    assert alone(tmp_path, "again", *scratch, "--resume", half, "--export.enabled", "false") == 0
    assert [row["loss"] for row in rows(tmp_path, "again")] == losses[2:]
    assert alone(tmp_path, "other", "--resume", half, "--steps", "4", "--optimizer.name", "adamw") == 2
    said = capsys.readouterr()
    assert "warm-up 10 steps, weight decay 0.1: training from random weights" in said.out
    assert "saved with AdamW+Muon, loaded into AdamW" in said.err

    tuned = ("--model", str(tmp_path / "first" / "model"), "--export.enabled", "false", "--checkpoint.every", "1")
    assert alone(tmp_path, "tuned", *tuned, "--epochs", "1", "--global-batch", "30") == 0
    said = capsys.readouterr().out
    steps = int(re.search(r"learning rate 1e-5, 1 epoch = (\d+) steps, .*: fine-tuning of a model", said)[1])  # type: ignore[index]
    assert len(rows(tmp_path, "tuned")) == steps
    saved = yaml.safe_load((tmp_path / "tuned" / "config.yaml").read_text())
    assert (saved["learning_rate"], saved["steps"], saved["epochs"]) == (1e-5, steps, None)
    manifest = json.loads(next((tmp_path / "tuned" / "checkpoints").glob("*/tawpipe.json")).read_text())
    assert manifest["run"]["settled"]["steps"] == steps
