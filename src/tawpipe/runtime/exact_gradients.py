"""Gradients, coded without loss: their exponents in 4 bits, and nothing of the zeros that sums of few numbers end in.

Exponents of gradients lie near one another, and a sum of few bf16 numbers in fp32 ends in zeros. So a message gives
every element its sign with its leading digits in one, two or three bytes, and in 4 bits its exponent: one of 14 that
follow each other, or none, which is zero. What that does not say comes whole in a list behind. Where this is not
shorter, all do. So the length of a message is known only when it is made, and depends on nothing else.

Nearly all is done with bytes, by numpy, whose operations on these take less than torch's.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tawpipe.schedule.spec import CODED_HEADER

Array = NDArray[np.generic]
ESCAPE = 15
"""The code of an exponent whose element is in the list."""
WINDOW = 14
SLICE = 1 << 18
"""Elements that are worked on at one time: what a core's caches hold."""
SAMPLE = 1 << 11
"""Elements by which the form of a message is chosen."""
_BITS = {2: torch.int16, 4: torch.int32}


def encode_gradient(values: Tensor, out: Tensor) -> int:
    """Write a message; how many bytes of ``out`` it has.

    Args:
        values: bf16 or fp32 [n], on a CPU.
        out: uint8 [coded_room(n, bytes of an element)].
    """
    count, width, message = values.numel(), values.itemsize, out.numpy()
    bits = values.view(_BITS[width]).numpy()
    kept, lowest = _form(bits)
    begin = _list_begins(count, kept)
    if begin >= CODED_HEADER + count * width:  # of very few
        kept = 0
    codes, planes, rest = _parts(message, count, kept)
    room, used = rest[: rest.size // width * width].view(bits.dtype), 0
    for at in range(0, count, SLICE) if kept else ():
        given, half = bits[at : at + SLICE], (min(SLICE, count - at) + 1) // 2
        code, bytes_of = _codes(given, lowest, kept)
        far = np.flatnonzero(code == ESCAPE)
        if begin + (used + far.size) * width >= CODED_HEADER + count * width:
            kept = 0
            break
        np.take(given, far, out=room[used : used + far.size])
        used += far.size
        packed = codes[at // 2 : at // 2 + half]
        np.copyto(packed, code[:half])
        packed[: code.size - half] |= code[half:] * np.uint8(16)
        for plane, some in zip(planes, bytes_of, strict=True):
            plane[at : at + SLICE] = some
    message[:CODED_HEADER].view(np.int32)[:] = kept, lowest
    if kept:
        return begin + used * width
    message[CODED_HEADER : CODED_HEADER + count * width].view(bits.dtype)[:] = bits
    return CODED_HEADER + count * width


def decode_gradient(message: Tensor, out: Tensor) -> None:
    """Read a message into ``out``, bf16 or fp32 [n].

    Args:
        message: of ``encode_gradient``; what is behind it is not looked at.
    """
    count, width = out.numel(), out.itemsize
    bits, whole = out.view(_BITS[width]).numpy(), message.numpy()
    kept, lowest = whole[:CODED_HEADER].view(np.int32).tolist()
    codes, planes, rest = _parts(whole, count, kept)
    room, taken = rest[: rest.size // width * width].view(bits.dtype), 0
    if not kept:
        bits[:] = room[:count]
        return
    for at in range(0, count, SLICE):
        target, half = bits[at : at + SLICE], (min(SLICE, count - at) + 1) // 2
        packed = codes[at // 2 : at // 2 + half]
        code = np.concatenate((packed & 15, packed >> 4))[: target.size]
        first, *more = (plane[at : at + SLICE] for plane in planes)
        exponent = (code + np.uint8(lowest - 1)) * (code != 0)
        top = exponent.astype(np.int16)
        top <<= 7
        top |= first & 0x7F
        sign = first.astype(np.int16)
        sign &= 0x80
        sign <<= 8
        top |= sign
        raised = top.astype(bits.dtype)
        for plane in more:
            raised <<= 8
            raised |= plane.astype(bits.dtype)
        np.left_shift(raised, 8 * (width - 1 - kept), out=target)
        far = np.flatnonzero(code == ESCAPE)
        target[far] = room[taken : taken + far.size]
        taken += far.size


def _form(bits: Array) -> tuple[int, int]:
    """How many bytes of an element's sign and digits are said, 0 where it comes whole; and the lowest exponent of the
    window. By a sample.
    """
    some, width = np.ascontiguousarray(bits[:: bits.size // SAMPLE | 1]), bits.itemsize
    exponents = (some >> (8 * width - 9)).astype(np.uint8)
    often = np.cumsum(np.bincount(exponents, minlength=256))
    lowest = 1 + int((often[WINDOW:] - often[:-WINDOW]).argmax())
    far, best, fewest = _codes(some, lowest, width - 1)[0] == ESCAPE, 0, 8.0 * width
    for kept in range(1, width):
        dropped = some & ((1 << 8 * (width - 1 - kept)) - 1)
        size = 4 + 8 * kept + 8 * width * np.count_nonzero(far | (dropped != 0)) / some.size
        if size < fewest:
            best, fewest = kept, size
    return best, lowest


def _codes(bits: Array, lowest: int, kept: int) -> tuple[NDArray[np.uint8], list[NDArray[np.uint8]]]:
    """Codes of exponents, uint8 [n]; and the bytes that are said of every element, sign and leading digits first."""
    width = bits.itemsize
    top = bits if width == 2 else (bits >> 16).astype(np.int16)
    high, low = (top >> 8).astype(np.uint8), top.astype(np.uint8)
    exponent = high + high
    exponent |= low >> 7
    code = exponent - np.uint8(lowest)  # what is below the lowest becomes large
    torch.from_numpy(code).clamp_max_(WINDOW)  # numpy's takes ten times as long
    code += np.uint8(1)
    code *= exponent != 0
    if dropped := width - 1 - kept:
        rest = bits.astype(np.int16 if dropped == 2 else np.uint8)
        code |= (rest != 0) * np.uint8(ESCAPE)
    high &= 0x80
    low &= 0x7F
    low |= high
    return code, [low, *((bits >> (8 * (width - place))).astype(np.uint8) for place in range(3, kept + 2))]


def _parts(message: NDArray[np.uint8], count: int, kept: int) -> tuple[Array, list[NDArray[np.uint8]], Array]:
    """Codes, planes of bytes and what is behind them; each begins at a multiple of four bytes."""
    codes, end = message[CODED_HEADER:][: (count + 1) // 2], _list_begins(count, kept)
    begins = (end - place * _aligned(count) for place in range(kept, 0, -1))
    return codes, [message[begin : begin + count] for begin in begins], message[end:]


def _list_begins(count: int, kept: int) -> int:
    """Bytes before the list of a message."""
    return CODED_HEADER + (_aligned((count + 1) // 2) + kept * _aligned(count) if kept else 0)


def _aligned(size: int) -> int:
    return -(-size // 4) * 4
