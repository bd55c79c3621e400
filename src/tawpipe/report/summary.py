"""A timeline in a few lines of text, for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tawpipe.report.bars import Bar, label
from tawpipe.schedule.actions import Lane

GAPS = 3
"""Number of the longest gaps that are named."""


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
        yield f"  not computing {total:.3f} s, of it {first:.3f} s at the start and {last:.3f} s at the end"
        between = [gap for gap in idle if gap.before is not None and gap.begin > begin]
        for gap in sorted(between, key=lambda gap: gap.begin - gap.end)[:GAPS]:
            assert gap.before is not None
            yield f"  {gap.end - gap.begin:.3f} s before {label(gap.before)} (at {gap.begin:.3f} s)"
