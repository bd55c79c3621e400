"""Memory of the host for homes: page-locked where a GPU copies from and to it.

Not torch's pinned memory, which comes in powers of two: 2.1 GiB of an embedding would take 4. Pages are the system's,
exactly as many as are needed, and are registered with the driver one tensor at a time.
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
    """Zeros that a GPU reads and writes by itself, for as long as a tensor is on them."""

    address = device = 0

    def register(self, address: int) -> None:
        """Lock the pages, which takes the system about a second for some gigabytes.

        Raises:
            OSError: the system does not let so much memory be locked.
        """
        status = torch.cuda.cudart().cudaHostRegister(address, len(self), 0)  # pyright: ignore
        if int(status) != 0:
            limit = "containers and WSL limit it; see ulimit -l and what other jobs have locked"
            raise OSError(f"it locks no more of its memory: {status}; {limit}")
        self.address, self.device = address, torch.cuda.current_device()

    def __del__(self) -> None:
        if self.address:
            with torch.cuda.device(self.device):  # in whichever thread collects it
                torch.cuda.cudart().cudaHostUnregister(self.address)  # pyright: ignore


def host_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, level: str) -> Tensor:
    """Zeros in the host's memory, for a device that they will be copied to.

    Args:
        level: ``schedule.host_homes``, whose homes they are.

    Raises:
        UserError: the host does not give so much, or does not lock it.
    """
    size = torch.Size(shape).numel() * dtype.itemsize
    if not size:
        return torch.zeros(shape, dtype=dtype, device="cpu")
    try:
        flat = _locked(size, dtype) if device.type == "cuda" else torch.zeros(shape, dtype=dtype, device="cpu")
        return flat.view(shape)
    except (OSError, RuntimeError) as error:  # RuntimeError is what torch says of memory that it does not get
        expected = f"none, or a host with {size / 2**30:.2f} GiB more for its homes ({error})"
        raise UserError("schedule.host_homes", level, expected) from error


def _locked(size: int, dtype: torch.dtype) -> Tensor:
    """So many bytes that are zero, page-locked."""
    pages = _Pages(-1, size)
    flat = torch.frombuffer(pages, dtype=dtype)
    pages.register(flat.data_ptr())
    return flat


def is_the_hosts(device: torch.device) -> bool:
    """True if a device's memory is its host's."""
    return device.type == "cuda" and bool(getattr(torch.cuda.get_device_properties(device), "is_integrated", False))


def lock_limit(wanted: float) -> int:
    """Bytes that this process may lock (``ulimit -l``), if that is less than it wants and the driver keeps to it; 0 if
    nothing stands in the way. Many drivers do not: whether one does is seen by locking a little more than is allowed.
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
    """Return the bytes that this machine could give to this process now, within the limits of its job; 0 where that is
    not known.

    Args:
        left: bytes that these limits leave; read if it is not given.
    """
    try:
        with Path("/proc/meminfo").open(encoding="ascii") as file:
            lines = dict(line.split(":", 1) for line in file)
        free = int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):  # no Linux: at least what is built in
        try:
            free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        except (OSError, ValueError, AttributeError):
            return 0
    return int(max(1, min(free, memory_left() if left is None else left)))
