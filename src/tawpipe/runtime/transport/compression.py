"""Numbers as they travel between nodes where 8 bits have to do.

A message is cut into blocks of 256 elements (the last may be shorter); each block is divided by a scale of its own, so
that its largest element fits, and rounded to int8 or to float8 (e4m3). Behind the elements come the scales in fp32. A
block with a number that is not finite comes out as not finite, so that the finite check of the receiver sees it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from tawpipe.schedule.spec import COMPRESSION_BLOCK, compressed_bytes

CPU = torch.device("cpu")
_LARGEST = {"int8": 127.0, "fp8": torch.finfo(torch.float8_e4m3fn).max}
SLICE = 1 << 20
"""Elements that are worked on at one time: so small are the temporary copies, however large a message is."""


def encode(values: Tensor, compression: str, out: Tensor) -> None:
    """Write ``values`` into a message.

    Args:
        values: [n], of any floating type.
        compression: ``int8`` or ``fp8``.
        out: uint8 [compressed_bytes(n)].
    """
    count, largest = values.numel(), _LARGEST[compression]
    for begin, end in _slices(count):
        blocks = F.pad(values[begin:end].float(), (0, -(end - begin) % COMPRESSION_BLOCK)).view(-1, COMPRESSION_BLOCK)
        scales = blocks.abs().amax(dim=1) / largest  # nan and inf stay what they are
        scaled = blocks / torch.where(scales == 0, 1.0, scales).unsqueeze(1)
        scaled = scaled.nan_to_num_(0.0).clamp_(-largest, largest)  # a scale this side of 2^-126 is not exact
        coded = scaled.round_().to(torch.int8) if compression == "int8" else scaled.to(torch.float8_e4m3fn)
        out[begin:end].copy_(coded.view(torch.uint8).flatten()[: end - begin])
        out[_scales(count, begin, end)].copy_(scales.view(torch.uint8))


def decode(message: Tensor, compression: str, out: Tensor, *, add: bool = False) -> None:
    """Read a message.

    Args:
        message: uint8 [compressed_bytes(n)].
        out: [n], of any floating type; replaced, or added to.
    """
    count = out.numel()
    kind = torch.int8 if compression == "int8" else torch.float8_e4m3fn
    for begin, end in _slices(count):
        scales = message[_scales(count, begin, end)].clone().view(torch.float32)  # it may begin at any byte
        values = message[begin:end].view(kind).float()
        values *= scales.repeat_interleave(COMPRESSION_BLOCK)[: end - begin]
        if add:
            out[begin:end].add_(values)
        else:
            out[begin:end].copy_(values)


def _slices(count: int) -> Iterator[tuple[int, int]]:
    for begin in range(0, count, SLICE):
        yield begin, min(begin + SLICE, count)


def _scales(count: int, begin: int, end: int) -> slice:
    """Place of the scales of some elements in a message of ``count``; ``begin`` is at the border of a block."""
    return slice(count + 4 * (begin // COMPRESSION_BLOCK), count + 4 * -(-end // COMPRESSION_BLOCK))


class Scratch:
    """Messages of one lane. Its operations are one after the other, so that one buffer serves them all."""

    def __init__(self, device: torch.device) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8, device=device)

    @property
    def nbytes(self) -> int:
        return self._buffer.nbytes

    def take(self, elements: Sequence[int], compression: str) -> list[Tensor]:
        """Room for messages of so many elements each, uint8, one behind the other; good until the next call."""
        return self.room([compressed_bytes(count) for count in elements])

    def room(self, sizes: Sequence[int]) -> list[Tensor]:
        """The same for messages of so many bytes each."""
        if self._buffer.numel() < sum(sizes):
            self._buffer = torch.empty(sum(sizes), dtype=torch.uint8, device=self._buffer.device)
        return list(self._buffer[: sum(sizes)].split(sizes))


class Rooms(threading.local):
    """Memory for what is soon forgotten, of every thread its own, taken again and again: on a processor memory that is
    new takes longer than the coding that is done in it.
    """

    def __init__(self) -> None:
        self._of = dict[tuple[str, torch.dtype], Tensor]()

    def take(self, name: str, count: int, dtype: torch.dtype, device: torch.device = CPU) -> Tensor:
        """[count], with whatever it holds; on a CPU good until the next call with this name."""
        if device.type != "cpu":  # whose allocator keeps what it has
            return torch.empty(count, dtype=dtype, device=device)
        held = self._of.get((name, dtype))
        if held is None or held.numel() < count:
            held = self._of[name, dtype] = torch.empty(count, dtype=dtype)
        return held[:count]


class Sent:
    """How much of what travels coded without loss was sent, beside the same numbers as they are."""

    def __init__(self) -> None:
        self.coded_bytes, self.plain_bytes = 0, 0
        self._asked = (0, 0)

    def add(self, coded: int, plain: int) -> None:
        self.coded_bytes += coded
        self.plain_bytes += plain

    def share(self) -> float | None:
        """The part that was sent since this was last asked; None if nothing was."""
        before, self._asked = self._asked, (self.coded_bytes, self.plain_bytes)
        coded, plain = (now - then for now, then in zip(self._asked, before, strict=True))
        return coded / plain if plain else None
