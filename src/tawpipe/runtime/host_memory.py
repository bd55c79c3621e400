"""Memory of the host for homes: page-locked where a GPU copies from and to it.

Not torch's pinned memory, which comes in powers of two: 2.1 GiB of an embedding would take 4. Pages are the system's,
exactly as many as are needed, and are registered with the driver one tensor at a time.
"""

from __future__ import annotations

import mmap

import torch
from torch import Tensor

from tawpipe.errors import UserError


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
        return torch.zeros(shape, dtype=dtype)
    pages = _Pages(-1, size)
    flat = torch.frombuffer(pages, dtype=dtype)
    pages.register(flat.data_ptr())
    return flat.view(shape)
