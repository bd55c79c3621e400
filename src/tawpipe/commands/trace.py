"""Command ``tawpipe trace``: draw when the actions of a recorded or planned step run."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from tawpipe.errors import UserError
from tawpipe.options import CommandParser
from tawpipe.report.bars import Bar, executed_bars, find_recording, first_of_nodes, predicted_bars
from tawpipe.report.page import check_page
from tawpipe.report.trace import Timelines, write_trace


def run(argv: Sequence[str]) -> int:
    """Run ``tawpipe trace``: write the timelines of a step as files, print a summary, and return 0."""
    arguments = _parser().parse_args(argv)
    check_page(arguments.report)
    path = Path(arguments.run)
    timelines, folder = from_plan(path) if path.is_file() else from_run(path)
    page = Path(arguments.report) if arguments.report else None
    out, ranks = Path(arguments.out) if arguments.out else folder, _ranks(arguments.ranks, timelines[-1][1])
    for line in write_trace(timelines, out, ranks=ranks, title=str(path), page=page):
        print(line)
    return 0


def from_plan(path: Path) -> tuple[Timelines, Path]:
    """Read a saved plan; return the timeline of the step that it predicts, in a list, and the plan's folder."""
    from tawpipe.plan.search.plan_file import replay

    timeline, left_out = replay(path)
    return [(f"predicted, {left_out}" if left_out else "predicted", predicted_bars(timeline))], path.parent


def from_run(path: Path) -> tuple[Timelines, Path]:
    """Return the timelines of a recorded step, and the folder of the recording.

    If the run followed a plan, the predicted timeline comes before the recorded one.

    Args:
        path: output folder of a run, or folder of a recorded step.

    Raises:
        UserError: there is no recording, or it is damaged.
    """
    folder = find_recording(path)
    executed = ("executed", executed_bars(folder))
    plan = folder.parent.parent / "plan.yaml"
    if not plan.is_file():
        return [executed], folder
    before, _ = from_plan(plan)
    return [*before, executed], folder


def _ranks(words: str | None, bars: Sequence[Bar]) -> list[int]:
    """Return the ranks to draw that ``--ranks`` names.

    Args:
        words: value of ``--ranks``: ``all``, or numbers with commas between; None for the first rank of every node, or
            for all ranks of a pipeline.
        bars: bars of the timeline, which show the ranks that exist.

    Raises:
        UserError: a rank does not exist.
    """
    known = sorted({bar.rank for bar in bars})
    if words is None:
        return first_of_nodes(bars)
    try:
        chosen = known if words == "all" else [int(word) for word in words.split(",")]
    except ValueError:
        chosen = [-1]
    if not set(chosen) <= set(known):
        raise UserError("--ranks", words, f"all, or some of {', '.join(map(str, known))}, separated by commas")
    return chosen


def _parser() -> argparse.ArgumentParser:
    """Build the parser of the options of ``tawpipe trace``."""
    parser = CommandParser(
        prog="tawpipe trace",
        description=(
            "Draws the timeline of a recorded step beside the prediction of the run's plan, or the timeline that "
            "a plan predicts. Prints a summary and writes timeline.svg and trace.json for ui.perfetto.dev."
        ),
    )
    parser.add_argument(
        "run",
        metavar="RUN|PLAN",
        help="the output folder of a run with --log.trace-step, the folder of such a step, or a saved plan",
    )
    parser.add_argument("--ranks", help="ranks to draw: 0,4 or all (default: the first rank of every node)")
    parser.add_argument("--out", metavar="DIR", help="folder for the files (default: next to the recording or plan)")
    parser.add_argument("--report", metavar="FILE", help="write an HTML page with timelines to zoom into")
    return parser
