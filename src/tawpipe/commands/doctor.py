"""``tawpipe doctor``: on several processes, which torchrun or it itself starts, or alone on this one."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from tawpipe.commands.processes import add_processes, on_processes
from tawpipe.options import CommandParser
from tawpipe.train.settings.names import ELSEWHERE


def run(argv: Sequence[str]) -> int:
    """Runs ``tawpipe doctor`` with the words ``argv`` and returns the exit code."""
    return on_processes("doctor", argv, _parser().parse_args(argv), _examine)


def _parser() -> argparse.ArgumentParser:
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
    from tawpipe.plan.machine.doctor import examine

    examine(Path(arguments.out) if arguments.out else None, device=arguments.device)
    return 0
