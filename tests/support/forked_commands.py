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


def run_tawpipe(
    words: Sequence[str], variables: Mapping[str, str], timeout_s: float
) -> subprocess.CompletedProcess[str]:
    """A command with an environment of its own, as ``subprocess.run`` would run it."""
    with tempfile.TemporaryDirectory() as folder:
        said = [Path(folder) / name for name in ("stdout", "stderr")]
        process = forking().Process(target=_run, args=([*words], {**variables}, [*map(str, said)]))
        process.start()
        process.join(timeout_s)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired([*words], timeout_s, *(path.read_bytes() for path in said))
        return subprocess.CompletedProcess([*words], process.exitcode, *(path.read_text() for path in said))


def _run(words: list[str], variables: dict[str, str], said: list[str]) -> None:
    """The life of the process; it ends here, without what ``multiprocessing`` does at an end."""
    for number, path in enumerate(said, 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
    os.environ.clear()
    os.environ.update(variables)
    sys.argv = ["tawpipe", *words]
    gc.freeze()
    code = 1
    try:
        from tawpipe.commands import train
        from tawpipe.launch import launcher

        launcher.import_once = train.import_once = _imported  # what it would import is there, and nothing has run yet
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
