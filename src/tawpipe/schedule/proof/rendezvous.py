"""Matching of the actions of several ranks, by rules that the proof and the clock share.

* A collective takes place when all members of its group have it as the first action of the same lane. All must issue
  the same operation.
* Each transfer of an exchange takes place when its other side has been issued, too. Transfers between two ranks on one
  lane and group match in the order in which they were issued.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from tawpipe.schedule.actions import Action, Transfer
from tawpipe.schedule.proof.symbolic import ScheduleError

Part = TypeVar("Part")


class Rendezvous(Generic[Part]):
    """Actions that wait for actions of other ranks. A part is any object with which the caller represents an action.

    Args:
        describe: function that returns a text for a part, for error messages.
    """

    def __init__(self, describe: Callable[[Part], str]) -> None:
        self._describe = describe
        self._gathering: dict[tuple, list[tuple[Part, Action]]] = {}
        self._open: dict[tuple, deque[tuple[Part, Transfer, str]]] = {}

    def collective(self, part: Part, action: Action, members: tuple[int, ...], needed: int) -> list[Part]:
        """Add a part of a collective; return all parts, in order of arrival, once ``needed`` have arrived.

        Returns an empty list while parts are missing. Parts that are returned are forgotten.

        Args:
            part: the caller's object for the action.
            action: the action.
            members: ranks of the group.
            needed: number of parts to wait for.

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
        """Match the transfers of an exchange with waiting transfers of other ranks.

        Yields (its own transfer, the other part, the other transfer) for each match. A transfer without a match is
        stored, and waits for its other side.

        Args:
            part: the caller's object for the action.
            rank: the rank of the action.
            action: the exchange.

        Raises:
            ScheduleError: a send matches a receive of another unit or compression.
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
        """Return the parts of a collective that have arrived and still wait for other members."""
        return [member for member, _ in self._gathering.get((action.lane, action.group, members[0]), ())]

    def unmet(self, part: Part) -> list[Transfer]:
        """Return the transfers of an exchange whose other side has not arrived."""
        return [transfer for queue in self._open.values() for other, transfer, _ in queue if other == part]


def _operation(action: Action) -> tuple:
    """Return the fields of an action that must be equal on all members of a group."""
    about = action.block, action.micro_batch, action.unit
    return action.op, action.collective, *about, action.root, action.compression
