"""The CUDA device of threads. A new thread begins on device 0, whatever device its process computes on.

Its first call to CUDA, if only for an event, would make a context of about 0.5 GB there: on a GPU that belongs to
another process where every process sees all GPUs, as under torchrun and Slurm.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch


def use_device(device: torch.device | None) -> None:
    """Set the calling thread's CUDA device; call it first in a thread that may call CUDA. Does nothing for a CPU."""
    if device is not None and device.type == "cuda":
        torch.cuda.set_device(device)


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which a thread of somebody else's is on ``device``. Does nothing for a CPU."""
    return torch.cuda.device(device if device.type == "cuda" else -1)
