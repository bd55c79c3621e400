"""Error messages of a process that torchrun has started.

When a process fails, torchrun prints a traceback of its own, which hides the message of the process. At the end of its
report torchrun prints a file that the first failed process has written: this module writes the message there, so that
it is the last text on the screen. It does not import torch, because wrong settings are refused before torch is loaded.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from tawpipe.environment import ERROR_PREFIX, restart_count, started_by_local_launcher
from tawpipe.launch.workers import print_expected_error

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
"""Environment variable with the name of that file."""
MAX_RESTARTS = "TORCHELASTIC_MAX_RESTARTS"
PATIENCE_S = 5.0
"""Seconds within which torchrun ends the other processes of a machine after the first one has failed."""


def print_refusal(error: Exception) -> None:
    """Print an error that all processes of a machine have, once; under torchrun at the end of its report.

    The process of local rank 0 reports at once. Others wait ``PATIENCE_S`` seconds, in which torchrun usually ends
    them. If not, the error is theirs only, and they report it.
    """
    if _file(os.environ) is None:
        print_expected_error(error)
        return
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(PATIENCE_S)
    if not leave_words(f"{ERROR_PREFIX}{error}") or restart_count() < _max_restarts(os.environ):
        print_expected_error(error)  # torchrun prints the file after its last restart only


def leave_words(text: str, environ: Mapping[str, str] = os.environ) -> bool:
    """Write ``text`` into torchrun's error file, as the reason why this process fails; return True if it was written.

    Returns False if torchrun did not start this process, or if the file cannot be written."""
    if (file := _file(environ)) is None:
        return False
    more = {"py_callstack": text, "timestamp": str(int(time.time()))}
    with suppress(OSError):
        file.write_text(json.dumps({"message": {"message": text, "extraInfo": more}}), encoding="utf-8")
        return True
    return False


def _file(environ: Mapping[str, str]) -> Path | None:
    """Return the path of torchrun's error file; None if torchrun did not start this process."""
    name = "" if started_by_local_launcher(environ) else environ.get(ERROR_FILE)
    return Path(name) if name else None


def _max_restarts(environ: Mapping[str, str]) -> int:
    """Return the number of restarts that torchrun allows; 0 if not known."""
    text = environ.get(MAX_RESTARTS, "0")
    return int(text) if text.isdecimal() else 0
