"""Numbers as they travel between nodes where 8 bits have to do. Imports schedule and torch.

A message is cut into blocks of 256 elements (the last may be shorter); each block is divided by a scale of its own, so
that its largest element fits, and rounded to int8 or to float8 (e4m3). Behind the elements come the scales in fp32. A
block with a number that is not finite comes out as not finite, so that the finite check of the receiver sees it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tawpipe.schedule.spec import WIRE_BLOCK, wire_bytes

_LARGEST = {"int8": 127.0, "fp8": torch.finfo(torch.float8_e4m3fn).max}


def encode(values: Tensor, wire: str, out: Tensor) -> None:
    """Write ``values`` into a message.

    Args:
        values: [n], of any floating type.
        wire: ``int8`` or ``fp8``.
        out: uint8 [wire_bytes(n, wire)].
    """
    count = values.numel()
    blocks = F.pad(values.float(), (0, -count % WIRE_BLOCK)).view(-1, WIRE_BLOCK)
    scales = blocks.abs().amax(dim=1) / _LARGEST[wire]  # nan and inf stay what they are
    scaled = blocks / torch.where(scales == 0, 1.0, scales).unsqueeze(1)
    if wire == "int8":
        coded = scaled.nan_to_num_(0.0).round_().clamp_(-127, 127).to(torch.int8)
    else:
        coded = scaled.nan_to_num_(0.0).to(torch.float8_e4m3fn)
    out[:count].copy_(coded.view(torch.uint8).flatten()[:count])
    out[count:].copy_(scales.view(torch.uint8))


def decode(message: Tensor, wire: str, out: Tensor, *, add: bool = False) -> None:
    """Read a message.

    Args:
        message: uint8 [wire_bytes(n, wire)].
        out: [n], of any floating type; replaced, or added to.
    """
    count = out.numel()
    kind = torch.int8 if wire == "int8" else torch.float8_e4m3fn
    scales = message[count:].clone().view(torch.float32)  # a copy, because it may begin at any byte
    values = message[:count].view(kind).float()
    values *= scales.repeat_interleave(WIRE_BLOCK)[:count]
    if add:
        out.add_(values)
    else:
        out.copy_(values)


class Scratch:
    """Messages of one lane. Its operations are one after the other, so that one set of buffers serves them all."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: dict[str, Tensor] = {}

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers.values())

    def take(self, name: str, pieces: int, elements: int, wire: str) -> Tensor:
        """uint8 [pieces, bytes of a message of so many elements], good until the lane's next operation takes it."""
        size = pieces * wire_bytes(elements, wire)
        if name not in self._buffers or self._buffers[name].numel() < size:
            self._buffers[name] = torch.empty(size, dtype=torch.uint8, device=self._device)
        return self._buffers[name][:size].view(pieces, -1)
