"""CPU memory for homes, page-locked if a GPU copies from and to it.

torch's pinned memory is not used, as its sizes are powers of two: an embedding of 2.1 GiB would take 4 GiB. Instead
each tensor gets exactly the pages it needs from the system, which are registered with the CUDA driver.
"""

from __future__ import annotations

import mmap
import os
import resource
from pathlib import Path

import torch
from torch import Tensor

from tawpipe.errors import UserError
from tawpipe.job_limits import memory_left


class _Pages(mmap.mmap):
    """Zeroed pages that a GPU can read and write directly. They are unlocked when the last tensor on them is freed."""

    address = device = 0

    def register(self, address: int) -> None:
        """Lock the pages in memory, which takes about a second for some gigabytes.

        Args:
            address: Address of the first page.

        Raises:
            OSError: If the system does not allow that much memory to be locked.
        """
        status = torch.cuda.cudart().cudaHostRegister(address, len(self), 0)  # pyright: ignore
        if int(status) != 0:
            limit = "containers and WSL limit it; see ulimit -l and what other jobs have locked"
            raise OSError(f"it locks no more of its memory: {status}; {limit}")
        self.address, self.device = address, torch.cuda.current_device()

    def __del__(self) -> None:
        if self.address:
            with torch.cuda.device(self.device):  # any thread may free the pages
                torch.cuda.cudart().cudaHostUnregister(self.address)  # pyright: ignore


def host_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, level: str) -> Tensor:
    """Return a tensor of zeros in CPU memory, page-locked if ``device`` is a GPU.

    Args:
        shape: Shape of the tensor.
        dtype: Its dtype.
        device: Device that the tensor will be copied to.
        level: Value of ``schedule.host_homes``, for the error.

    Raises:
        UserError: If the system does not provide or does not lock the memory.
    """
    size = torch.Size(shape).numel() * dtype.itemsize
    if not size:
        return torch.zeros(shape, dtype=dtype, device="cpu")
    try:
        flat = _locked(size, dtype) if device.type == "cuda" else torch.zeros(shape, dtype=dtype, device="cpu")
        return flat.view(shape)
    except (OSError, RuntimeError) as error:  # torch raises RuntimeError if memory is exhausted
        expected = f"none, or a host with {size / 2**30:.2f} GiB more for its homes ({error})"
        raise UserError("schedule.host_homes", level, expected) from error


def _locked(size: int, dtype: torch.dtype) -> Tensor:
    """Return ``size`` bytes of page-locked zeros as a flat tensor of ``dtype``."""
    pages = _Pages(-1, size)
    flat = torch.frombuffer(pages, dtype=dtype)
    pages.register(flat.data_ptr())
    return flat


def is_the_hosts(device: torch.device) -> bool:
    """Return True if the GPU shares its memory with the CPU (an integrated GPU)."""
    return device.type == "cuda" and bool(getattr(torch.cuda.get_device_properties(device), "is_integrated", False))


def lock_limit(wanted: float) -> int:
    """Return the bytes that this process may lock (``ulimit -l``) if they are too few, else 0.

    Also 0 if the driver ignores the limit, as many do. To find out, this locks a little more than the limit.

    Args:
        wanted: Bytes that the process wants to lock.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit == resource.RLIM_INFINITY or limit >= wanted:
        return 0
    try:
        _locked(limit + mmap.PAGESIZE, torch.uint8)
    except OSError:
        return max(limit, 1)
    return 0


def free_memory(left: float | None = None) -> int:
    """Return the bytes that this machine could give to this process now, within the limits of its job; 0 if unknown.

    Args:
        left: Bytes that the job's limits leave; read from the system if None.
    """
    try:
        with Path("/proc/meminfo").open(encoding="ascii") as file:
            lines = dict(line.split(":", 1) for line in file)
        free = int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):  # not Linux: use the installed memory
        try:
            free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        except (OSError, ValueError, AttributeError):
            return 0
    return int(max(1, min(free, memory_left() if left is None else left)))
