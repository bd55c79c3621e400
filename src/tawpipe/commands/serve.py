"""Command ``tawpipe serve``: answer requests over HTTP, on one process or on several with one stage each."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from tawpipe.commands.chat import ADAPTER, CONFIG, model_folder
from tawpipe.environment import LaunchEnvironment, started_by_local_launcher
from tawpipe.errors import UserError
from tawpipe.extras import install_hint
from tawpipe.launch.gpus import find_gpus
from tawpipe.launch.launcher import in_this_process, launch, local_shape
from tawpipe.options import CommandParser
from tawpipe.options.library import as_option
from tawpipe.serving.service.settings import OPTIONS, ServeConfig, load, read_key

IMPORTS = ("tawpipe.serving.engine", "transformers.models.llama.modeling_llama")
"""Modules that every process imports."""
HUGE_PAGES = "THP_MEM_ALLOC_ENABLE", "1"
"""Environment variable that makes torch use huge pages on CPUs, with which weights are read 5 % faster.

It must be set before torch allocates memory."""
MORE_S = 5.0
"""Seconds that the launcher waits for the processes, in addition to the time for open answers."""


def run(argv: Sequence[str]) -> int:
    """Run ``tawpipe serve``: answer requests until a signal ends the service, and return the exit code."""
    config = load(argv)
    try:
        return _run(argv, config)
    except UserError as error:
        if error.setting in {leaf.key for leaf in OPTIONS.leaves.values()}:
            error = UserError(f"--{error.setting.replace('_', '-')}", error.value, error.expected)
        raise OPTIONS.located(as_option(error), argv) from error


def _parser() -> CommandParser:
    """Return the parser of the command line."""
    return OPTIONS.parser


def _run(argv: Sequence[str], config: ServeConfig) -> int:
    """Check the settings; serve in this process, or start the processes of the service and wait for their end.

    Returns:
        The exit code.
    """
    if started_by_local_launcher():
        return _serve(config)
    missing = [name for name in ("starlette", "uvicorn") if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError("tawpipe", "serve", f"{' and '.join(missing)} installed: {install_hint('serve')}")
    read_key(config)
    _folder(config)
    if LaunchEnvironment.read(os.environ) is not None:
        if config.nproc is not None:
            raise UserError("--nproc", config.nproc, "unset under torchrun, whose --nproc-per-node sets it")
        return _serve(config)
    gpus = find_gpus() if config.device != "cpu" else ()
    shape = local_shape(1, config.nproc or len(gpus) or 1, num_gpus=len(gpus))
    if shape.nproc == 1 and not config.max_restarts:
        with in_this_process(gpus=gpus):
            return _serve(config)
    os.environ.setdefault(*HUGE_PAGES)  # set before torch is imported, as workers are forked after that
    return launch(
        [sys.executable, "-m", "tawpipe", "serve", *argv],
        shape,
        gpus=gpus,
        patience_s=config.drain_s + MORE_S,
        max_restarts=config.max_restarts,
        imports=IMPORTS,
    )


def _folder(config: ServeConfig) -> Path:
    """Return the folder of the model.

    Raises:
        UserError: there is no model, or only an adapter.
    """
    folder = model_folder(Path(config.model).expanduser(), "--model")
    if (folder / ADAPTER).is_file() and not (folder / CONFIG).is_file():
        expected = "a whole model (tawpipe export RUN --merge writes one with the adapter merged)"
        raise UserError("--model", config.model, expected)
    return folder


def _serve(config: ServeConfig) -> int:
    """Serve in this process until the service ends, and return 0. The variables of a launcher must be set."""
    os.environ.setdefault(*HUGE_PAGES)
    from tawpipe.serving.service.start import serve

    serve(config, _folder(config))
    return 0
