"""The hunt: cases of every kind run and repeat, what is sound is right, and what is put wrong is found."""

from __future__ import annotations

import pytest

import hunt
import hunt_text
import hunt_training
import tawpipe.data.render
from pool import WorkerPool


@pytest.fixture(autouse=True)
def workers(pool: WorkerPool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(hunt_training, "POOL", pool)


def numbers(kind: str, count: int) -> list[int]:
    """Cases that are quick."""
    cases = ((number, hunt.drawn(1, number, kind)) for number in range(200))
    alone = [n for n, case in cases if kind != "training" or all(p["nodes"] * p["local"] == 1 for p in case["parts"])]
    return alone[:count]


@pytest.mark.parametrize(("kind", "count"), [("data", 6), ("text", 9), ("training", 3)])
def test_what_is_sound_is_right_or_refused(kind: str, count: int):
    assert hunt.drawn(1, 0, kind) == hunt.drawn(1, 0, kind) != hunt.drawn(2, 0, kind)
    outcomes = {hunt.find(1, number, kind)[0] for number in numbers(kind, count)}
    assert "right" in outcomes <= {"right", "refused"}


def test_a_column_that_holds_nothing_and_counts_is_found(monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.setattr(tawpipe.data.render, "EMPTY", ())
    assert hunt.main(["--only", "data", "--seed", "1", "--first"]) == 1
    said = capsys.readouterr().out
    again = said.partition('ARGS="')[2].partition('"')[0].split()
    assert again[0] == "--case" and hunt.main(again) == 1
    monkeypatch.undo()
    assert hunt.main(again) == 0


def test_another_learning_rate_is_found(monkeypatch: pytest.MonkeyPatch):
    """Here, that is in the plain loop; the worker processes know nothing of it."""
    for name, (kind, options) in list(hunt_training.OPTIMIZERS.items()):
        monkeypatch.setitem(hunt_training.OPTIMIZERS, name, (kind, {**options, "lr": 1.5 * options["lr"]}))
    assert "WRONG" in {hunt.find(1, number, "training")[0] for number in numbers("training", 3)}


def test_an_error_that_names_no_setting_is_found(monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.setattr(hunt_text, "_readers", lambda: {"a": lambda random: {}["no setting"]})
    assert hunt.main(["--only", "text", "--seed", "1", "--first"]) == 1
    assert "KeyError" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        hunt.main(["--case", "text"])
