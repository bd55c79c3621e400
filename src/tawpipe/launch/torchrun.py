"""The last words of a process that torchrun has started.

When a process fails, torchrun prints a traceback of its own, behind which the words of the process are hard to find.
At its end stands the text of a file that the first failed process has left: what is written there comes last on the
screen. Without torch, because a wrong setting is refused before torch is loaded.
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
"""The variable with the name of that file."""
MAX_RESTARTS = "TORCHELASTIC_MAX_RESTARTS"
PATIENCE_S = 5.0
"""Seconds in which torchrun has ended the other processes of a machine after the first one has failed."""


def print_refusal(error: Exception) -> None:
    """Say once on every machine what all its processes find wrong: under torchrun at the end of its report.

    The first process of a machine speaks. The others wait until torchrun ends them, and speak where it does not:
    then the fault is theirs alone.
    """
    if _file(os.environ) is None:
        print_expected_error(error)
        return
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(PATIENCE_S)
    if not leave_words(f"{ERROR_PREFIX}{error}") or restart_count() < _max_restarts(os.environ):
        print_expected_error(error)  # torchrun reports the last of its starts alone


def leave_words(text: str, environ: Mapping[str, str] = os.environ) -> bool:
    """Write why this process fails where torchrun looks for it. False if there is no torchrun, or it cannot be."""
    if (file := _file(environ)) is None:
        return False
    more = {"py_callstack": text, "timestamp": str(int(time.time()))}
    with suppress(OSError):
        file.write_text(json.dumps({"message": {"message": text, "extraInfo": more}}), encoding="utf-8")
        return True
    return False


def _file(environ: Mapping[str, str]) -> Path | None:
    name = "" if started_by_local_launcher(environ) else environ.get(ERROR_FILE)
    return Path(name) if name else None


def _max_restarts(environ: Mapping[str, str]) -> int:
    text = environ.get(MAX_RESTARTS, "0")
    return int(text) if text.isdecimal() else 0
