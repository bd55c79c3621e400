"""Changes of bf16 weights, coded without loss: what turns the bits of a copy into those of its owner.

A change is the difference of two numbers' 16 bits as integers, which wrap, so that any bits, those of no number
included, become any others; an update moves most of them by a few. It is a code of 2, 4 or 8 bits, of which one value
means: the difference is in a list behind the codes, where it has 8 bits, of which again one means: it is in a last
list, whole. Lengths of messages depend on numbers that all members know before one is made, and on a GPU shapes on
nothing else: nothing waits for what is in a message.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tawpipe.runtime.transport.compression import Rooms

NOTHING, WHOLE = 0, 16
"""Bits of an element: of weights that have not changed; of weights that come as they are."""
CODED = (2, 4, 8)
ABSENT = 1 << 40
"""In a place of ``changes`` of weights whose copy is not there: more than any count."""
CPU_SLICE, GPU_SLICE = 1 << 18, 1 << 22
"""Elements that are worked on at one time: so many that calls take little beside them, and so few that a core's caches
hold them, or that temporary copies stay small."""
_HASH = (1 << 31) - 1
_ROOMS = Rooms()
_FIRST = -0x8000
"""The least 16 bits: in the order of integers of 16 bits from here on, differences are compared as if without sign."""


class ChangeForm(NamedTuple):
    """How the change of a stripe travels.

    Args:
        bits: of an element.
        listed: room for so many differences behind the codes that do not fit in these; none behind codes of 8 bits.
        whole: room for so many that do not fit in 8 bits.
    """

    bits: int
    listed: int = 0
    whole: int = 0

    def message_bytes(self, elements: int) -> int:
        """Bytes of a message, an even number.

        >>> [form.message_bytes(1000) for form in (ChangeForm(NOTHING), ChangeForm(4, 10, 2), ChangeForm(WHOLE))]
        [0, 514, 2000]
        """
        if self.bits in (NOTHING, WHOLE):
            return elements * self.bits // 8
        return sum(self._sizes(elements))

    def _sizes(self, elements: int) -> tuple[int, int, int]:
        """Bytes of the codes, of the list and of the last list."""
        return -(-elements * self.bits // 16) * 2, (self.listed + 1) // 2 * 2, 2 * self.whole

    def parts(self, message: Tensor, elements: int) -> tuple[Tensor, Tensor, Tensor]:
        """Codes (uint8), the list (uint8) and the last list (int16) of a message."""
        codes, listed, whole = message.split(self._sizes(elements))
        return codes, listed[: self.listed], whole.view(torch.int16)


def best_form(counts: Sequence[int], elements: int) -> ChangeForm:
    """The form with the fewest bytes for a stripe of so many elements.

    >>> best_form([0, 0, 0, 0], 1000).bits, best_form([900, 300, 9, 0], 1000), best_form([1000] * 4, 1000).bits
    (0, ChangeForm(bits=4, listed=9, whole=0), 16)

    Args:
        counts: of ``changes``, the most of all members.
    """
    changed, *beyond, far = counts
    if not changed:
        return ChangeForm(NOTHING)
    forms = [ChangeForm(WHOLE), ChangeForm(8, 0, far)]
    forms += [ChangeForm(bits, count, far) for bits, count in zip(CODED, beyond, strict=False)]
    return min(forms, key=lambda form: form.message_bytes(elements))


def changes(home: Tensor, copy: Tensor) -> Tensor:
    """How many elements of a stripe have changed, and how many of these changes do not fit in each of ``CODED``.

    Args:
        home, copy: bf16 [n].

    Returns:
        int64 [4].
    """
    counts: list[Any] = [0] * (1 + len(CODED))
    for new, old in _slices(home, copy):
        moved = _moved(new, old)
        sizes, mask = moved.numpy() if _waits_for_nobody(home) else None, _room("mask", moved, torch.bool)
        if sizes is not None:
            sizes = np.abs(sizes, out=sizes).view(np.uint16)
        for place, most in enumerate((0, *map(_most, CODED))):
            if sizes is None:
                counts[place] += torch.count_nonzero(moved + (_FIRST + most) > _FIRST + 2 * most)
            else:
                counts[place] += int(np.count_nonzero(np.greater(sizes, most, out=mask.numpy())))
    return torch.tensor(counts) if _waits_for_nobody(home) else torch.stack(counts)


def encode_change(home: Tensor, copy: Tensor, form: ChangeForm, out: Tensor) -> None:
    """Write the message that turns ``copy`` into ``home``.

    Args:
        home, copy: bf16 [n].
        form: one of ``CODED``, with room for all that does not fit.
        out: uint8 [form.message_bytes(n)].
    """
    listed, begin = _lists(form, out, home.numel()), 0
    for new, old in _slices(home, copy):
        moved, end = _moved(new, old), begin + -(-new.numel() * form.bits // 8)
        listed.append(moved, _write(moved, form.bits, out[begin:end]))
        begin = end
    listed.finish()


def decode_change(message: Tensor, form: ChangeForm, copy: Tensor) -> None:
    """Turn ``copy`` (bf16 [n]) into what a message was made of."""
    listed, begin = _lists(form, message, copy.numel()), 0
    for (old,) in _slices(copy):
        end = begin + -(-old.numel() * form.bits // 8)
        _read(message[begin:end], form.bits, listed, old)
        begin = end


def _lists(form: ChangeForm, message: Tensor, elements: int) -> _Counted | _Placed:
    """What is behind the codes of a message."""
    _, listed, whole = form.parts(message, elements)
    if _waits_for_nobody(message):
        return _Counted(listed, _Counted(whole)) if form.listed else _Counted(whole)
    return _Placed(listed, _Placed(whole)) if form.listed else _Placed(whole)


def _write(moved: Tensor, bits: int, out: Tensor) -> Any:
    """Write codes of differences (int16 [n]) into bytes, each of which has codes that lie a part of n from each other;
    which differences do not fit.
    """
    beyond, each, count = _FIRST + (1 << bits) - 1, out.numel(), moved.numel()
    codes = _ROOMS.take(f"{bits} bits", 8 // bits * each, torch.int16, moved.device)
    codes[count:] = 0
    code = torch.add(moved, _FIRST + _most(bits), out=codes[:count]).clamp_(max=beyond)
    far = _equal(code, beyond)
    *parts, packed = codes.split(each)
    for part in reversed(parts):
        packed = part.add_(packed, alpha=1 << bits)  # _FIRST is 0 in the byte that is left
    out.copy_(packed)
    return far


def _read(packed: Tensor, bits: int, listed: _Counted | _Placed, old: Tensor) -> None:
    """Add the differences that codes say to ``old`` (int16 [n])."""
    last, wide = (1 << bits) - 1, _room("packed", packed, torch.int16).copy_(packed)
    code = _ROOMS.take(f"{bits} bits", 8 // bits * wide.numel(), torch.int16, old.device)
    for place, part in enumerate(code.split(wide.numel())):
        _shift(wide, bits * place, part)
    code = code.bitwise_and_(last)[: old.numel()]
    far = _equal(code, last) if listed.room else None
    code.sub_(_most(bits))
    old.add_(code if far is None else listed.put(far, code))


class _Counted:
    """A list of a message where shapes may depend on numbers.

    Args:
        values: its room; int16, or codes of 8 bits.
        then: the list behind these.
    """

    def __init__(self, values: Tensor, then: _Counted | None = None) -> None:
        self._values, self._then, self.room, self._at = values, then, values.numel(), 0

    def append(self, moved: Tensor, far: Tensor) -> None:
        """Write those differences whose places these are."""
        some, part = moved.index_select(0, far), self._next(far)
        if self._then is None:
            part.copy_(some)
        elif some.numel():
            self._then.append(some, _write(some, 8, part))

    def finish(self) -> None:
        """All that was appended is in the message."""

    def put(self, far: Tensor, code: Tensor) -> Tensor:
        """``code`` with the next differences where they are far."""
        if not far.numel():
            return code
        some = self._next(far)
        if self._then is not None:
            codes, some = some, torch.zeros(some.numel(), dtype=torch.int16)
            _read(codes, 8, self._then, some)
        return code.index_copy_(0, far, some)

    def _next(self, like: Tensor) -> Tensor:
        begin, self._at = self._at, self._at + like.numel()
        return self._values[begin : self._at]


class _Placed:
    """The same where nothing may wait for numbers: places are counted, and ``far`` is a mask."""

    def __init__(self, values: Tensor, then: _Placed | None = None) -> None:
        self._values, self._then, self.room = values, then, values.numel()
        self._wide: Tensor | None = None
        self._count: Any = 0

    def append(self, moved: Tensor, far: Tensor) -> None:
        if self._wide is None:  # the first is a place for what is none
            self._wide = torch.zeros(1 + self.room, dtype=torch.int16, device=moved.device)
        if self.room:
            self._wide.scatter_(0, self._places(far).mul_(far).long(), moved)

    def finish(self) -> None:
        assert self._wide is not None
        some = self._wide[1:]
        if self._then is None:
            self._values.copy_(some)
        else:
            self._then.append(some, _write(some, 8, self._values))
            self._then.finish()

    def put(self, far: Tensor, code: Tensor) -> Tensor:
        if self._wide is None:
            self._wide = self._values
            if self._then is not None:
                self._wide = torch.zeros(self.room, dtype=torch.int16, device=code.device)
                _read(self._values, 8, self._then, self._wide)
        places = self._places(far).sub_(1).clamp_(0, self.room - 1)
        return torch.where(far, self._wide.index_select(0, places), code)

    def _places(self, far: Tensor) -> Tensor:
        places = far.cumsum(0, dtype=torch.int32).add_(self._count)
        self._count = places[-1].clone()
        return places


def _equal(code: Tensor, value: int) -> Any:
    """Which codes have a value: on a CPU their places, and a mask where nothing may wait for these."""
    if _waits_for_nobody(code):
        mask = _room("mask", code, torch.bool).numpy()
        return torch.from_numpy(np.flatnonzero(np.equal(code.numpy(), value, out=mask)))
    return code == value


def _moved(new: Tensor, old: Tensor) -> Tensor:
    return torch.sub(new, old, out=_room("moved", new, torch.int16))


def _room(name: str, like: Tensor, dtype: torch.dtype) -> Tensor:
    return _ROOMS.take(name, like.numel(), dtype, like.device)


def _shift(wide: Tensor, places: int, out: Tensor) -> None:
    """``wide`` shifted to the right."""
    if _waits_for_nobody(wide):
        np.right_shift(wide.numpy(), places, out=out.numpy())
    else:
        torch.bitwise_right_shift(wide, places, out=out)


def _waits_for_nobody(values: Tensor) -> bool:
    """True where shapes may depend on numbers: whoever works there has them. There numpy compares and finds ten times
    as fast as torch.
    """
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


def _slice(values: Tensor) -> int:
    return CPU_SLICE if values.device.type == "cpu" else GPU_SLICE


def _slices(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The bits (int16) of tensors of one length, slice by slice."""
    size = _slice(tensors[0])
    return zip(*(tensor.view(torch.int16).split(size) for tensor in tensors), strict=True)
