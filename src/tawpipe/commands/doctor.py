"""Command ``tawpipe doctor``: examine the installation and the devices, on one or several processes."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from tawpipe.commands.processes import add_processes, on_processes
from tawpipe.options import CommandParser
from tawpipe.train.settings.names import ELSEWHERE


def run(argv: Sequence[str]) -> int:
    """Run ``tawpipe doctor`` on one or several processes, and return the exit code."""
    return on_processes("doctor", argv, _parser().parse_args(argv), _examine)


def _parser() -> argparse.ArgumentParser:
    """Build the parser of the options of ``tawpipe doctor``."""
    parser = CommandParser(
        elsewhere=ELSEWHERE,
        prog="tawpipe doctor",
        description=(
            "Shows what is installed and which devices are present. With several processes or nodes it also "
            "measures the links between them, which takes a few seconds. On several machines: torchrun --nnodes N "
            "--nproc-per-node L ... -m tawpipe doctor"
        ),
    )
    add_processes(parser, out=None, what="write the measurements to a topology file for `tawpipe plan --topology`")
    return parser


def _examine(arguments: argparse.Namespace) -> int:
    """Examine this machine and the links between the processes, and print the result; return 0.

    With ``--out``, also write a topology file. Runs in every process."""
    from tawpipe.plan.machine.doctor import examine

    examine(Path(arguments.out) if arguments.out else None, device=arguments.device)
    return 0
