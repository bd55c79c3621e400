"""Memory of a GPU as those count it who give it: tensors, torch's allocator, the driver."""

from __future__ import annotations

import ctypes
import gc
import sys
from dataclasses import dataclass

import torch

MALLOC = {-8: 1, -3: 1 << 20, -1: 64 << 20}
"""Parameters of glibc's allocator (malloc.h): M_ARENA_MAX; M_MMAP_THRESHOLD, bytes of the smallest block that is mapped
by itself; M_TRIM_THRESHOLD, free bytes at the end of its heap that it keeps.
"""


@dataclass(frozen=True)
class Taken:
    """The most bytes of a GPU since its statistics were reset, as four count them, each with what the one before has.

    Args:
        allocated: tensors that there are.
        active: and tensors that have gone, which another stream may still read (``record_stream``): nothing else can
            have their memory.
        reserved: and what lies free between them in torch's allocator, which one stream cannot give to another.
        driver: and what the driver, libraries, communicators and other processes have; of now.
    """

    allocated: int
    active: int
    reserved: int
    driver: int

    @classmethod
    def of(cls, device: torch.device) -> Taken:
        """Of a GPU."""
        said = torch.cuda.memory_stats(device)
        free, total = torch.cuda.mem_get_info(device)
        allocated, active, reserved = (said[f"{name}_bytes.all.peak"] for name in ("allocated", "active", "reserved"))
        return cls(allocated, active, reserved, total - free)

    def __str__(self) -> str:
        values = (f"{value / 2**30:.2f} GiB {name}" for name, value in vars(self).items())
        return ", ".join(values)


def give_back(device: torch.device) -> None:
    """Give memory that no tensor has back to the driver, or to the system: one stream's free blocks are of no use to
    another, nor are those of one thread.
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif trim := getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None:  # glibc has it
        trim(0)


def share_allocator() -> None:
    """Let all threads of this process take memory of the CPU from one place, and give large blocks back to the system.
    Of what glibc otherwise keeps for each of a pipeline's threads apart, and between large blocks, no count of tensors
    knows: 61 MiB beside 236 were measured. Call before there are threads; other systems' allocators stay as they are.
    """
    if sys.platform == "linux" and (tune := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:
        for parameter, value in MALLOC.items():
            tune(parameter, value)


def taken_outside_torch(device: torch.device) -> int:
    """Bytes of a GPU that are in use, and not by torch's allocator; when the device has done what it was given."""
    torch.cuda.synchronize(device)
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device)
