"""How often Python looks for objects that refer to each other and to nothing else."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

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


@cache
def leave_imports_alone() -> None:
    """Let no collection look through what there is by now, once in a process: modules, of which nothing goes, are most
    of what a full one takes, and a run makes some before its first step (``runtime.memory.give_back``).
    """
    gc.freeze()
