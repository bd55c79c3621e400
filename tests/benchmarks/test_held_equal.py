"""Held equal: each difference is named with both values, and the options of every command are recorded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import held_equal


def test_each_difference_is_named_with_both_values():
    recorded = {"same": 1, "loss": {"step 0": "0.5", "step 1": "0.25"}, "gone": "x"}
    values = {"same": 1, "loss": {"step 0": "0.5", "step 1": "0.125"}, "added": [2]}
    assert held_equal.differences(recorded, recorded) == []
    assert held_equal.differences(recorded, values) == [
        "added: new, [2]",
        'gone: missing; recorded "x"',
        'loss: step 1: recorded "0.25", now "0.125"',
    ]


def test_a_long_value_is_cut_around_its_first_difference():
    before, after = held_equal.shown("a" * 999 + "b" + "c" * 999, "a" * 999 + "d" + "c" * 999)
    assert before.count("b") == after.count("d") == 1
    assert len(before) == len(after) == 2 * held_equal.SHOWN + 2


@pytest.fixture(scope="module")
def options() -> dict:
    return held_equal.made("help", 0)


def test_options_of_all_commands_are_recorded(options):
    assert options["tawpipe train --schedule.reduce-dtype"]["metavar"]
    assert options["settings of a run"]["schedule"]["micro_batches_per_visit"] == 2
    commands = {name.split()[1] for name in options}
    assert {"train", "plan", "checkpoint", "lab", "doctor", "open"} <= commands
    assert len(options) > 300


def test_a_changed_a_missing_and_a_new_key_are_reported(options, tmp_path: Path, monkeypatch, capsys):
    monkeypatch.setattr(held_equal, "all_made", lambda parts: iter([("help", options, 0.0)]))
    assert held_equal.main(["--compare", str(tmp_path), "--only", "help"]) == 1  # nothing was recorded
    assert held_equal.main(["--record", str(tmp_path), "--only", "help"]) == 0
    assert held_equal.main(["--compare", str(tmp_path), "--only", "help"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith(f"help: {len(options)} values, all equal")
    file = tmp_path / "help.json"
    recorded = json.loads(file.read_text())
    recorded["tawpipe train --steps"]["default"] = "7"
    recorded["tawpipe train --gone"] = recorded.pop("tawpipe train --seed")
    file.write_text(json.dumps(recorded))
    assert held_equal.main(["--compare", str(tmp_path), "--only", "help"]) == 1
    said = capsys.readouterr().out
    assert 'help: tawpipe train --steps: default: recorded "7", now' in said
    assert "help: tawpipe train --gone: missing" in said and "help: tawpipe train --seed: new" in said


def test_a_part_that_fails_is_not_recorded(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.setattr(held_equal, "all_made", lambda parts: iter([("help", {"failed 0": "no parser"}, 0.0)]))
    assert held_equal.main(["--record", str(tmp_path), "--only", "help"]) == 1
    assert "help: failed 0: no parser" in capsys.readouterr().out and not [*tmp_path.iterdir()]
