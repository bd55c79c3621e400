"""Items prepared ahead by a background thread, so that reading does not hold up the steps. Draws no random numbers."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Generic, TypeVar

T = TypeVar("T")


class _End:
    """The mark behind the last item, with the exception that ended the thread, if one did."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error


class Prefetcher(Generic[T]):
    """Iterator over ``items`` whose thread is up to ``depth`` items ahead; used in a ``with`` block.

    An exception of the iterable is raised by the ``next()`` that would have returned its item. ``close()`` ends the
    thread after the item that it is working on; leaving a ``with`` block does so too. After the end, ``next()`` goes
    on raising StopIteration.
    """

    def __init__(self, items: Iterable[T], depth: int = 2) -> None:
        assert depth >= 1, depth
        self._queue: queue.Queue[T | _End] = queue.Queue(depth)
        self._stop = threading.Event()
        self._done = False
        self._thread = threading.Thread(target=self._work, args=(iter(items),), name="prefetch", daemon=True)
        self._thread.start()

    def _work(self, items: Iterator[T]) -> None:
        end = _End(None)
        try:
            for item in items:
                if not self._put(item):
                    return
        except BaseException as error:  # handed to the consumer, whatever it is
            end = _End(error)
        self._put(end)

    def _put(self, item: T | _End) -> bool:
        while not self._stop.is_set():
            try:
                self._queue.put(item, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        if self._done:
            raise StopIteration
        item = self._queue.get()
        if isinstance(item, _End):
            self.close()
            if item.error is not None:
                raise item.error
            raise StopIteration
        return item

    def close(self) -> None:
        """End the thread and wait for it. May be called more than once."""
        self._done = True
        self._stop.set()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def __enter__(self) -> Prefetcher[T]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
