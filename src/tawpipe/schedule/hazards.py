"""Dependencies of actions: which earlier actions an action must wait for, from its buffers alone."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Generic, TypeVar

Event = TypeVar("Event")


class Hazards(Generic[Event]):
    """Track the last writer of every buffer and its readers since then, over any number of steps.

    >>> hazards = Hazards()
    >>> hazards.add("recv", reads=[], writes=["W0"])
    []
    >>> hazards.add("compute", reads=["W0"], writes=["x"])
    ['recv']
    >>> hazards.add("recv again", reads=[], writes=["W0"])
    ['recv', 'compute']
    """

    def __init__(self) -> None:
        self._writer: dict[Hashable, Event] = {}
        self._readers: dict[Hashable, dict[object, Event]] = {}
        """Buffer -> lane -> event of the last reader on that lane. A reader without a lane is its own key."""
        self._freed: dict[Hashable, Hashable | None] = {}
        """Freed buffers -> lane of the action that freed them. This action counts as their last writer."""

    def before(
        self,
        *,
        reads: Iterable[Hashable],
        writes: Iterable[Hashable],
        frees: Iterable[Hashable] = (),
        lane: Hashable | None = None,
    ) -> list[Event]:
        """Return the events that an action must wait for, without duplicates. Records nothing.

        These are the writers of the buffers that it reads, the writers and readers of the buffers that it writes, and
        the readers of the buffers that it frees. A buffer that was freed has the freeing action as its writer.

        Args:
            reads: buffers that the action reads.
            writes: buffers that the action writes.
            frees: buffers that the action frees.
            lane: lane of the action, as for ``record``. Two kinds of events are left out if they are on this lane,
                because they end before the action begins: the freeing of a buffer that it writes, and reads of a buffer
                that it frees.
        """
        events: list[Event] = []
        for name in reads:
            if name in self._writer:
                events.append(self._writer[name])
        for name in writes:
            if name in self._writer and (lane is None or self._freed.get(name) != lane):
                events.append(self._writer[name])
            if name in self._readers:
                events.extend(self._readers[name].values())
        for name in frees:
            if name in self._readers:
                events.extend(event for key, event in self._readers[name].items() if lane is None or key != lane)
        return list(dict.fromkeys(events))

    def record(
        self,
        event: Event,
        *,
        reads: Iterable[Hashable],
        writes: Iterable[Hashable],
        frees: Iterable[Hashable] = (),
        lane: Hashable | None = None,
    ) -> None:
        """Record the event of an action as writer or reader of its buffers.

        Args:
            event: event that marks the end of the action.
            reads: buffers that the action reads.
            writes: buffers that the action writes.
            frees: buffers that hold nothing afterwards. The action that next writes a buffer of this name waits for
                ``event``.
            lane: lane of the action, if actions on it end in the order in which they are recorded. Then only the last
                reader of a buffer on each lane is stored, so that buffers that are read in every step but never written
                collect no events. None if there is no such order.
        """
        for name in reads:
            self._readers.setdefault(name, {})[event if lane is None else lane] = event
        for name in writes:
            self._writer[name] = event
            self._readers[name] = {}
            self._freed.pop(name, None)
        for name in frees:
            self._writer[name] = event
            self._readers[name] = {}
            self._freed[name] = lane

    def add(
        self, event: Event, *, reads: Iterable[Hashable], writes: Iterable[Hashable], frees: Iterable[Hashable] = ()
    ) -> list[Event]:
        """Return the events that an action must wait for (``before``), and record its own event (``record``).

        Args:
            event: event that marks the end of the action.
            reads: buffers that the action reads.
            writes: buffers that the action writes.
            frees: buffers that hold nothing after the action.
        """
        events = self.before(reads=reads, writes=writes, frees=frees)
        self.record(event, reads=reads, writes=writes, frees=frees)
        return events

    def last_events(self) -> list[Event]:
        """Return every recorded event that a later action could still wait for, without duplicates."""
        events = list(self._writer.values())
        for readers in self._readers.values():
            events.extend(readers.values())
        return list(dict.fromkeys(events))
