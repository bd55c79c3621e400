"""Computing and waiting time of every rank in each round of a step: which rank the others wait for.

A new round begins where a rank starts again at its first block. Time that a rank waits before an action counts in the
round of that action. Waiting at the end of the step counts in the last round. Computing times of a recording are used
as recorded. Ranks on different machines are compared only by durations, never by times of their clocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import mean

from tawpipe.report.bars import Bar
from tawpipe.schedule.actions import Lane, Op

COMPUTING = (Op.FORWARD, Op.BACKWARD, Op.KEYS, Op.KEYS_BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)
MOST_ROUNDS = 12
"""Maximum number of rounds that are printed. If there are more, those with the longest waiting are printed."""
MOST_RANKS = 16
"""Maximum number of ranks whose seconds are listed in a line."""


@dataclass
class RoundPart:
    """Seconds that one rank computed and waited in a round."""

    computed: float = 0.0
    waited: float = 0.0


@dataclass(frozen=True)
class Round:
    """Round of a step.

    Args:
        number: number of the round, from 0.
        shares: times of every rank that computed in this round.
    """

    number: int
    shares: dict[int, RoundPart]

    @property
    def longest(self) -> int:
        """Rank that computed for the longest time; the other ranks wait for it."""
        return max(self.shares, key=lambda rank: self.shares[rank].computed)

    @property
    def imbalance(self) -> float:
        """Longest computing time of a rank divided by the mean; 1 if all ranks are equal."""
        average = mean(share.computed for share in self.shares.values())
        return self.shares[self.longest].computed / average if average else 1.0


def rounds(bars: Sequence[Bar]) -> list[Round]:
    """Divide the bars of a step into rounds; return each round with the computing and waiting seconds of all ranks."""
    by_number: list[dict[int, RoundPart]] = []
    begin = min((bar.begin for bar in bars), default=0.0)
    for rank in sorted({bar.rank for bar in bars}):
        lane = sorted((b for b in bars if b.rank == rank and b.action.lane is Lane.COMPUTE), key=lambda bar: bar.begin)
        first = min((bar.action.block for bar in lane if bar.action.op is Op.FORWARD), default=-1)
        shares: list[RoundPart] = []
        free, before, late = begin, None, 0.0
        for bar in lane:
            place = bar.action.op, bar.action.block
            if bar.action.op in COMPUTING:
                if place == (Op.FORWARD, first) != before or not shares:
                    shares.append(RoundPart(waited=late))
                    late = 0.0
                shares[-1].computed += bar.end - bar.begin
                before = place
            waited = max(0.0, bar.begin - free)
            if shares:
                shares[-1].waited += waited
            else:
                late += waited
            free = max(free, bar.end)
        for number, share in enumerate(shares):
            if number == len(by_number):
                by_number.append({})
            by_number[number][rank] = share
    return [Round(number, shares) for number, shares in enumerate(by_number)]


def waiting(bars: Sequence[Bar]) -> Iterator[str]:
    """Yield lines for a terminal about the step and its rounds: which rank computes longest, and waiting times.

    Yields nothing if no round has two ranks or more."""
    all_of_them = [round_ for round_ in rounds(bars) if len(round_.shares) > 1]
    if not all_of_them:
        return
    total = {rank: RoundPart() for round_ in all_of_them for rank in round_.shares}
    for round_ in all_of_them:
        for rank, share in round_.shares.items():
            total[rank].computed += share.computed
            total[rank].waited += share.waited
    step = Round(-1, total)
    yield f"waiting by rank: {_of(step)}"
    shown = sorted(all_of_them, key=lambda round_: -sum(share.waited for share in round_.shares.values()))[:MOST_ROUNDS]
    for round_ in sorted(shown, key=lambda round_: round_.number):
        yield f"  round {round_.number}: {_of(round_)}"
        if len(round_.shares) <= MOST_RANKS:
            each = (f"{rank} {share.computed:.3f} + {share.waited:.3f}" for rank, share in round_.shares.items())
            yield f"    seconds computing + waiting by rank: {', '.join(each)}"
    if left := len(all_of_them) - len(shown):
        yield f"  {left} rounds with less waiting are not listed"


def _of(round_: Round) -> str:
    """Return text about a round: which rank computes longest, and the mean and the longest waiting time."""
    longest = round_.shares[round_.longest]
    most = max(round_.shares, key=lambda rank: round_.shares[rank].waited)
    waited = mean(share.waited for share in round_.shares.values())
    return (
        f"rank {round_.longest} computes longest, {longest.computed:.3f} s ({round_.imbalance:.2f} of the "
        f"mean); ranks wait {waited:.3f} s on average, rank {most} longest, {round_.shares[most].waited:.3f} s"
    )
