"""Command ``tawpipe train``: start the processes of a run on this machine, or be a process of a run."""

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
"""Modules that every process of a run imports.

Llama's module is in the list because it imports most of what other models' modules need."""


def run(argv: Sequence[str]) -> int:
    """Run ``tawpipe train``: train, and return the exit code. A UserError gets the file and line of its setting."""
    try:
        return _run(argv, load_config(argv))
    except UserError as error:
        raise located(as_option(error), argv) from error


def _run(argv: Sequence[str], config: TrainConfig) -> int:
    """Check the settings; train in this process, or start the processes of the run and wait for their end.

    The output folder is created and locked. With ``--dry-run``, only the checks are made.

    Returns:
        The exit code.
    """
    launched = LaunchEnvironment.read(os.environ)
    if started_by_local_launcher():
        # The launcher has made all checks. They would fail here, as rank 0 may already be writing into the output
        # folder.
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
    """Return True for a folder with weights and for a name on the Hub; False for presets."""
    folder = Path(model).expanduser()
    has_files = any(folder.glob("*.safetensors*")) if folder.is_dir() else "/" in model
    return has_files and model not in PRESET_NAMES


@contextmanager
def _held(config: TrainConfig, new_folders: Sequence[Path]) -> Iterator[None]:
    """Hold the lock on the run's output folder within the context.

    After a restart, wait for the earlier process first, which may be about to end.

    Args:
        config: settings of the run.
        new_folders: folders that were made for the run, the innermost first. They are deleted on exit if they are
            empty.

    Raises:
        UserError: another process runs in the folder.
    """
    try:
        with running_in(config.output_path, patience_s=config.timeouts.grace_s if restart_count() else 0.0):
            yield
    finally:
        with suppress(OSError):  # stops at the first folder that is not empty
            for folder in new_folders:
                folder.rmdir()


def _start(argv: Sequence[str], config: TrainConfig, shape: Shape, gpus: Sequence[Gpu]) -> int:
    """Train in this process if it is the only one, else start the processes of the run; return the exit code."""
    if shape.nproc == 1 and not config.max_restarts:
        with in_this_process(gpus=gpus):
            return _train_unwatched(config)
    # The last --output takes effect, so that all processes use the folder that was named here.
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
    """Train in a process that no launcher of tawpipe watches; on an error, add a note that says how to resume.

    Args:
        speaks: True if this process is the one that adds the note.
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
    """Train in this process, which has the environment variables of a launcher; return the exit code."""
    from tawpipe.train.run import run as train

    leave_imports_alone()
    return train(config)


def _look(config: TrainConfig, shape: Shape | None) -> int:
    """Run the checks of ``--dry-run``, and return the exit code.

    If the run would fork its workers, the dry run uses a forked process, too: it holds less memory than a process that
    imports the modules itself, and its memory is measured.

    Args:
        config: settings of the run.
        shape: processes of the run; None in every process that torchrun started.
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
