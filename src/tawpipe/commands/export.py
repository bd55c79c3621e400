"""Command ``tawpipe export``: export the model of a run from a checkpoint, also if the run was interrupted."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from tawpipe.options import CommandParser


def run(argv: Sequence[str]) -> int:
    """Run ``tawpipe export``: write the model of a checkpoint as a Hugging Face folder, and print it; return 0."""
    arguments = _parser().parse_args(argv)
    from tawpipe.train.exporting import export_again

    folder = Path(arguments.output) if arguments.output else None
    exported, source = export_again(
        Path(arguments.run),
        step=arguments.step,
        merge=arguments.merge,
        format=arguments.format,
        folder=folder,
        model=arguments.model,
    )
    print(f"{exported}: the model of {source}\nexport: checked")
    return 0


def _parser() -> argparse.ArgumentParser:
    """Build the parser of the options of ``tawpipe export``."""
    parser = CommandParser(
        prog="tawpipe export",
        description=(
            "Exports the model of a run from one of its checkpoints as a Hugging Face folder. Runs in one process "
            "that holds one layer at a time. Works after an interruption or a failed export, too."
        ),
    )
    parser.add_argument("run", metavar="RUN", help="the output folder of a run")
    parser.add_argument(
        "--step",
        type=int,
        metavar="N",
        help=("take the checkpoint after this step (default: the best one if kept, else the newest)"),
    )
    parser.add_argument(
        "--merge",
        action="store_true",
        help=("write the whole model with the adapter merged into its weights, not the adapter alone"),
    )
    parser.add_argument(
        "--format",
        choices=("hf", "w4a16", "w8a8"),
        help=("quantised form of the weights, see --export.format (default: as the run says)"),
    )
    parser.add_argument("--model", default="", help="model that the run started from (default: as the run says)")
    parser.add_argument("--output", metavar="FOLDER", help="folder to create or replace (default: model in RUN)")
    return parser
