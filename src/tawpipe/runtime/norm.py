"""The sum of squares of many numbers, the same however they are cut into tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

AT_ONCE = 2**16
"""Elements that are converted at once on a CPU; twice as many bytes as in fp32 stay in its cache."""


def sum_of_squares(tensors: Sequence[Tensor]) -> Tensor:
    """The sum of all squares of one-dimensional tensors on one device: a scalar in fp64, summed in it.

    torch's own norm of an fp32 tensor adds in fp32 on a CPU: off by 1e-3 for 16 M elements, and otherwise for each cut.
    """
    if tensors[0].is_cuda:  # the kernel converts as it reads
        norms = torch._foreach_norm(list(tensors), 2, torch.float64)  # pyright: ignore[reportPrivateImportUsage]
        return torch.stack(norms).square().sum()
    room = torch.empty(min(AT_ONCE, max(tensor.numel() for tensor in tensors)), dtype=torch.float64)
    sums = []
    for part in (part for tensor in tensors for part in tensor.split(AT_ONCE)):
        wide = room[: part.numel()].copy_(part)
        sums.append(torch.dot(wide, wide))
    return torch.stack(sums).sum()
