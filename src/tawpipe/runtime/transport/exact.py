"""Lossless coding of changes of bf16 weights: a message turns the bits of a copy into the bits of its owner's weights.

A change is the difference of the 16 bits of two numbers, as integers that wrap around. So any bit pattern can become
any other, also patterns that are no numbers. An update changes most weights by a few units. Each difference is a code
of 2, 4 or 8 bits. One code value means that the difference is in a list behind the codes, where it has 8 bits. One
value in that list means that the difference is in a last list, in 16 bits. The length of a message depends only on
numbers that all members know before it is made. On a GPU the shapes depend on nothing else, so the host never waits for
the content of a message.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tawpipe.runtime.transport.compression import ThreadBuffers

NOTHING, WHOLE = 0, 16
"""Bits per element of weights that have not changed, and of weights that are sent whole."""
CODED = (2, 4, 8)
ABSENT = 1 << 40
"""Count in ``changes`` of weights whose copy does not exist yet: more than any real count."""
CPU_SEGMENT, GPU_SEGMENT = 1 << 18, 1 << 22
"""Elements coded at one time.

Large enough that the calls cost little, small enough for a CPU core's caches and for small temporary copies on a GPU.
"""
_HASH = (1 << 31) - 1
_BUFFERS = ThreadBuffers()
_FIRST = -0x8000
"""Smallest int16. Differences plus this offset can be compared as if they were unsigned."""


class ChangeForm(NamedTuple):
    """Form in which the change of a shard is sent.

    Args:
        bits: Bits of each code: one of ``CODED``, ``NOTHING`` or ``WHOLE``.
        listed: Number of 8-bit entries for differences that do not fit in a code; 0 with codes of 8 bits.
        whole: Number of 16-bit entries for differences that do not fit in 8 bits.
    """

    bits: int
    listed: int = 0
    whole: int = 0

    def message_bytes(self, elements: int) -> int:
        """Return the bytes of a message for ``elements`` elements, an even number.

        >>> [form.message_bytes(1000) for form in (ChangeForm(NOTHING), ChangeForm(4, 10, 2), ChangeForm(WHOLE))]
        [0, 514, 2000]
        """
        if self.bits in (NOTHING, WHOLE):
            return elements * self.bits // 8
        return sum(self._sizes(elements))

    def _sizes(self, elements: int) -> tuple[int, int, int]:
        """Return the bytes of the codes, of the 8-bit list and of the 16-bit list, each even."""
        return -(-elements * self.bits // 16) * 2, (self.listed + 1) // 2 * 2, 2 * self.whole

    def parts(self, message: Tensor, elements: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return views of the codes (uint8), the 8-bit list (uint8) and the 16-bit list (int16) of a message."""
        codes, listed, whole = message.split(self._sizes(elements))
        return codes, listed[: self.listed], whole.view(torch.int16)


def best_form(counts: Sequence[int], elements: int) -> ChangeForm:
    """Return the form with the fewest bytes for a shard of ``elements`` elements.

    >>> best_form([0, 0, 0, 0], 1000).bits, best_form([900, 300, 9, 0], 1000), best_form([1000] * 4, 1000).bits
    (0, ChangeForm(bits=4, listed=9, whole=0), 16)

    Args:
        counts: Result of ``changes``, with the largest value of all members.
        elements: Number of elements of the shard.
    """
    changed, *beyond, far = counts
    if not changed:
        return ChangeForm(NOTHING)
    forms = [ChangeForm(WHOLE), ChangeForm(8, 0, far)]
    forms += [ChangeForm(bits, count, far) for bits, count in zip(CODED, beyond, strict=False)]
    return min(forms, key=lambda form: form.message_bytes(elements))


def changes(home: Tensor, copy: Tensor) -> Tensor:
    """Count the elements of ``home`` that differ from ``copy``, and the differences too large for codes of each width.

    Args:
        home, copy: bf16 [n]: weights of a shard, and this rank's older copy of them.

    Returns:
        int64 [4]: differing elements, then the differences that do not fit in 2, 4 and 8 bits.
    """
    counts: list[Any] = [0] * (1 + len(CODED))
    for new, old in _segments(home, copy):
        moved = _moved(new, old)
        sizes, mask = moved.numpy() if _waits_for_nobody(home) else None, _buffer("mask", moved, torch.bool)
        if sizes is not None:
            sizes = np.abs(sizes, out=sizes).view(np.uint16)
        for place, most in enumerate((0, *map(_most, CODED))):
            if sizes is None:
                counts[place] += torch.count_nonzero(moved + (_FIRST + most) > _FIRST + 2 * most)
            else:
                counts[place] += int(np.count_nonzero(np.greater(sizes, most, out=mask.numpy())))
    return torch.tensor(counts) if _waits_for_nobody(home) else torch.stack(counts)


