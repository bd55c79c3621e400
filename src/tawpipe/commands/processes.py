"""Commands that run on several processes: started by torchrun or by the command, or on this process alone."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from tawpipe.environment import LaunchEnvironment, started_by_local_launcher
from tawpipe.errors import UserError
from tawpipe.launch.gpus import find_gpus
from tawpipe.launch.launcher import in_this_process, launch, local_shape

TORCHRUNS = {"nproc": "nproc-per-node", "nodes": "nnodes"}
"""Name in torchrun of each of these options."""


def add_processes(parser: argparse.ArgumentParser, *, out: str | None, what: str) -> None:
    """Add the options ``--nproc``, ``--nodes``, ``--device`` and ``--out`` to ``parser``.

    Args:
        parser: parser of a command that runs on several processes.
        out: default file of ``--out``; None if a file is written only on request.
        what: description of the file.
    """
    parser.add_argument("--nproc", type=int, metavar="N", help="processes to start here (default: one per GPU)")
    parser.add_argument("--nodes", type=int, metavar="N", help="virtual nodes to group the processes into")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--out", default=out, metavar="FILE", help=what + (f" (default: {out})" if out else ""))


def on_processes(
    command: str, argv: Sequence[str], arguments: argparse.Namespace, act: Callable[[argparse.Namespace], int]
) -> int:
    """Call ``act(arguments)`` on every process of a command, wait for all, and return the exit code.

    If torchrun or a launcher has started this process, ``act`` is only called here. Otherwise the processes are started
    first, each of which runs this command again. A single process is this one.

    Args:
        command: name of the command.
        argv: arguments of the command line, for the processes to start.
        arguments: parsed arguments.
        act: function that does the work of the command.

    Raises:
        UserError: a number of processes cannot work, or the output file cannot be written.
    """
    for name in ("nproc", "nodes"):
        if (value := getattr(arguments, name)) is not None and value < 1:
            raise UserError(f"--{name}", value, "at least 1")
    if arguments.out and ((out := Path(arguments.out)).is_dir() or not out.parent.is_dir()):
        raise UserError("--out", arguments.out, "a file in a folder that exists")
    if started_by_local_launcher():
        return act(arguments)
    if LaunchEnvironment.read(os.environ) is not None:
        for name in ("nproc", "nodes"):
            if (value := getattr(arguments, name)) is not None:
                raise UserError(f"--{name}", value, f"unset under torchrun, whose --{TORCHRUNS[name]} sets it")
        return act(arguments)
    gpus = find_gpus() if arguments.device != "cpu" else ()
    shape = local_shape(arguments.nodes, arguments.nproc or (len(gpus) or 1), num_gpus=len(gpus))
    if shape.nproc == 1:
        with in_this_process(gpus=gpus):
            return act(arguments)
    return launch([sys.executable, "-m", "tawpipe", command, *argv], shape, gpus=gpus)
