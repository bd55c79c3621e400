"""A caching allocator as CUDA's, reduced to what decides how much memory it takes, fed by the trace of a ``Ledger``:
of all of it at the end (``ToyAllocator``), or while it grows (``Driver``, in the place of ``torch.cuda``'s counts).

Every stream has free blocks of its own, which no other stream is given. A block that other streams have used is free
only when these have come so far. How far the device is, is said: ``ahead`` operations behind the host, unless the host
has waited. Blocks have the sizes that were asked for; a free one is cut, and joined with its neighbours again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from ledger import Clock, Happening, Ledger, Stream

FAR_AHEAD = math.inf
"""The host waits for nothing but what it waits for explicitly."""


@dataclass(frozen=True)
class Bytes:
    """The most that there was at one time.

    Args:
        allocated: of tensors.
        active: and of what other streams may still use.
        reserved: taken from the device.
    """

    allocated: int
    active: int
    reserved: int


@dataclass(eq=False)
class _Free:
    segment: int
    begin: int
    size: int


class ToyAllocator:
    """Replays a trace; ``most`` is what came of it.

    Args:
        ahead: operations for which the host does not wait.
    """

    def __init__(self, trace: Iterable[Happening], *, ahead: float) -> None:
        self._prefetched = ahead
        self._issued_and_over: float = 0
        self._over: Clock = {}
        self._free: dict[Stream, list[_Free]] = {}
        self._taken: dict[int, _Free] = {}
        self._pending: list[Happening] = []
        """Of freed blocks, what may still use them."""
        self._segments = list[int]()
        """Their bytes."""
        self._now = {"allocated": 0, "active": 0, "reserved": 0}
        self._most = dict(self._now)
        self.feed(trace)

    def feed(self, trace: Iterable[Happening]) -> None:
        """Go on with what has happened since."""
        for one in trace:
            self._happens(one)

    @property
    def now(self) -> Bytes:
        return Bytes(**self._now)

    @property
    def most(self) -> Bytes:
        return Bytes(**self._most)

    def forget_most(self) -> None:
        """Let ``most`` begin with what there is now."""
        self._most = dict(self._now)

    def empty(self) -> None:
        """Give the device back what is free as a whole, when everything is over."""
        self._issued_and_over = math.inf
        self._give_back()
        self._issued_and_over = 0
        for stream, free in self._free.items():
            whole = [one for one in free if one.size == self._segments[one.segment]]
            self._free[stream] = [one for one in free if one not in whole]
            self._now["reserved"] -= sum(one.size for one in whole)

    def _happens(self, one: Happening) -> None:
        if (over := one.over) is not None:
            self._over = {**self._over, **{stream: max(at, self._over.get(stream, 0)) for stream, at in over.items()}}
        elif one.what == "allocate":
            assert one.stream is not None
            self._issued_and_over = max(self._issued_and_over, one.at - self._prefetched)
            self._give_back()
            self._allocate(one.stream, one.block, one.size)
        elif one.what == "free":
            assert one.stream is not None
            self._now["allocated"] -= one.size
            self._pending.append(one)
            self._give_back()

    def _give_back(self) -> None:
        still = []
        for one in self._pending:
            if any(self._over.get(s, 0) < at and number > self._issued_and_over for s, at, number in one.last):
                still.append(one)
                continue
            place = self._taken.pop(one.block)
            self._now["active"] -= place.size
            assert one.stream is not None
            self._join(self._free.setdefault(one.stream, []), place)
        self._pending = still

    def _join(self, free: list[_Free], place: _Free) -> None:
        for other in [one for one in free if one.segment == place.segment]:
            if other.begin + other.size == place.begin or place.begin + place.size == other.begin:
                free.remove(other)
                place = _Free(place.segment, min(place.begin, other.begin), place.size + other.size)
        free.append(place)

    def _allocate(self, stream: Stream, block: int, size: int) -> None:
        free = self._free.setdefault(stream, [])
        place = min((one for one in free if one.size >= size), key=lambda one: one.size, default=None)
        if place is None:
            self._segments.append(size)
            self._now["reserved"] += size
            place = _Free(len(self._segments) - 1, 0, size)
        else:
            free.remove(place)
            if place.size > size:
                free.append(_Free(place.segment, place.begin + size, place.size - size))
        self._taken[block] = _Free(place.segment, place.begin, size)
        self._now["allocated"] += size
        self._now["active"] += size
        self._most = {name: max(most, self._now[name]) for name, most in self._most.items()}


class Driver:
    """``torch.cuda``'s counts of memory, as the toy allocator gives them while a ledger grows.

    Args:
        system: bytes that are not the allocator's.
    """

    TOTAL = 1 << 40

    def __init__(self, ledger: Ledger, system: int) -> None:
        self._ledger, self._system, self._read = ledger, system, 0
        self._toy = ToyAllocator((), ahead=FAR_AHEAD)

    def functions(self) -> dict[str, Callable[..., Any]]:
        """By their names in ``torch.cuda``."""
        return {
            "memory_allocated": lambda *_: self._up_to_date().now.allocated,
            "max_memory_allocated": lambda *_: self._up_to_date().most.allocated,
            "memory_reserved": lambda *_: self._up_to_date().now.reserved,
            "reset_peak_memory_stats": lambda *_: self._up_to_date().forget_most(),
            "empty_cache": lambda *_: self._up_to_date().empty(),
            "memory_stats": self._stats,
            "mem_get_info": lambda *_: (self.TOTAL - self._system - self._up_to_date().now.reserved, self.TOTAL),
        }

    def _up_to_date(self) -> ToyAllocator:
        self._ledger.sweep()
        trace = self._ledger.trace
        self._toy.feed(trace[self._read :])
        self._read = len(trace)
        return self._toy

    def _stats(self, *_: Any) -> dict[str, int]:
        return {f"{name}_bytes.all.peak": value for name, value in vars(self._up_to_date().most).items()}
