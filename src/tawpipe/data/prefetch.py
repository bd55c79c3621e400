"""Prefetching of items in a background thread, so that reading does not delay the steps; draws no random numbers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, TypeVar

T = TypeVar("T")
_END = object()


class Prefetcher(Generic[T]):
    """Iterator over ``items`` that a thread prepares up to ``depth`` items in advance; use it in a ``with`` block.

    An exception of ``items`` is raised by the ``next()`` that would have returned its item. ``close()``, or leaving the
    ``with`` block, ends the thread after the current item. After the end every ``next()`` raises StopIteration.

    Args:
        items: iterable of the items.
        depth: number of items to prepare in advance.
        begin: called once in the thread before the first item.
    """

    def __init__(self, items: Iterable[T], depth: int = 2, *, begin: Callable[[], None] | None = None) -> None:
        assert depth >= 1, depth
        self._items = iter(items)
        self._thread = ThreadPoolExecutor(1, "prefetch", begin)
        self._prefetched: deque[Future[Any]] = deque()
        for _ in range(depth):
            self._prepare_one()

    def _prepare_one(self) -> None:
        """Submit the preparation of one more item to the thread."""
        self._prefetched.append(self._thread.submit(next, self._items, _END))

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        item: Any = _END
        try:
            if self._prefetched:
                item = self._prefetched.popleft().result()
        finally:
            if item is _END:
                self.close()
        if item is _END:
            raise StopIteration
        self._prepare_one()
        return item

    def close(self) -> None:
        """End the thread and wait for it. May be called more than once."""
        self._prefetched.clear()
        self._thread.shutdown(cancel_futures=True)

    def __enter__(self) -> Prefetcher[T]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
