"""Checks of how processes end."""

from __future__ import annotations

import os
import subprocess
import sys

from tawpipe.prove.outcome import Outcome
from tawpipe.runtime.world import World

SCRIPT = """
import torch, tawpipe
from tawpipe.prove.models import seeded_model, rows, small
from tawpipe.runtime.world import connect
pipeline = tawpipe.Pipeline(seeded_model(small()), world=connect(device={device!r}))
print(pipeline.step(rows(small(), 2, 16)).loss)
"""
LIMIT_S = 120


def without_close(world: World) -> Outcome:
    """Check that a script which trains and does not call ``close`` ends with exit code 0 within ``LIMIT_S`` seconds.

    The script runs in a new process without a launcher."""
    words = [sys.executable, "-c", SCRIPT.format(device=world.device.type)]
    launcher = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "TAWPIPE_LOCAL_LAUNCHER")
    environment = {name: value for name, value in os.environ.items() if name not in launcher}
    try:
        done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        return Outcome(False, f"it has not ended after {LIMIT_S} s")
    last_line = done.stderr.strip().split("\n")[-1]  # only its part before a colon: messages of errors may hold paths
    error = {"error": last_line.partition(":")[0][:80]} if done.returncode else {}
    return Outcome(done.returncode == 0, f"exit code {done.returncode}", error)