def encode_change(home: Tensor, copy: Tensor, form: ChangeForm, out: Tensor) -> None:
    """Write into ``out`` the message that turns ``copy`` into ``home``.

    Args:
        home, copy: bf16 [n].
        form: Form with ``bits`` in ``CODED``, and enough list entries for all differences that do not fit.
        out: uint8 [form.message_bytes(n)].
    """
    listed, begin = _lists(form, out, home.numel()), 0
    for new, old in _segments(home, copy):
        moved, end = _moved(new, old), begin + -(-new.numel() * form.bits // 8)
        listed.append(moved, _write(moved, form.bits, out[begin:end]))
        begin = end
    listed.finish()


def decode_change(message: Tensor, form: ChangeForm, copy: Tensor) -> None:
    """Apply a message of ``encode_change`` to ``copy`` (bf16 [n]), in place: it becomes the sender's weights."""
    listed, begin = _lists(form, message, copy.numel()), 0
    for (old,) in _segments(copy):
        end = begin + -(-old.numel() * form.bits // 8)
        _read(message[begin:end], form.bits, listed, old)
        begin = end


def _lists(form: ChangeForm, message: Tensor, elements: int) -> _Counted | _Placed:
    """Return the object that reads and writes the lists of large differences, which follow the codes in a message.

    It is a ``_Counted`` if the message is on a CPU, a ``_Placed`` on a GPU. If the form has 8-bit entries, it is the
    8-bit list and contains the 16-bit list. Otherwise it is the 16-bit list."""
    _, listed, whole = form.parts(message, elements)
    if _waits_for_nobody(message):
        return _Counted(listed, _Counted(whole)) if form.listed else _Counted(whole)
    return _Placed(listed, _Placed(whole)) if form.listed else _Placed(whole)


def _write(moved: Tensor, bits: int, out: Tensor) -> Any:
    """Write differences (int16 [n]) as codes of ``bits`` bits into the bytes ``out``; return which do not fit.

    With m bytes, byte i holds the codes of elements i, i + m, i + 2m and so on. Differences that do not fit are
    returned as indices on a CPU, as a mask on a GPU.
    """
    beyond, each, count = _FIRST + (1 << bits) - 1, out.numel(), moved.numel()
    codes = _BUFFERS.take(f"{bits} bits", 8 // bits * each, torch.int16, moved.device)
    codes[count:] = 0
    code = torch.add(moved, _FIRST + _most(bits), out=codes[:count]).clamp_(max=beyond)
    far = _equal(code, beyond)
    *parts, packed = codes.split(each)
    for part in reversed(parts):
        packed = part.add_(packed, alpha=1 << bits)  # _FIRST is 0 in the low byte, which is kept
    out.copy_(packed)
    return far


def _read(packed: Tensor, bits: int, listed: _Counted | _Placed, old: Tensor) -> None:
    """Decode the codes in ``packed`` and add the differences to ``old`` (int16 [n]); long ones are in ``listed``."""
    last, wide = (1 << bits) - 1, _buffer("packed", packed, torch.int16).copy_(packed)
    code = _BUFFERS.take(f"{bits} bits", 8 // bits * wide.numel(), torch.int16, old.device)
    for place, part in enumerate(code.split(wide.numel())):
        _shift(wide, bits * place, part)
    code = code.bitwise_and_(last)[: old.numel()]
    far = _equal(code, last) if listed.capacity else None
    code.sub_(_most(bits))
    old.add_(code if far is None else listed.put(far, code))


class _Counted:
    """List of a message on a CPU, where the number of entries may be read from the data.

    Args:
        values: Entries of the list in the message; int16, or codes of 8 bits.
        then: The 16-bit list behind 8-bit codes.
    """

    def __init__(self, values: Tensor, then: _Counted | None = None) -> None:
        self._values, self._then, self.capacity, self._at = values, then, values.numel(), 0

    def append(self, moved: Tensor, far: Tensor) -> None:
        """Write the differences ``moved`` at the indices ``far`` into the next entries of the list.

        Differences that do not fit in an entry of 8 bits go to the 16-bit list."""
        some, part = moved.index_select(0, far), self._next(far)
        if self._then is None:
            part.copy_(some)
        elif some.numel():
            self._then.append(some, _write(some, 8, part))

    def finish(self) -> None:
        """Do nothing: ``append`` has already written all entries into the message."""

    def put(self, far: Tensor, code: Tensor) -> Tensor:
        """Return ``code`` with the next differences of the list written at the indices ``far``, in place."""
        if not far.numel():
            return code
        some = self._next(far)
        if self._then is not None:
            codes, some = some, torch.zeros(some.numel(), dtype=torch.int16)
            _read(codes, 8, self._then, some)
        return code.index_copy_(0, far, some)

    def _next(self, like: Tensor) -> Tensor:
        """Return the next entries of the list, one for each index in ``like``."""
        begin, self._at = self._at, self._at + like.numel()
        return self._values[begin : self._at]


class _Placed:
    """List of a message like ``_Counted``, but without a host sync, for GPUs: ``far`` is a mask.

    A cumulative sum over the mask gives the position of each entry.

    Args:
        values: Entries of the list in the message; int16, or codes of 8 bits.
        then: The 16-bit list behind 8-bit codes.
    """

    def __init__(self, values: Tensor, then: _Placed | None = None) -> None:
        self._values, self._then, self.capacity = values, then, values.numel()
        self._wide: Tensor | None = None
        self._count: Any = 0

    def append(self, moved: Tensor, far: Tensor) -> None:
        """Collect the differences ``moved`` where the mask ``far`` is True. ``finish`` writes them into the message."""
        if self._wide is None:  # entry 0 receives the differences that are not in the list
            self._wide = torch.zeros(1 + self.capacity, dtype=torch.int16, device=moved.device)
        if self.capacity:
            self._wide.scatter_(0, self._places(far).mul_(far).long(), moved)

    def finish(self) -> None:
        """Write all collected differences into the message; those that do not fit in 8 bits go to the 16-bit list."""
        assert self._wide is not None
        some = self._wide[1:]
        if self._then is None:
            self._values.copy_(some)
        else:
            self._then.append(some, _write(some, 8, self._values))
            self._then.finish()

    def put(self, far: Tensor, code: Tensor) -> Tensor:
        """Return ``code`` with the next differences of the list where the mask ``far`` is True."""
        if self._wide is None:
            self._wide = self._values
            if self._then is not None:
                self._wide = torch.zeros(self.capacity, dtype=torch.int16, device=code.device)
                _read(self._values, 8, self._then, self._wide)
        places = self._places(far).sub_(1).clamp_(0, self.capacity - 1)
        return torch.where(far, self._wide.index_select(0, places), code)

    def _places(self, far: Tensor) -> Tensor:
        """Return the position in the list, from 1, of each True element of the mask, continuing from earlier calls."""
        places = far.cumsum(0, dtype=torch.int32).add_(self._count)
        self._count = places[-1].clone()
        return places


def _equal(code: Tensor, value: int) -> Any:
    """Return which codes equal ``value``: their indices on a CPU, a mask on a GPU."""
    if _waits_for_nobody(code):
        mask = _buffer("mask", code, torch.bool).numpy()
        return torch.from_numpy(np.flatnonzero(np.equal(code.numpy(), value, out=mask)))
    return code == value


def _moved(new: Tensor, old: Tensor) -> Tensor:
    """Return the int16 differences ``new - old`` in a reused buffer."""
    return torch.sub(new, old, out=_buffer("moved", new, torch.int16))


def _buffer(name: str, like: Tensor, dtype: torch.dtype) -> Tensor:
    return _BUFFERS.take(name, like.numel(), dtype, like.device)


def _shift(wide: Tensor, places: int, out: Tensor) -> None:
    """Write ``wide`` shifted right by ``places`` bits into ``out``."""
    if _waits_for_nobody(wide):
        np.right_shift(wide.numpy(), places, out=out.numpy())
    else:
        torch.bitwise_right_shift(wide, places, out=out)


def _waits_for_nobody(values: Tensor) -> bool:
    """Return True if shapes may depend on values without a wait: on a CPU.

    numpy compares and searches there ten times as fast as torch.
    """
    return values.device.type == "cpu"


def checksum(copy: Tensor) -> Tensor:
    """Return a checksum below 2^31 of ``copy`` (bf16 [n]) as an int64 tensor on its device.

    It changes if any single element changes.
    """
    total = torch.zeros((), dtype=torch.int64, device=copy.device)
    odd = (
        torch.arange(_segment_size(copy), device=copy.device).mul_(2 * 0x9E3779B1).add_(0x85EBCA6B).bitwise_and_(_HASH)
    )
    for (bits,) in _segments(copy):
        total = (total * 31 + (bits.long() * odd[: bits.numel()]).sum()).bitwise_and_(_HASH)
    return total


def _most(bits: int) -> int:
    """Return the largest difference that a code of ``bits`` bits can hold."""
    return (1 << bits - 1) - 1


def _segment_size(values: Tensor) -> int:
    return CPU_SEGMENT if values.device.type == "cpu" else GPU_SEGMENT


def _segments(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Return slices of the int16 bits of tensors of equal length: one tuple of views per slice."""
    size = _segment_size(tensors[0])
    return zip(*(tensor.view(torch.int16).split(size) for tensor in tensors), strict=True)
