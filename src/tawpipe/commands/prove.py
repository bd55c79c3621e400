"""``tawpipe prove``: whether what the tests promise holds on these devices, in ten minutes and one JSON file."""

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

FILE = "tawpipe-prove.json"


def run(argv: Sequence[str]) -> int:
    """Runs ``tawpipe prove`` with the words ``argv`` and returns the exit code: 1 if a check fails."""
    arguments = _parser().parse_args(argv)
    for name in ("nproc", "nodes"):
        if (value := getattr(arguments, name)) is not None and value < 1:
            raise UserError(f"--{name}", value, "at least 1")
    out = Path(arguments.out)
    if out.is_dir() or not out.parent.is_dir():
        raise UserError("--out", arguments.out, "a file in a folder that exists")
    if started_by_local_launcher() or LaunchEnvironment.read(os.environ) is not None:
        return _prove(arguments)
    gpus = find_gpus() if arguments.device != "cpu" else ()
    shape = local_shape(arguments.nodes, arguments.nproc or (len(gpus) or 1), num_gpus=len(gpus))
    if shape.nproc == 1:
        with in_this_process(gpus=gpus):
            return _prove(arguments)
    return launch([sys.executable, "-m", "tawpipe", "prove", *argv], shape, gpus=gpus)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tawpipe prove",
        description="Checks on these devices what the tests check elsewhere: numbers against one plain process, memory "
        "and seconds against their predictions, the kernels that run, how processes end. Writes one JSON file. On "
        "several machines: torchrun --nnodes N --nproc-per-node L ... -m tawpipe prove",
    )
    parser.add_argument("--nproc", type=int, metavar="N", help="processes to start here (default: one for each GPU)")
    parser.add_argument("--nodes", type=int, metavar="N", help="virtual nodes that they are grouped into")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--only", nargs="+", default=(), metavar="CHECK", help="some checks (default: all)")
    parser.add_argument("--out", default=FILE, metavar="FILE", help=f"the file (default: {FILE})")
    return parser


def _prove(arguments: argparse.Namespace) -> int:
    from tawpipe.prove.checks import CHECKS
    from tawpipe.prove.run import prove
    from tawpipe.runtime.world import connect

    known = [check.name for check in CHECKS]
    for name in arguments.only:
        if name not in known:
            raise UserError("--only", name, f"some of {', '.join(known)}")
    world = connect(device=arguments.device)
    found = prove(world, Path(arguments.out), only=arguments.only)
    world.leave()
    return 1 if found.failed else 0
