"""Libraries of trackers as far as they are used: with the arguments of the real ones, and a record of what they got."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any


@dataclass
class Kept:
    """One run in a tracker: how it was begun, and everything that came after."""

    project: str | None = None
    name: str | None = None
    starts: int = 0
    settings: dict[str, Any] = field(default_factory=dict)
    rows: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    texts: dict[str, str] = field(default_factory=dict)
    ended: list[Any] = field(default_factory=list)


class Library(ModuleType):
    """A module with ``runs``, by their ids."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.runs: dict[str, Kept] = {}

    def begin(self, id: str | None, project: str | None, name: str | None) -> tuple[str, Kept]:
        id = id or f"{self.__name__}-{len(self.runs)}"
        kept = self.runs.setdefault(id, Kept(project, name))
        kept.starts += 1
        return id, kept


class FakeWandb(Library):
    def Settings(self, *, console: str) -> str:
        return console

    def Table(self, *, columns: list[str], data: list[list[Any]]) -> SimpleNamespace:
        return SimpleNamespace(columns=columns, data=data)

    def init(
        self, *, project: str | None, name: str | None, id: str | None, resume: str | None, dir: str, settings: str
    ) -> Any:
        assert settings == "off" and resume == ("allow" if id else None)
        id, kept = self.begin(id, project or os.environ["WANDB_PROJECT"], name or os.environ["WANDB_NAME"])

        def log(data: dict[str, Any]) -> None:
            table = data.get("samples")
            if table is None:
                kept.rows.append((data["step"], {one: value for one, value in data.items() if one != "step"}))
            else:
                assert table.columns == ["step", "prompt", "text"]
                kept.texts["samples"] = str(table.data)

        def update(settings: dict[str, Any], *, allow_val_change: bool) -> None:
            assert allow_val_change
            kept.settings |= settings

        def define_metric(name: str, *, step_metric: str | None = None, hidden: bool = False) -> None:
            assert (name, step_metric, hidden) in (("step", None, True), ("*", "step", False))

        return SimpleNamespace(
            id=id,
            config=SimpleNamespace(update=update),
            define_metric=define_metric,
            log=log,
            finish=lambda *, exit_code: kept.ended.append(exit_code),
        )


class FakeMlflow(Library):
    _experiment: str | None = None

    def set_experiment(self, name: str) -> None:
        self._experiment = name

    def start_run(self, *, run_id: str | None, run_name: str | None) -> Any:
        id, self._kept = self.begin(run_id, self._experiment or os.environ["MLFLOW_EXPERIMENT_NAME"], run_name)
        return SimpleNamespace(info=SimpleNamespace(run_id=id))

    def log_params(self, parameters: dict[str, Any]) -> None:
        assert len(parameters) <= 100 and not parameters.keys() & self._kept.settings.keys()
        self._kept.settings |= parameters

    def log_metrics(self, metrics: dict[str, float], *, step: int) -> None:
        self._kept.rows.append((step, metrics))

    def log_text(self, text: str, file: str) -> None:
        self._kept.texts[file] = text

    def end_run(self, status: str) -> None:
        self._kept.ended.append(status)


class FakeTrackio(Library):
    def Markdown(self, text: str) -> str:
        return text

    def init(
        self, project: str, *, name: str, config: dict[str, Any], resume: str, embed: bool, auto_log_gpu: bool
    ) -> Any:
        assert not embed and not auto_log_gpu
        assert resume == ("allow" if name in self.runs else "never")
        _, kept = self.begin(name, project, name)
        kept.settings |= config

        def log(metrics: dict[str, Any], *, step: int) -> None:
            if "samples" in metrics:
                kept.texts["samples"] = metrics["samples"]
            else:
                kept.rows.append((step, metrics))

        return SimpleNamespace(name=name, log=log, finish=lambda: kept.ended.append(True))


FAKES = {"wandb": FakeWandb, "mlflow": FakeMlflow, "trackio": FakeTrackio}
