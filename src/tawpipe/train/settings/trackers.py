"""The experiment trackers that a run can write to, one class each, all with the two methods of :class:`Tracker`.

Only rank 0 makes them, and calls each from one thread of its own (tracking.py): they may be slow, wait for a network or
raise. A setting that is empty is left to the library, which reads its own environment variables.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, Protocol

from tawpipe.errors import UserError
from tawpipe.extras import install_hint

NONE = "none"
"""The word that stands alone for no tracker."""
PROJECT = "tawpipe"
"""The project of runs that name none."""
PARAMETERS_AT_ONCE = 100
"""As many as MLflow takes in one call."""

Samples = Sequence[tuple[str, str]]
"""Prompts, each with the text that the model wrote after it."""
Outcome = Literal["finished", "stopped", "failed"]
"""How a run ended: as it should, early and in good order, or by an error."""


@dataclass(frozen=True)
class TrackedRun:
    """The facts about a run that its trackers are given.

    Args:
        output: the run's folder.
        project: what groups runs; empty for what the library's environment variables say, else :data:`PROJECT`.
        name: of the run; empty for what the library's environment variables say, else that of the output folder.
        settings: every setting under its name with dots.
        plan: that it follows, as text; empty without one.
        id: that the tracker gave this run when it began; empty for a new one.
        resumed_step: the last step that the run goes on from; 0 for none.
    """

    output: Path
    project: str = ""
    name: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    plan: str = ""
    id: str = ""
    resumed_step: int = 0

    @property
    def with_plan(self) -> dict[str, Any]:
        """The settings, and the plan as one of them."""
        return {**self.settings, **({"plan_followed": self.plan} if self.plan else {})}

    def project_unless(self, *variables: str) -> str | None:
        """The project; None where one of these environment variables says it."""
        return self.project or (None if any(map(os.environ.get, variables)) else PROJECT)

    def name_unless(self, *variables: str) -> str | None:
        """The name; None where one of these environment variables says it."""
        return self.name or (None if any(map(os.environ.get, variables)) else self.output.absolute().name)


class Tracker(Protocol):
    """A service or library that keeps the numbers of runs. Making one begins a run, or resumes the one with ``run.id``.
    Any method may raise anything.
    """

    id: str
    """The tracker's name for the run; empty where it needs none to resume."""

    def __init__(self, run: TrackedRun) -> None: ...

    def log(self, step: int, values: Mapping[str, float], samples: Samples = ()) -> None:
        """Take the numbers of a step, or prompts and what the model wrote after them."""
        ...

    def close(self, outcome: Outcome) -> None:
        """End, when everything is written."""
        ...


class TensorBoard:
    """Event files under tensorboard/ in the output folder. Steps that are repeated replace those of before."""

    id = ""

    def __init__(self, run: TrackedRun) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._board = SummaryWriter(str(run.output / "tensorboard"), purge_step=run.resumed_step + 1)
        if not run.resumed_step:
            settings = "\n".join(f"{name}: {value}" for name, value in run.settings.items())
            self._board.add_text("settings", _as_code(settings), 0)
            self._board.add_text("plan", _as_code(run.plan or "none"), 0)

    def log(self, step: int, values: Mapping[str, float], samples: Samples = ()) -> None:
        for name, value in values.items():
            self._board.add_scalar(name, value, step)
        if samples:
            self._board.add_text("samples", _shown(samples), step)

    def close(self, outcome: Outcome) -> None:
        self._board.close()


class Wandb:
    """Weights & Biases. Its step only rises, also over restarts: ours is a metric of its own, and the axis of all."""

    def __init__(self, run: TrackedRun) -> None:
        self._wandb = import_module("wandb")
        self._run = self._wandb.init(
            project=run.project_unless("WANDB_PROJECT"),
            name=run.name_unless("WANDB_NAME"),
            id=run.id or None,
            resume="allow" if run.id else None,
            dir=os.environ.get("WANDB_DIR") or str(run.output),
            # It would take a progress bar for text, and standard output for its own.
            settings=self._wandb.Settings(console=os.environ.get("WANDB_CONSOLE", "off")),
        )
        self._run.config.update(run.with_plan, allow_val_change=True)
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")
        self.id = self._run.id

    def log(self, step: int, values: Mapping[str, float], samples: Samples = ()) -> None:
        row = {**values, "step": step}
        if samples:
            rows = [[step, *sample] for sample in samples]
            row["samples"] = self._wandb.Table(columns=["step", "prompt", "text"], data=rows)
        self._run.log(row)

    def close(self, outcome: Outcome) -> None:
        self._run.finish(exit_code=int(outcome == "failed"))


