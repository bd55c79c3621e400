"""Stalls: in a step that takes too long, every rank reports its state, and all derive which rank the others wait for.

Ranks exchange reports through the store in which they met, because the lanes are blocked. The first rank whose step is
late asks. The others check regularly whether one has asked, and answer even if they are in no step. A rank waits for
the peers of a message that is under way on its side and not on theirs.

Ranks do not answer at one time. So each looks twice, with a pause in which all other ranks look for the first time. If
nothing has moved on any rank between its looks, all reports were true at one common time.
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
"""Store key of the number of reports that ranks have asked for."""
SETTLE_S = 1.5
"""Seconds between a rank's two looks, in which all ranks notice that one asks."""
ANSWERS_S = 2.5
"""Seconds to wait for the answers of the other ranks."""
BEGINNING = "the beginning of a step"
"""Name of the point that all ranks must reach before they issue a step of a new form."""
MOST_NAMED = 4
"""Largest number of ranks that a conclusion describes."""


@dataclass(frozen=True)
class Standing:
    """State of one rank in a report.

    Args:
        text: What the rank does, as a verb and its objects.
        late: Step that takes too long here, with its limit; ``""`` on a rank whose own step is not late.
        waits: True if it can continue only when other ranks do.
        messages: Name of each message under way, equal on all its ends -> the ranks at the other ends.
        failure: Error of an action, or ``""``.
        held: Debugger or interactive session that the process is in, or ``""``.
        moves: True if any action has begun or ended on this rank between its two looks.
    """

    text: str
    late: str
    waits: bool
    messages: Mapping[str, Sequence[int]]
    failure: str
    held: str
    moves: bool = False


def messages_of(label: object, topology: Topology, rank: int) -> dict[str, list[int]]:
    """Return the names of an action's messages, each with the ranks at its other ends; empty for other labels."""
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
    """Return the verdict on all ranks as text: failures, the late step, and the ranks that the others wait for.

    Args:
        standings: Rank -> its state, or None if it did not answer.
    """
    known = {rank: it for rank, it in standings.items() if it is not None}
    waiting = {rank: it.messages for rank, it in known.items() if it.waits}
    blocking_peers = {
        rank: {peer for name in messages for peer in messages[name] if name not in waiting.get(peer, ())}
        for rank, messages in waiting.items()
    }
    awaited = set[int]().union(*blocking_peers.values())
    causes = [rank for rank in standings if not blocking_peers.get(rank) and (rank in awaited or rank not in known)]
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
    """Exchange of states with the other ranks through the store.

    Args:
        connect: Returns a new connection to the store, with keys for one pipeline.
        rank: This rank.
        size: Number of ranks.
    """

    def __init__(self, connect: Callable[[], Any], rank: int, size: int) -> None:
        self._store, self._rank, self._size = cache(connect), rank, size
        self.ranks, self._answered = [other for other in range(size) if other != rank], 0

    @property
    def ask(self) -> bool:
        """True if any rank has asked since this one last answered. Reads the store."""
        return self._store().add(ASKED, 0) > self._answered

    def gather(self, look: Callable[[], Standing], *, ask: bool) -> dict[int, Standing | None]:
        """Answer with this rank's state, and return the states of all ranks; None for a rank that does not answer.

        Waits ``SETTLE_S`` seconds before its answer and at most ``ANSWERS_S`` seconds after it.

        Args:
            look: Returns this rank's state at the second look.
            ask: Ask the other ranks for their states, unless another rank has.
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
