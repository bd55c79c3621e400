"""Trackers: what they are given, where a resumed run goes on, and that none of them can hold up or end a run."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from fake_trackers import FAKES, Library
from processes import wait_for
from tawpipe.commands.train import run as train
from tawpipe.errors import UserError
from tawpipe.train.saying import tracking
from tawpipe.train.saying.tracking import Tracking
from tawpipe.train.settings.trackers import TRACKERS, Outcome, Samples, TrackedRun, check_trackers

ROW = {"loss": 2.5, "grad_norm": float("inf"), "mfu": None, "validation_by_position": {"256": 3.5, "512": None}}
GIVEN = {"loss": 2.5, "validation_by_position/256": 3.5}
SETTINGS = {"seed": 0, "optimizer.name": "adamw", **{f"group.setting{n}": [n] for n in range(150)}}


@pytest.fixture(params=list(FAKES))
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Library:
    """A library that records what it is given."""
    for name in ("WANDB_PROJECT", "WANDB_NAME", "WANDB_DIR", "MLFLOW_EXPERIMENT_NAME", "MLFLOW_EXPERIMENT_ID"):
        monkeypatch.delenv(name, raising=False)
    module = FAKES[request.param](request.param)
    monkeypatch.setitem(sys.modules, request.param, module)
    return module


def follow(
    names: Sequence[str], output: Path, steps: range, *, first: int = 0, fails: bool = False, **facts: str
) -> list[str]:
    """Track the rows of some steps, and a sample after the last; what was said about trackers."""
    said: list[str] = []
    run = TrackedRun(output, settings=SETTINGS, plan="a: plan", resumed_step=first, **facts)
    try:
        with Tracking(names, run, lambda _, words: said.append(words), closing_s=20) as trackers:
            for step in steps:
                trackers.log(step, ROW)
            trackers.samples(steps[-1], [("def ", "f():")])
            if fails:
                raise ValueError
    except ValueError:
        assert fails
    return said


# what each is given


def test_tracker_gets_settings_rows_and_samples_and_resumes_its_run(library: Library, tmp_path: Path):
    name, output = library.__name__, tmp_path / "run"
    assert follow([name], output, range(1, 4)) == []
    ((id, kept),) = library.runs.items()
    assert (kept.project, kept.name) == ("tawpipe", "run")
    assert kept.settings.items() >= SETTINGS.items()
    assert "a: plan" in {**kept.settings, **kept.texts}.values()
    assert kept.rows == [(step, GIVEN) for step in (1, 2, 3)]
    assert any("f():" in text and "def " in text for text in kept.texts.values())
    assert json.loads((output / "trackers.json").read_text()) == {name: id}
    assert follow([name], output, range(3, 6), first=2, fails=True) == []
    assert list(library.runs) == [id] and kept.starts == 2
    assert [step for step, _ in kept.rows] == [1, 2, 3, 3, 4, 5]
    assert kept.ended == {"wandb": [0, 1], "mlflow": ["FINISHED", "FAILED"], "trackio": [True, True]}[name]


def test_tracker_names_come_from_settings_then_from_environment_variables(
    library: Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    name = library.__name__
    follow([name], tmp_path / "a", range(1, 2), project="mine", name="first")
    monkeypatch.setenv("WANDB_PROJECT", "theirs")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "theirs")
    follow([name], tmp_path / "b", range(1, 2), project="mine")
    monkeypatch.setattr(library, "_experiment", None, raising=False)  # as a new process has it
    follow([name], tmp_path / "c", range(1, 2))
    assert [(kept.project, kept.name) for kept in library.runs.values()] == [
        ("mine", "first"),
        ("mine", "b"),
        ("tawpipe" if name == "trackio" else "theirs", "c"),
    ]


def test_tensorboard_records_equal_values_and_drops_repeated_steps(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for steps, first in ((range(1, 5), 0), (range(3, 5), 2)):
        assert follow(["tensorboard"], tmp_path, steps, first=first) == []
    board = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert set(board.Tags()["scalars"]) == set(GIVEN)
    assert [(event.step, event.value) for event in board.Scalars("loss")] == [(step, 2.5) for step in (1, 2, 3, 4)]
    texts = {tag: board.Tensors(tag)[-1].tensor_proto.string_val[0].decode() for tag in board.Tags()["tensors"]}
    assert "optimizer.name: adamw" in texts["settings/text_summary"]
    assert "a: plan" in texts["plan/text_summary"] and "def f():" in texts["samples/text_summary"]
    assert len(board.Tensors("settings/text_summary")) == 1 and not (tmp_path / "trackers.json").exists()


# what cannot work is refused before anything starts


@pytest.mark.parametrize(
    ("names", "value", "expected"),
    [
        (["tensorbord"], "tensorbord", "one or several of tensorboard, wandb, mlflow, trackio; or none"),
        (["none", "wandb"], "none wandb", "none alone"),
        (["mlflow"], "mlflow", r"pip install -e '.*\[mlflow\]'"),
    ],
)
def test_unknown_or_missing_trackers_are_refused(names, value, expected, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=f"--log.trackers: got '{value}'; .*{expected}"):
        check_trackers(names)


def test_folder_left_by_wandb_is_not_taken_for_a_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    (tmp_path / "trackio").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(UserError, match="a library that is installed"):
        check_trackers(["trackio"])
    check_trackers(["trackio"], here=False)  # a rank that has no trackers
    check_trackers(["none"])
    check_trackers([])


def test_unknown_tracker_is_refused_before_a_folder_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    output = tmp_path / "run"
    with pytest.raises(UserError, match=r"--log\.trackers: got 'aim'"):
        train(["--device", "cpu", "--output", str(output), "--log.trackers", "tensorboard", "aim"])
    assert not output.exists()


# a tracker in trouble is left out

OVER = threading.Event()
"""Set when nobody need wait any more."""


class Quiet:
    """A tracker that does nothing."""

    id = ""

    def __init__(self, run: TrackedRun) -> None: ...

    def log(self, step: int, values: Mapping[str, float], samples: Samples = ()) -> None: ...

    def close(self, outcome: Outcome) -> None: ...


class Good(Quiet):
    """A tracker that works; what it was given stands in ``told``."""

    told: list = []

    def log(self, step: int, values: Mapping[str, float], samples: Samples = ()) -> None:
        self.told.append("samples" if samples else step)

    def close(self, outcome: Outcome) -> None:
        self.told.append(outcome)


class NoNetwork(Quiet):
    def __init__(self, run: TrackedRun) -> None:
        raise ConnectionError("no route\nto host")


class FullDisk(Quiet):
    def log(self, step: int, values: Mapping[str, float], samples: Samples = ()) -> None:
        if step == 2:
            raise OSError(28, "No space left on device")


class Leaves(Quiet):
    def log(self, step: int, values: Mapping[str, float], samples: Samples = ()) -> None:
        if samples:
            sys.exit(1)


class NeverEnds(Quiet):
    def close(self, outcome: Outcome) -> None:
        OVER.wait(30)


class Stuck(Quiet):
    def log(self, step: int, values: Mapping[str, float], samples: Samples = ()) -> None:
        OVER.wait(30)


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        (NoNetwork, "ConnectionError: no route to host"),
        (FullDisk, "OSError: [Errno 28] No space left on device"),
        (Leaves, "SystemExit: 1"),
        (NeverEnds, "not ready within 1 s at the end"),
        (Stuck, "it is 3 rows behind"),
    ],
)
def test_failing_tracker_is_reported_once_and_disabled(broken, words, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tracking, "ROWS_WAITING", 3)
    monkeypatch.setitem(TRACKERS, "wandb", broken)  # type: ignore[arg-type]
    monkeypatch.setitem(TRACKERS, "mlflow", Good)  # type: ignore[arg-type]
    monkeypatch.setattr(Good, "told", [])
    OVER.clear()
    said: list[tuple[str, str]] = []
    tell = lambda *told: said.append(told)  # noqa: E731
    with Tracking(["wandb", "mlflow"], TrackedRun(tmp_path), tell, closing_s=1.0) as trackers:
        for step in range(1, 8):
            trackers.log(step, ROW)
            assert wait_for(lambda last=step: Good.told[-1:] == [last])
        trackers.samples(7, [("a", "b")])
    OVER.set()
    assert said == [("wandb", f"disabled tracker wandb; training continues without it: {words}")]
    assert Good.told == [1, 2, 3, 4, 5, 6, 7, "samples", "finished"]


def test_damaged_tracker_ids_are_replaced(library: Library, tmp_path: Path):
    (tmp_path / "trackers.json").write_text('["no"')
    assert follow([library.__name__], tmp_path, range(1, 2)) == []
    assert json.loads((tmp_path / "trackers.json").read_text()) == {library.__name__: next(iter(library.runs))}


def test_trackers_none_writes_nothing(tmp_path: Path):
    for names in (["none"], []):
        assert follow(names, tmp_path / "no", range(1, 3)) == []
    assert not (tmp_path / "no").exists()
