"""Memory of a GPU at four levels: live tensors, blocks in use, torch's allocator, and the driver."""

from __future__ import annotations

import ctypes
import gc
import sys
from dataclasses import dataclass

import torch

MALLOC = {-8: 1, -3: 1 << 20, -1: 64 << 20}
"""Parameters of glibc's allocator (malloc.h) and the values to set.

M_ARENA_MAX; M_MMAP_THRESHOLD, bytes of the smallest block that is mapped by itself; M_TRIM_THRESHOLD, free bytes that
the allocator keeps at the end of its heap.
"""


@dataclass(frozen=True)
class Taken:
    """Peak bytes of a GPU since its statistics were reset, counted at four levels. Each level includes the one before.

    Args:
        allocated: Live tensors.
        active: ``allocated``, and freed tensors that another stream may still read (``record_stream``), whose memory
            cannot be reused yet.
        reserved: ``active``, and free blocks inside torch's allocator, which one stream cannot give to another.
        driver: Memory in use on the GPU now, in total: also the driver, libraries, communicators and other processes.
    """

    allocated: int
    active: int
    reserved: int
    driver: int

    @classmethod
    def of(cls, device: torch.device) -> Taken:
        """Read the peak memory statistics of ``device``, and its memory in use now."""
        stats = torch.cuda.memory_stats(device)
        free, total = torch.cuda.mem_get_info(device)
        allocated, active, reserved = (stats[f"{name}_bytes.all.peak"] for name in ("allocated", "active", "reserved"))
        return cls(allocated, active, reserved, total - free)

    def __str__(self) -> str:
        values = (f"{value / 2**30:.2f} GiB {name}" for name, value in vars(self).items())
        return ", ".join(values)


def give_back(device: torch.device) -> None:
    """Return unused memory of torch's allocator to the driver, or of glibc's to the system, after a garbage collection.

    Free blocks of one stream, or of one thread, are of no use to another.
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif trim := getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None:
        # only glibc has it
        trim(0)


def share_allocator() -> None:
    """Make all threads of this process allocate CPU memory from one arena, and return large blocks to the system.

    Otherwise glibc keeps free memory for each of a pipeline's threads and between large blocks. No count of tensors
    shows it: 61 MiB in addition to 236 MiB were measured. Call before threads are started. Does nothing without glibc.
    """
    if sys.platform == "linux" and (tune := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:
        for parameter, value in MALLOC.items():
            tune(parameter, value)


def taken_outside_torch(device: torch.device) -> int:
    """Return the bytes of a GPU in use outside torch's allocator, after waiting for the device to finish its work."""
    torch.cuda.synchronize(device)
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device)
