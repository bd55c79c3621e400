"""Frequency of Python's garbage collection, which searches for unreachable reference cycles."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

RARELY = (100_000, 20, 100)
"""Thresholds of ``gc.set_threshold`` that ``rarely_collected`` sets."""


@contextmanager
def rarely_collected() -> Iterator[None]:
    """Run garbage collection about a hundred times less often within the context.

    Schedules and timelines consist of hundreds of thousands of small objects that stay. Scanning them repeatedly takes
    a third of the time of planning.

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


@cache
def leave_imports_alone() -> None:
    """Exclude all objects that exist now from garbage collection. Only the first call in a process has an effect.

    Most objects that a full collection scans belong to imported modules, which are never freed. A run makes some full
    collections before its first step (``runtime.memory.give_back``).
    """
    gc.freeze()
