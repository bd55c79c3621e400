"""``python -m tawpipe ...`` in a process that is forked from one which has imported what takes seconds."""

from __future__ import annotations

import atexit
import gc
import os
import runpy
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path

from pool import forking


class ForkedCommand:
    """A command that runs here and with this environment, with what tests use of ``subprocess.Popen``.

    Args:
        words: of ``tawpipe``; or a script, a path that ends with .py, and its words.
        out: the file that its standard output goes to.
        error: the same for its standard error; by default both go to ``out``.
    """

    def __init__(
        self, words: Sequence[str], variables: Mapping[str, str], out: Path, error: Path | None = None
    ) -> None:
        given = [*words], {**variables}, str(out), str(error or "")
        self._process = forking().Process(target=_run, args=given)
        self._process.start()
        assert self._process.pid is not None
        self.pid, self._words = self._process.pid, given[0]

    def poll(self) -> int | None:
        """The exit code; None while it runs."""
        return self._process.exitcode

    def wait(self, timeout_s: float) -> int:
        """The exit code, once there is one."""
        self._process.join(timeout_s)
        if (code := self.poll()) is None:
            raise subprocess.TimeoutExpired(self._words, timeout_s)
        return code

    def send_signal(self, number: int) -> None:
        """As ``Popen`` does, nothing where it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)


def run_tawpipe(
    words: Sequence[str], variables: Mapping[str, str], timeout_s: float
) -> subprocess.CompletedProcess[str]:
    """A command with an environment of its own, as ``subprocess.run`` would run it."""
    with tempfile.TemporaryDirectory() as folder:
        said = [Path(folder) / name for name in ("stdout", "stderr")]
        process = ForkedCommand(words, variables, *said)
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired as error:
            os.kill(process.pid, 9)
            process.wait(timeout_s)
            raise subprocess.TimeoutExpired([*words], timeout_s, *(path.read_bytes() for path in said)) from error
        return subprocess.CompletedProcess([*words], code, *(path.read_text() for path in said))


def _run(words: list[str], variables: dict[str, str], out: str, error: str) -> None:
    """The life of the process; it ends here, without what ``multiprocessing`` does at an end."""
    os.dup2(os.open(out, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 1)
    os.dup2(os.open(error, os.O_WRONLY | os.O_CREAT) if error else 1, 2)
    os.environ.clear()
    os.environ.update(variables)
    if variables.get("PYTHONUNBUFFERED"):
        sys.stdout.reconfigure(line_buffering=True)  # pyright: ignore[reportAttributeAccessIssue]
    gc.freeze()
    code = 1
    try:
        from tawpipe.commands import train
        from tawpipe.launch import launcher

        launcher.import_once = train.import_once = _imported  # what it would import is there, and nothing has run yet
        if words[0].endswith(".py"):
            sys.argv = words
            runpy.run_path(words[0], run_name="__main__")
        else:
            sys.argv = ["tawpipe", *words]
            runpy.run_module("tawpipe", run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


def _imported(modules: Sequence[str], variables: Mapping[str, str]) -> bool:
    os.environ.update(variables)
    return True
