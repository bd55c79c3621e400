"""Dealing documents in a process of its own.

A thousand of them take some tenths of a second of Python, for which the thread that issues actions would wait. So every
process of a run has a worker. What is dealt is the same everywhere; where the worker cannot start or is gone, it is
dealt here.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial

from tawpipe.dealing.balance import Bins, deal
from tawpipe.errors import UserError
from tawpipe.worker import Worker

logger = logging.getLogger(__name__)

Dealing = Callable[[Sequence[int]], Bins]
"""``Strategy.dealing``."""
FEW = 32
"""Documents that are dealt here in no more time than the way to a worker takes; finding the places of few bins in a
pipeline takes tenths of a second.
"""


class Dealer:
    """Dealing in a worker, which starts with the first step that takes long to deal. Several threads may call it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._worker: Worker | None = None
        self._starts = True

    def __call__(self, lengths: Sequence[int], dealing: Dealing) -> Bins:
        is_quick = len(lengths) <= FEW and isinstance(dealing, partial) and dealing.func is deal
        return (None if is_quick else self._asked(list(lengths), dealing)) or dealing(lengths)

    def _asked(self, lengths: list[int], dealing: Dealing) -> Bins | None:
        """The worker's answer; None if it has none."""
        with self._lock:
            try:
                if self._starts:
                    self._starts, self._worker = False, Worker()
                if self._worker is None:
                    return None
                self._worker.ask(deal_or_none, lengths, dealing)
                return self._worker.answer()
            except (OSError, EOFError) as error:
                why = "the worker is gone" if self._worker else f"no worker could be started ({error})"
                logger.warning("documents are now assigned to ranks in the run's own processes: %s", why)
                self._end()
                return None

    def close(self) -> None:
        """End the worker. May be called more than once."""
        with self._lock:
            self._end()

    def _end(self) -> None:
        self._starts = False
        if self._worker is not None:
            self._worker.close()
            self._worker = None


def deal_or_none(lengths: Sequence[int], dealing: Dealing) -> Bins | None:
    """Deal in the worker; None for what cannot be dealt, which the run finds as well and can name."""
    try:
        return dealing(lengths)
    except UserError:
        return None
