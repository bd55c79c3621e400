"""Output that cannot be written as it is: letters, readers that have gone, full disks, streams that are missing."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path
from typing import TextIO

import pytest

from tawpipe.cli import main
from tawpipe.console import Console
from tawpipe.streams import lossy

LETTERS = "Größe 漢字 🙂"
FULL = Path("/dev/full")


class Closed(io.StringIO):
    """A stream that somebody else has closed."""

    def write(self, _: str) -> int:
        raise ValueError("I/O operation on closed file")


def broken_pipe() -> int:
    """The end to write to of a pipe that nobody reads."""
    reading, writing = os.pipe()
    os.close(reading)
    return writing


@pytest.mark.parametrize(
    ("encoding", "text"),
    [
        ("latin-1", LETTERS),
        ("ascii", LETTERS),
        ("cp1252", "€ 漢"),
        ("gbk", "漢 🙂"),
        ("utf-8", "a lone \ud83d"),
    ],
)
def test_unencodable_letter_is_escaped_as_python_does(encoding, text, tmp_path):
    with (tmp_path / "python").open("w", encoding=encoding, errors="backslashreplace") as file:
        print(text, file=file)
    with (tmp_path / "ours").open("w", encoding=encoding) as file:
        console = Console(stream=file)
        console.line(text)
        assert console._stream.lost == 0
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "python").read_bytes()


def test_lost_lines_are_reported_once_and_counted(capsys):
    with os.fdopen(broken_pipe(), "w") as stream:
        for broken in (stream, Closed()):
            console = Console(stream=broken)
            for number in range(5):
                console.line(f"line {number}")
            console.summary([("a", "b")])
            first, last = capsys.readouterr().err.splitlines()
            assert "standard output accepts no more text: " in first
            assert "7 lines of standard output were lost" in last
        with pytest.raises(OSError, match="Broken pipe"):
            stream.close()


def test_failed_display_is_reported_once_and_counted():
    stream = io.StringIO()
    console = Console(stream=stream)
    for problem in (RuntimeError("no display"), UnicodeEncodeError("ascii", "é", 0, 1, "no"), MemoryError()):
        with console.showing("picture"):
            raise problem
    console.missed("wandb", "wandb is left out")
    console.summary([])
    said = stream.getvalue()
    assert said.count("picture: not shown, training continues: RuntimeError: no display\n") == 1
    assert said.endswith("done:\n  not shown  picture (3 times), wandb\n")


@pytest.mark.parametrize("signal", [KeyboardInterrupt, SystemExit])
def test_keyboard_interrupt_and_system_exit_are_not_suppressed(signal):
    with pytest.raises(signal), Console(stream=io.StringIO()).showing("picture"):
        raise signal


def test_lossy_stream_is_wrapped_only_once():
    inner = io.StringIO()
    lossy(lossy(lossy(inner, (BrokenPipeError,)))).write("once\n")
    assert inner.getvalue() == "once\n"


def run_on(stream: TextIO | None, monkeypatch: pytest.MonkeyPatch) -> int:
    """The exit code of a command that prints letters to ``stream``."""
    monkeypatch.setattr(sys, "stdout", stream)
    return main(["train", "--print-config", "--output", LETTERS])


def test_command_continues_after_its_reader_has_gone(monkeypatch, capsys, tmp_path):
    with os.fdopen(broken_pipe(), "w") as pipe:
        assert run_on(pipe, monkeypatch) == 0
    assert run_on(None, monkeypatch) == 0
    with (tmp_path / "said").open("w", encoding="ascii") as file:
        assert run_on(file, monkeypatch) == 0
    assert f"output: {LETTERS}".encode("ascii", "backslashreplace") in (tmp_path / "said").read_bytes()
    assert capsys.readouterr().err == ""


@pytest.mark.skipif(not FULL.exists(), reason="no /dev/full")
def test_command_fails_if_a_full_disk_takes_no_output(monkeypatch, capsys):
    with FULL.open("w") as file:
        assert run_on(file, monkeypatch) == 1
    said = capsys.readouterr().err
    assert "No space left" in said and "Traceback" not in said


def test_interpreter_ends_without_error_after_its_reader_has_gone():
    pipe = broken_pipe()
    code = "import sys; from tawpipe.cli import main; sys.exit(main(['--version']))"
    done = subprocess.run([sys.executable, "-c", code], stdout=pipe, stderr=subprocess.PIPE, timeout=120)
    os.close(pipe)
    assert (done.returncode, done.stderr) == (0, b"")
