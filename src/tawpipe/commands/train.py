"""``tawpipe train``: starts the processes on this machine, or is one of those that a launcher started."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from tawpipe.environment import LaunchEnvironment, started_by_local_launcher
from tawpipe.launch.gpus import find_gpus
from tawpipe.launch.launcher import in_this_process, launch, local_shape
from tawpipe.train.checks import check_output, check_output_name, validate
from tawpipe.train.config import TrainConfig, load_config, with_output_named

IMPORTS = ("tawpipe.train.run", "tawpipe.plan.search", "transformers.models.llama.modeling_llama")
"""What every process of a run imports, whatever its model: most of a model's module is what all have in common."""


def run(argv: Sequence[str]) -> int:
    """Runs ``tawpipe train`` with the words ``argv`` and returns the exit code."""
    config = load_config(argv)
    launched = LaunchEnvironment.read(os.environ)
    if started_by_local_launcher():
        # The launcher has checked everything; rank 0 may be writing into the output folder already.
        assert launched is not None
        return _train_here(config)

    gpus = find_gpus() if config.device != "cpu" else ()
    validate(config, gpus=gpus)
    if launched is not None:
        check_output_name(config)
        if launched.rank == 0:
            check_output(config)
        return _train_here(config)

    config = with_output_named(config)
    shape = local_shape(config.nodes, config.nproc, num_gpus=len(gpus))
    check_output(config)
    if shape.nproc == 1 and not config.max_restarts:
        with in_this_process(gpus=gpus):
            return _train_here(config)
    # The word that names the folder comes last and so beats one given before.
    command = [sys.executable, "-m", "tawpipe", "train", *argv, f"--output={config.output}"]
    return launch(
        command,
        shape,
        gpus=gpus,
        patience_s=config.timeouts.grace_s,
        max_restarts=config.max_restarts,
        imports=IMPORTS,
    )


def _train_here(config: TrainConfig) -> int:
    """One process of the run, under the variables of a launcher."""
    from tawpipe.train.run import run as train

    return train(config)
