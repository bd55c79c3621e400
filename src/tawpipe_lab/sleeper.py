"""Device that computes by sleeping, with slow spells if asked for.

Slow spells stand for a neighbour's job on the same machine, a hot device, or a page cache that fills. Each node has its
own. They are a function of seed, node, step and time since the step began, so that every strategy is slowed down at the
same times.
"""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tawpipe.errors import UserError

TURN_S = 0.005
"""Seconds for which one lane uses a link before another lane takes its turn."""
MOST_OVERSLEPT_S = 5e-4
"""Most seconds by which the next sleep is shortened because the last one ended late. Timers wake 0.1 to 0.2 ms late. A
busy machine wakes later, and that delay remains."""


@dataclass(frozen=True)
class Slowdown:
    """Slow spells of the nodes.

    Args:
        factor: factor by which computing takes longer in a slow spell.
        share: share of the time that a node spends in slow spells, between 0 and 1.
        spell_s: mean seconds of a slow spell. Lengths of spells and of the times between are exponentially distributed.
        seed: seed of the random numbers.

    Raises:
        UserError: a factor below 1, a share that is not between 0 and 1, or a length that is not above 0.
    """

    factor: float = 2.0
    share: float = 0.1
    spell_s: float = 0.5
    seed: int = 0

    def __post_init__(self) -> None:
        if self.factor < 1:
            raise UserError("factor", self.factor, "at least 1: how many times as long computing takes in a spell")
        if not 0 < self.share < 1:
            raise UserError("share", self.share, "between 0 and 1: the part of the time that is slow")
        if self.spell_s <= 0:
            raise UserError("spell_s", self.spell_s, "above 0: the mean seconds of a spell")


class Pace:
    """Speed at which one node computes in the course of a step.

    Args:
        slowdown: slow spells; None for none.
        node: number of the node; nodes have independent spells.
        speed: speed of the device outside of slow spells; 0.5 for a device that takes twice the seconds of the
            workload.
    """

    def __init__(self, slowdown: Slowdown | None = None, node: int = 0, speed: float = 1.0) -> None:
        self._slowdown, self._node, self.speed = slowdown, node, speed
        self._borders: list[float] = []
        self._random = random.Random()
        self._slow_first, self._begin = False, 0.0

    def begin(self, step: int) -> None:
        """Note that step ``step`` begins now, and draw its slow spells; equal numbers give equal spells."""
        self._begin = time.perf_counter()
        self._borders = []
        if self._slowdown is not None:
            self._random = random.Random(f"{self._slowdown.seed}/{self._node}/{step}")
            self._slow_first = self._random.random() < self._slowdown.share

    def seconds(self, work: float, since: float | None = None) -> float:
        """Return the real seconds that ``work`` seconds of computing take with slow spells; does not sleep.

        ``speed`` is not applied.

        Args:
            work: seconds without slow spells.
            since: start of the computation, in seconds after the begin of the step; None for now.
        """
        if self._slowdown is None:
            return work
        begin = now = time.perf_counter() - self._begin if since is None else since
        piece = 0
        while work > 0:
            border = self._border(piece)
            if border > now:
                speed = 1 / self._slowdown.factor if self._is_slow(piece) else 1.0
                spent = min(border - now, work / speed)
                work -= spent * speed
                now += spent
                if work < 1e-12:
                    break
            piece += 1
        return now - begin

    def _is_slow(self, piece: int) -> bool:
        """Return True if period ``piece`` of the step is a slow spell; periods alternate."""
        return (piece % 2 == 0) == self._slow_first

    def _border(self, piece: int) -> float:
        """Return the end of period ``piece`` of the step, in seconds after its begin; draws periods as needed."""
        assert self._slowdown is not None
        while len(self._borders) <= piece:
            slow = self._is_slow(len(self._borders))
            share = self._slowdown.share
            mean = self._slowdown.spell_s if slow else self._slowdown.spell_s * (1 - share) / share
            self._borders.append((self._borders[-1] if self._borders else 0.0) + self._random.expovariate(1 / mean))
        return self._borders[piece]


