"""The commands by themselves: what cannot be is refused before anything is started, and results become exit codes."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

import tawpipe.__main__ as entry
from tawpipe.commands import doctor, plan, prove, trace
from tawpipe.commands.processes import add_processes, on_processes
from tawpipe.errors import UserError
from tawpipe.options import CommandParser
from tawpipe_lab import command


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "TAWPIPE_LOCAL_LAUNCHER"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("command", "words", "message"),
    [
        (
            command,
            ["up", "--nodes", "2", "--", "ls"],
            "--: got 'ls'; nothing, because `tawpipe lab up` runs no command",
        ),
        (command, ["exec", "0"], "COMMAND: got 'nothing'; a command behind --"),
        (command, ["compare", "--suite", "smoke", "--out", "x", "--samples", "0"], "--samples: got 0; at least 1"),
        (doctor, ["--nproc", "0"], "--nproc: got 0; at least 1"),
        (doctor, ["--out", "missing/topology.yaml"], "--out: got 'missing/topology.yaml'; a file in a folder"),
        (prove, ["--nodes", "-1"], "--nodes: got -1; at least 1"),
        (prove, ["--only", "speeed", "--device", "cpu"], "--only: got 'speeed'; some of "),
        (trace, ["missing"], "RUN: got 'missing'"),
        (plan, ["--modle", "x"], "command line: got '--modle'; no such option; did you mean --model"),
    ],
)
def test_invalid_command_arguments_are_refused_before_anything_starts(
    command, words: list[str], message: str, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as refused:
        command.run(words)
    assert str(refused.value).startswith(message)
    assert not list(tmp_path.iterdir())


# on several processes


def arguments(*words: str) -> argparse.Namespace:
    parser = CommandParser(prog="tawpipe some")
    add_processes(parser, out="found.json", what="the file")
    return parser.parse_args(words)


def test_single_process_acts_here_and_its_result_is_the_exit_code(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    seen = []
    given = arguments("--device", "cpu", "--nproc", "1")
    assert on_processes("some", [], given, lambda one: seen.append(one) or 3) == 3
    assert seen == [given] and given.out == "found.json"


def test_process_under_torchrun_acts_here_and_refuses_process_counts(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    place = {"RANK": 2, "WORLD_SIZE": 4, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 2, "GROUP_RANK": 1}
    for name, value in {**place, "MASTER_ADDR": "localhost", "MASTER_PORT": 1}.items():
        monkeypatch.setenv(name, str(value))
    assert on_processes("some", [], arguments("--device", "cpu"), lambda _: 4) == 4
    for option, theirs in (("--nproc", "--nproc-per-node"), ("--nodes", "--nnodes")):
        with pytest.raises(UserError, match=f"{option}: got 2; unset under torchrun, whose {theirs} sets it"):
            on_processes("some", [], arguments(option, "2", "--device", "cpu"), lambda _: 4)


def test_several_processes_start_with_the_arguments_of_the_user(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    started = []
    monkeypatch.setattr("tawpipe.commands.processes.launch", lambda *words, **_: started.append(words) or 5)
    words = ["--nproc", "4", "--nodes", "2", "--device", "cpu"]
    assert on_processes("some", words, arguments(*words), lambda _: 0) == 5
    ((command, shape),) = started
    assert command[1:] == ["-m", "tawpipe", "some", *words] and (shape.nodes, shape.nproc) == (2, 4)


# the end of the process


def test_process_ends_with_its_exit_code_if_stdout_is_closed(monkeypatch) -> None:
    codes, flushed = [], []

    def broken() -> None:
        raise BrokenPipeError

    monkeypatch.setattr(entry, "_code", 7)
    monkeypatch.setattr(os, "_exit", codes.append)
    monkeypatch.setattr("sys.stdout", SimpleNamespace(flush=broken))
    monkeypatch.setattr("sys.stderr", SimpleNamespace(flush=lambda: flushed.append("stderr")))
    entry._end()
    assert codes == [7] and flushed == ["stderr"]
