"""Lossless coding of gradients: exponents in 4 bits, and no bytes for trailing zeros of sums of few numbers.

Exponents of gradients lie close together, and a sum of few bf16 numbers in fp32 ends in zeros. So a message holds for
every element its sign and leading mantissa digits in one, two or three bytes, and its exponent in 4 bits: one of 14
consecutive exponents, or zero. Elements that do not fit follow whole, in a list. If this is not shorter, all elements
are sent whole. The length of a message is known only after coding, and depends on nothing but its values.

Most of the work is done on bytes with numpy, whose operations on bytes take less time than torch's.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tawpipe.runtime.transport.compression import ThreadBuffers
from tawpipe.schedule.spec import CODED_HEADER

Bytes = NDArray[np.uint8]
Array = NDArray[np.integer[Any]]
ESCAPE = 15
"""Exponent code of an element that is in the list."""
WINDOW = 14
SEGMENT = 1 << 18
"""Elements coded at one time: they fit in the caches of a CPU core."""
SAMPLE = 1 << 11
"""Elements sampled to choose the form of a message."""
_BUFFERS = ThreadBuffers()
_BITS = {2: torch.int16, 4: torch.int32}


def encode_gradient(values: Tensor, out: Tensor) -> int:
    """Code ``values`` into ``out``, and return the number of bytes of the message.

    Args:
        values: bf16 or fp32 [n], on a CPU.
        out: uint8 [coded_room(n, bytes of an element)].
    """
    count, width, message = values.numel(), values.itemsize, out.numpy()
    bits = values.view(_BITS[width]).numpy()
    kept, lowest = _form(bits)
    begin = _list_begins(count, kept)
    if begin >= CODED_HEADER + count * width:  # too few values: coding would not make them smaller
        kept = 0
    codes, planes, rest = _parts(message, count, kept)
    escaped, used = rest[: rest.size // width * width].view(bits.dtype), 0
    for at in range(0, count, SEGMENT) if kept else ():
        portion, half = bits[at : at + SEGMENT], (min(SEGMENT, count - at) + 1) // 2
        code, bytes_of = _codes(portion, lowest, kept)
        far = np.flatnonzero(np.equal(code, ESCAPE, out=_buffer("mask", code.size, torch.bool)))
        if begin + (used + far.size) * width >= CODED_HEADER + count * width:
            kept = 0
            break
        np.take(portion, far, out=escaped[used : used + far.size])
        used += far.size
        packed = codes[at // 2 : at // 2 + half]
        np.copyto(packed, code[:half])
        last = code[half:]
        last *= np.uint8(16)
        packed[: last.size] |= last
        for plane, some in zip(planes, bytes_of, strict=True):
            plane[at : at + SEGMENT] = some
    message[:CODED_HEADER].view(np.int32)[:] = kept, lowest
    if kept:
        return begin + used * width
    message[CODED_HEADER : CODED_HEADER + count * width].view(bits.dtype)[:] = bits
    return CODED_HEADER + count * width


def decode_gradient(message: Tensor, out: Tensor) -> None:
    """Decode a message into ``out``, bf16 or fp32 [n].

    Args:
        message: Written by ``encode_gradient``. Bytes behind its end are ignored.
        out: Tensor with the sender's dtype and number of elements.
    """
    count, width = out.numel(), out.itemsize
    bits, whole = out.view(_BITS[width]).numpy(), message.numpy()
    kept, lowest = whole[:CODED_HEADER].view(np.int32).tolist()
    codes, planes, rest = _parts(whole, count, kept)
    escaped, taken = rest[: rest.size // width * width].view(bits.dtype), 0
    if not kept:
        bits[:] = escaped[:count]
        return
    for at in range(0, count, SEGMENT):
        target, half = bits[at : at + SEGMENT], (min(SEGMENT, count - at) + 1) // 2
        packed = codes[at // 2 : at // 2 + half]
        code = _buffer("code", 2 * half)
        np.bitwise_and(packed, 15, out=code[:half])
        np.right_shift(packed, 4, out=code[half:])
        code = code[: target.size]
        first, *more = (plane[at : at + SEGMENT] for plane in planes)
        exponent, mask = _buffer("exponent", code.size), _buffer("mask", code.size, torch.bool)
        np.add(code, np.uint8(lowest - 1), out=exponent)
        exponent *= np.not_equal(code, 0, out=mask)
        top, some = _buffer("top", code.size, torch.int16), _buffer("some", code.size, torch.int16)
        digits = _buffer("digits", code.size)
        np.left_shift(_into(top, exponent), 7, out=top)
        top |= np.bitwise_and(first, 0x7F, out=digits)
        np.left_shift(_into(some, np.bitwise_and(first, 0x80, out=digits)), 8, out=some)
        top |= some
        _into(target, top)
        wide = _buffer("wide", code.size, _BITS[width])
        for plane in more:
            target <<= 8
            target |= _into(wide, plane)
        target <<= 8 * (width - 1 - kept)
        far = np.flatnonzero(np.equal(code, ESCAPE, out=mask))
        target[far] = escaped[taken : taken + far.size]
        taken += far.size


def _form(bits: Array) -> tuple[int, int]:
    """Choose the form of a message from a sample of its elements.

    Args:
        bits: Elements as integers of the same width.

    Returns:
        Number of bytes kept for sign and mantissa of each element, 0 to send elements whole; and the lowest exponent of
        the window of 14.
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