class BusyTime:
    """Seconds for which lanes were busy. Only one thread may record a given lane."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, lane: str) -> Iterator[None]:
        """Return a context whose duration is added to the busy seconds of ``lane``."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[lane] = self._seconds.get(lane, 0.0) + time.perf_counter() - begin

    def take(self) -> dict[str, float]:
        """Return the busy seconds by lane since the last call, and reset them.

        Call it between steps, when no lane runs.
        """
        taken, self._seconds = self._seconds, {}
        return taken


class HostLink:
    """Link that passes bytes by sleeping, between a device and homes in the memory of its host.

    Lanes that use it at one time share it, in each direction, in slices of ``TURN_S`` seconds.

    Args:
        bytes_per_s: rate in each direction.
    """

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s, self._lock = bytes_per_s, threading.Lock()
        self._free = {"up": 0.0, "down": 0.0}
        """Direction -> time from which it is free, on the clock of ``time.perf_counter``."""

    def carry(self, since: float, *, up: float, down: float) -> None:
        """Sleep until ``up`` and ``down`` bytes have passed the link, behind the bytes of other lanes that use it.

        The two directions pass at one time. A large transfer is cut into slices, between which other lanes take their
        turn.

        Args:
            since: start of the transfer, on the clock of ``time.perf_counter``.
            up: bytes in one direction.
            down: bytes in the other direction.
        """
        seconds = {"up": up / self._bytes_per_s, "down": down / self._bytes_per_s}
        turns = max(1, math.ceil(max(seconds.values()) / TURN_S))
        for _ in range(turns):
            with self._lock:
                ends = {way: max(since, self._free[way]) + each / turns for way, each in seconds.items() if each}
                self._free |= ends
            since = max([since, *ends.values()])
            time.sleep(max(0.0, since - time.perf_counter()))


class Sleeper:
    """Stand-in for a device that sleeps instead of computing.

    Attributes:
        asked_s: seconds of computing that were asked for since it was made, at the device's full speed. The seconds
            that it really took are lane COMPUTE of ``busy``.
        delay_s: seconds that slow spells have added to ``asked_s``.
        first_s, last_s: begin of the first computation since ``forget`` and end of the last one, on the clock of
            ``time.perf_counter``; nan before the first one.
        pace: speed at which it computes; the worker sets it.
    """

    def __init__(self, busy: BusyTime) -> None:
        self.busy, self.asked_s, self.delay_s, self.pace = busy, 0.0, 0.0, Pace()
        self._overslept_s = 0.0
        self.forget()

    def forget(self) -> None:
        """Reset ``first_s`` and ``last_s``, so that the next computation is the first."""
        self.first_s = self.last_s = math.nan

    @contextmanager
    def computing(self, seconds: float) -> Iterator[None]:
        """Make the context last as long as the device computes ``seconds`` of the workload, by sleeping at its end.

        Speed of the device and slow spells are applied to ``seconds``. The time that the body of the context takes is
        part of them. If a sleep ends late, the next one is shorter. The attributes count the seconds."""
        seconds /= self.pace.speed
        needed = self.pace.seconds(seconds)
        self.asked_s += seconds
        self.delay_s += needed - seconds
        needed -= self._overslept_s
        with self.busy("COMPUTE"):
            begin = time.perf_counter()
            if math.isnan(self.first_s):
                self.first_s = begin
            yield
            time.sleep(max(0.0, begin + needed - time.perf_counter()))
            self.last_s = time.perf_counter()
        self._overslept_s = min(self.last_s - begin - needed, MOST_OVERSLEPT_S)

    def compute(self, seconds: float) -> None:
        """Sleep as long as the device computes ``seconds`` of the workload; see ``computing``."""
        with self.computing(seconds):
            pass
