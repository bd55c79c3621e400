"""A timeline in a few lines of text, for a terminal; and a predicted step beside the same step as it ran.

Actions are matched by their rank and text. How long one took means something else for transfers: in a recording it
includes waiting for the other side, which a prediction counts as waiting; computing is comparable as it is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tawpipe.report.bars import KINDS, Bar, kind_of, label
from tawpipe.schedule.actions import Lane

GAPS = 3
"""Number of the longest gaps that are named."""
NAMED = 4
"""Actions that are named because they differ most, of computing and of transfers each."""


@dataclass(frozen=True)
class Gap:
    """A time in which a rank did not compute.

    Args:
        before: what was computed after it, or None at the end of the step.
    """

    rank: int
    begin: float
    end: float
    before: Bar | None


def gaps(bars: Sequence[Bar], rank: int) -> list[Gap]:
    """The times when ``rank`` did not compute, from the first action of the step on any rank to the last."""
    if not bars:
        return []
    free, last = min(bar.begin for bar in bars), max(bar.end for bar in bars)
    times = []
    for bar in sorted((b for b in bars if b.rank == rank and b.action.lane is Lane.COMPUTE), key=lambda b: b.begin):
        if bar.begin > free:
            times.append(Gap(rank, free, bar.begin, bar))
        free = max(free, bar.end)
    if last > free:
        times.append(Gap(rank, free, last, None))
    return times


def summary(bars: Sequence[Bar], ranks: Sequence[int]) -> Iterator[str]:
    """Length of the step; of every rank how long its lanes were busy, and when it did not compute."""
    begin, end = min(bar.begin for bar in bars), max(bar.end for bar in bars)
    yield f"step of {end - begin:.3f} s, {len({bar.rank for bar in bars})} ranks, {len(bars)} actions"
    for rank in ranks:
        idle = gaps(bars, rank)
        mine = [bar for bar in bars if bar.rank == rank]
        busy = {lane: sum(b.end - b.begin for b in mine if b.action.lane is lane) for lane in Lane}
        lanes = ", ".join(f"{lane} {seconds:.3f}" for lane, seconds in busy.items() if seconds)
        first = sum(gap.end - gap.begin for gap in idle[:1] if gap.begin == begin)
        last = sum(gap.end - gap.begin for gap in idle[-1:] if gap.before is None)
        total = sum(gap.end - gap.begin for gap in idle)
        yield f"rank {rank}: busy {lanes} s"
        yield f"  not computing: {total:.3f} s, {first:.3f} s of it at the start and {last:.3f} s at the end"
        between = [gap for gap in idle if gap.before is not None and gap.begin > begin]
        for gap in sorted(between, key=lambda gap: gap.begin - gap.end)[:GAPS]:
            assert gap.before is not None
            yield f"  {gap.end - gap.begin:.3f} s before {label(gap.before)} (at {gap.begin:.3f} s)"


@dataclass(frozen=True)
class Pair:
    """One action, twice."""

    predicted: Bar
    executed: Bar

    @property
    def longer_s(self) -> float:
        """Seconds that it took longer than predicted."""
        return _length(self.executed) - _length(self.predicted)


def matched(predicted: Sequence[Bar], executed: Sequence[Bar]) -> list[Pair]:
    """The actions that are in both, in the order in which they ran."""
    known = dict(_numbered(predicted))
    pairs = ((known.get(key), bar) for key, bar in _numbered(executed))
    return [Pair(before, bar) for before, bar in pairs if before is not None]


def _numbered(bars: Sequence[Bar]) -> Iterator[tuple[tuple[int, str, int], Bar]]:
    """Every bar with its rank, its text and its position among bars of that text: transfers of several rounds read
    alike.
    """
    count: Counter[tuple[int, str]] = Counter()
    for bar in bars:
        key = bar.rank, str(bar.action)
        yield (*key, count[key]), bar
        count[key] += 1


def differences(predicted: Sequence[Bar], executed: Sequence[Bar]) -> Iterator[str]:
    """The step, the kinds of action, and the single actions that differ most, in lines."""
    pairs = matched(predicted, executed)
    if not pairs:
        yield "the plan is for another schedule: none of its actions was recorded"
        return
    ranks = sorted({pair.executed.rank for pair in pairs})
    before, after = (max(b.end for b in bars) - min(b.begin for b in bars) for bars in (predicted, executed))
    yield f"step predicted {before:.3f} s, executed {after:.3f} s ({after / before - 1:+.1%})"
    for kind in KINDS:
        same = [pair for pair in pairs if kind_of(pair.executed) == kind]
        if same:
            said, took = (sum(map(_length, bars)) / len(ranks) for bars in zip(*map(_both, same), strict=True))
            change = f" ({took / said - 1:+.0%})" if said > 0 else ""
            yield f"  {kind}: predicted {said:.3f} s, executed {took:.3f} s a rank{change}"
    for what, computes in (("computing", True), ("transfers, including waiting for the other side", False)):
        some = [pair for pair in pairs if (pair.executed.action.lane is Lane.COMPUTE) == computes]
        if not some:
            continue
        yield f"largest differences from the prediction, {what}:"
        for pair in sorted(some, key=lambda pair: -abs(pair.longer_s))[:NAMED]:
            yield (
                f"  rank {pair.executed.rank} {label(pair.executed)}: predicted {_length(pair.predicted):.4f} s, "
                f"executed {_length(pair.executed):.4f} s, at {pair.executed.begin:.3f} s"
            )


def _both(pair: Pair) -> tuple[Bar, Bar]:
    return pair.predicted, pair.executed


def _length(bar: Bar) -> float:
    return bar.end - bar.begin
