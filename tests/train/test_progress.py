"""Progress on a terminal: one line that is drawn again and again, and that nobody's words get mixed up with."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from processes import wait_for
from tawpipe.console import Console, above_bar
from terminal import Terminal


@pytest.fixture
def plain_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal that can do what most can, whatever the tests themselves run in."""
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "COLUMNS", "LINES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")


@pytest.fixture
def terminal(plain_terminal) -> Iterator[Terminal]:
    one = Terminal()
    yield one
    one.finish()


def drive(console: Console, steps: range, **more) -> None:
    for step in steps:
        console.progress(step, 100, loss=3.25, grad_norm=0.5, tokens_per_second=12345.6, **more)


def test_progress_bar_shows_its_values_and_leaves_no_trace(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")  # rich asks the process's own standard streams
    with os.fdopen(terminal.slave, "w") as stream:
        console = Console(stream=stream, bar=True, clock=iter(range(1000)).__next__)
        console.line("before")
        drive(console, range(1, 11), shares={"MFU": 0.41, "link": 0.635, "unknown": None})
        assert wait_for(lambda: "step  10/100" in terminal.screen[-1])
        last = terminal.screen[-1]
        for words in ("loss 3.2500", " left", "12,346 tokens/s", "MFU 41%", "link 64%"):
            assert words in last
        assert "━" in last and "unknown" not in last and len(last) < 100
        console.notice("a notice [with brackets]")
        drive(console, range(11, 13), extra="validation loss 3.1")
        console.end_progress()
        console.line("after")
    terminal.finish()
    said = [line for line in terminal.screen if line]
    assert said[0] == "before" and said[1] == "a notice [with brackets]" and said[-1] == "after"
    assert [line.split(" | ")[-1] for line in said[2:-1]] == ["validation loss 3.1"] * 2
    assert "\x1b[?25l" not in terminal.text  # a process that is killed could not show the cursor again


def test_progress_bar_is_one_line_in_any_terminal_width(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    with os.fdopen(terminal.slave, "w") as stream:
        console = Console(stream=stream, bar=True)
        for columns in (200, 60, 40, 25, 8, 120):
            monkeypatch.setenv("COLUMNS", str(columns))
            drive(console, range(columns, columns + 1))
            before = len(terminal.text)
            assert wait_for(lambda since=before: "step" in terminal.text[since:])
            time.sleep(0.1)
            assert len(terminal.screen) == 1 and len(terminal.screen[0]) < columns, terminal.screen
        console.end_progress()


def test_output_of_other_processes_is_printed_on_separate_lines(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    with os.fdopen(terminal.slave, "w") as stream, os.fdopen(os.dup(terminal.slave), "w", buffering=1) as other:
        monkeypatch.setattr(sys, "stdout", stream)
        console, errors = Console(stream=stream, bar=True), above_bar(other)
        drive(console, range(1, 2))
        for words in ("a warning", "two\nlines"):
            print(words, file=errors)
            drive(console, range(2, 3))
        time.sleep(0.7)
        console.end_progress()
    terminal.finish()
    assert [line for line in terminal.screen if line] == ["a warning", "two", "lines"]


def test_above_bar_leaves_streams_of_files_unchanged(tmp_path: Path) -> None:
    with (tmp_path / "errors").open("w") as stream:
        assert above_bar(stream) is stream


@pytest.mark.parametrize(
    ("variables", "bar"), [({"TERM": "dumb"}, True), ({}, False), ({"TTY_INTERACTIVE": "0"}, True)]
)
def test_plain_lines_replace_an_impossible_or_unwanted_bar(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], bar: bool
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with os.fdopen(terminal.slave, "w") as stream:
        console = Console(stream=stream, bar=bar)
        drive(console, range(1, 3))
        drive(console, range(3, 4), line=False)
        console.end_progress()
    terminal.finish()
    assert [line.split(" | ")[0] for line in terminal.screen if line] == ["step   1/100", "step   2/100"]


def test_progress_bar_honours_no_color(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    with os.fdopen(terminal.slave, "w") as stream:
        console = Console(stream=stream, bar=True)
        drive(console, range(50, 51))
        assert wait_for(lambda: "loss" in terminal.text)
        console.end_progress()
    terminal.finish()
    assert "\x1b[3" not in terminal.text and "\x1b[2K" in terminal.text


def test_file_output_gets_lines_even_with_forced_colours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    with (tmp_path / "log").open("w") as stream:
        console = Console(stream=stream, bar=True)
        drive(console, range(1, 3))
        console.end_progress()
    assert (tmp_path / "log").read_text().count("step") == 2


LAUNCHED = """
import os, sys
from tawpipe.launch.launcher import Shape, launch
sys.exit(launch([sys.executable, '-c', sys.argv[1]], Shape(1, 2), grace_s=1.0))
"""
RANKS = """
import os, sys, time
from tawpipe.console import Console
rank = int(os.environ['RANK'])
console = Console(rank, bar=True)
for step in range(1, 5):
    console.progress(step, 4, loss=1.0, grad_norm=1.0, tokens_per_second=1.0)
    print(f'warning {step} of rank {rank}', file=sys.stderr)
    time.sleep(0.3)
if os.environ.get('DIES'):
    os.kill(os.getpid(), 9)
console.end_progress()
console.line('done')
"""


@pytest.mark.parametrize("dies", ["", "1"])
def test_ranks_under_the_launcher_draw_on_its_terminal(plain_terminal, dies: str) -> None:
    terminal = Terminal()
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHED, RANKS],
        stdin=terminal.slave,
        stdout=terminal.slave,
        stderr=terminal.slave,
        env={**os.environ, "DIES": dies},
    )
    terminal.close_slave()
    assert launcher.wait(60) == (1 if dies else 0)
    terminal.finish()
    said = [line for line in terminal.screen if line]
    assert said[:4] == [f"warning {step} of rank 0" for step in range(1, 5)]
    assert "loss 1.0000" in terminal.text
    if dies:
        assert said[4].startswith("tawpipe: error: rank ") and "killed by SIGKILL" in said[4]
    else:
        assert said[4:] == ["done"]
