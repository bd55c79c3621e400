"""Assignment of documents in a separate process.

A thousand documents take some tenths of a second of Python, for which the thread that issues actions would have to
wait. Therefore every process of a run has a worker. Results do not depend on where they are computed. If the worker
cannot be started or has died, documents are assigned in the calling process."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial

from tawpipe.dealing.balance import Packs, deal
from tawpipe.errors import UserError
from tawpipe.worker import Worker

logger = logging.getLogger(__name__)

Dealing = Callable[[Sequence[int]], Packs]
"""Function that assigns documents, as ``Strategy.dealing`` returns it."""
FEW = 32
"""Number of documents up to which ``deal`` is called directly, because that takes no longer than asking the worker. For
pipelines the worker is always asked: assigning even a few documents takes tenths of a second."""


class Dealer:
    """Assigns documents in a worker, which is started at the first step that needs it. Several threads may call it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._worker: Worker | None = None
        self._starts = True

    def __call__(self, lengths: Sequence[int], dealing: Dealing) -> Packs:
        """Return the assignment of documents with ``lengths``, computed in the worker process; waits for it.

        If the documents are few, or the worker fails, ``dealing`` runs in the calling thread.

        Args:
            lengths: lengths of the documents, in tokens.
            dealing: function that assigns documents; can be pickled.

        Raises:
            UserError: the documents cannot be assigned.
        """
        is_quick = len(lengths) <= FEW and isinstance(dealing, partial) and dealing.func is deal
        return (None if is_quick else self._asked(list(lengths), dealing)) or dealing(lengths)

    def _asked(self, lengths: list[int], dealing: Dealing) -> Packs | None:
        """Return the worker's assignment; None if there is no worker, if it fails, or if it refuses the documents.

        The worker is started at the first call. If it cannot be started or has died, a warning is logged, and it is not
        started again."""
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
        """Stop the worker; it is not started again. May be called more than once."""
        with self._lock:
            self._end()

    def _end(self) -> None:
        self._starts = False
        if self._worker is not None:
            self._worker.close()
            self._worker = None


def deal_or_none(lengths: Sequence[int], dealing: Dealing) -> Packs | None:
    """Return ``dealing(lengths)``, or None if the documents cannot be assigned; runs in the worker process.

    The run then computes the assignment again, and raises the error."""
    try:
        return dealing(lengths)
    except UserError:
        return None
