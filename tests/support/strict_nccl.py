"""Schedules on NCCL's communicators in strict mode, simulated without a clock: which ranks would wait for ever?

A communicator runs its operations one after another, a send of a few bytes ends at once, a receive waits for its send,
and a collective for all its members. A batch waits until all its parts are posted on both sides. In strict mode a
header travels before every message by itself, and the thread that issues waits for the headers that it receives.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from tawpipe.schedule.actions import Action, Lane, Op
from tawpipe.schedule.hazards import Hazards
from tawpipe.schedule.step import Schedule

Communicator = tuple[Lane, str]
SUMS = (Op.COUNT, Op.NORM, Op.SIZE)


@dataclass
class _Rank:
    program: tuple[Action, ...]
    hazards: Hazards[int] = field(default_factory=Hazards)
    next: int = 0
    done: set[int] = field(default_factory=set)
    awaited: dict[int, set[int]] = field(default_factory=dict)
    """Action -> those that it waits for."""
    queues: dict[Any, deque[tuple[str, int, int]]] = field(default_factory=lambda: defaultdict(deque))
    """Communicator -> its operations: their kind, the action's number and the peer. Other actions are alone in one."""
    last: dict[Lane, int] = field(default_factory=dict)
    headers: Counter[int] = field(default_factory=Counter)
    """Action -> headers that the issuing thread waits for."""

    @property
    def ended(self) -> bool:
        return self.next == len(self.program) and not any(self.queues.values())


def stuck(schedule: Schedule, *, strict: bool) -> list[int]:
    """Return the ranks that do not come to the end of a step."""
    ranks = [_Rank(tuple(program)) for program in schedule.programs]
    sent, posted = Counter[Any](), Counter[Any]()
    own: dict[Any, int] = {}
    moved = True
    while moved:
        moved = False
        for number, rank in enumerate(ranks):
            while rank.next < len(rank.program) and not +rank.headers:
                _issue(rank, strict=strict)
                moved = True
            for key in list(rank.queues):
                while rank.queues.get(key) and _runs(schedule, ranks, number, key, sent, posted, own):
                    moved = True
    return [number for number, rank in enumerate(ranks) if not rank.ended]


def _issue(rank: _Rank, *, strict: bool) -> None:
    number, action = rank.next, rank.program[rank.next]
    names: Any = {"reads": action.reads, "writes": action.writes, "frees": action.frees, "lane": action.lane}
    rank.awaited[number] = {
        *rank.hazards.before(**names),
        *[rank.last[lane] for lane in {action.lane} & rank.last.keys()],
    }
    rank.hazards.record(number, **names)
    rank.last[action.lane], rank.next = number, number + 1
    travels = action.group and (action.op in (Op.EXCHANGE, Op.COLLECTIVE) or action.op in SUMS)
    queue = rank.queues[(action.lane, action.group) if travels else number]
    if not travels:
        queue.append(("alone", number, 0))
    elif action.op is Op.EXCHANGE:
        for transfer in action.transfers if strict else ():
            queue.append(("send" if transfer.send else "receive", number, transfer.peer))
            rank.headers[number] += not transfer.send
        queue.append(("batch", number, 0))
    else:
        if strict:
            queue.append(("header", number, 0))
            rank.headers[number] += 1
        queue.append(("collective", number, 0))


def _runs(schedule: Schedule, ranks: list[_Rank], at: int, key: Any, sent: Any, posted: Any, own: Any) -> bool:
    """Run the first operation of a communicator of the rank ``at`` if it can; True if it did."""
    rank = ranks[at]
    kind, number, peer = rank.queues[key][0]
    action = rank.program[number]
    if not rank.awaited[number] <= rank.done:
        return False
    if kind == "send":
        sent[key, at, peer] += 1
    elif kind == "receive":
        if not sent[key, peer, at]:
            return False
        sent[key, peer, at] -= 1
        rank.headers[number] -= 1
    elif kind == "batch":
        for place, way, _ in _ways(action, at, key):
            if (at, number, place) not in own:
                posted[way] += 1
                own[at, number, place] = posted[way]
        if any(posted[other] < own[at, number, place] for place, _, other in _ways(action, at, key)):
            return False
    elif kind in ("header", "collective"):
        members = schedule.topology.group(action.group, at)
        if not all(_is_at(ranks[member], key, kind) for member in members):
            return False
        for member in members:
            _end(ranks[member], key)
        return True
    _end(rank, key)
    return True


def _ways(action: Action, at: int, key: Any) -> Iterator[tuple[int, Any, Any]]:
    """The number of every part of a batch, its way as this side posts it, and as the other one does."""
    for place, transfer in enumerate(action.transfers):
        ends = (at, transfer.peer) if transfer.send else (transfer.peer, at)
        yield place, (key, *ends, transfer.send), (key, *ends, not transfer.send)


def _is_at(rank: _Rank, key: Any, kind: str) -> bool:
    if not rank.queues.get(key):
        return False
    here, number, _ = rank.queues[key][0]
    return here == kind and rank.awaited[number] <= rank.done


def _end(rank: _Rank, key: Any) -> None:
    kind, number, _ = rank.queues[key].popleft()
    if not rank.queues[key]:
        del rank.queues[key]
    if kind == "header":
        rank.headers[number] -= 1
    elif kind not in ("send", "receive"):
        rank.done.add(number)
