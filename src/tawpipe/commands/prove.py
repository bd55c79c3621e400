"""Command ``tawpipe prove``: check on these devices what the tests promise, in ten minutes and one JSON file."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from tawpipe.commands.brought import brought
from tawpipe.commands.processes import add_processes, on_processes
from tawpipe.errors import UserError
from tawpipe.options import CommandParser
from tawpipe.train.settings.names import ELSEWHERE

FILE = "tawpipe-prove.json"


def run(argv: Sequence[str]) -> int:
    """Run ``tawpipe prove`` on one or several processes, and return the exit code: 1 if a check fails, else 0."""
    return on_processes("prove", argv, _parser().parse_args(argv), _prove)


def _parser() -> argparse.ArgumentParser:
    """Build the parser of the options of ``tawpipe prove``."""
    parser = CommandParser(
        elsewhere=ELSEWHERE,
        prog="tawpipe prove",
        description=(
            "Checks on these devices: numbers against one plain process, memory and seconds against their "
            "predictions, the kernels in use, and how processes end. Takes about ten minutes and writes one JSON "
            "file. On several machines: torchrun --nnodes N --nproc-per-node L ... -m tawpipe prove"
        ),
    )
    add_processes(parser, out=FILE, what="file to write")
    parser.add_argument(
        "--only", nargs="+", default=(), metavar="CHECK", help="checks to run (default: all but rivals)"
    )
    for module in brought().values():
        if hasattr(module, "check_options"):
            module.check_options(parser)
    return parser


def _prove(arguments: argparse.Namespace) -> int:
    """Run the checks in this process, one of all that take part, and return 1 if one has failed, else 0.

    Raises:
        UserError: ``--only`` names a check that does not exist.
    """
    from tawpipe.model.attention.attention_kernel import activate_flash
    from tawpipe.prove.checks import CHECKS
    from tawpipe.prove.models import dtype_here, sized
    from tawpipe.prove.run import prove
    from tawpipe.runtime.world import connect

    more = [check for module in brought().values() if hasattr(module, "checks") for check in module.checks(arguments)]
    known = [check.name for check in (*CHECKS, *more)]
    for name in arguments.only:
        if name not in known:
            raise UserError("--only", name, f"some of {', '.join(known)}")
    world = connect(device=arguments.device)
    activate_flash(world.device, dtype_here(world), lambda: sized(world.device))  # as in a training run
    proof = prove(world, Path(arguments.out), only=arguments.only, more=more)
    world.leave()
    return 1 if proof.failed else 0
