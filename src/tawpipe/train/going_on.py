"""Words for a run that ended early: what is saved, and the command that resumes it.

This module does not import torch, because a launcher uses it, too.
"""

from __future__ import annotations

import shlex

from tawpipe.checkpoint.names import complete_states, step_of
from tawpipe.environment import started_by_local_launcher
from tawpipe.train.settings.config import SETTINGS, TrainConfig


def how_to_go_on(config: TrainConfig, *, by_torchrun: bool) -> str:
    """Return a sentence with the newest checkpoint of a run and the command that resumes the run.

    Without a checkpoint, the sentence gives the command that starts anew.

    Args:
        config: settings of the run.
        by_torchrun: True if torchrun started the run. Its command line is not known here, so that the sentence only
            says to add ``--resume auto``.
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
    """Return ``how_to_go_on`` for the run that this process belongs to."""
    return how_to_go_on(config, by_torchrun=not started_by_local_launcher())
