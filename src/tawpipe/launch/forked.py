"""Workers forked from the launcher, which has imported what takes seconds once for all of them.

Four workers on two cores would otherwise each spend as long on importing torch and transformers as their first steps
take. What a forked worker runs is what ``python -m MODULE WORDS...`` runs. It begins as that would: in a process group
of its own, with the signals' usual effects, its own variables and standard streams. Only a process that has done
nothing else yet can be forked safely: threads do not come along, and a library that has started some waits for them.
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
"""A process that has loaded it may have computed with it, in threads."""


def import_once(modules: Sequence[str], variables: Mapping[str, str]) -> bool:
    """Import what workers need; False, and nothing done, where they cannot be forked from this process.

    Args:
        variables: that libraries read when they are loaded, the same for all workers.
    """
    if not modules or not sys.platform.startswith("linux"):
        return False
    if NEVER_BEFORE in sys.modules or threading.active_count() > 1:
        return False
    os.environ.update(variables)
    try:
        for module in modules:
            importlib.import_module(module)
    except Exception:  # the workers say what is wrong, one by one
        return False
    gc.freeze()  # or the first collection of a worker would copy all that they share
    return threading.active_count() == 1


class ForkedWorker:
    """A child of this process that runs a module, with what the launcher uses of ``subprocess.Popen``.

    Args:
        command: ``python -m MODULE WORDS...``.
        variables: added to those of this process.
        shown: its standard output is this process's; otherwise nobody sees it.
        first: is called in the worker before anything else.
    """

    def __init__(
        self, command: Sequence[str], variables: Mapping[str, str], *, shown: bool, first: Callable[[], None] | None
    ) -> None:
        module, words = command[2], command[3:]
        assert command[1] == "-m"
        for stream in (sys.stdout, sys.stderr):
            stream.flush()  # or the worker would write it once more
        reading, writing = os.pipe()
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            _run(module, words, variables, writing, shown=shown, first=first)
        os.close(writing)
        with suppress(OSError):  # it has done so itself, or has ended
            os.setpgid(self.pid, self.pid)
        self.stderr: BinaryIO | None = os.fdopen(reading, "rb", buffering=0)

    def poll(self) -> int | None:
        """The exit code, as of ``subprocess``; None while it runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float) -> int:
        """The exit code, once there is one.

        Raises:
            subprocess.TimeoutExpired: there is none after so many seconds.
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
    """The life of a worker."""
    code = 1
    try:
        atexit._clear()  # what the launcher does when it ends is not for its workers
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
