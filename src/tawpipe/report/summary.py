"""Timelines as a few lines of text for a terminal, and a comparison of a predicted step with the recorded one.

Actions are matched by their rank and text. Durations of transfers have different meanings: in a recording they include
waiting for the other side, which a prediction counts as waiting. Durations of computing are directly comparable.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tawpipe.report.bars import KINDS, Bar, kind_of, label
from tawpipe.schedule.actions import Lane

GAPS = 3
"""Number of the longest gaps that are listed."""
NAMED = 4
"""Number of actions with the largest difference that are listed, for computing and for transfers each."""


@dataclass(frozen=True)
class Gap:
    """Time in which a rank did not compute.

    Args:
        rank: the rank.
        begin: beginning of the gap in seconds.
        end: end of the gap in seconds.
        before: bar that was computed after the gap, or None at the end of the step.
    """

    rank: int
    begin: float
    end: float
    before: Bar | None


def gaps(bars: Sequence[Bar], rank: int) -> list[Gap]:
    """Return the times when ``rank`` did not compute, in order; ``[]`` without bars.

    They lie between the first and the last action of all ranks in the step."""
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
    """Yield lines of text about a step: its length, and for each of ``ranks`` its lanes' busy seconds and its gaps."""
    begin, end = min(bar.begin for bar in bars), max(bar.end for bar in bars)
    yield f"step of {end - begin:.3f} s, {len({bar.rank for bar in bars})} ranks, {len(bars)} actions"
    for rank in ranks:
        idle = gaps(bars, rank)
        rank_bars = [bar for bar in bars if bar.rank == rank]
        busy = {lane: sum(b.end - b.begin for b in rank_bars if b.action.lane is lane) for lane in Lane}
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
    """Predicted and recorded bar of one action."""

    predicted: Bar
    executed: Bar

    @property
    def longer_s(self) -> float:
        """Seconds by which the recorded action took longer than predicted."""
        return _length(self.executed) - _length(self.predicted)


def matched(predicted: Sequence[Bar], executed: Sequence[Bar]) -> list[Pair]:
    """Return pairs of the actions that are in both timelines, in the order in which they are recorded."""
    known = dict(_numbered(predicted))
    pairs = ((known.get(key), bar) for key, bar in _numbered(executed))
    return [Pair(before, bar) for before, bar in pairs if before is not None]


def _numbered(bars: Sequence[Bar]) -> Iterator[tuple[tuple[int, str, int], Bar]]:
    """Yield every bar with a key: its rank, its text, and its index among the rank's bars with this text.

    The index is needed because transfers of several rounds have equal texts.
    """
    count: Counter[tuple[int, str]] = Counter()
    for bar in bars:
        key = bar.rank, str(bar.action)
        yield (*key, count[key]), bar
        count[key] += 1


def differences(predicted: Sequence[Bar], executed: Sequence[Bar]) -> Iterator[str]:
    """Yield lines that compare a predicted with a recorded step: total time, time by kind, largest differences.

    If no action is in both, the only line says that the plan is for another schedule."""
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
            predicted_s, took = (sum(map(_length, bars)) / len(ranks) for bars in zip(*map(_both, same), strict=True))
            change = f" ({took / predicted_s - 1:+.0%})" if predicted_s > 0 else ""
            yield f"  {kind}: predicted {predicted_s:.3f} s, executed {took:.3f} s a rank{change}"
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
    """Return the predicted and the recorded bar of a pair."""
    return pair.predicted, pair.executed


def _length(bar: Bar) -> float:
    """Return the duration of a bar in seconds."""
    return bar.end - bar.begin
