"""States of a resumed run: each is kept, begins anew or is refused, as the table in docs/reliability.md says."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path

import pytest

from runs import command, rows
from small import make_small
from states import make, train
from tawpipe.checkpoint.format import SEAL, read_manifest, sealed
from tawpipe.checkpoint.names import MARKER, complete_states
from tawpipe.checkpoint.resume import RunState, read_run
from tawpipe.cli import main
from tawpipe.train.judging.evaluation import Best, Evaluation, resumed_best

PAGE = Path(__file__).parents[2] / "docs" / "reliability.md"
OF_THE_FORMAT = {"format", "tensors", "files", SEAL, "run"}
"""Keys of a manifest that are how a state is written, or hold the others."""
QUIET = ("--nproc", "1", "--device", "cpu", "--sample.tokens", "0", "--export.enabled", "false", "--resume", "auto")


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("states")
    make_small(folder, files=20, layers=1, positions=256)
    (folder / "other.txt").write_text("\n".join(f"Other held-out words, line {n}." for n in range(60)))
    return folder


def losses(monkeypatch, *values: float) -> None:
    """Let evaluations find these losses, one after the other."""
    left = iter(values)
    monkeypatch.setattr(Evaluation, "_validate", lambda *_: next(left))


def test_resume_table_has_a_row_for_every_key_of_a_checkpoint(tmp_path):
    table = PAGE.read_text(encoding="utf-8").partition("## What a resumed run keeps")[2].partition("\n## ")[0]
    cells = [line.strip("|").split(" | ") for line in table.splitlines() if line.startswith("| ")][2:]
    named = {name for first, *_ in cells for name in re.findall(r"`([\w.*/]+)`", first)}
    pipeline = make()
    train(pipeline)
    pipeline.save(tmp_path / "state")
    pipeline.close()
    manifest = read_manifest(tmp_path / "state")
    saved = {f"{name.partition('.')[0]}.*" for name in manifest["tensors"]} | {"quantize", "frozen"}
    keys = saved | (manifest.keys() - OF_THE_FORMAT) | {one.name for one in fields(RunState)}
    files = {"metrics.jsonl", "samples.jsonl", "tensorboard/", "trackers.json"}
    assert named == keys | files
    assert all(re.search(r"kept|begins? anew|refused", verdict) for *_, verdict in cells)


RECORD = "documents:a tokenizer:b rows:c batches:16"
KNOWN = RunState(9, 9, 0, best={"step": 6, "loss": 2.0, "beaten": 2.0, "since": 3}, validation=RECORD)
BEST = Best(6, 2.0, 2.0, 3)


@pytest.mark.parametrize(
    ("state", "record", "best", "words"),
    [
        (None, RECORD, Best(), ""),
        (RunState(9, 9, 0, validation=RECORD), RECORD, Best(), ""),
        (KNOWN, RECORD, BEST, ""),
        (KNOWN, "", BEST, ""),  # nothing is evaluated: they wait for a start that evaluates
        (KNOWN, RECORD.replace(":a", ":d"), Best(), r"has changed \(documents\): best step \(6, .* start again"),
        (KNOWN, RECORD.replace("16", "32"), Best(), r"has changed \(batches\)"),
        (RunState(9, 9, 0, best=KNOWN.best), RECORD, BEST, "does not name its validation data"),
    ],
)
def test_best_step_is_valid_only_for_its_validation_data(state, record, best, words):
    found, line = resumed_best(state, record)
    assert found == best and bool(line) == bool(words) and re.search(words, line)


@pytest.mark.slow
def test_changed_validation_data_resets_best_step_and_patience(home, monkeypatch, capsys):
    words = command(home, "other", *QUIET, "--evaluation.every", "1", "--evaluation.patience", "2")[2:]
    losses(monkeypatch, 1.0, 2.0)
    assert main([*words, "--steps", "2"]) == 0
    losses(monkeypatch, 9.0, 8.0, 7.0)
    more = ("--steps", "5", "--validation-data", str(home / "other.txt"))
    assert main([*words, *more]) == 0
    said = "".join(capsys.readouterr())
    assert re.search(r"data has changed \(.*documents.*\): best step \(1, .* 1\.0000\) and patience start again", said)
    assert "ended early" not in said and rows(home, "other")[-1]["step"] == 5
    assert read_run(complete_states(home / "other" / "checkpoints")[-1]).best["step"] == 5


@pytest.mark.slow
def test_checkpoint_without_a_data_record_is_assumed_unchanged_once(home, monkeypatch, capsys):
    words = command(home, "old", *QUIET, "--evaluation.every", "1", "--checkpoint.every", "1")[2:]
    losses(monkeypatch, 1.0, 2.0)
    assert main([*words, "--steps", "2"]) == 0
    folder = complete_states(home / "old" / "checkpoints")[-1]
    manifest = {name: value for name, value in read_manifest(folder).items() if name != SEAL}
    del manifest["run"]["validation"]
    (folder / MARKER).write_text(json.dumps(sealed(manifest)))
    for step, times in ((3, 1), (4, 0)):
        capsys.readouterr()
        losses(monkeypatch, 3.0)
        assert main([*words, "--steps", str(step)]) == 0
        assert "".join(capsys.readouterr()).count("does not name its validation data") == times
        assert read_run(complete_states(home / "old" / "checkpoints")[-1]).best["step"] == 1


@pytest.mark.slow
def test_best_step_without_a_checkpoint_is_reset(home, monkeypatch, capsys):
    words = command(home, "gone", *QUIET, "--evaluation.every", "1", "--checkpoint.every", "2")[2:]
    losses(monkeypatch, 1.0, 2.0)
    assert main([*words, "--steps", "2"]) == 0
    losses(monkeypatch, 4.0, 5.0)
    assert main([*words, "--steps", "4", "--checkpoint.best"]) == 0
    said = "".join(capsys.readouterr())
    assert "best step: starts again" in said and "step 3, validation loss 4.0000" in said
