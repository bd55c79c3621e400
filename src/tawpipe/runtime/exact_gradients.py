"""Gradients, coded without loss: their exponents in 4 bits, and nothing of the zeros that sums of few numbers end in.

Exponents of gradients lie near one another, and a sum of few bf16 numbers in fp32 ends in zeros. So a message gives
every element its sign with its leading digits in one, two or three bytes, and in 4 bits its exponent: one of 14 that
follow each other, or none, which is zero. What that does not say comes whole in a list behind. Where this is not
shorter, all do. So the length of a message is known only when it is made, and depends on nothing else.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tawpipe.schedule.spec import CODED_HEADER

ESCAPE = 15
"""The code of an exponent whose element is in the list."""
WINDOW = 14
SLICE = 1 << 16
"""Elements that are worked on at one time: what a core's cache holds."""
SAMPLE = 1 << 12
"""Elements by which the form of a message is chosen."""
_BITS = {2: torch.int16, 4: torch.int32}


def encode_gradient(values: Tensor, out: Tensor) -> int:
    """Write a message; how many bytes of ``out`` it has.

    Args:
        values: bf16 or fp32 [n], on a CPU.
        out: uint8 [coded_room(n, bytes of an element)].
    """
    count, width = values.numel(), values.itemsize
    kept, lowest = _form(values)
    if _list_begins(count, kept) >= CODED_HEADER + count * width:  # of very few
        kept = 0
    exceptions, at = list[Tensor](), 0
    codes, planes, rest = _parts(out, count, kept)
    for given in values.split(SLICE) if kept else ():
        end, raw = at + given.numel(), given.view(torch.uint8).view(-1, width)
        code, signed = _codes(given, lowest, kept)
        exceptions.append(given.view(_BITS[width])[code == ESCAPE])
        half = (given.numel() + 1) // 2
        packed = codes[at // 2 : at // 2 + half]
        packed.copy_(code[:half])
        packed[: given.numel() - half].bitwise_or_(code[half:] << 4)
        planes[0][at:end] = signed
        for place, plane in enumerate(planes[1:], 3):
            plane[at:end] = raw[:, width - place]
        at = end
    size = sum(part.numel() for part in exceptions) * width
    if not kept or _list_begins(count, kept) + size >= CODED_HEADER + count * width:
        kept, size = 0, count * width
        rest = out[CODED_HEADER:]
        exceptions = [values.view(_BITS[width])]
    rest[:size].view(_BITS[width]).copy_(torch.cat(exceptions))
    out[:CODED_HEADER].view(torch.int32).copy_(torch.tensor([kept, lowest]))
    return _list_begins(count, kept) + size


def decode_gradient(message: Tensor, out: Tensor) -> None:
    """Read a message into ``out``, bf16 or fp32 [n].

    Args:
        message: of ``encode_gradient``; what is behind it is not looked at.
    """
    count, width = out.numel(), out.itemsize
    kept, lowest = message[:CODED_HEADER].view(torch.int32).tolist()
    codes, planes, rest = _parts(message, count, kept)
    if not kept:
        out.view(torch.uint8).copy_(rest[: count * width])
        return
    exceptions, at = rest[: rest.numel() // width * width].view(_BITS[width]), 0
    taken = 0
    for target in out.split(SLICE):
        end, raw = at + target.numel(), target.view(torch.uint8).view(-1, width)
        packed = codes[at // 2 : at // 2 + (target.numel() + 1) // 2]
        code = torch.cat((packed & 15, packed >> 4))[: target.numel()]
        turned = torch.empty(target.numel(), 2, dtype=torch.uint8)
        turned[:, 0] = planes[0][at:end]
        turned[:, 1] = (code + (lowest - 1)).masked_fill_(code == 0, 0)
        halves, top = target.view(torch.int16).view(-1, width // 2), turned.view(torch.int16)[:, 0]
        if width == 4:
            halves[:, 0] = 0
        halves[:, -1] = (top >> 1).bitwise_and_(0x7FFF).bitwise_or_(top << 15)
        for place, plane in enumerate(planes[1:], 3):
            raw[:, width - place] = plane[at:end]
        far = (code == ESCAPE).nonzero()[:, 0]
        target.view(_BITS[width]).index_copy_(0, far, exceptions[taken : taken + far.numel()])
        taken, at = taken + far.numel(), end


def _form(values: Tensor) -> tuple[int, int]:
    """How many bytes of an element's sign and digits are said, 0 where it comes whole; and the lowest exponent of the
    window. By a sample.
    """
    some, width = values[:: values.numel() // SAMPLE | 1].contiguous(), values.itemsize
    exponents = (some.view(torch.int16).view(-1, width // 2)[:, -1] >> 7).bitwise_and_(0xFF)
    often = torch.bincount(exponents.long(), minlength=256)[1:]
    lowest = 1 + int(often.unfold(0, WINDOW, 1).sum(1).argmax())
    best, fewest = 0, 8.0 * width
    for kept in range(1, width):
        far = (_codes(some, lowest, kept)[0] == ESCAPE).double().mean().item()
        bits = 4 + 8 * kept + 8 * width * far
        if bits < fewest:
            best, fewest = kept, bits
    return best, lowest


def _codes(values: Tensor, lowest: int, kept: int) -> tuple[Tensor, Tensor]:
    """Codes of exponents; and sign and leading digits, in the last bit and the seven before it; uint8 [n]."""
    width = values.itemsize
    halves = values.view(torch.int16).view(-1, width // 2)
    top = halves[:, -1]
    turned = (top << 1).sub_(top >> 15).view(torch.uint8).view(-1, 2)  # the sign goes behind the digits
    exponent = turned[:, 1]
    code = (exponent - (lowest - 1)).clamp_(max=ESCAPE)  # what is below the lowest has become large
    code.masked_fill_(code == 0, ESCAPE).masked_fill_(exponent == 0, 0)
    if dropped := width - 1 - kept:
        low = halves[:, 0] if dropped == 2 else values.view(torch.uint8).view(-1, width)[:, 0]
        code.masked_fill_(low != 0, ESCAPE)
    return code, turned[:, 0]


def _parts(message: Tensor, count: int, kept: int) -> tuple[Tensor, list[Tensor], Tensor]:
    """Codes, planes of bytes and what is behind them; each begins at a multiple of four bytes."""
    codes, end = message[CODED_HEADER:][: (count + 1) // 2], _list_begins(count, kept)
    planes = message[end - kept * _aligned(count) : end].split(_aligned(count)) if kept else ()
    return codes, [plane[:count] for plane in planes], message[end:]


def _list_begins(count: int, kept: int) -> int:
    """Bytes before the list of a message."""
    return CODED_HEADER + (_aligned((count + 1) // 2) + kept * _aligned(count) if kept else 0)


def _aligned(size: int) -> int:
    return -(-size // 4) * 4
