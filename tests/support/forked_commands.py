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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pool import forking


class ForkedCommand:
    """A command that runs here, with what tests use of ``subprocess.Popen``.

    Args:
        out: the file that its standard output goes to.
        error: the same for its standard error; by default both go to ``out``.
        program: what follows ``python -m``, or the path of a script.
        terminal: the path of one to run on, which then has what the command says.
        few_strategies: plans look at few strategies, and search for a moment.
    """

    def __init__(
        self,
        words: Sequence[str],
        variables: Mapping[str, str],
        out: Path,
        error: Path | None = None,
        *,
        program: str = "tawpipe",
        terminal: str = "",
        few_strategies: bool = False,
    ) -> None:
        self._words, self._said = [program, *words], (out, error or out)
        files = [terminal] * 3 if terminal else [os.devnull, *map(str, self._said)]
        for path in self._said:
            path.touch()
        given = (self._words, {**variables}, files, few_strategies)
        self._process = forking().Process(target=_run, args=given)
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def stdout(self) -> str:
        """What has been said until now."""
        return self._said[0].read_text()

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

    def end(self, timeout_s: float) -> subprocess.CompletedProcess[str]:
        """Its end; a command that does not end in time is killed."""
        try:
            code = self.wait(timeout_s)
        except subprocess.TimeoutExpired as error:
            self.kill()
            said = [path.read_bytes() for path in self._said]
            raise subprocess.TimeoutExpired(self._words, timeout_s, *said) from error
        return subprocess.CompletedProcess(self._words, code, *(path.read_text() for path in self._said))

    def kill(self) -> None:
        """End it at once, if it still runs."""
        self._process.kill()
        self._process.join()


@contextmanager
def started(words: Sequence[str], variables: Mapping[str, str], **how: Any) -> Iterator[ForkedCommand]:
    """A command with an environment of its own; killed at the end if it runs then. ``how`` is of ``ForkedCommand``."""
    with tempfile.TemporaryDirectory() as folder:
        command = ForkedCommand(words, variables, Path(folder) / "stdout", Path(folder) / "stderr", **how)
        try:
            yield command
        finally:
            command.kill()


def run_tawpipe(
    words: Sequence[str], variables: Mapping[str, str], timeout_s: float, **how: Any
) -> subprocess.CompletedProcess[str]:
    """A command with an environment of its own, as ``subprocess.run`` would run it."""
    with started(words, variables, **how) as command:
        return command.end(timeout_s)


def _run(words: list[str], variables: dict[str, str], files: list[str], few_strategies: bool) -> None:
    """The life of the process; it ends here, without what ``multiprocessing`` does at an end."""
    handles = [os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND) for path in files]
    if is_terminal := os.isatty(handles[0]):
        os.login_tty(os.dup(handles[0]))
    if is_terminal or variables.get("PYTHONUNBUFFERED"):
        sys.stdout.reconfigure(line_buffering=True)  # pyright: ignore[reportAttributeAccessIssue]
    for number, handle in enumerate(handles):
        os.dup2(handle, number)
        os.close(handle)
    os.environ.clear()
    os.environ.update(variables)
    program, sys.argv = words[0], words
    gc.freeze()
    code = 1
    try:
        from tawpipe.commands import train
        from tawpipe.launch import launcher

        launcher.import_once = train.import_once = _imported  # what it would import is there, and nothing has run yet
        if few_strategies:
            _plan_quickly()
        if program.endswith(".py"):
            sys.path.insert(0, str(Path(program).parent))
            runpy.run_path(program, run_name="__main__")
        else:
            runpy.run_module(program, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


def _plan_quickly() -> None:
    """As the fixtures ``few_strategies`` and ``quickly_solved`` do, until the end of the process."""
    from plan_requests import FEW
    from tawpipe.plan.search import search
    from tawpipe.schedule.pipelines import cost_based

    few = {name: one for name, one in search.strategies().items() if name in FEW}
    search.strategies = lambda: few
    cost_based.KEEP_TRIES, cost_based.SOLVE_S = 500, 0.1


def _imported(modules: Sequence[str], variables: Mapping[str, str]) -> bool:
    os.environ.update(variables)
    return True
