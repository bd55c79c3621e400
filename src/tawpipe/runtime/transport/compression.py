"""Coding of messages in 8 bits per number, for slow links between nodes.

A message is cut into blocks of 256 elements (the last may be shorter). Each block is divided by its own scale, so that
its largest element fits, and rounded to int8 or float8 (e4m3). The scales follow the elements in fp32. A block that
contains a number that is not finite is decoded as not finite, so the receiver's finite check finds it.
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
SEGMENT = 1 << 20
"""Elements coded at one time. It limits the size of temporary copies."""


def encode(values: Tensor, compression: str, out: Tensor) -> None:
    """Write ``values`` into the message ``out``, in 8 bits per element.

    Args:
        values: [n], of any floating type.
        compression: ``int8`` or ``fp8``.
        out: uint8 [compressed_bytes(n)].
    """
    count, largest = values.numel(), _LARGEST[compression]
    for begin, end in _segments(count):
        blocks = F.pad(values[begin:end].float(), (0, -(end - begin) % COMPRESSION_BLOCK)).view(-1, COMPRESSION_BLOCK)
        scales = blocks.abs().amax(dim=1) / largest  # nan and inf stay unchanged
        scaled = blocks / torch.where(scales == 0, 1.0, scales).unsqueeze(1)
        scaled = scaled.nan_to_num_(0.0).clamp_(-largest, largest)  # a scale below 2^-126 is not exact
        coded = scaled.round_().to(torch.int8) if compression == "int8" else scaled.to(torch.float8_e4m3fn)
        out[begin:end].copy_(coded.view(torch.uint8).flatten()[: end - begin])
        out[_scales(count, begin, end)].copy_(scales.view(torch.uint8))


def decode(message: Tensor, compression: str, out: Tensor, *, add: bool = False) -> None:
    """Decode a message into ``out``.

    Args:
        message: uint8 [compressed_bytes(n)].
        compression: ``int8`` or ``fp8``.
        out: [n], of any floating type.
        add: Add to ``out`` instead of replacing it.
    """
    count = out.numel()
    kind = torch.int8 if compression == "int8" else torch.float8_e4m3fn
    for begin, end in _segments(count):
        # cloned, as the scales may start at an unaligned byte
        scales = message[_scales(count, begin, end)].clone().view(torch.float32)
        values = message[begin:end].view(kind).float()
        values *= scales.repeat_interleave(COMPRESSION_BLOCK)[: end - begin]
        if add:
            out[begin:end].add_(values)
        else:
            out[begin:end].copy_(values)


def _segments(count: int) -> Iterator[tuple[int, int]]:
    """Yield the begin and end of each slice of at most ``SEGMENT`` elements."""
    for begin in range(0, count, SEGMENT):
        yield begin, min(begin + SEGMENT, count)


def _scales(count: int, begin: int, end: int) -> slice:
    """Return the byte range of the scales of elements ``begin`` to ``end`` in a message of ``count`` elements.

    ``begin`` must be at the start of a block.
    """
    return slice(count + 4 * (begin // COMPRESSION_BLOCK), count + 4 * -(-end // COMPRESSION_BLOCK))


class Scratch:
    """Message buffer of one lane. Operations of a lane run one after another, so one buffer serves them all."""

    def __init__(self, device: torch.device) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8, device=device)

    @property
    def nbytes(self) -> int:
        return self._buffer.nbytes

    def take(self, elements: Sequence[int], compression: str) -> list[Tensor]:
        """Return a uint8 buffer for each message of that number of ``elements``, one behind the other.

        They are valid until the next call.
        """
        return self.buffers([compressed_bytes(count) for count in elements])

    def buffers(self, sizes: Sequence[int]) -> list[Tensor]:
        """Return a uint8 buffer for each of the given ``sizes`` in bytes, one behind the other.

        They are valid until the next call.
        """
        if self._buffer.numel() < sum(sizes):
            self._buffer = torch.empty(sum(sizes), dtype=torch.uint8, device=self._buffer.device)
        return list(self._buffer[: sum(sizes)].split(sizes))


class ThreadBuffers(threading.local):
    """Temporary CPU buffers of each thread, reused by name.

    On a CPU, newly allocated memory costs more time than the coding done in it.
    """

    def __init__(self) -> None:
        self._of = dict[tuple[str, torch.dtype], Tensor]()

    def take(self, name: str, count: int, dtype: torch.dtype, device: torch.device = CPU) -> Tensor:
        """Return an uninitialised tensor of ``count`` elements.

        On a CPU it is part of a reused buffer: the next call in this thread with the same name and dtype may return the
        same memory. On a GPU it is newly allocated."""
        if device.type != "cpu":  # torch's GPU allocator already reuses memory
            return torch.empty(count, dtype=dtype, device=device)
        held = self._of.get((name, dtype))
        if held is None or held.numel() < count:
            held = self._of[name, dtype] = torch.empty(count, dtype=dtype)
        return held[:count]


class Sent:
    """Counter of the bytes that were sent with lossless coding, and of the bytes of the same numbers without coding."""

    def __init__(self) -> None:
        self.coded_bytes, self.plain_bytes = 0, 0
        self._asked = (0, 0)

    def add(self, coded: int, plain: int) -> None:
        self.coded_bytes += coded
        self.plain_bytes += plain

    def share(self) -> float | None:
        """Return coded bytes divided by plain bytes since the last call, or None if nothing was sent since then."""
        before, self._asked = self._asked, (self.coded_bytes, self.plain_bytes)
        coded, plain = (now - then for now, then in zip(self._asked, before, strict=True))
        return coded / plain if plain else None
