"""How long lanes were busy. Imports nothing of the project."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


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
        """What has gathered since the last call. Only between steps, when no lane runs."""
        taken, self._seconds = self._seconds, {}
        return taken
