"""Interface between the owner of requests (a ``PassFeeder``) and the engine that computes for them. Without torch.

A *slot* holds the keys and values of one request on every stage. A *group* is a number of slots that go through the
stages together. In a *decode step* every group passes all stages once. The engine asks the feeder for each pass of a
group. Before it asks for the group's next pass, it gives the feeder the tokens that were drawn.

All stages see the passes in the order in which they were fed. So chunks of one prompt can be part of successive passes
of any groups. A slot can be given to another request between two passes; the new request starts at position 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol


@dataclass(frozen=True)
class SlotLayout:
    """Numbers and sizes of the KV-cache slots of an engine, fixed while it runs.

    Attributes:
        groups: groups that pass the stages in a decode step.
        slots: slots of each group.
        context: positions of each slot. The last token of an answer needs none.
        chunk: maximum number of prompt tokens in one pass.
    """

    groups: int
    slots: int
    context: int
    chunk: int


class Sampling(NamedTuple):
    """Sampling settings of a request. The random number of a token depends only on ``seed`` and the token's position.

    Attributes:
        temperature: divides the logits. 0 selects the likeliest token.
        top_k: number of likeliest tokens to draw from; 0 for all.
        top_p: draw from the fewest likeliest tokens whose probabilities reach this sum, after ``top_k``; 1 for all.
        seed: in [0, 2**63).
        logprobs: number of likeliest tokens that are reported along with the drawn one.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    logprobs: int = 0


@dataclass(frozen=True)
class Row:
    """Document in a pass: the next tokens of one slot.

    Attributes:
        slot: index among all slots: ``group * SlotLayout.slots`` + index in the group that computes its single next
            token. No two rows of a pass have the same slot.
        first: position of the first token. At 0, a new request begins in the slot.
        tokens: token ids, at least one.
        draw: sampling settings of the token after the row; None if none is drawn, because the tokens are a chunk of a
            prompt and not its last one.
        known: prompt tokens at the positions after those of the row's tokens, whose logprobs are reported. Empty if no
            logprobs of the prompt are wanted.
        likeliest: number of likeliest tokens that are reported along with each known token.
    """

    slot: int
    first: int
    tokens: tuple[int, ...]
    draw: Sampling | None = None
    known: tuple[int, ...] = ()
    likeliest: int = 0


@dataclass(frozen=True)
class Pass:
    """Tokens that pass the stages together.

    They are one row with a single token for slots of the group, and at most one row with prompt tokens for a slot of
    any group.

    Attributes:
        group: index of the group.
        rows: may be empty while the group has nothing to compute; the empty pass is computed all the same.
        last: no pass follows. The engine stops when the last passes of all groups are computed.
    """

    group: int
    rows: tuple[Row, ...]
    last: bool = False


class Drawn(NamedTuple):
    """Token that was drawn, or a known token of a prompt that was scored.

    Attributes:
        slot: slot of its row.
        position: position of the token in its slot. For a drawn token, one more than the position of the row's last
            token.
        token: token id.
        logprob: natural logarithm of its probability from the model's unchanged logits: without temperature and
            ``top_k``.
        top: ids and logprobs of the likeliest tokens by these logits, in descending order; as many as were asked for.
    """

    slot: int
    position: int
    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class PassFeeder(Protocol):
    """Owner of the requests. The engine calls its methods from one thread in the process of the first stage."""

    def feed(self, group: int) -> Pass:
        """Return the next pass of a group, which may be empty.

        While no group has anything to compute, this may wait, at most ``IDLE_S`` seconds per decode step. An idle
        service then uses little processor time, and no watchdog expires. After a pass marked ``last``, every later pass
        is marked as well."""
        ...

    def take(self, group: int, drawn: Sequence[Drawn]) -> None:
        """Receive the tokens from the group's previous pass. The engine calls this before the group's next ``feed``.

        Args:
            group: index of the group.
            drawn: first the known tokens of its rows in their order, then a token for each row that draws one.
        """
        ...


IDLE_S = 5.0
"""Maximum number of seconds between decode steps of an idle engine."""
