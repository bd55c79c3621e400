"""The libraries themselves, without a network: each is skipped where it is not installed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tawpipe.train.saying.tracking import Tracking
from tawpipe.train.settings.trackers import TrackedRun

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("judges")]
SETTINGS = {"seed": 0, "optimizer.name": "adamw", "schedule.homes": "", "sample.prompt": ["def "], "log.project": None}
QUIET = {
    "WANDB_MODE": "offline",
    "WANDB_SILENT": "true",
    "WANDB_ERROR_REPORTING": "false",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "true",
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
}
"""No word to anybody."""


def follow(name: str, output: Path) -> str:
    """Two starts of one run, whose third step is done twice; what the tracker calls it."""
    said: list[str] = []
    for first, steps in ((0, (1, 2, 3)), (2, (3, 4))):
        run = TrackedRun(output, project="trial", settings=SETTINGS, plan="a: plan", resumed_step=first)
        with Tracking([name], run, lambda name, words: said.append(words)) as trackers:
            for step in steps:
                trackers.log(step, {"loss": 1 / step, "mfu": None, "validation_by_position": {"256": 3.5}})
            trackers.samples(steps[-1], [("def ", "f():\n  pass")])
        assert said == []
    return json.loads((output / "trackers.json").read_text())[name]


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in QUIET.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)


def test_wandb_records_a_run_offline(tmp_path: Path):
    pytest.importorskip("wandb")
    id = follow("wandb", tmp_path / "run")
    starts = sorted((tmp_path / "run" / "wandb").glob(f"offline-run-*-{id}"))
    assert len(starts) == 2
    for start in starts:
        kept = (start / f"run-{id}.wandb").read_bytes()
        assert all(word in kept for word in (b"loss", b"validation_by_position/256", b"optimizer.name", b"a: plan"))
        assert list((start / "files" / "media" / "table").glob("samples*.json"))


def test_mlflow_records_a_run_in_a_local_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    mlflow: Any = pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    id = follow("mlflow", tmp_path / "run")
    client = mlflow.MlflowClient()
    run = client.get_run(id)
    assert client.get_experiment(run.info.experiment_id).name == "trial"
    assert (run.info.run_name, run.info.status) == ("run", "FINISHED")
    assert run.data.params["optimizer.name"] == "adamw"
    assert sorted(one.step for one in client.get_metric_history(id, "loss")) == [1, 2, 3, 3, 4]
    assert run.data.metrics["validation_by_position/256"] == 3.5
    assert {one.path for one in client.list_artifacts(id)} == {"plan.yaml", "samples"}


def test_trackio_records_a_run_in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    storage: Any = pytest.importorskip("trackio.sqlite_storage").SQLiteStorage
    name = follow("trackio", tmp_path / "run")
    assert name == "run" and storage.get_runs("trial") == ["run"]
    logs = storage.get_logs("trial", name)
    assert [one["step"] for one in logs if "loss" in one] == [1, 2, 3, 3, 4]
    assert [one["step"] for one in logs if "samples" in one] == [3, 4]
    assert storage.get_run_config("trial", name)["optimizer.name"] == "adamw"
