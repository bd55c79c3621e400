"""CUDA device of threads. A new thread starts on device 0, whatever device its process uses.

Its first call to CUDA, even creating an event, would make a context of about 0.5 GB there. With torchrun and Slurm
every process sees all GPUs, so that GPU may belong to another process.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch


def use_device(device: torch.device | None) -> None:
    """Set the calling thread's CUDA device. Call it first in a thread that may use CUDA. Does nothing for a CPU."""
    if device is not None and device.type == "cuda":
        torch.cuda.set_device(device)


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which the calling thread uses ``device``, for threads not started here.

    Does nothing for a CPU.
    """
    return torch.cuda.device(device if device.type == "cuda" else -1)
