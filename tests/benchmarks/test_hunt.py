"""The hunt: cases of every kind run and repeat, what is sound is right, and what is put wrong is found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import hunt
import hunt_text
import hunt_training
import plans
import tawpipe.data.chats.render
from pool import WorkerPool


@pytest.fixture(autouse=True)
def workers(pool: WorkerPool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(hunt_training, "POOL", pool)


def numbers(kind: str, count: int) -> list[int]:
    """Cases that are quick."""
    quick: dict[str, Callable[[Any], bool]] = {
        "training": lambda case: all(part["nodes"] * part["local"] == 1 for part in case["parts"]),
        "plans": lambda case: sum(case["nodes"]) <= 2 and case["model"]["layers"] < 9,
    }
    cases = ((number, hunt.drawn(1, number, kind)) for number in range(200))
    return [number for number, case in cases if kind not in quick or quick[kind](case)][:count]


@pytest.mark.parametrize(("kind", "count"), [("data", 20), ("text", 5), ("training", 2), ("plans", 1)])
def test_drawn_cases_repeat_and_are_right_or_refused(kind: str, count: int):
    assert hunt.drawn(1, 0, kind) == hunt.drawn(1, 0, kind) != hunt.drawn(2, 0, kind)
    outcomes = {hunt.find(1, number, kind)[0] for number in numbers(kind, count)}
    assert "right" in outcomes <= {"right", "refused"}


def test_hunt_draws_steps_of_few_rows_with_host_homes():
    drawn = [hunt.drawn(1, number, "training") for number in range(300)]
    parts = [part for case in drawn for part in case["parts"] if part["nodes"] * part["local"] == 4]
    rows = [({word[2] for word in part["words"] if word[0] == "step"}, part["knobs"]) for part in parts]
    few = [knobs for counts, knobs in rows if len(counts) > 1 and min(counts) < 4]
    assert {"state", "all"} <= {knobs.get("host_homes") for knobs in few}


def test_hunt_finds_and_repeats_a_fault_of_empty_columns(monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.setattr(tawpipe.data.chats.render, "EMPTY", ())
    assert hunt.main(["--only", "data", "--seed", "1", "--first"]) == 1
    said = capsys.readouterr().out
    again = said.partition('ARGS="')[2].partition('"')[0].split()
    assert again[0] == "--case" and hunt.main(again) == 1
    monkeypatch.undo()
    assert hunt.main(again) == 0


@pytest.mark.slow
def test_hunt_finds_a_wrong_learning_rate(monkeypatch: pytest.MonkeyPatch):
    """Here, that is in the plain loop; the worker processes know nothing of it."""
    for name, (kind, options) in list(hunt_training.OPTIMIZERS.items()):
        monkeypatch.setitem(hunt_training.OPTIMIZERS, name, (kind, {**options, "lr": 1.5 * options["lr"]}))
    assert "WRONG" in {hunt.find(1, number, "training")[0] for number in numbers("training", 3)}


@pytest.mark.slow
def test_hunt_finds_empty_plans_and_internal_plan_errors(monkeypatch: pytest.MonkeyPatch, capsys):
    number = numbers("plans", 2)[1]  # the first does not fit
    monkeypatch.setattr(plans, "search", lambda request, **_: [])
    assert hunt.find(1, number, "plans")[0] == "WRONG"
    said = capsys.readouterr().out
    assert "names nothing, and tawpipe-" in said and f'ARGS="--case 1.{number}:plans"' in said
    monkeypatch.setattr(plans, "ask", lambda case: {}["no request"])
    assert "KeyError" in hunt.find(1, number, "plans")[1]


def test_hunt_finds_an_error_that_names_no_setting(monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.setattr(hunt_text, "_readers", lambda: {"a": lambda random: {}["no setting"]})
    assert hunt.main(["--only", "text", "--seed", "1", "--first"]) == 1
    assert "KeyError" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        hunt.main(["--case", "text"])
