"""A worker calls functions, waits for the next, and ends with its faults and with whoever started it."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from processes import wait_for
from tawpipe.worker import Worker


def test_worker_answers_in_order_and_ends_after_an_error():
    worker = Worker()
    worker.ask(math.gcd, 12, 18)
    worker.ask(os.getpid)
    assert worker.answer() == 6 and worker.answer() == worker.process.pid and not worker.ready
    worker.ask(math.sqrt, -1)
    with pytest.raises((EOFError, OSError)):
        worker.answer()
    assert worker.process.wait(60) == 1
    worker.close()
    worker.close()


def test_worker_does_not_outlive_its_parent_process():
    script = "import os, tawpipe.worker as w; worker = w.Worker(); print(worker.process.pid, flush=True); os._exit(0)"
    pid = int(subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout)
    command = Path(f"/proc/{pid}/cmdline")
    assert wait_for(lambda: not command.exists() or not command.read_bytes())  # gone, or not yet waited for
