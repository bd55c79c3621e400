"""Evaluations: which step is the best, what stays and is exported of it, when a run ends for it, and what it writes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from runs import command
from small import make_small
from tawpipe.checkpoint.names import complete_states
from tawpipe.checkpoint.resume import read_run
from tawpipe.cli import main
from tawpipe.train.judging.evaluation import Evaluation
from tawpipe.train.loop import Training


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("evaluation")
    make_small(folder, files=20, layers=1, positions=256)
    return folder


def alone(home: Path, output: str, *words: str) -> int:
    quiet = ("--nproc", "1", "--device", "cpu", "--log.trackers", "none", "--steps", "8", "--evaluation.every", "1")
    return main([*command(home, output, *quiet, "--checkpoint.keep", "1", *words)[2:]])


def losses(monkeypatch, *values: float) -> None:
    """Let evaluations find these losses, one after the other."""
    left = iter(values)
    monkeypatch.setattr(Evaluation, "_validate", lambda *_: next(left))


def _noted(method: Callable[..., Any], loops: list[Training]) -> Callable[..., Any]:
    """The method, which notes whose it is."""
    return lambda training, *given: loops.append(training) or method(training, *given)


def steps(home: Path, output: str) -> list[int]:
    return [read_run(path).step for path in complete_states(home / output / "checkpoints")]


def test_run_without_gain_ends_early_and_exports_its_best_step(home, monkeypatch, capsys):
    losses(monkeypatch, 9.0, 3.0, 2.0, 1.95, 2.5)
    loops: list[Training] = []
    monkeypatch.setattr(Training, "write_samples", _noted(Training.write_samples, loops))
    words = (
        "--evaluation.patience",
        "2",
        "--evaluation.least-gain",
        "0.1",
        "--evaluation.at-start",
        "--sample.every",
        "2",
    )
    asked = ("--sample.prompt", "def ", "class while with", "--checkpoint.best", "--checkpoint.every", "4")
    assert alone(home, "early", *words, *asked) == 0
    # Nobody stopped it, and the numbers of all steps were read.
    assert {(one.first, one.last, one.stopped, len(one._pending)) for one in loops[-1:]} == {(0, 4, None, 0)}
    assert loops[-1].evaluation.exhausted and loops[-1].evaluation.best.step == 3
    said = capsys.readouterr().out
    assert "before the first step: validation loss 9.0000 (perplexity 8103)" in said
    assert "ended early" in said and "step 3, validation loss 1.9500 (perplexity 7.029): the following is from" in said
    assert steps(home, "early") == [3, 4]  # the best and the newest
    rows = [json.loads(line) for line in (home / "early" / "metrics.jsonl").read_text().splitlines()]
    assert [(row["step"], row["validation_loss"]) for row in rows] == [*enumerate((9.0, 3.0, 2.0, 1.95, 2.5))]
    texts = [json.loads(line) for line in (home / "early" / "samples.jsonl").read_text().splitlines()]
    assert [one["step"] for one in texts] == [2, 2, 4, 4, 3, 3]
    assert {one["prompt"] for one in texts} == {"def ", "class while with"}


@pytest.mark.slow
def test_export_of_the_best_step_equals_a_run_that_ends_at_that_step(home, monkeypatch):
    """The same weights, bit by bit."""
    losses(monkeypatch, 3.0, 2.0, 1.95)
    assert alone(home, "whole", "--checkpoint.best", "--steps", "3", "--optimizer.min-learning-rate-ratio", "1") == 0
    losses(monkeypatch, 3.0, 2.0, 1.95, 2.5)
    assert alone(home, "back", "--checkpoint.best", "--steps", "4", "--optimizer.min-learning-rate-ratio", "1") == 0
    whole, back = (load_file(home / name / "model" / "model.safetensors") for name in ("whole", "back"))
    assert all(whole[name].equal(back[name]) for name in whole)


@pytest.mark.slow
def test_resumed_run_knows_its_earlier_best_step(home, monkeypatch, capsys):
    losses(monkeypatch, 3.0, 2.0, 2.5, 2.4)
    quiet = ("--sample.tokens", "0", "--export.enabled", "false", "--checkpoint.best", "--resume", "auto")
    quiet += ("--checkpoint.every", "1", "--evaluation.patience")
    assert alone(home, "on", *quiet, "2") == 0
    assert steps(home, "on") == [2, 4]
    assert "ended early" in capsys.readouterr().out
    losses(monkeypatch, 2.3, 1.0, 2.0, 2.0)
    assert alone(home, "on", *quiet, "4") == 0
    assert steps(home, "on") == [6, 8]
    assert main(["checkpoint", "list", str(home / "on")]) == 0
    assert "lowest validation loss: 1.0000 after step 6" in capsys.readouterr().out
    assert main(["checkpoint", "prune", str(home / "on"), "--keep", "1"]) == 0
    assert steps(home, "on") == [6, 8]


@pytest.mark.slow
def test_best_checkpoint_is_kept_only_if_requested(home, monkeypatch):
    words = ("--steps", "4", "--checkpoint.every", "2", "--sample.tokens", "0", "--export.enabled", "false")
    for output, asked, kept in (("newest", (), [4]), ("both", ("--checkpoint.best",), [2, 4])):
        losses(monkeypatch, 3.0, 2.0, 2.5, 2.4)
        assert alone(home, output, *words, *asked) == 0
        assert steps(home, output) == kept


@pytest.mark.parametrize(
    ("asked", "words", "said"),
    [
        (("--checkpoint.best",), ("--evaluation.every", "0"), "evaluation.every"),
        (("--evaluation.patience", "2"), ("--validation-fraction", "0"), "held-out"),
    ],
)
def test_best_step_settings_need_an_evaluation(home, capsys, asked, words, said):
    assert alone(home, "unmeasured", *asked, *words) == 2
    error = capsys.readouterr().err
    assert asked[0] in error and said in error
