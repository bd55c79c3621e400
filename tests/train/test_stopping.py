"""Signals: all ranks agree on one, and a second one ends the process at once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from states import ALONE
from tawpipe.train.stopping import StopRequest


def test_a_signal_is_agreed_on_and_a_second_one_ends_at_once():
    with StopRequest(ALONE) as stop:
        assert stop.agreed() is None
        os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(0.01)
        assert stop.agreed() is signal.SIGUSR1
    child = "import os, signal, time; from tawpipe.train.stopping import StopRequest\n"
    child += "from states import ALONE\n"
    child += "with StopRequest(ALONE):\n    os.kill(os.getpid(), 15)\n    os.kill(os.getpid(), 15)\n"
    child += "    time.sleep(1.1)\n    os.kill(os.getpid(), 15)\n    time.sleep(9)\n"
    support = Path(__file__).parents[1] / "support"
    done = subprocess.run([sys.executable, "-c", child], cwd=support, timeout=60)
    assert done.returncode == 128 + signal.SIGTERM
