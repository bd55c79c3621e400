"""What a run that ended too soon has left, and how to go on with it. Without torch: a launcher says it, too."""

from __future__ import annotations

import shlex

from tawpipe.checkpoint.names import complete_states, step_of
from tawpipe.environment import started_by_local_launcher
from tawpipe.train.settings.config import SETTINGS, TrainConfig


def how_to_go_on(config: TrainConfig, *, by_torchrun: bool) -> str:
    """The newest checkpoint of a run, and the command that goes on from it.

    Args:
        by_torchrun: whether torchrun started the run, whose own words nobody here knows.
    """
    settings = config.output_path / SETTINGS
    if by_torchrun or not settings.exists():
        command = "the same command with --resume auto"
    else:
        command = f"tawpipe train --config {shlex.quote(str(settings))} --resume auto"
    if not (complete := complete_states(config.output_path / "checkpoints")):
        return f"no checkpoint was written yet. To start again in that folder: {command}"
    return f"checkpoint of step {step_of(complete[-1])}: {complete[-1]}. To resume from there: {command}"


def how_this_process_goes_on(config: TrainConfig) -> str:
    """The same in a process of the run."""
    return how_to_go_on(config, by_torchrun=not started_by_local_launcher())
