"""Where actions of several ranks meet: the one set of rules that the proof and the clock share.

* A collective takes place when all members of its group have it at the head of the same lane; all must mean the same
  operation.
* Each part of an exchange takes place when its other side is there. Parts between two ranks on one lane and group match
  in the order in which they were issued.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from tawpipe.schedule.actions import Action, Transfer
from tawpipe.schedule.proof.symbolic import ScheduleError

Part = TypeVar("Part")


class Rendezvous(Generic[Part]):
    """Actions that wait for others, whatever their player calls them.

    Args:
        describe: a part in words, for errors.
    """

    def __init__(self, describe: Callable[[Part], str]) -> None:
        self._describe = describe
        self._gathering: dict[tuple, list[tuple[Part, Action]]] = {}
        self._open: dict[tuple, deque[tuple[Part, Transfer, str]]] = {}

    def collective(self, part: Part, action: Action, members: tuple[int, ...], needed: int) -> list[Part]:
        """All parts of a collective, in the order of their arrival, once ``needed`` of them are there; none before.

        Raises:
            ScheduleError: members of the group issue different operations.
        """
        here = self._gathering.setdefault((action.lane, action.group, members[0]), [])
        if here and _operation(here[0][1]) != _operation(action):
            texts = f"{self._describe(part)} and {self._describe(here[0][0])}"
            raise ScheduleError(f"members of a group issue different operations: {texts}")
        here.append((part, action))
        if len(here) < needed:
            return []
        parts = [member for member, _ in here]
        here.clear()
        return parts

    def exchange(self, part: Part, rank: int, action: Action) -> Iterator[tuple[Transfer, Part, Transfer]]:
        """The transfers of an exchange whose other side is there: (its own, the other part, the other's).

        Raises:
            ScheduleError: a send meets the receive of something else.
        """
        for transfer in action.transfers:
            sender, receiver = (rank, transfer.peer) if transfer.send else (transfer.peer, rank)
            way = (action.lane, action.group, sender, receiver)
            waiting = self._open.get((*way, not transfer.send))
            if not waiting:
                entry = (part, transfer, action.compression)
                self._open.setdefault((*way, transfer.send), deque()).append(entry)
                continue
            other, match, compression = waiting.popleft()
            if (match.unit, compression) != (transfer.unit, action.compression):
                texts = f"{self._describe(part)} and {self._describe(other)}"
                raise ScheduleError(f"a send meets the receive of something else: {texts}")
            yield transfer, other, match

    def present(self, action: Action, members: tuple[int, ...]) -> list[Part]:
        """The parts of a collective that are there and wait for the others."""
        return [member for member, _ in self._gathering.get((action.lane, action.group, members[0]), ())]

    def unmet(self, part: Part) -> list[Transfer]:
        """The transfers of an exchange that wait for their other side."""
        return [transfer for queue in self._open.values() for other, transfer, _ in queue if other == part]


def _operation(action: Action) -> tuple:
    about = action.block, action.micro_batch, action.unit
    return action.op, action.collective, *about, action.root, action.compression
