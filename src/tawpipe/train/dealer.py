"""Dealing documents in a process of its own.

A thousand of them take some tenths of a second of Python, for which the thread that issues actions would wait. So every
process of a run has a worker, which knows nothing but numbers and ends with it. What is dealt is the same everywhere;
where the worker cannot start or is gone, it is dealt here.
"""

from __future__ import annotations

import logging
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial

from tawpipe.errors import UserError
from tawpipe.schedule.balance import Bins, deal

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
        self._worker: subprocess.Popen[bytes] | None = None
        self._starts = True

    def _start(self) -> None:
        self._starts = False
        try:
            command = [sys.executable, "-m", __name__]
            self._worker = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
            )
        except OSError as error:
            logger.warning("documents are dealt in the run's own processes: no worker could be started (%s)", error)

    def __call__(self, lengths: Sequence[int], dealing: Dealing) -> Bins:
        is_quick = len(lengths) <= FEW and isinstance(dealing, partial) and dealing.func is deal
        bins = None if is_quick else self._asked((list(lengths), dealing))
        return bins or dealing(lengths)

    def _asked(self, question: tuple[list[int], Dealing]) -> Bins | None:
        """The worker's answer; None if it has none."""
        with self._lock:
            if self._starts:
                self._start()
            if self._worker is None:
                return None
            assert self._worker.stdin is not None and self._worker.stdout is not None
            try:
                pickle.dump(question, self._worker.stdin)
                self._worker.stdin.flush()
                return pickle.load(self._worker.stdout)
            except (OSError, EOFError, pickle.UnpicklingError):
                logger.warning("documents are dealt in the run's own processes from now on: the worker is gone")
                self._end()
                return None

    def close(self) -> None:
        """End the worker. May be called more than once."""
        with self._lock:
            self._end()

    def _end(self) -> None:
        self._starts = False
        if self._worker is not None:
            self._worker.kill()
            self._worker.communicate()
            self._worker = None


def serve() -> None:
    """Answer until nobody can ask any more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the run itself knows what to do about it
    while True:
        try:
            lengths, dealing = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            answer = dealing(lengths)
        except UserError:
            answer = None  # whoever asks finds the same, and can name it
        pickle.dump(answer, sys.stdout.buffer)
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    serve()
