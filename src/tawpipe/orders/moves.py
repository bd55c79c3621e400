"""Neighbours of a layout, and lower bounds for the time of layouts, computed without playing their orders."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, product
from typing import NamedTuple

from tawpipe.orders.ticks import Ticks
from tawpipe.schedule.pipelines.work import TIMES, BlockTimes


class StagePlan(NamedTuple):
    """First block of each stage (``cuts``) and position of each stage (``places``)."""

    cuts: tuple[int, ...]
    places: tuple[int, ...]


def _sums(times: Sequence[int], pace: float = 1) -> list[int]:
    """Return the running sums of times, each rounded after multiplication with ``pace``; the first sum is 0."""
    return list(accumulate((round(time * pace) for time in times), initial=0))


class Moves:
    """Changes of layouts, and loads and bounds of the results.

    Args:
        ticks: costs in whole numbers.
        positions: number of pipeline positions.
        micro_batches: number of micro-batches.
        most: maximum number of stages on all positions together.
    """

    def __init__(self, ticks: Ticks, positions: int, micro_batches: int, most: int) -> None:
        self.positions, self.micro_batches, self.most, self.travel = positions, micro_batches, most, ticks.travel
        self.blocks = len(ticks.blocks)
        kinds = [[round(time(block)) for block in ticks.blocks] for time in map(TIMES.__getitem__, "FIW")]
        self.forward, self.inputs, self.total = (
            [_sums(times, pace) for pace in ticks.pace] if ticks.pace else [_sums(times)] * positions
            for times in (*kinds[:2], [sum(three) for three in zip(*kinds, strict=True)])
        )
        """By position: running sums of the time of the first blocks, for F (``forward``), I (``inputs``) and all kinds
        (``total``)."""

    @classmethod
    def of_memory(cls, ticks: Ticks, positions: int, most: int, flying: int) -> Moves:
        """Return a ``Moves`` object whose loads are memory instead of time.

        The load of a block is its resident memory plus what ``flying`` micro-batches keep."""
        blocks = tuple(BlockTimes(block.resident + flying * block.kept, 0, 0) for block in ticks.blocks)
        return cls(replace(ticks, blocks=blocks, pace=()), positions, 1, most)

    def loads(self, plan: StagePlan) -> list[int]:
        """Return the load of every position: the time of F, I and W of one micro-batch in all its stages, in ticks.

        The loads of an object from ``of_memory`` are memory instead."""
        loads, total = [0] * self.positions, self.total
        for first, end, place in zip(plan.cuts, self._ends(plan), plan.places, strict=True):
            loads[place] += total[place][end] - total[place][first]
        return loads

    def bounds(self, plan: StagePlan) -> list[int]:
        """Return for every position a time that no order of its works can undercut.

        Before the first micro-batch reaches a stage, its position can run only F of earlier stages. After the last one
        has gone back through it, the position can run only I and W of earlier stages.
        """
        count, travel, places, loads = self.micro_batches, self.travel, plan.places, self.loads(plan)
        forward, inputs = [0] * self.positions, [0] * self.positions
        first, bounds = [-1] * self.positions, [0] * self.positions
        at, tail, before = 0, 0, places[0]
        tails = []
        for cut, end, place in zip(plan.cuts, self._ends(plan), places, strict=True):
            if place != before:
                hop = travel(before, place)
                before = place
                at += hop
                tail += hop
            time = at + count * (loads[place] - forward[place])
            if time > bounds[place]:
                bounds[place] = time
            if first[place] < 0:
                first[place] = at
            sums = self.forward[place]
            time = sums[end] - sums[cut]
            forward[place] += time
            at += time
            sums = self.inputs[place]
            tails.append(tail)
            tail += sums[end] - sums[cut]
        tails.append(tail)
        for stage in range(len(places) - 1, -1, -1):
            place = places[stage]
            hop = travel(place, places[stage + 1]) if stage + 1 < len(places) else 0
            inputs[place] += tails[stage + 1] - tails[stage] - hop
            time = first[place] + count * (forward[place] + inputs[place]) + tails[stage]
            if time > bounds[place]:
                bounds[place] = time
        return bounds

    def shifts(self, plan: StagePlan, limit: int) -> list[tuple[int, StagePlan]]:
        """Return neighbours of ``plan`` with one or two cuts moved by a block, each as (largest load, plan).

        Only plans whose loads all stay below ``limit`` are included."""
        cuts, places, total = plan.cuts, plan.places, self.total
        loads, ends = self.loads(plan), self._ends(plan)
        plans, single = [], []
        for at in range(1, len(cuts)):
            for step in (-1, 1):
                cut = cuts[at] + step
                if cuts[at - 1] < cut < ends[at]:
                    gives, takes = (at - 1, at) if step < 0 else (at, at - 1)
                    block = min(cut, cuts[at])
                    less, more = places[gives], places[takes]
                    out, into = (total[place][block + 1] - total[place][block] for place in (less, more))
                    single.append((at, cut, less, more, out, into))
        for index, (at, cut, less, more, out, into) in enumerate(single):
            loads[less] -= out
            loads[more] += into
            if (most := max(loads)) < limit:
                plans.append((most, StagePlan((*cuts[:at], cut, *cuts[at + 1 :]), places)))
            for other, place, less2, more2, out2, into2 in single[index + 1 :]:
                loads[less2] -= out2
                loads[more2] += into2
                if (most := max(loads)) < limit and other != at and place > (cut if other == at + 1 else 0):
                    changed = (*cuts[:at], cut, *cuts[at + 1 : other], place, *cuts[other + 1 :])
                    plans.append((most, StagePlan(changed, places)))
                loads[less2] += out2
                loads[more2] -= into2
            loads[less] += out
            loads[more] -= into
        return plans

    def placements(self, plan: StagePlan, limit: int) -> list[tuple[int, StagePlan]]:
        """Return neighbours of ``plan`` with other positions or stages, each as (largest load, plan).

        A stage moves to another position, two stages swap positions, one stage is split, or two are joined. Only plans
        whose loads all stay below ``limit`` are included."""
        loads, plans = self.loads(plan), []
        for less, more, (first, end), (start, stop), changed in self._placed(plan):
            if len(set(changed.places)) < self.positions:
                continue
            here, target = self.total[less], self.total[more]
            out = here[end] - here[first] - here[stop] + here[start]
            into = target[end] - target[first] - target[stop] + target[start]
            loads[less] -= out
            loads[more] += into
            if (most := max(loads)) < limit:
                plans.append((most, changed))
            loads[less] += out
            loads[more] -= into
        return plans

    def _placed(self, plan: StagePlan) -> Iterator[tuple[int, int, tuple[int, int], tuple[int, int], StagePlan]]:
        """Yield all neighbours with other positions, and the blocks that move.

        Yields:
            (position that gives blocks, position that takes them, first and end of the blocks, first and end of blocks
            that move back, plan)
        """
        cuts, places, ends, none = plan.cuts, plan.places, self._ends(plan), (0, 0)
        for stage, place in enumerate(places):
            first, end, before, after = cuts[stage], ends[stage], places[:stage], places[stage + 1 :]
            for other in range(self.positions):
                if other == place:
                    continue
                yield place, other, (first, end), none, StagePlan(cuts, (*before, other, *after))
                if len(cuts) < self.most:
                    for cut in range(first + 1, end):
                        parted = (*cuts[: stage + 1], cut, *cuts[stage + 1 :])
                        yield place, other, (cut, end), none, StagePlan(parted, (*before, place, other, *after))
                        yield place, other, (first, cut), none, StagePlan(parted, (*before, other, place, *after))
            for later in range(stage + 1, len(places)):
                if (other := places[later]) != place:
                    swapped = (*before, other, *places[stage + 1 : later], place, *places[later + 1 :])
                    yield place, other, (first, end), (cuts[later], ends[later]), StagePlan(cuts, swapped)
            if after:
                other, fewer = after[0], (*cuts[: stage + 1], *cuts[stage + 2 :])
                yield place, other, (first, end), none, StagePlan(fewer, (*before, *after))
                yield other, place, (end, ends[stage + 1]), none, StagePlan(fewer, (*before, place, *after[1:]))

    def balanced(self, plan: StagePlan, enough: float = -1) -> StagePlan:
        """Move one or two cuts by a block, again and again, while this lowers the largest load; return the result.

        At an equal largest load, a smaller sum of squared loads counts as better.

        Args:
            plan: plan to begin with.
            enough: stop at this largest load.
        """
        while max(loads := self.loads(plan)) > enough:
            now = max(loads), sum(load * load for load in loads)
            options = sorted(self.shifts(plan, now[0] + 1))[:40]
            best = min(
                (((most, sum(x * x for x in self.loads(option))), option) for most, option in options), default=None
            )
            if best is None or best[0] >= now:
                return plan
            plan = best[1]
        return plan

    def starts(self) -> Iterator[StagePlan]:
        """Yield balanced starting plans.

        Their stages go round the positions, or there and back. Some begin with a round of single-block stages, which
        gives work to all positions early.
        """
        size, blocks = self.positions, self.blocks
        forth, back = tuple(range(size)), tuple(range(size - 1, -1, -1))
        turns = [turn for number in (1, 2, 3) for turn in product((forth, back), repeat=number) if turn[0] is forth]
        turns += [(forth,) * 4, (forth, back) * 2]
        for turn, ramp in product(turns, ((), forth, back)):
            turned = sum(turn, ())
            stages = len(ramp) + len(turned)
            if stages <= min(blocks, self.most):
                rest = blocks - len(ramp)
                cuts = *range(len(ramp)), *(len(ramp) + rest * at // len(turned) for at in range(len(turned)))
                yield self.balanced(StagePlan(cuts, (*ramp, *turned)))

    def _ends(self, plan: StagePlan) -> tuple[int, ...]:
        """Return the end of each stage: the number of the block after its last one."""
        return (*plan.cuts[1:], self.blocks)
