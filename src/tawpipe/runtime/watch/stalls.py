"""Stalls: every rank says what it does in a step that takes too long, and all conclude which rank they wait for.

Ranks tell each other through the store in which they met, as the lanes wait. The first rank whose step is late asks;
the others look now and then, and answer also if they are in no step. A rank waits for the peers of a message that is
under way on its side and not on theirs.

Ranks do not answer at the same time. So each looks twice, and for as long between the looks that all ranks have looked
once by then: if nothing has moved anywhere, what they say was all true at one time.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

from tawpipe.schedule.actions import Action
from tawpipe.topology import Topology

ASKED = "asked"
"""Key of the number of reports that were asked for."""
SETTLE_S = 1.5
"""Seconds between a rank's two looks, after which all ranks have seen that one asks."""
ANSWERS_S = 2.5
"""Seconds that a rank waits for the other ranks' answers."""
BEGINNING = "the beginning of a step"
"""Name of what all ranks come to before they issue a step of a form that is new."""
MOST_NAMED = 4
"""Ranks that a conclusion describes."""


@dataclass(frozen=True)
class Standing:
    """State of one rank.

    Args:
        text: what it does, as a verb and its objects.
        late: the step that takes too long here and its limit; empty on a rank that was asked before its own is late.
        waits: whether it can go on only when other ranks do.
        messages: for the name of every message under way, which is the same on all its ends, the ranks at the others.
        failure: error of an action, or "".
        held: the debugger or interactive session that the process is in, or "".
        moves: whether anything has begun or ended here between the two looks.
    """

    text: str
    late: str
    waits: bool
    messages: Mapping[str, Sequence[int]]
    failure: str
    held: str
    moves: bool = False


def messages_of(label: object, topology: Topology, rank: int) -> dict[str, list[int]]:
    """Names of the messages of an action, each with the ranks at its other ends."""
    if not isinstance(label, Action) or not label.group:
        return {}
    members = topology.group(label.group, rank)
    name = f"{label.lane} {label.op} {label.collective} b{label.block} m{label.micro_batch} u{label.unit} of {members}"
    named = {name: [member for member in members if member != rank]} if len(members) > 1 and not label.transfers else {}
    for t in label.transfers:
        way = f"{rank}>{t.peer}" if t.send else f"{t.peer}>{rank}"
        named[f"{name} {way} {t.buffer if t.buffer.is_activation else t.unit}"] = [t.peer]
    return named


def conclusion(standings: Mapping[int, Standing | None]) -> str:
    """The verdict on all ranks, of which those that did not answer are None."""
    known = {rank: it for rank, it in standings.items() if it is not None}
    waiting = {rank: it.messages for rank, it in known.items() if it.waits}
    ahead = {
        rank: {peer for name in messages for peer in messages[name] if name not in waiting.get(peer, ())}
        for rank, messages in waiting.items()
    }
    awaited = set[int]().union(*ahead.values())
    causes = [rank for rank in standings if not ahead.get(rank) and (rank in awaited or rank not in known)]
    named = [f"rank {r}, which {known[r].text if r in known else 'does not answer'}" for r in causes]
    if any(it.moves for it in known.values()):
        who = "the step continues, slowly"
    elif named:
        who = "the others wait for " + "; and for ".join(named[:MOST_NAMED])
        who += f"; and for {len(named) - MOST_NAMED} more" * (len(named) > MOST_NAMED)
    elif awaited:
        fault = ", which is a fault of tawpipe's" * all(BEGINNING not in messages for messages in waiting.values())
        who = f"ranks {', '.join(map(str, sorted(awaited)))} wait for each other{fault}"
    else:
        who = "; ".join(f"rank {rank} {it.text}" for rank, it in [*known.items()][:MOST_NAMED])
    failed = [f"rank {rank} has failed: {it.failure}" for rank, it in known.items() if it.failure]
    none = "no rank has failed" + ", as far as they answer" * (len(known) < len(standings))
    late = [it.late for it in known.values() if it.late]
    held = [f"nothing is ended, as rank {rank} is in {it.held}" for rank, it in known.items() if it.held]
    return "; ".join([*(failed or [none]), *late[:1], who, *held[:1]])


class Others:
    """The other ranks, asked and told through the store.

    Args:
        connect: gives a connection of its own to the store, for the keys of one pipeline.
    """

    def __init__(self, connect: Callable[[], Any], rank: int, size: int) -> None:
        self._store, self._rank, self._size = cache(connect), rank, size
        self.ranks, self._answered = [other for other in range(size) if other != rank], 0

    @property
    def ask(self) -> bool:
        """True if some rank has asked since this one answered last."""
        return self._store().add(ASKED, 0) > self._answered

    def gather(self, look: Callable[[], Standing], *, ask: bool) -> dict[int, Standing | None]:
        """The standings of all ranks, None for those that do not answer.

        Args:
            look: gives this rank's, at the second look.
            ask: whether this rank asks for them unless another has.
        """
        store = self._store()
        if ask and not self.ask:
            store.add(ASKED, 1)
        time.sleep(SETTLE_S)
        self._answered = number = store.add(ASKED, 0)
        store.append(f"{number}", json.dumps([self._rank, asdict(look())]) + "\n")
        store.add(f"{number} answers", 1)
        end = time.monotonic() + ANSWERS_S
        while store.add(f"{number} answers", 0) < self._size and time.monotonic() < end:
            time.sleep(0.1)
        known = {rank: Standing(**it) for rank, it in map(json.loads, store.get(f"{number}").splitlines())}
        return {rank: known.get(rank) for rank in range(self._size)}
