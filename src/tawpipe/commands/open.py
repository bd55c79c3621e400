"""Command ``tawpipe open``: show the pages of a run, a plan or a comparison in a browser."""

from __future__ import annotations

import argparse
import os
import sys
import webbrowser
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from tawpipe.commands.brought import brought
from tawpipe.errors import UserError
from tawpipe.extras import install_hint
from tawpipe.options import CommandParser
from tawpipe.report.site import INDEX, Page, Site, write_pages

SETTING = "PATH"
EXPECTED = "the output folder of a run, a folder with results of `tawpipe lab compare` or with pages, or a page"
LAST_PORT = 65535


def run(argv: Sequence[str]) -> int:
    """Run ``tawpipe open``: serve pages to a browser on this machine until ctrl-C, and return 0.

    With ``--out``, the pages are written as files instead. A browser is opened, unless ``--no-browser`` is set or there
    is no display."""
    arguments = _parser().parse_args(argv)
    if not 0 <= arguments.port <= LAST_PORT:
        raise UserError("--port", arguments.port, f"a number up to {LAST_PORT}; 0 for any free one")
    path = Path(arguments.path)
    pages = find_pages(path, skip=Path(arguments.out) if arguments.out else None)
    title = path.resolve().name
    if arguments.out:
        written = write_pages(title, pages, Path(arguments.out))
        print(f"wrote {', '.join(map(str, written))}")
        return 0
    with Site(title, pages, arguments.port) as site:
        address = site.address + (pages[0].name if len(pages) == 1 else "")
        for page in pages:
            print(f"{page.title}: {page.line}")
        try:
            print(f"{address} (press ctrl-C to stop)", flush=True)
            if not arguments.no_browser and has_display():
                webbrowser.open(address)
            site.serve_forever()
        except KeyboardInterrupt:
            print()
    return 0


def has_display() -> bool:
    """Return True if a browser could be shown."""
    return sys.platform != "linux" or any(map(os.environ.get, ("DISPLAY", "WAYLAND_DISPLAY")))


def find_pages(path: Path, *, skip: Path | None = None) -> list[Page]:
    """Return the pages at ``path``: existing HTML files, and pages that are made from the results in the folder.

    Args:
        path: folder or HTML file.
        skip: folder whose files are not listed, because they are about to be written; None for none.

    Raises:
        UserError: there are no pages, or plotly is needed and not installed.
    """
    if path.is_file() and path.suffix == ".html":
        return [_file_page(path)]
    if not path.is_dir():
        raise UserError(SETTING, str(path), EXPECTED if not path.exists() else f"{EXPECTED} (.html)")
    drawn = [*_of_run(path), *_of_others(path)]
    if drawn:
        _check_plotly(path)
    taken = {page.name for page in drawn} | {INDEX}
    files = sorted(path.glob("*.html")) if skip is None or path.resolve() != skip.resolve() else []
    pages = [*drawn, *(_file_page(file, "written-" if file.name in taken else "") for file in files)]
    if not pages:
        names = "metrics.jsonl, plan.yaml, traces, results.json or pages"
        raise UserError(SETTING, str(path), f"{EXPECTED}; this folder has no {names}")
    return pages


def _check_plotly(path: Path) -> None:
    """Raise UserError if plotly is not installed, which draws the figures."""
    from importlib.util import find_spec

    if find_spec("plotly") is None:
        raise UserError(SETTING, str(path), f"plotly installed, which draws the figures: {install_hint('plan')}")


def _of_run(folder: Path) -> Iterator[Page]:
    """Yield the pages of a run's output folder: metrics, plan and recorded steps, as far as their files exist."""
    from tawpipe.report.bars import recordings
    from tawpipe.train.page import METRICS, run_page
    from tawpipe.train.planned import PLAN

    if (folder / METRICS).is_file():
        yield Page("run.html", "Run", "Loss, speed and memory of every step so far.", partial(run_page, folder))
    if (folder / PLAN).is_file():
        from tawpipe.plan.answer.page import saved_plan_page

        line = "Strategy of the run, the reason for it, and one step as predicted."
        yield Page("plan.html", "Plan", line, partial(saved_plan_page, folder / PLAN))
    for recording in recordings(folder):
        step = recording.name.removeprefix("step-").lstrip("0") or "0"
        line = "Timeline of this step" + (", with the plan." if (folder / PLAN).is_file() else ".")
        yield Page(f"step-{step}.html", f"Step {step}", line, partial(_trace, recording))


def _trace(recording: Path) -> str:
    """Return the HTML page of a recorded step."""
    from tawpipe.commands.trace import from_run
    from tawpipe.report.bars import first_of_nodes
    from tawpipe.report.trace import trace_page

    timelines, _ = from_run(recording)
    return trace_page(timelines, ranks=first_of_nodes(timelines[-1][1]), title=recording.name)


def _of_others(folder: Path) -> Iterator[Page]:
    """Yield the pages that commands of other installed packages make from the results in ``folder``."""
    for command in brought().values():
        yield from getattr(command, "pages", lambda _: ())(folder)


def _file_page(file: Path, before: str = "") -> Page:
    """Return the page of an existing HTML file.

    Args:
        before: prefix for the page's name, if another page has the name; else empty.
    """
    return Page(before + file.name, file.stem, f"The saved page {file.name}.", partial(_read, file))


def _read(file: Path) -> str:
    """Return the text of ``file``; raise UserError if it cannot be read."""
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(SETTING, str(file), f"a page that can be read ({error})") from error


def _parser() -> argparse.ArgumentParser:
    """Build the parser of the options of ``tawpipe open``."""
    parser = CommandParser(
        prog="tawpipe open",
        description=(
            "Shows the pages of a run, a plan, a recorded step or a comparison in a browser. Only this machine "
            "can open them. The page of a running run renews itself."
        ),
    )
    parser.add_argument("path", metavar=SETTING, help=EXPECTED)
    parser.add_argument("--port", type=int, default=0, help="port to serve on (default: a free one)")
    parser.add_argument("--no-browser", action="store_true", help="print the address, open no browser")
    parser.add_argument(
        "--out", metavar="DIR", help=("write the pages as files into this folder instead of serving them")
    )
    return parser
