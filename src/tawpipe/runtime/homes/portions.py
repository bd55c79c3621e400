"""Portions of a unit at home: the parts that are squared, copied to a device or updated at one time.

Homes in CPU memory pass through their device portion by portion. The gradient's norm is always summed portion by
portion, wherever homes are, so that its bits are equal. A portion begins at a multiple of ``PORTION_SIZE`` elements of
its piece. Then an optimizer's kernel treats every element as it would in the whole piece (on a CPU it would round the
last few differently otherwise).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tawpipe.runtime.homes.storage import HomePiece
from tawpipe.schedule.landing import PORTION_SIZE

ALIGNMENT = 64
"""Elements; portions that are on a device together begin at multiples of this number."""
AT_ONCE = 2**16
"""Elements that a CPU converts to fp64 at one time, so that they stay in its cache."""


@dataclass(frozen=True)
class Portion:
    """A portion: elements ``begin`` to ``end`` of a piece.

    Args:
        place: Index of the piece among the pieces of its unit.
        begin, end: Elements of the piece.
        at: Offset of the portion in the buffer of its load, in elements.
        number: Index of the portion in its unit.
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
        """Return the elements of this portion of ``whole``, a tensor with as many elements as the piece; flat."""
        return whole.view(-1)[self.begin : self.end]


Load = tuple[Portion, ...]
"""Portions that are on the device together."""


def loads_of(pieces: Sequence[HomePiece]) -> tuple[Load, ...]:
    """Return the loads of a unit, each of at most ``PORTION_SIZE`` elements; a whole matrix is never split."""
    loads: list[Load] = []
    load: list[Portion] = []
    number, at = 0, 0
    for place, piece in enumerate(pieces):
        size = piece.value.numel()
        step = size if piece.value.ndim > 1 else PORTION_SIZE
        for begin in range(0, size, step):
            end = min(size, begin + step)
            if load and at + end - begin > PORTION_SIZE:
                loads.append(tuple(load))
                load, at = [], 0
            load.append(Portion(place, begin, end, at, number))
            number, at = number + 1, at + -(-(end - begin) // ALIGNMENT) * ALIGNMENT
    return (*loads, *([tuple(load)] if load else []))


def elements_of(load: Load) -> int:
    """Return the number of elements that the buffer of a load needs on a device."""
    return load[-1].at + -(-load[-1].numel // ALIGNMENT) * ALIGNMENT


def squares_of(portions: Sequence[Tensor]) -> Tensor:
    """Return the sum of squares of every tensor, computed and returned in fp64, on the tensors' device.

    torch's own norm of an fp32 tensor adds in fp32 on a CPU. Its error is 1e-3 for 16 M elements, and depends on how
    the tensor is cut.
    """
    if portions[0].device.type == "cuda":  # the kernel converts as it reads
        norms = torch._foreach_norm(list(portions), 2, torch.float64)  # pyright: ignore[reportPrivateImportUsage]
        return torch.stack(norms).square()
    scratch = torch.empty(min(AT_ONCE, max(part.numel() for part in portions)), dtype=torch.float64, device="cpu")
    return torch.stack([_sum_of_squares(part, scratch) for part in portions])


def _sum_of_squares(values: Tensor, scratch: Tensor) -> Tensor:
    """Return the sum of squares of ``values``, converting at most ``AT_ONCE`` elements at a time into ``scratch``."""
    sums = []
    for part in values.reshape(-1).split(AT_ONCE):
        wide = scratch[: part.numel()].copy_(part)
        sums.append(torch.dot(wide, wide))
    return torch.stack(sums).sum()
