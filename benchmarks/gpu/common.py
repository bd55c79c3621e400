"""Helpers of the scripts in this folder: lines of JSON, and times on a GPU."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import torch


def say(**values: Any) -> None:
    """Print one line of JSON."""
    print(json.dumps(values), flush=True)


def in_words(error: Exception) -> str:
    """Return the kind of an error and the beginning of its message."""
    return f"{type(error).__name__}: {str(error)[:300]}"


def wait(device: torch.device) -> None:
    """Wait until the device has nothing left to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(run: Callable[[], object], device: torch.device, *, least_s: float = 0.15) -> tuple[float, float]:
    """Return the seconds that a call takes on the device, and those that it takes to issue it.

    Args:
        least_s: the call is repeated for about so long.
    """
    run()
    wait(device)
    begin = time.perf_counter()
    run()
    wait(device)
    times = max(1, round(least_s / max(time.perf_counter() - begin, 1e-5)))
    begin = time.perf_counter()
    for _ in range(times):
        run()
    issued = time.perf_counter() - begin
    wait(device)
    return (time.perf_counter() - begin) / times, issued / times
