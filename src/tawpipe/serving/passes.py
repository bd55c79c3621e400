"""What goes between those who hold requests and the engine that computes for them. Without torch.

A *slot* holds one request's keys and values on every stage; a *group* is some slots that pass the stages together; in
a *lap* every group passes once. The engine asks a ``PassFeeder`` for each pass of a group, and gives it what was drawn
after that pass before it asks for the group's next one. All stages see the passes in the order in which they were fed,
so chunks of one prompt may ride on successive passes, of whatever groups, and a slot can be given to another request
between two passes: that begins again at position 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol


@dataclass(frozen=True)
class Room:
    """The places that an engine has: they stay as they are while it runs.

    Attributes:
        groups: that pass in a lap.
        slots: of each group.
        context: positions of each slot. The last token of an answer needs none.
        chunk: tokens of a prompt that ride on one pass, at most.
    """

    groups: int
    slots: int
    context: int
    chunk: int


class Sampling(NamedTuple):
    """How a token is drawn. Its random numbers follow from (seed, position of the token) alone.

    Attributes:
        temperature: divides the logits; 0 takes the likeliest token.
        top_k: draw among so many of the likeliest tokens; 0 for all.
        top_p: draw among the fewest likeliest tokens whose chances reach this, of those that ``top_k`` leaves; 1 for
            all.
        seed: from 0 up to, not including, 2**63.
        logprobs: how many of the likeliest tokens are told besides the drawn one.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    logprobs: int = 0


@dataclass(frozen=True)
class Row:
    """A document of a pass: the next tokens of one slot.

    Attributes:
        slot: its number among all slots: ``group * Room.slots`` + its place in the group that passes with its one
            token. No two rows of a pass have the same.
        first: position of the first token. Where it is 0, a new request begins in the slot.
        tokens: at least one.
        draw: how the token behind them is drawn; None if none is, as they are a chunk that is not a prompt's last.
        known: tokens that a prompt has behind those of the row, each one position later. Their logprobs are told.
        likeliest: number of the likeliest tokens that are told besides each known one.
    """

    slot: int
    first: int
    tokens: tuple[int, ...]
    draw: Sampling | None = None
    known: tuple[int, ...] = ()
    likeliest: int = 0


@dataclass(frozen=True)
class Pass:
    """What passes the stages at one time: a row of one token for slots of its group, and at most one row besides, with
    tokens of a prompt for any slot.

    Attributes:
        group: the number of the group.
        rows: none while the group has nothing to compute; the pass is made all the same.
        last: nothing comes behind it: the engine stops when all groups have passed.
    """

    group: int
    rows: tuple[Row, ...]
    last: bool = False


class Drawn(NamedTuple):
    """A token that was drawn, or a known one of a prompt.

    Attributes:
        slot: the row's.
        position: of the token in its slot: that of the row's last token, and one.
        token: its id.
        logprob: natural logarithm of its chance by the model's logits as they are: no temperature, no ``top_k``.
        top: the likeliest tokens by the same logits and their logprobs, the likeliest first; as many as were asked for.
    """

    slot: int
    position: int
    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class PassFeeder(Protocol):
    """Who holds the requests. The engine calls it from one thread, in the first stage's process."""

    def feed(self, group: int) -> Pass:
        """The next pass of a group. May wait while no group has anything to do, at most ``IDLE_S`` in a lap, so that
        an idle service is not busy and no watchdog runs out. Once a pass was ``last``, every later one is, too.
        """
        ...

    def take(self, group: int, drawn: Sequence[Drawn]) -> None:
        """Take what was drawn after the group's last pass, before its next ``feed``: the known tokens of its rows in
        their order, then a token for each row that draws.
        """
        ...


IDLE_S = 5.0
"""Seconds between laps of an idle engine, at most."""
