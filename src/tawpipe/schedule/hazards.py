"""Which earlier actions an action waits for, from its buffers alone; for all players of a schedule."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Generic, TypeVar

Event = TypeVar("Event")


class Hazards(Generic[Event]):
    """Tracks the last writer and the readers since, of every buffer, over any number of steps.

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
        """Buffer -> lane -> its last reader there; readers without a lane stand for themselves."""
        self._freed: dict[Hashable, Hashable | None] = {}
        """Buffers that hold nothing, with the lane of what has freed them, which counts as their last writer."""

    def before(
        self,
        *,
        reads: Iterable[Hashable],
        writes: Iterable[Hashable],
        frees: Iterable[Hashable] = (),
        lane: Hashable | None = None,
    ) -> list[Event]:
        """The events that an action must wait for: writers of what it reads, writers and readers of what it writes,
        readers of what it frees.

        Args:
            lane: what the action runs on, as for ``record``: what reads or frees there ends before it begins.
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
        """Note an action's event.

        Args:
            frees: hold nothing afterwards. What makes an activation of the same name in the next step waits for this.
            lane: what the action runs on, if actions end there in the order in which they are recorded: then its last
                reader of a buffer stands for all, and what is read in every step but never written piles up no events.
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
        """``before`` and ``record`` in one."""
        events = self.before(reads=reads, writes=writes, frees=frees)
        self.record(event, reads=reads, writes=writes, frees=frees)
        return events

    def last_events(self) -> list[Event]:
        """Every event that something could still wait for."""
        events = list(self._writer.values())
        for readers in self._readers.values():
            events.extend(readers.values())
        return list(dict.fromkeys(events))
