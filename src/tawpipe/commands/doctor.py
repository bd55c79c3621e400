"""``tawpipe doctor``: on several processes, which torchrun or it itself starts, or alone on this one."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from tawpipe.environment import LaunchEnvironment, started_by_local_launcher
from tawpipe.errors import UserError
from tawpipe.launch.gpus import find_gpus
from tawpipe.launch.launcher import in_this_process, launch, local_shape

FILE = "tawpipe-topology.yaml"


def run(argv: Sequence[str]) -> int:
    """Runs ``tawpipe doctor`` with the words ``argv`` and returns the exit code."""
    arguments = _parser().parse_args(argv)
    for name in ("nproc", "nodes"):
        if (value := getattr(arguments, name)) is not None and value < 1:
            raise UserError(f"--{name}", value, "at least 1")
    if started_by_local_launcher() or LaunchEnvironment.read(os.environ) is not None:
        return _examine(arguments)
    gpus = find_gpus() if arguments.device != "cpu" else ()
    shape = local_shape(arguments.nodes, arguments.nproc or (len(gpus) or 1), num_gpus=len(gpus))
    if shape.nproc == 1:
        with in_this_process(gpus=gpus):
            return _examine(arguments)
    return launch([sys.executable, "-m", "tawpipe", "doctor", *argv], shape, gpus=gpus)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tawpipe doctor",
        description="Says what is installed and what devices there are; on several processes or nodes also measures "
        "the links between them, which takes a few seconds, and writes a topology file. On several machines: "
        "torchrun --nnodes N --nproc-per-node L ... -m tawpipe doctor",
    )
    parser.add_argument("--nproc", type=int, metavar="N", help="processes to start here (default: one for each GPU)")
    parser.add_argument("--nodes", type=int, metavar="N", help="virtual nodes that they are grouped into")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--out", default=FILE, metavar="FILE", help=f"the topology file (default: {FILE})")
    return parser


def _examine(arguments: argparse.Namespace) -> int:
    from tawpipe.plan.doctor import examine

    out = Path(arguments.out)
    if out.is_dir() or not out.parent.is_dir():
        raise UserError("--out", arguments.out, "a file in a folder that exists")
    examine(out, device=arguments.device)
    return 0
