"""Experiment trackers that a run can write to. Each is one class with the methods of :class:`Tracker`.

Only rank 0 makes trackers, and calls each one from a thread of its own (``tracking.py``): a tracker may be slow, wait
for a network or raise. An empty setting is left to the library, which then reads its own environment variables.
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
"""Value of ``--log.trackers`` that stands for no tracker."""
PROJECT = "tawpipe"
"""Default project of runs."""
PARAMETERS_AT_ONCE = 100
"""Largest number of parameters in one call to MLflow."""

Samples = Sequence[tuple[str, str]]
"""Pairs of a prompt and the text that the model wrote after it."""
Outcome = Literal["finished", "stopped", "failed"]
"""End of a run: after its last step, early on request, or by an error."""


@dataclass(frozen=True)
class TrackedRun:
    """Facts about a run that its trackers receive.

    Args:
        output: the run's output folder.
        project: name that groups runs; empty for the library's environment variables, else :data:`PROJECT`.
        name: name of the run; empty for the library's environment variables, else the name of the output folder.
        settings: all settings, by their names with dots.
        plan: text of the plan that the run follows; empty without one.
        id: name that the tracker gave this run when it began; empty for a new run.
        resumed_step: last step before the resume; 0 for a new run.
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
        """Settings, with the plan's text as one more (``plan_followed``) if there is a plan."""
        return {**self.settings, **({"plan_followed": self.plan} if self.plan else {})}

    def project_unless(self, *variables: str) -> str | None:
        """Return the project or the default; None if the project is empty and one of ``variables`` is set.

        The default is :data:`PROJECT`.

        Args:
            variables: environment variables from which the tracker's library reads the project.
        """
        return self.project or (None if any(map(os.environ.get, variables)) else PROJECT)

    def name_unless(self, *variables: str) -> str | None:
        """Return the run's name or the default; None if the name is empty and one of ``variables`` is set.

        The default is the name of the output folder.

        Args:
            variables: environment variables from which the tracker's library reads the name.
        """
        return self.name or (None if any(map(os.environ.get, variables)) else self.output.absolute().name)


class Tracker(Protocol):
    """Service or library that stores the numbers of runs.

    Making one begins a run, or resumes the run ``run.id``. Any method may raise anything.
    """

    id: str
    """The tracker's name for the run; empty if the tracker needs none to resume."""

    def __init__(self, run: TrackedRun) -> None: ...

    def log(self, step: int, values: Mapping[str, float], samples: Samples = ()) -> None:
        """Record the numbers of a step, or prompts and the texts that the model wrote after them."""
        ...

    def close(self, outcome: Outcome) -> None:
        """Wait until everything is written, and end the run at the tracker."""
        ...


class TensorBoard:
    """Tracker that writes event files under ``tensorboard/`` in the output folder.

    When a run resumes, steps that are repeated replace the earlier ones.
    """

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
    """Tracker for Weights & Biases.

    The step of wandb can only rise, also over restarts. So ``step`` is logged as a metric, which is the axis of all
    others.
    """

    def __init__(self, run: TrackedRun) -> None:
        self._wandb = import_module("wandb")
        self._run = self._wandb.init(
            project=run.project_unless("WANDB_PROJECT"),
            name=run.name_unless("WANDB_NAME"),
            id=run.id or None,
            resume="allow" if run.id else None,
            dir=os.environ.get("WANDB_DIR") or str(run.output),
            # By default wandb captures the console: it records progress bars as text and wraps standard output.
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
    """Tracker for MLflow, at the address in ``MLFLOW_TRACKING_URI``."""

    ENDED: Mapping[Outcome, str] = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}

    def __init__(self, run: TrackedRun) -> None:
        self._mlflow = mlflow = import_module("mlflow")
        if experiment := run.project_unless("MLFLOW_EXPERIMENT_NAME", "MLFLOW_EXPERIMENT_ID"):
            mlflow.set_experiment(experiment)
        active = mlflow.start_run(run_id=run.id or None, run_name=run.name_unless())
        if not run.id:  # MLflow does not allow changes of a run's parameters
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
    """Tracker for trackio, which writes to a local folder unless its environment variables name a Space or a server.

    The id of a run is its name.
    """

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
    """Return ``text`` indented, so that Markdown shows it unchanged as a code block."""
    return "\n".join(f"    {line}" for line in text.splitlines())


def _shown(samples: Samples) -> str:
    """Return all samples as Markdown code blocks, each with prompt and text joined."""
    return "\n\n".join(_as_code(prompt + text) for prompt, text in samples)


TRACKERS: Mapping[str, type[Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": Wandb,
    "mlflow": Mlflow,
    "trackio": Trackio,
}
"""Tracker of each name in ``--log.trackers``. The name is also the name of its library and of the extra to install."""


def check_trackers(names: Sequence[str], *, here: bool = True) -> None:
    """Check that ``names`` are known trackers, and that their libraries are installed.

    Args:
        names: trackers, or ``none`` alone.
        here: True if the trackers are to run in this process, so that their libraries must be installed.

    Raises:
        UserError: a tracker is not known or not installed, or ``none`` is used together with others.
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
    """Return True if Python finds the library ``name``. A folder without code, as wandb leaves one, is not counted."""
    with suppress(ImportError, ValueError):
        spec = importlib.util.find_spec(name)
        return spec is not None and spec.origin is not None
    return False
