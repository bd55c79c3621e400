"""``tawpipe train``: starts the processes on this machine, or is one of those that a launcher started."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

from tawpipe.environment import LaunchEnvironment, restart_count, started_by_local_launcher
from tawpipe.errors import UserError
from tawpipe.garbage import leave_imports_alone
from tawpipe.launch.forked import import_once
from tawpipe.launch.gpus import Gpu, find_gpus
from tawpipe.launch.launcher import Shape, in_this_process, launch, local_shape
from tawpipe.model.settings import PRESET_NAMES
from tawpipe.options.library import as_option
from tawpipe.train.going_on import how_this_process_goes_on, how_to_go_on
from tawpipe.train.lock import running_in
from tawpipe.train.settings.checks import check_output, check_output_name, validate
from tawpipe.train.settings.config import TrainConfig, load_config, located, with_output_named

IMPORTS = ("tawpipe.train.run", "tawpipe.plan.search.search", "transformers.models.llama.modeling_llama")
"""What every process of a run imports, whatever its model: most of a model's module is what all have in common."""


def run(argv: Sequence[str]) -> int:
    """Runs ``tawpipe train`` with the words ``argv`` and returns the exit code."""
    try:
        return _run(argv, load_config(argv))
    except UserError as error:
        raise located(as_option(error), argv) from error


def _run(argv: Sequence[str], config: TrainConfig) -> int:
    launched = LaunchEnvironment.read(os.environ)
    if started_by_local_launcher():
        # The launcher has checked everything; rank 0 may be writing into the output folder already.
        assert launched is not None
        return _train_here(config)

    gpus = find_gpus() if config.device != "cpu" else ()
    validate(config, gpus=gpus)
    if launched is not None:
        check_output_name(config)
        new_folders = check_output(config, make=not config.dry_run) if launched.rank == 0 else []
        if config.dry_run:
            return _look(config, None)
        with _held(config, new_folders) if launched.rank == 0 else nullcontext():
            return _train_unwatched(config, speaks=launched.rank == 0)

    config = with_output_named(config)
    shape = local_shape(config.nodes, config.nproc, num_gpus=len(gpus), emulates=not _has_weights(config.model))
    new_folders = check_output(config, make=not config.dry_run)
    if config.dry_run:
        return _look(config, shape)
    with _held(config, new_folders):
        return _start(argv, config, shape, gpus)


def _has_weights(model: str) -> bool:
    """True for a folder with weights and for a name on the Hub; False for presets, whose runs are demonstrations."""
    folder = Path(model).expanduser()
    given = any(folder.glob("*.safetensors*")) if folder.is_dir() else "/" in model
    return given and model not in PRESET_NAMES


@contextmanager
def _held(config: TrainConfig, new_folders: Sequence[Path]) -> Iterator[None]:
    """The run's hold on its output folder. After a restart the process before may still be about to end.

    Args:
        new_folders: that were made for it, the innermost first, which go again if nothing was written.
    """
    try:
        with running_in(config.output_path, patience_s=config.timeouts.grace_s if restart_count() else 0.0):
            yield
    finally:
        with suppress(OSError):  # from the first one on that holds something
            for folder in new_folders:
                folder.rmdir()


def _start(argv: Sequence[str], config: TrainConfig, shape: Shape, gpus: Sequence[Gpu]) -> int:
    """The run, in this process if it is the only one, or else in as many as there are to be."""
    if shape.nproc == 1 and not config.max_restarts:
        with in_this_process(gpus=gpus):
            return _train_unwatched(config)
    # The word that names the folder comes last and so beats one given before.
    command = [sys.executable, "-m", "tawpipe", "train", *argv, f"--output={config.output}"]
    return launch(
        command,
        shape,
        gpus=gpus,
        patience_s=config.timeouts.grace_s,
        max_restarts=config.max_restarts,
        imports=IMPORTS,
        last_words=lambda: how_to_go_on(config, by_torchrun=False),
    )


def _train_unwatched(config: TrainConfig, *, speaks: bool = True) -> int:
    """One process of the run that no launcher of ours watches: on an error, it says itself how to go on.

    Args:
        speaks: whether it is the one process that says so.
    """
    try:
        return _train_here(config)
    except UserError:
        raise
    except Exception as error:
        if speaks:
            error.add_note(f"tawpipe: {how_this_process_goes_on(config)}")
        raise


def _train_here(config: TrainConfig) -> int:
    """One process of the run, under the variables of a launcher."""
    from tawpipe.train.run import run as train

    leave_imports_alone()
    return train(config)


def _look(config: TrainConfig, shape: Shape | None) -> int:
    """``--dry-run``; without a shape in every process that torchrun started.

    Workers of ours are forked from a process that has imported what they need, and so hold less memory than one that
    imports it itself: where they would be, it is such a one that looks.
    """
    if shape is not None and shape.nproc > 1 and import_once(IMPORTS, {}):
        sys.stdout.flush()
        if (worker := os.fork()) > 0:
            code = os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1])
            if code < 0:
                print(f"tawpipe: error: the process that checked the run was killed by signal {-code}", file=sys.stderr)
            return code if code >= 0 else 1
    from tawpipe.train.dry_run import dry_run

    return dry_run(config, shape)
