"""Slices of what lives at home: how much of a unit is squared, brought to a device or updated at one time.

Homes in the host's memory pass through their device slice by slice, and the gradient's norm is summed slice by slice
wherever homes are, so that it has the same bits. A slice begins at a multiple of ``SLICE`` elements of its piece: an
optimizer's kernel then treats every element as it would in the whole piece (a CPU's rounds the last few otherwise).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tawpipe.runtime.homes.storage import HomePiece
from tawpipe.schedule.landing import SLICE

ALIGNMENT = 64
"""Elements: slices that are on a device together begin at multiples of it."""
AT_ONCE = 2**16
"""Elements that are converted at once on a CPU; twice as many bytes as in fp32 stay in its cache."""


@dataclass(frozen=True)
class Slice:
    """Elements ``begin`` to ``end`` of a piece.

    Args:
        place: of the piece, among those of its unit.
        at: where the slice begins in the memory of its load.
        number: of the slice in its unit.
    """

    place: int
    begin: int
    end: int
    at: int
    number: int

    @property
    def numel(self) -> int:
        return self.end - self.begin

    def of(self, whole: Tensor) -> Tensor:
        """The slice of a tensor of the piece's elements, flat."""
        return whole.view(-1)[self.begin : self.end]


Load = tuple[Slice, ...]
"""Slices that are on the device together."""


def loads_of(pieces: Sequence[HomePiece]) -> tuple[Load, ...]:
    """The loads of a unit, of ``SLICE`` elements or fewer; a matrix that comes whole is a load of its own."""
    loads: list[Load] = []
    load: list[Slice] = []
    number, at = 0, 0
    for place, piece in enumerate(pieces):
        size = piece.value.numel()
        step = size if piece.value.ndim > 1 else SLICE
        for begin in range(0, size, step):
            end = min(size, begin + step)
            if load and at + end - begin > SLICE:
                loads.append(tuple(load))
                load, at = [], 0
            load.append(Slice(place, begin, end, at, number))
            number, at = number + 1, at + -(-(end - begin) // ALIGNMENT) * ALIGNMENT
    return (*loads, *([tuple(load)] if load else []))


def room_of(load: Load) -> int:
    """Elements that a load takes on a device."""
    return load[-1].at + -(-load[-1].numel // ALIGNMENT) * ALIGNMENT


def squares_of(slices: Sequence[Tensor]) -> Tensor:
    """The sum of the squares of every slice, in fp64 and summed in it, on the slices' device.

    torch's own norm of an fp32 tensor adds in fp32 on a CPU: off by 1e-3 for 16 M elements, and otherwise for each cut.
    """
    if slices[0].device.type == "cuda":  # the kernel converts as it reads
        norms = torch._foreach_norm(list(slices), 2, torch.float64)  # pyright: ignore[reportPrivateImportUsage]
        return torch.stack(norms).square()
    room = torch.empty(min(AT_ONCE, max(part.numel() for part in slices)), dtype=torch.float64, device="cpu")
    return torch.stack([_sum_of_squares(part, room) for part in slices])


def _sum_of_squares(values: Tensor, room: Tensor) -> Tensor:
    sums = []
    for part in values.reshape(-1).split(AT_ONCE):
        wide = room[: part.numel()].copy_(part)
        sums.append(torch.dot(wide, wide))
    return torch.stack(sums).sum()
