"""The device that computes by sleeping, at a pace that may be disturbed.

A disturbance slows every node for spells, each node by itself: a neighbour's job on the same machine, a hot device, a
page cache that fills. It is a function of seed, node, step and time since the step began, so that every strategy meets
the same one.
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

SLICE_S = 0.005
"""Seconds for which one lane has a link before another lane has its turn."""
MOST_OVERSLEPT_S = 5e-4
"""By which the next sleep is shorter at most: timers wake 0.1 to 0.2 ms late, a busy machine later, which stays."""


@dataclass(frozen=True)
class Slowdown:
    """A disturbance of the nodes.

    Args:
        factor: computing takes so many times as long in a spell.
        share: of the time that a node spends in spells, 0 to 1.
        spell_s: mean length of a spell, exponentially distributed, as the time between spells is.
        seed: of the random numbers.

    Raises:
        UserError: a factor below 1, a share that is not between 0 and 1, or no length.
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
    """The speed at which one node computes in the course of a step.

    Args:
        slowdown: None for always at full speed.
        node: whose pace this is; nodes are disturbed independently.
        speed: its full speed; 0.5 for a device that takes twice the seconds of the workload.
    """

    def __init__(self, slowdown: Slowdown | None = None, node: int = 0, speed: float = 1.0) -> None:
        self._slowdown, self._node, self.speed = slowdown, node, speed
        self._borders: list[float] = []
        self._random = random.Random()
        self._slow_first, self._begin = False, 0.0

    def begin(self, step: int) -> None:
        """Step ``step`` begins now. The same number means the same disturbance."""
        self._begin = time.perf_counter()
        self._borders = []
        if self._slowdown is not None:
            self._random = random.Random(f"{self._slowdown.seed}/{self._node}/{step}")
            self._slow_first = self._random.random() < self._slowdown.share

    def seconds(self, work: float, since: float | None = None) -> float:
        """Seconds that ``work`` seconds at full speed take.

        Args:
            since: seconds after the begin of the step; None for now.
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
        return (piece % 2 == 0) == self._slow_first

    def _border(self, piece: int) -> float:
        """The end of piece ``piece`` of the step's time."""
        assert self._slowdown is not None
        while len(self._borders) <= piece:
            slow = self._is_slow(len(self._borders))
            share = self._slowdown.share
            mean = self._slowdown.spell_s if slow else self._slowdown.spell_s * (1 - share) / share
            self._borders.append((self._borders[-1] if self._borders else 0.0) + self._random.expovariate(1 / mean))
        return self._borders[piece]


class BusyTime:
    """Seconds that lanes were busy. Each lane is written by one thread."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, lane: str) -> Iterator[None]:
        begin = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[lane] = self._seconds.get(lane, 0.0) + time.perf_counter() - begin

    def take(self) -> dict[str, float]:
        """Seconds by lane since the last call. Only between steps, when no lane runs."""
        taken, self._seconds = self._seconds, {}
        return taken


class HostLink:
    """The link between a device and homes in its host's memory, which passes by sleeping. What several lanes pass at
    one time shares it, each way, slice by slice.

    Args:
        bytes_per_s: each way.
    """

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s, self._lock = bytes_per_s, threading.Lock()
        self._free = {"up": 0.0, "down": 0.0}
        """When each way is free, on the clock of ``time.perf_counter``."""

    def carry(self, since: float, *, up: float, down: float) -> None:
        """Wait until so many bytes have passed up and down, beginning at ``since``."""
        seconds = {"up": up / self._bytes_per_s, "down": down / self._bytes_per_s}
        slices = max(1, math.ceil(max(seconds.values()) / SLICE_S))
        for _ in range(slices):
            with self._lock:
                ends = {way: max(since, self._free[way]) + each / slices for way, each in seconds.items() if each}
                self._free |= ends
            since = max([since, *ends.values()])
            time.sleep(max(0.0, since - time.perf_counter()))


class Sleeper:
    """Computes by sleeping.

    Attributes:
        asked_s: the seconds that it was told to compute, since it was made. What it took is lane COMPUTE of ``busy``.
        delay_s: the seconds that disturbances have added to that.
        first_s, last_s: on the clock of ``time.perf_counter``, when it began to compute first since ``forget``, and
            when it last ended; nan if it did not.
        pace: at which it computes; the harness sets it.
    """

    def __init__(self, busy: BusyTime) -> None:
        self.busy, self.asked_s, self.delay_s, self.pace = busy, 0.0, 0.0, Pace()
        self._overslept_s = 0.0
        self.forget()

    def forget(self) -> None:
        """Begin anew: the next computation is the first."""
        self.first_s = self.last_s = math.nan

    @contextmanager
    def computing(self, seconds: float) -> Iterator[None]:
        """A context that takes ``seconds`` at full speed; what the process does in it for what is computed, as a device
        would meanwhile, is part of these.
        """
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
        with self.computing(seconds):
            pass
