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
CPU_SEGMENT, GPU_SEGMENT, HASHED = 1 << 18, 1 << 25, 1 << 22
"""Elements coded at one time, and elements of a GPU that a checksum takes at one time.

Large enough that the calls cost little, small enough for a CPU core's caches and for bounded copies on a GPU.
"""
MOST_LISTED = 3
"""A list holds at most 1 / ``MOST_LISTED`` of all elements, which bounds the memory of their positions on a GPU."""
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
    forms = [ChangeForm(8, 0, far), *(ChangeForm(bits, count, far) for bits, count in zip(CODED, beyond, strict=False))]
    short = [form for form in forms if max(form[1:]) * MOST_LISTED <= elements]
    return min([ChangeForm(WHOLE), *short], key=lambda form: form.message_bytes(elements))


def coding_bytes(elements: int) -> int:
    """Return the most bytes that a GPU allocates temporarily to count, code and decode changes of a shard.

    Coding takes for each element of a slice the difference and its code, 2 bytes each; for each element of the shard 1
    byte that says whether it is in a list; and for each entry of a list 16 bytes for positions and values. Counting has
    memory of its own, as it runs in another lane: 7 bytes for each element of a slice, and 16 for a checksum.

    Args:
        elements: number of elements of the shard.
    """
    portion = min(elements, GPU_SEGMENT)
    return 4 * portion + elements + 16 * (elements // MOST_LISTED) + max(7 * portion, 16 * HASHED)


def changes(home: Tensor, copy: Tensor) -> Tensor:
    """Count the elements of ``home`` that differ from ``copy``, and the differences too large for codes of each width.

    Args:
        home, copy: bf16 [n]: weights of a shard, and this rank's older copy of them.

    Returns:
        int64 [4]: differing elements, then the differences that do not fit in 2, 4 and 8 bits.
    """
    counts, limits = list[Tensor](), (0, *map(_most, CODED))
    for new, old in _segments(home, copy):
        moved = _moved(new, old)
        if _waits_for_nobody(home):
            sizes, mask = moved.numpy(), _buffer("mask", moved, torch.bool).numpy()
            sizes = np.abs(sizes, out=sizes).view(np.uint16)
            counts.append(torch.tensor([int(np.count_nonzero(np.greater(sizes, most, out=mask))) for most in limits]))
        else:
            far = moved.clamp_(min=1 + _FIRST).abs_()
            counts.append(torch.stack([(far > most).sum(dtype=torch.int32) for most in limits]))
    return torch.stack(counts).sum(0)


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
        listed.append(moved, _write(moved, form.bits, out[begin:end], listed))
        begin = end
    listed.finish(home.view(torch.int16), copy.view(torch.int16))


def decode_change(message: Tensor, form: ChangeForm, copy: Tensor) -> None:
    """Apply a message of ``encode_change`` to ``copy`` (bf16 [n]), in place: it becomes the sender's weights."""
    listed, begin = _lists(form, message, copy.numel()), 0
    for (old,) in _segments(copy):
        end = begin + -(-old.numel() * form.bits // 8)
        _read(message[begin:end], form.bits, listed, old)
        begin = end
    listed.correct(copy.view(torch.int16), form.bits)


def _lists(form: ChangeForm, message: Tensor, elements: int) -> _Counted | _Placed:
    """Return the object that reads and writes the lists of large differences, which follow the codes in a message.

    It is a ``_Counted`` if the message is on a CPU, a ``_Placed`` on a GPU. If the form has 8-bit entries, it is the
    8-bit list and contains the 16-bit list. Otherwise it is the 16-bit list."""
    _, listed, whole = form.parts(message, elements)
    if _waits_for_nobody(message):
        return _Counted(listed, _Counted(whole)) if form.listed else _Counted(whole)
    return _Placed(listed, elements, _Placed(whole, form.listed)) if form.listed else _Placed(whole, elements)


def _write(moved: Tensor, bits: int, out: Tensor, listed: _Counted | _Placed) -> Any:
    """Write differences (int16 [n]) as codes of ``bits`` bits into the bytes ``out``.

    With m bytes, byte i holds the codes of elements i, i + m, i + 2m and so on. Returns what ``listed.find`` returns
    for differences that do not fit.
    """
    beyond, each, count = _FIRST + (1 << bits) - 1, out.numel(), moved.numel()
    codes = _BUFFERS.take(f"{bits} bits", 8 // bits * each, torch.int16, moved.device)
    codes[count:] = 0
    code = torch.add(moved, _FIRST + _most(bits), out=codes[:count]).clamp_(max=beyond)
    far = listed.find(code, beyond)
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
    old.add_(listed.put(code.sub_(_most(bits)), last - _most(bits)))


class _Counted:
    """List of a message on a CPU, where the number of entries may be read from the data.

    Args:
        values: Entries of the list in the message; int16, or codes of 8 bits.
        then: The 16-bit list behind 8-bit codes.
    """

    def __init__(self, values: Tensor, then: _Counted | None = None) -> None:
        self._values, self._then, self.capacity, self._at = values, then, values.numel(), 0

    def find(self, code: Tensor, value: int) -> Tensor:
        """Return the indices of the codes that equal ``value``."""
        mask = _buffer("mask", code, torch.bool).numpy()
        return torch.from_numpy(np.flatnonzero(np.equal(code.numpy(), value, out=mask)))

    def append(self, moved: Tensor, far: Tensor) -> None:
        """Write the differences ``moved`` at the indices ``far`` into the next entries of the list.

        Differences that do not fit in an entry of 8 bits go to the 16-bit list."""
        some, part = moved.index_select(0, far), self._next(far)
        if self._then is None:
            part.copy_(some)
        elif some.numel():
            self._then.append(some, _write(some, 8, part, self._then))

    def finish(self, *_: Tensor) -> None:
        """Do nothing: ``append`` has already written all entries into the message."""

    def correct(self, *_: Any) -> None:
        """Do nothing: ``put`` has already added all differences of the list."""

    def put(self, code: Tensor, value: int) -> Tensor:
        """Return ``code`` with the next differences of the list in place of elements that equal ``value``."""
        if not self.capacity or not (far := self.find(code, value)).numel():
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
    """List of a message like ``_Counted``, but without a host sync, for GPUs.

    The slices only mark their long differences in a mask. All entries are then read or written together.

    Args:
        values: Entries of the list in the message; int16, or codes of 8 bits.
        elements: Number of elements that may have an entry.
        then: The 16-bit list behind 8-bit codes.
    """

    def __init__(self, values: Tensor, elements: int, then: _Placed | None = None) -> None:
        self._values, self._then, self.capacity, self._end = values, then, values.numel(), 0
        self._mask = torch.empty(elements if self.capacity else 0, dtype=torch.bool, device=values.device)

    def find(self, code: Tensor, value: int) -> None:
        """Mark the next elements, those of ``code``, where their code equals ``value``."""
        if self.capacity:
            begin, self._end = self._end, self._end + code.numel()
            torch.eq(code, value, out=self._mask[begin : self._end])

    def append(self, moved: Tensor, far: None) -> None:
        """Do nothing: ``finish`` writes all entries."""

    def put(self, code: Tensor, value: int) -> Tensor:
        """Mark the elements of ``code`` that equal ``value``, and return it: ``correct`` replaces them."""
        self.find(code, value)
        return code

    def finish(self, new: Tensor, old: Tensor | None = None) -> None:
        """Write the marked differences of ``new`` from ``old`` (int16 [elements]) into the message.

        Entries beyond their number get any values. ``new`` holds the differences themselves if there is no ``old``."""
        if not self.capacity:
            return
        at = self._positions(0)
        some = new.index_select(0, at)
        if old is not None:
            some.sub_(old.index_select(0, at))
        del at  # the next list takes as much memory
        if self._then is None:
            self._values.copy_(some)
        else:
            _write(some, 8, self._values, self._then)
            self._then.finish(some)

    def correct(self, old: Tensor, bits: int) -> None:
        """Add the differences of the list to the marked elements of ``old`` (int16 [elements]).

        ``_read`` has added to each of them the difference that its code of ``bits`` bits seemed to hold."""
        if not self.capacity:
            return
        some = self._values
        if self._then is not None:
            some = torch.zeros(self.capacity, dtype=torch.int16, device=old.device)
            _read(self._values, 8, self._then, some)
            self._then.correct(some, 8)
        at = self._positions(-1)
        some = (some - (1 << bits - 1)).mul_(at >= 0)
        # Entry k belongs to element k or a later one. Entries beyond their number add 0 to element k.
        torch.maximum(at, torch.arange(self.capacity, dtype=torch.int32, device=old.device), out=at)
        old.index_add_(0, at, some)

    def _positions(self, otherwise: int) -> Tensor:
        """Return the indices of the marked elements, int64 [capacity], with ``otherwise`` for entries beyond them."""
        return torch.nonzero_static(self._mask, size=self.capacity, fill_value=otherwise)[:, 0]


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
    size = min(HASHED, _segment_size(copy))
    odd = torch.arange(size, device=copy.device).mul_(2 * 0x9E3779B1).add_(0x85EBCA6B).bitwise_and_(_HASH)
    for bits in copy.view(torch.int16).split(size):
        total = (total * 31 + bits.long().mul_(odd[: bits.numel()]).sum()).bitwise_and_(_HASH)
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