def _codes(bits: Array, lowest: int, kept: int) -> tuple[Bytes, list[Bytes]]:
    """Return the exponent codes, uint8 [n], and the kept bytes of every element, sign and leading digits first.

    Args:
        bits: Elements as integers.
        lowest: Lowest exponent of the window.
        kept: Bytes kept for sign and mantissa.
    """
    width, count = bits.itemsize, bits.size
    top = bits if width == 2 else _into(_buffer("top", count, torch.int16), _shifted(bits, 16))
    high, low = _into(_buffer("high", count), _shifted(top, 8)), _into(_buffer("low", count), top)
    exponent, code, mask = _buffer("exponent", count), _buffer("code", count), _buffer("mask", count, torch.bool)
    np.add(high, high, out=exponent)
    exponent |= np.right_shift(low, 7, out=code)
    np.subtract(exponent, np.uint8(lowest), out=code)  # uint8 wraps: exponents below the window become large
    torch.from_numpy(code).clamp_max_(WINDOW)  # numpy's clip takes ten times as long
    code += np.uint8(1)
    code *= np.not_equal(exponent, 0, out=mask)
    if dropped := width - 1 - kept:
        rest = _into(_buffer("rest", count, torch.int16 if dropped == 2 else torch.uint8), bits)
        np.multiply(np.not_equal(rest, 0, out=mask), np.uint8(ESCAPE), out=exponent)
        code |= exponent
    high &= 0x80
    low &= 0x7F
    low |= high
    more = (_into(_buffer(f"byte {place}", count), _shifted(bits, 8 * (width - place))) for place in range(3, kept + 2))
    return code, [low, *more]


def _shifted(bits: Array, places: int) -> Array:
    """Return ``bits`` shifted right by ``places`` bits, in a buffer valid until the next call with this dtype."""
    out = _buffer("shifted", bits.size, torch.int16 if bits.itemsize == 2 else torch.int32)
    return np.right_shift(bits, places, out=out)


def _into(out: Any, values: Array) -> Any:
    """Copy ``values`` into ``out``, keep only the low bits that its dtype holds, and return ``out``."""
    np.copyto(out, values, casting="unsafe")
    return out


def _buffer(name: str, count: int, dtype: torch.dtype = torch.uint8) -> Any:
    """Return a reused numpy array of ``count`` elements, valid until the next call with this name."""
    return _BUFFERS.take(name, count, dtype).numpy()


def _parts(message: Bytes, count: int, kept: int) -> tuple[Bytes, list[Bytes], Bytes]:
    """Return views of a message: exponent codes, one plane for each kept byte, and the list behind them.

    Each view starts at a multiple of four bytes.
    """
    codes, end = message[CODED_HEADER:][: (count + 1) // 2], _list_begins(count, kept)
    begins = (end - place * _aligned(count) for place in range(kept, 0, -1))
    return codes, [message[begin : begin + count] for begin in begins], message[end:]


def _list_begins(count: int, kept: int) -> int:
    """Return the offset in bytes of the list in a message of ``count`` elements with ``kept`` bytes each."""
    return CODED_HEADER + (_aligned((count + 1) // 2) + kept * _aligned(count) if kept else 0)


def _aligned(size: int) -> int:
    return -(-size // 4) * 4