class Mlflow:
    """MLflow, wherever MLFLOW_TRACKING_URI says."""

    ENDED: Mapping[Outcome, str] = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}

    def __init__(self, run: TrackedRun) -> None:
        self._mlflow = mlflow = import_module("mlflow")
        if experiment := run.project_unless("MLFLOW_EXPERIMENT_NAME", "MLFLOW_EXPERIMENT_ID"):
            mlflow.set_experiment(experiment)
        active = mlflow.start_run(run_id=run.id or None, run_name=run.name_unless())
        if not run.id:  # parameters of a run cannot be changed
            items = list(run.settings.items())
            for first in range(0, len(items), PARAMETERS_AT_ONCE):
                mlflow.log_params(dict(items[first : first + PARAMETERS_AT_ONCE]))
            if run.plan:
                mlflow.log_text(run.plan, "plan.yaml")
        self.id = active.info.run_id

    def log(self, step: int, values: Mapping[str, float], samples: Samples = ()) -> None:
        if values:
            self._mlflow.log_metrics(dict(values), step=step)
        if samples:
            text = "\n\n".join(f"{prompt}\n---\n{written}" for prompt, written in samples)
            self._mlflow.log_text(text + "\n", f"samples/step-{step:08}.txt")

    def close(self, outcome: Outcome) -> None:
        self._mlflow.end_run(self.ENDED[outcome])


class Trackio:
    """trackio, in a folder of this machine unless its variables name a Space or a server. A run's id is its name."""

    def __init__(self, run: TrackedRun) -> None:
        self._trackio = import_module("trackio")
        self._run = self._trackio.init(
            run.project_unless(),
            name=run.id or run.name_unless(),
            config=run.with_plan,
            resume="allow" if run.id else "never",
            embed=False,
            auto_log_gpu=False,
        )
        self.id = str(self._run.name)

    def log(self, step: int, values: Mapping[str, float], samples: Samples = ()) -> None:
        shown = {"samples": self._trackio.Markdown(_shown(samples))} if samples else {}
        self._run.log({**values, **shown}, step=step)

    def close(self, outcome: Outcome) -> None:
        self._run.finish()


def _as_code(text: str) -> str:
    """Text as Markdown that is shown as it is."""
    return "\n".join(f"    {line}" for line in text.splitlines())


def _shown(samples: Samples) -> str:
    return "\n\n".join(_as_code(prompt + text) for prompt, text in samples)


TRACKERS: Mapping[str, type[Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": Wandb,
    "mlflow": Mlflow,
    "trackio": Trackio,
}
"""Every tracker under its name in ``--log.trackers``, which is also that of its library and of its extra."""


def check_trackers(names: Sequence[str], *, here: bool = True) -> None:
    """The trackers are known.

    Args:
        here: whether they are to run in this process, and so must be installed.

    Raises:
        UserError: one is not known or not installed.
    """
    known = ", ".join(TRACKERS)
    for name in names:
        if name == NONE and len(names) > 1:
            raise UserError("--log.trackers", " ".join(names), f"{NONE} alone, or only names of trackers ({known})")
        if name not in TRACKERS and name != NONE:
            raise UserError("--log.trackers", name, f"one or several of {known}; or {NONE}")
        if here and name != NONE and not _is_installed(name):
            raise UserError("--log.trackers", name, f"a library that is installed: {install_hint(name)}")


def _is_installed(name: str) -> bool:
    """True if Python finds the library. A folder of that name, as wandb leaves one, is none."""
    with suppress(ImportError, ValueError):
        spec = importlib.util.find_spec(name)
        return spec is not None and spec.origin is not None
    return False
