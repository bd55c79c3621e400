"""Memory of the host for homes: page-locked where a GPU copies from and to it.

Not torch's pinned memory, which comes in powers of two: 2.1 GiB of an embedding would take 4. Pages are the system's,
exactly as many as are needed, and are registered with the driver one tensor at a time.
"""

from __future__ import annotations

import mmap
import os
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from tawpipe.errors import UserError

CONTAINER = (
    ("/sys/fs/cgroup", "memory.max", "memory.current", ""),
    ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
)
"""Folder, limit and use of a container's memory, and how its counts begin, in both versions of control groups."""


class _Pages(mmap.mmap):
    """Zeros that a GPU reads and writes by itself, for as long as a tensor is on them."""

    address = 0

    def register(self, address: int) -> None:
        """Lock the pages, which takes the system about a second for some gigabytes.

        Raises:
            UserError: the system does not let so much memory be locked.
        """
        status = torch.cuda.cudart().cudaHostRegister(address, len(self), 0)  # pyright: ignore
        if int(status) != 0:
            limit = "containers and WSL limit it; see ulimit -l and what other jobs have locked"
            expected = f"none, or a host that locks {len(self) / 2**30:.2f} GiB more of its memory ({status}; {limit})"
            raise UserError("schedule.host_homes", "state", expected)
        self.address = address

    def __del__(self) -> None:
        if self.address:
            torch.cuda.cudart().cudaHostUnregister(self.address)  # pyright: ignore


def host_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros in the host's memory, for a device that they will be copied to."""
    size = torch.Size(shape).numel() * dtype.itemsize
    if device.type != "cuda" or not size:
        return torch.zeros(shape, dtype=dtype, device="cpu")
    pages = _Pages(-1, size)
    flat = torch.frombuffer(pages, dtype=dtype)
    pages.register(flat.data_ptr())
    return flat.view(shape)


def free_memory() -> int:
    """Bytes that this machine, or the container, could give to processes now; 0 where that is not known."""
    try:
        with Path("/proc/meminfo").open(encoding="ascii") as file:
            lines = dict(line.split(":", 1) for line in file)
        free = int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):  # no Linux: at least what is built in
        try:
            free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        except (OSError, ValueError, AttributeError):
            return 0
    for folder, most, used, name in CONTAINER:
        try:
            left = int(Path(folder, most).read_text()) - int(Path(folder, used).read_text())
        except (OSError, ValueError):  # none, or no limit
            continue
        with suppress(OSError, ValueError):  # files that were read, which give way
            counts = dict(line.split() for line in Path(folder, "memory.stat").read_text().splitlines())
            left += sum(int(counts.get(f"{name}{kind}_file", 0)) for kind in ("active", "inactive"))
        free = min(free, left)
    return max(free, 1)
