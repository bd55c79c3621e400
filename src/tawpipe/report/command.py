"""``tawpipe trace``: the words that follow it on the command line. Imports errors and report."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from tawpipe.errors import UserError
from tawpipe.report.bars import Bar, executed_bars, first_of_nodes
from tawpipe.report.chrome import write_chrome_trace
from tawpipe.report.picture import draw_timeline
from tawpipe.report.summary import summary


def trace(argv: Sequence[str]) -> int:
    """Runs ``tawpipe trace`` with the words ``argv`` and returns the exit code."""
    arguments = _parser().parse_args(argv)
    folder = find_recording(Path(arguments.run))
    bars = executed_bars(folder)
    ranks = _ranks(arguments.ranks, bars)
    out = Path(arguments.out) if arguments.out else folder
    out.mkdir(parents=True, exist_ok=True)
    for line in summary(bars, ranks):
        print(line)
    write_chrome_trace(bars, out / "trace.json")
    files = [out / "trace.json", out / "timeline.svg", out / "timeline.png"]
    try:
        for picture in files[1:]:
            draw_timeline([("executed", bars)], picture, ranks=ranks, title=str(folder))
    except ImportError:
        files = files[:1]
        print("no picture: matplotlib is not installed (pip install 'tawpipe[lab]')")
    print(f"wrote {', '.join(map(str, files))}; ui.perfetto.dev opens the first")
    return 0


def find_recording(path: Path) -> Path:
    """The folder with the files of the ranks: ``path`` itself, or the newest recording of a run's output folder.

    Raises:
        UserError: there is none.
    """
    if not path.is_dir():
        raise UserError("RUN", str(path), "the output folder of a run, or a folder of a recorded step")
    if any(path.glob("rank-*.json")):
        return path
    found = sorted(folder for folder in (path / "traces").glob("step-*") if any(folder.glob("rank-*.json")))
    if not found:
        raise UserError("RUN", str(path), "a run with a recorded step: train with --log.trace-step N")
    return found[-1]


def _ranks(words: str | None, bars: Sequence[Bar]) -> list[int]:
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
    parser = argparse.ArgumentParser(
        prog="tawpipe trace",
        description="Shows when everything in a recorded step ran: a summary here, timeline.svg and timeline.png, and "
        "trace.json for ui.perfetto.dev or chrome://tracing.",
    )
    parser.add_argument(
        "run", metavar="RUN", help="the output folder of a run with --log.trace-step, or of such a step"
    )
    parser.add_argument("--ranks", help="whose lanes are drawn: 0,4 or all (default: the first of every node)")
    parser.add_argument("--out", metavar="DIR", help="where the files go (default: beside the recording)")
    return parser
