"""Workers forked from the launcher, which has imported slow modules once for all of them.

Otherwise four workers on two cores would each spend as much time on importing torch and transformers as on their first
steps. A forked worker runs the same code as ``python -m MODULE WORDS...``, and begins in the same state: in a process
group of its own, with default signal handlers, its own variables and standard streams. A process can be forked safely
only if it has done nothing else yet: threads do not exist in the child, and a library that had started some would wait
for them.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import BinaryIO, NoReturn

NEVER_BEFORE = "torch"
"""Module that must not be loaded before: the process may have used its threads."""


def import_once(modules: Sequence[str], variables: Mapping[str, str]) -> bool:
    """Import slow modules in this process, so that workers can be forked from it without importing them again.

    Args:
        modules: names of the modules.
        variables: environment variables that libraries read when they are loaded. They are set in this process.

    Returns:
        True if workers can be forked. False if forking is not safe here, or an import has failed.
    """
    if not modules or not sys.platform.startswith("linux"):
        return False
    if NEVER_BEFORE in sys.modules or threading.active_count() > 1:
        return False
    os.environ.update(variables)
    try:
        for module in modules:
            importlib.import_module(module)
    except Exception:  # each worker reports the error by itself
        return False
    gc.freeze()  # otherwise a worker's first garbage collection copies all shared pages
    return threading.active_count() == 1


class ForkedWorker:
    """Child process that runs a module, with those methods of ``subprocess.Popen`` that the launcher uses.

    Args:
        command: ``python -m MODULE WORDS...``.
        variables: environment variables to add to the launcher's.
        shown: True to share this process's standard output; False to drop it.
        first: function to call in the worker before anything else; None for none.
    """

    def __init__(
        self, command: Sequence[str], variables: Mapping[str, str], *, shown: bool, first: Callable[[], None] | None
    ) -> None:
        module, words = command[2], command[3:]
        assert command[1] == "-m"
        for stream in (sys.stdout, sys.stderr):
            stream.flush()  # otherwise the worker writes buffered text a second time
        reading, writing = os.pipe()
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            _run(module, words, variables, writing, shown=shown, first=first)
        os.close(writing)
        with suppress(OSError):  # the worker has done this already, or has ended
            os.setpgid(self.pid, self.pid)
        self.stderr: BinaryIO | None = os.fdopen(reading, "rb", buffering=0)

    def poll(self) -> int | None:
        """Return the exit code, or -n if signal n ended the worker; None while it runs. Does not wait."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float) -> int:
        """Wait until the worker has ended, and return its exit code.

        Raises:
            subprocess.TimeoutExpired: it still runs after ``timeout`` seconds.
        """
        end = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
            time.sleep(0.02)
        return code


def _run(
    module: str,
    words: Sequence[str],
    variables: Mapping[str, str],
    errors: int,
    *,
    shown: bool,
    first: Callable[[], None] | None,
) -> NoReturn:
    """Run ``python -m module words`` in the forked worker, and exit with its code. Never returns.

    First sets up a process group, default signal handlers, standard streams and environment variables.

    Args:
        module: name of the module.
        words: command-line arguments of the module.
        variables: environment variables to add.
        errors: file descriptor for standard error.
        shown: False to drop standard output.
        first: function to call before anything else; None for none.
    """
    code = 1
    try:
        atexit._clear()  # exit handlers of the launcher must not run in workers
        if first is not None:
            first()
        os.setpgid(0, 0)
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        nothing = os.open(os.devnull, os.O_RDWR)
        os.dup2(nothing, 0)
        if not shown:
            os.dup2(nothing, 1)
        os.dup2(errors, 2)
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(write_through=True)  # pyright: ignore[reportAttributeAccessIssue]
        os.environ.update(variables)
        sys.argv = [module, *words]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        atexit._run_exitfuncs()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    os._exit(code)
