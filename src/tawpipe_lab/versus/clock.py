"""Time limit of the check, and bytes that the network interfaces of a machine count."""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from tawpipe.plan.machine.doctor import INTERFACES

VISIBLE = 0.5
"""Share of the schedule's own count that an interface must count. With less, RDMA bypasses the interfaces."""
EXIT_CODE = 1


class Deadline:
    """Thread that ends this process if its work does not end in time, for example because a peer is gone.

    Args:
        late: called before the end.
    """

    def __init__(self, late: Callable[[], None]) -> None:
        self._at, self._late, self._closed = math.inf, late, threading.Event()
        threading.Thread(target=self._watch, name="deadline", daemon=True).start()

    def allow(self, seconds: float) -> None:
        """Allow ``seconds`` from now until the next call."""
        self._at = time.monotonic() + seconds

    def close(self) -> None:
        """End the thread."""
        self._closed.set()

    def _watch(self) -> None:
        while not self._closed.wait(0.25):
            if time.monotonic() > self._at:
                try:
                    self._late()
                finally:
                    sys.stdout.flush()
                    sys.stderr.flush()
                    os._exit(EXIT_CODE)


def grown_bytes(before: Mapping[str, int], after: Mapping[str, int], root: Path = INTERFACES) -> int:
    """Return the bytes that this machine has sent between two counts of ``sent_bytes``.

    The counts of all network cards are added. Without cards (in a namespace or a container) the largest count is taken,
    because bridges count bytes again.
    """
    grown = {name: count - before.get(name, count) for name, count in after.items()}
    cards = [count for name, count in grown.items() if (root / name / "device").exists()]
    return sum(cards) if cards else max(grown.values(), default=0)


def visible_bytes(counted: float, expected: float) -> int | str:
    """Return ``counted`` as a whole number, or ``not visible`` if it is far below the schedule's count ``expected``."""
    return "not visible" if counted < VISIBLE * expected else round(counted)
