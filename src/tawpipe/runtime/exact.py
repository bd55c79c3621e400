"""Changes of bf16 weights, coded without loss: what turns the bits of a copy into those of its owner.

bf16 numbers in their order are consecutive integers (minus zero is one, plus zero the next), and an update moves most
of them by a few. A change is the difference of these integers in 2, 4 or 8 bits, of which one value means: the new 16
bits are in a list behind the codes. Integers wrap at 16 bits, so that any bits, those of no number included, become any
others. Lengths of messages depend on numbers that all members know before one is made, and on a GPU shapes on nothing
else: nothing waits for what is in a message.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

NOTHING, WHOLE = 0, 16
"""Bits of an element: of weights that have not changed; of weights that come as they are."""
CODED = (2, 4, 8)
ABSENT = 1 << 40
"""In a place of ``changes`` of weights whose copy is not there: more than any count."""
CPU_SLICE, GPU_SLICE = 1 << 16, 1 << 22
"""Elements that are worked on at one time: what a core's cache holds, and what keeps temporary copies small."""
_HASH = (1 << 31) - 1


class ChangeForm(NamedTuple):
    """How the change of a stripe travels.

    Args:
        bits: of an element.
        exceptions: room for so many new values behind the codes.
    """

    bits: int
    exceptions: int = 0

    def message_bytes(self, elements: int) -> int:
        """Bytes of a message, an even number.

        >>> [ChangeForm(bits, 10).message_bytes(1000) for bits in (NOTHING, 4, WHOLE)]
        [0, 522, 2000]
        """
        if self.bits in (NOTHING, WHOLE):
            return elements * self.bits // 8
        return self._code_bytes(elements) + (2 * (1 + self.exceptions) if self.exceptions else 0)

    def _code_bytes(self, elements: int) -> int:
        return -(-elements * self.bits // 16) * 2

    def parts(self, message: Tensor, elements: int) -> tuple[Tensor, Tensor]:
        """Codes (uint8) and exceptions (int16) of a message; the first exception is a place for what is none."""
        codes = self._code_bytes(elements)
        return message[:codes], message[codes:].view(torch.int16)


def best_form(counts: Sequence[int], elements: int) -> ChangeForm:
    """The form with the fewest bytes for a stripe of so many elements.

    >>> best_form([0, 0, 0, 0], 1000), best_form([900, 300, 9, 0], 1000), best_form([1000] * 4, 1000)
    (ChangeForm(bits=0, exceptions=0), ChangeForm(bits=4, exceptions=9), ChangeForm(bits=16, exceptions=0))

    Args:
        counts: of ``changes``, the most of all members.
    """
    changed, *beyond = counts
    if not changed:
        return ChangeForm(NOTHING)
    forms = [ChangeForm(WHOLE), *(ChangeForm(bits, count) for bits, count in zip(CODED, beyond, strict=True))]
    return min(forms, key=lambda form: form.message_bytes(elements))


def changes(home: Tensor, copy: Tensor) -> Tensor:
    """How many elements of a stripe have changed, and how many of these changes do not fit in each of ``CODED``.

    Args:
        home, copy: bf16 [n].

    Returns:
        int64 [4].
    """
    counts = torch.zeros(1 + len(CODED), dtype=torch.int64, device=home.device)
    for new, old in _slices(home, copy):
        moved = _ordered(new).sub_(_ordered(old))
        for place, most in enumerate((0, *map(_most, CODED))):
            counts[place] += torch.count_nonzero(moved.clamp(-most, most) != moved if most else moved)
    return counts


def encode_change(home: Tensor, copy: Tensor, form: ChangeForm, out: Tensor) -> None:
    """Write the message that turns ``copy`` into ``home``.

    Args:
        home, copy: bf16 [n].
        form: one of ``CODED``, with room for all exceptions.
        out: uint8 [form.message_bytes(n)].
    """
    most, codes, exceptions = _most(form.bits), *form.parts(out, home.numel())
    per_byte, begin, listed = 8 // form.bits, 0, _Exceptions(exceptions)
    for new, old in _slices(home, copy):
        moved = _ordered(new).sub_(_ordered(old))
        small = moved.clamp(-most, most)
        if form.exceptions:
            far = small != moved
            small.masked_fill_(far, most + 1)
            listed.append(new, far)
        end = begin + -(-new.numel() // per_byte)
        packed = codes[begin:end]
        whole = torch.zeros(packed.numel() * per_byte, dtype=torch.uint8, device=home.device)
        whole[: new.numel()] = small.add_(most)
        parts = whole.view(per_byte, -1)  # a byte's codes lie a part of a slice from each other
        packed.copy_(parts[0])
        for place in range(1, per_byte):
            packed.bitwise_or_(parts[place] << place * form.bits)
        begin = end


def decode_change(message: Tensor, form: ChangeForm, copy: Tensor) -> None:
    """Turn ``copy`` (bf16 [n]) into what a message was made of."""
    most, codes, exceptions = _most(form.bits), *form.parts(message, copy.numel())
    per_byte, begin, listed = 8 // form.bits, 0, _Exceptions(exceptions)
    for (old,) in _slices(copy):
        end = begin + -(-old.numel() // per_byte)
        packed, last = codes[begin:end], (1 << form.bits) - 1
        parts = [(packed >> place * form.bits).bitwise_and_(last) for place in range(per_byte)]
        code = (torch.cat(parts) if per_byte > 1 else packed)[: old.numel()]
        new = _ordered(_ordered(old).add_(code).sub_(most))
        old.copy_(listed.take(new, code == last) if form.exceptions else new)
        begin = end


class _Exceptions:
    """The exceptions of a message, slice by slice."""

    def __init__(self, values: Tensor) -> None:
        self._values, self._counts = values, _waits_for_nobody(values)
        self._count: Any = 0

    def append(self, new: Tensor, far: Tensor) -> None:
        """Write those of ``new`` that are far behind what is there."""
        if self._counts:
            some = new[far]
            self._values[self._next(some.numel())] = some
        else:
            self._values.scatter_(0, self._places(far).mul_(far).long(), new)

    def take(self, new: Tensor, far: Tensor) -> Tensor:
        """``new`` with the next of them where they are far."""
        if self._counts:
            places = far.nonzero()[:, 0]
            return new.index_copy_(0, places, self._values[self._next(places.numel())])
        places = self._places(far).clamp_(max=self._values.numel() - 1)
        return torch.where(far, self._values.index_select(0, places), new)

    def _next(self, count: int) -> slice:
        begin, self._count = 1 + self._count, self._count + count
        return slice(begin, begin + count)

    def _places(self, far: Tensor) -> Tensor:
        places = far.cumsum(0, dtype=torch.int32).add_(self._count)
        self._count = places[-1].clone()
        return places


def _waits_for_nobody(values: Tensor) -> bool:
    """True where shapes may depend on numbers: whoever works there has them."""
    return values.device.type == "cpu"


def checksum(copy: Tensor) -> Tensor:
    """A number below 2^31 that no single element (bf16 [n]) changes without; int64, on its device."""
    total = torch.zeros((), dtype=torch.int64, device=copy.device)
    odd = torch.arange(_slice(copy), device=copy.device).mul_(2 * 0x9E3779B1).add_(0x85EBCA6B).bitwise_and_(_HASH)
    for (bits,) in _slices(copy):
        total = (total * 31 + (bits.long() * odd[: bits.numel()]).sum()).bitwise_and_(_HASH)
    return total


def _most(bits: int) -> int:
    """The largest difference that a code of so many bits says."""
    return (1 << bits - 1) - 1


def _ordered(bits: Tensor) -> Tensor:
    """Bits of bf16 as integers in the order of the numbers, or back; int16, a new tensor."""
    return (bits >> 15).bitwise_and_(0x7FFF).bitwise_xor_(bits)


def _slice(values: Tensor) -> int:
    return CPU_SLICE if values.device.type == "cpu" else GPU_SLICE


def _slices(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The bits (int16) of tensors of one length, slice by slice."""
    size = _slice(tensors[0])
    return zip(*(tensor.view(torch.int16).split(size) for tensor in tensors), strict=True)
