"""``tawpipe trace``: the words that follow it on the command line."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from tawpipe.errors import UserError
from tawpipe.report.bars import Bar, executed_bars, first_of_nodes, predicted_bars
from tawpipe.report.chrome import write_chrome_trace
from tawpipe.report.differences import differences
from tawpipe.report.page import check_page, timeline_page
from tawpipe.report.picture import draw_timeline
from tawpipe.report.summary import summary


def trace(argv: Sequence[str]) -> int:
    """Runs ``tawpipe trace`` with the words ``argv`` and returns the exit code."""
    arguments = _parser().parse_args(argv)
    check_page(arguments.report)
    path = Path(arguments.run)
    timelines, folder = _from_plan(path) if path.is_file() else _from_run(path)
    ranks = _ranks(arguments.ranks, timelines[-1][1])
    whole = timelines[0][0] in ("predicted", "executed")
    out = Path(arguments.out) if arguments.out else folder
    out.mkdir(parents=True, exist_ok=True)
    words = [line for name, bars in timelines for line in (f"{name}:", *summary(bars, _there(ranks, bars)))]
    compared = list(differences(timelines[0][1], timelines[1][1])) if len(timelines) > 1 and whole else []
    for line in (*words, *compared):
        print(line)
    write_chrome_trace(timelines, out / "trace.json")
    files = [out / "trace.json", out / "timeline.svg", out / "timeline.png"]
    try:
        for picture in files[1:]:
            draw_timeline(timelines, picture, ranks=ranks, title=str(path))
    except ImportError:
        files = files[:1]
        print("no picture: matplotlib is not installed (pip install 'tawpipe[lab]')")
    if arguments.report:
        timeline_page(Path(arguments.report), timelines, ranks, "\n".join(words), "\n".join(compared), str(path))
        files.append(Path(arguments.report))
    print(f"wrote {', '.join(map(str, files))}; ui.perfetto.dev opens the first")
    return 0


def _from_plan(path: Path) -> tuple[list[tuple[str, list[Bar]]], Path]:
    from tawpipe.plan.replay import replay

    timeline, left_out = replay(path)
    return [(f"predicted, {left_out}" if left_out else "predicted", predicted_bars(timeline))], path.parent


def _from_run(path: Path) -> tuple[list[tuple[str, list[Bar]]], Path]:
    """The recording, and before it what the run's plan predicted, if it followed one."""
    folder = find_recording(path)
    executed = ("executed", executed_bars(folder))
    plan = folder.parent.parent / "plan.yaml"
    if not plan.is_file():
        return [executed], folder
    before, _ = _from_plan(plan)
    return [*before, executed], folder


def _there(ranks: Sequence[int], bars: Sequence[Bar]) -> list[int]:
    known = {bar.rank for bar in bars}
    return [rank for rank in ranks if rank in known]


def find_recording(path: Path) -> Path:
    """The folder with the files of the ranks: ``path`` itself, or the newest recording of a run's output folder.

    Raises:
        UserError: there is none.
    """
    if not path.is_dir():
        raise UserError("RUN", str(path), "the output folder of a run, a folder of a recorded step, or a plan")
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
        description="Shows when everything in a recorded step ran, beside what the run's plan predicted; or what a "
        "plan predicts: a summary here, timeline.svg and timeline.png, and trace.json for ui.perfetto.dev.",
    )
    parser.add_argument(
        "run",
        metavar="RUN|PLAN",
        help="the output folder of a run with --log.trace-step, the folder of such a step, or a saved plan",
    )
    parser.add_argument("--ranks", help="whose lanes are drawn: 0,4 or all (default: the first of every node)")
    parser.add_argument("--out", metavar="DIR", help="where the files go (default: beside the recording or the plan)")
    parser.add_argument("--report", metavar="FILE", help="write a page (HTML) with the timelines to zoom into")
    return parser
