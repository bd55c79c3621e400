"""How often Python looks for objects that refer to each other and to nothing else."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

RARELY = (100_000, 20, 100)
"""Thresholds of ``gc``."""


@contextmanager
def rarely_collected() -> Iterator[None]:
    """Look for such objects a hundred times less often: schedules and timelines are hundreds of thousands of small ones
    that stay, and to go through them again and again takes a third of a plan's time.

    >>> with rarely_collected():
    ...     gc.get_threshold() == RARELY
    True
    """
    before = gc.get_threshold()
    gc.set_threshold(*RARELY)
    try:
        yield
    finally:
        gc.set_threshold(*before)
