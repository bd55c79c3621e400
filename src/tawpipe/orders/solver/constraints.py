"""A pipeline's step as a constraint program: the whole step, or a window of an order while the rest stays fixed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from tawpipe.orders.bounds import apart, bound
from tawpipe.orders.solver.rounded import GRAINS, Rounded, unit_of, up
from tawpipe.schedule.pipelines.layout import Layout
from tawpipe.schedule.pipelines.memory import fits, guarded
from tawpipe.schedule.pipelines.work import Order, PipelineCosts, Work, makespan, play

EARLY = 3
"""Weight of moving a position's later works earlier, in works of the window (objective of ``early``)."""


class Model:
    """Constraint program for CP-SAT: a start variable for every free work, and variables for what is optional.

    Kind I also represents B: W then follows directly within the same work. Works in the window are free. Works that
    start before it are fixed. Works that start after it keep their distances on their position, but may all move
    earlier together.

    Args:
        layout: stages and their positions.
        costs: times and memory of the blocks.
        micro_batches: number of micro-batches.
        split: backward passes may be whole or in two parts; if False they are whole.
        order: order to start from.
        window: begin and end in ticks of ``order`` as played; None for the whole step.
        early: do not minimise the step, but make all works of the window start as early as possible.
    """

    def __init__(
        self,
        layout: Layout,
        costs: PipelineCosts,
        micro_batches: int,
        split: bool,
        order: Order,
        window: tuple[int, int] | None = None,
        *,
        early: bool = False,
    ) -> None:
        from ortools.sat.python import cp_model

        self.layout, self.costs, self.micro_batches, self.split = layout, costs, micro_batches, split
        self.ticks = Rounded.of(layout, costs, makespan(play(layout, order, costs)))
        self.table, self.times = costs.stages(layout), self.ticks.stages(layout).seconds
        self.model = model = cp_model.CpModel()
        times = play(layout, order, self.ticks)
        self.wholes = {(work.stage, work.micro_batch) for work in times if work.kind == "B"}
        self.now = self._now(times)
        self.horizon = int(makespan(times))
        self.first, self.last = window or (0, self.horizon + 1)
        width = self.last - self.first
        self.far = self.last + width if window else self.horizon
        """Time at which all free works have ended."""
        least = up(bound(layout, costs, micro_batches, split=split) / self.ticks.unit)
        self.end = model.new_int_var(min(least, self.horizon), self.horizon, "")
        model.add_hint(self.end, self.horizon)
        self.moves = [model.new_int_var(0, width, "") for _ in range(layout.size)] if window else []
        for move in self.moves:
            model.add_hint(move, 0)
        self.slack: dict[tuple[int, int], int] = {}
        self.start: dict[Work, Any] = {}
        self.until: dict[tuple[int, int], Any] = {}
        """Ends of B or I by (stage, micro-batch)."""
        self.away: dict[tuple[int, int], Any] = {}
        self.whole: dict[tuple[int, int], Any] = {}
        self.lanes: list[list[Any]] = [[] for _ in range(2 * layout.size)]
        for number in range(micro_batches):
            for stage in range(layout.stages):
                self._compute(stage, number)
            for stage in range(1, layout.stages):
                self._travel(stage, number)
        for place in range(layout.size):
            self._limit(place)
        for stage in range(layout.stages):
            self._in_order(stage)
        for lane in self.lanes:
            if len(lane) > 1:
                model.add_no_overlap(lane)
        for (place, other), slack in self.slack.items():
            model.add(self.moves[place] - self.moves[other] <= slack)
        if early:
            free = [self.start[work] for work in self.start if work.kind in "FI" and self._side(work) == 0]
            model.minimize(sum(free) - EARLY * sum(self.moves))
        else:
            model.minimize(self.end * (width * layout.size + 1) - sum(self.moves) if window else self.end)

    def _apart(self, stage: int) -> bool:
        """Return True if the backward pass of a stage may be split."""
        return self.split and apart(self.table, stage)

    def _time(self, kind: str, stage: int) -> int:
        """Return the ticks of a work. An I that cannot be split from its W takes the time of B."""
        kind = "B" if kind == "I" and not self._apart(stage) else kind
        return self.times[kind, stage]

    def _is_whole(self, work: Work) -> bool:
        """Return True if ``work`` is an I that represents a whole B in the starting order."""
        return work.kind == "I" and (work.stage, work.micro_batch) in self.wholes

    def _now(self, times: Mapping[Work, tuple[float, float]]) -> dict[Work, int | None]:
        """Return the start of every work in the starting order; None for O and R that it does not have."""
        starts: dict[Work, int | None] = {}
        for stage in range(self.layout.stages):
            for number in range(self.micro_batches):
                for kind in "FIWOR":
                    work = Work(kind, stage, number)
                    starts[work] = int(times[work][0]) if work in times else None
                if (stage, number) in self.wholes:
                    start = int(times[Work("B", stage, number)][0])
                    starts[Work("I", stage, number)] = start
                    starts[Work("W", stage, number)] = start + self._time("I", stage)
        return starts

    def _side(self, work: Work) -> int:
        """Return -1 if a work is fixed, 0 if it is free, 1 if it moves with its position."""
        start = self.now[work]
        return 0 if start is None or self.first <= start < self.last else -1 if start < self.first else 1

    def _begin(self, work: Work) -> Any:
        """Return the start of a work for the model, and store it in ``start``.

        It is a number if the work is fixed, a new variable if it is free, or a number minus the move of its position.
        """
        start, side = self.now[work], self._side(work)
        if side == 0:
            last = min(self.far, self.horizon) - self._time(work.kind, work.stage)
            begin = self.model.new_int_var(self.first, max(self.first, last), "")
            fallback = self.now[Work("F", work.stage, work.micro_batch)] or 0
            self.model.add_hint(begin, max(self.first, fallback) if start is None else start)
        else:
            assert start is not None
            begin = start if side < 0 else start - self.moves[self.layout.places[work.stage]]
        self.start[work] = begin
        return begin

    def _lane(self, work: Work, size: int, interval: Any) -> None:
        """Add an interval to the lane of its work if it may overlap a free one."""
        start = self.now[work]
        reach = self.far + self.last - self.first
        if start is None or (start + size > self.first and start < reach):
            self.lanes[2 * self.layout.places[work.stage] + (work.kind in "OR")].append(interval)

    def _after(self, work: Work, end: Any, other: Work, gap: int = 0) -> None:
        """Require in the model that ``work`` starts at least ``gap`` ticks after ``end``, the end of ``other``.

        Nothing is needed if both are fixed. If both move with their positions, the difference between these moves is
        limited."""
        sides = self._side(work), self._side(other)
        if sides == (1, 1):
            key = self.layout.places[work.stage], self.layout.places[other.stage]
            start, before = self.now[work], self.now[other]
            assert start is not None and before is not None
            size = self._time("B" if self._is_whole(other) else other.kind, other.stage)
            slack = start - gap - before - size
            if key[0] != key[1]:
                self.slack[key] = min(slack, self.slack.get(key, slack))
        elif sides != (-1, -1):
            self.model.add(self.start[work] >= end + gap)

    def _compute(self, stage: int, number: int) -> None:
        """Add F and the backward pass of a stage and micro-batch, whole or split, to the model."""
        model, key = self.model, (stage, number)
        front, back, rest = (Work(kind, stage, number) for kind in "FIW")
        forward, inputs, weights = (self._time(kind, stage) for kind in "FIW")
        start = self._begin(front)
        self._lane(front, forward, model.new_fixed_size_interval_var(start, forward, ""))
        begin = self._begin(back)
        if not self._apart(stage):
            end = begin + inputs
            self._lane(back, inputs, model.new_fixed_size_interval_var(begin, inputs, ""))
        elif self._side(back) or (self._side(rest) and key not in self.wholes):
            whole = self.whole[key] = key in self.wholes
            end = begin + inputs + weights * whole
            size = inputs + weights * whole
            self._lane(back, size, model.new_fixed_size_interval_var(begin, size, ""))
            if not whole:
                late = self._begin(rest)
                self._lane(rest, weights, model.new_fixed_size_interval_var(late, weights, ""))
                self._after(rest, end, back)
                model.add(late + weights <= self.end)
        else:
            whole = self.whole[key] = model.new_bool_var("")
            model.add_hint(whole, key in self.wholes)
            end = model.new_int_var(0, self.horizon, "")
            before = self.now[back]
            assert before is not None
            model.add_hint(end, before + inputs + weights * (key in self.wholes))
            self._lane(back, inputs, model.new_interval_var(begin, inputs + weights * whole, end, ""))
            late = self.start[rest] = model.new_int_var(self.first, self.horizon - weights, "")
            model.add_hint(late, self.now[rest] or 0)
            self._lane(rest, weights, model.new_optional_fixed_size_interval_var(late, weights, ~whole, ""))
            model.add(late >= begin + inputs)
            model.add(late == begin + inputs).only_enforce_if(whole)
            model.add(late + weights <= min(self.far, self.horizon))
            model.add(late + weights <= self.end)
        self.until[key] = end
        self._after(back, start + forward, front)
        model.add(end <= self.end)

    def _travel(self, stage: int, number: int) -> None:
        """Require that F of ``stage`` waits for its activation, and I of the stage before for its gradient.

        Each of the two transfers takes the time of a hop between the positions of the stages."""
        hop = int(self.ticks.travel(self.layout.places[stage], self.layout.places[stage - 1]))
        front, before = Work("F", stage, number), Work("F", stage - 1, number)
        self._after(front, self.start[before] + self._time("F", stage - 1), before, hop)
        self._after(Work("I", stage - 1, number), self.until[stage, number], Work("I", stage, number), hop)

    def _limit(self, place: int) -> None:
        """Add the memory limit of a position, and the offloading of its activations, to the model.

        Nothing is added if everything fits in memory at the same time.
        """
        layout, costs, model = self.layout, self.costs, self.model
        stages = layout.stages_of(place)
        kept = {stage: self.table.kept[stage] for stage in stages}
        moved = {stage: self.table.moved[stage] for stage in stages}
        parts = {stage: self.table.kept_for_weights[stage] if self._apart(stage) else 0.0 for stage in stages}
        free_memory = self.table.free_memory[place]
        if fits(costs, self.table.resident[place] + self.micro_batches * sum([*kept.values(), *parts.values()])):
            return
        stays = {stage: kept[stage] - moved[stage] for stage in stages}
        sizes = (*kept.values(), *moved.values(), *stays.values(), *parts.values())
        unit = unit_of([size for size in sizes if size > 0], free_memory / GRAINS)
        held, demands = [], []

        def hold(first: Work, last: Work, memory: float, present: Any = True) -> None:
            """Note memory that is held from the start of one work to the end of another, for the position's limit.

            Args:
                first: work at whose start the memory is taken.
                last: work at whose end it is freed.
                memory: amount.
                present: True, False, or the variable that decides whether it is held at all.
            """
            start = self.start[first]
            end = self.until[stage, number] if last.kind == "I" else self.start[last] + self._time(last.kind, stage)
            sides = self._side(first), self._side(last)
            if present is False or (sides == (-1, -1) and end <= self.first):
                return
            size: Any = model.new_int_var(0, 2 * self.horizon, "") if sides[0] != sides[1] or not sides[0] else None
            if size is None:
                began, ended = self.now[first], self.now[last]
                assert began is not None and ended is not None
                if began >= self.far + self.last - self.first:
                    return
                size = (
                    ended - began + (self._time("B", stage) if self._is_whole(last) else self._time(last.kind, stage))
                )
            interval = start, size, end
            held.append(
                model.new_interval_var(*interval, "")
                if present is True
                else model.new_optional_interval_var(*interval, present, "")
            )
            demands.append(up(memory / unit))

        for stage in stages:
            for number in range(self.micro_batches):
                key = stage, number
                front, back, rest, out, into = (Work(kind, *key) for kind in "FIWOR")
                whole = self.whole.get(key, True)
                if parts[stage] and whole is not True:
                    hold(back, rest, parts[stage], True if whole is False else ~whole)
                if not kept[stage]:
                    continue
                away = self._transfers(*key) if moved[stage] and stage < layout.stages - 1 else False
                if away is False:
                    hold(front, back, kept[stage])
                    continue
                if stays[stage]:
                    hold(front, back, stays[stage])
                hold(front, out, moved[stage], away)
                hold(into, back, moved[stage], away)
                if away is not True:
                    hold(front, back, moved[stage], ~away)
        model.add_cumulative(held, demands, math.floor(free_memory / unit + 1e-6))

    def _transfers(self, stage: int, number: int) -> Any:
        """Add O and R of one stage and micro-batch to the model, if they may exist.

        Returns:
            True or False if it is fixed whether the activations are offloaded, else the variable that decides.
        """
        if math.isinf(self.costs.host):
            return False
        model, key = self.model, (stage, number)
        out, into, back = (Work(kind, stage, number) for kind in "ORI")
        time, now = self._time("O", stage), self.now[out] is not None
        free = self._side(back) == 0 and self._side(out) == 0 and self._side(into) == 0
        away: Any = now
        if free:
            away = self.away[key] = model.new_bool_var("")
            model.add_hint(away, now)
        elif not now:
            return False
        self.away[key] = away
        for work in (out, into):
            begin = self._begin(work)
            self._lane(work, time, model.new_optional_fixed_size_interval_var(begin, time, away, ""))
        front = Work("F", stage, number)
        starts = {work: self.start[work] for work in (front, out, into, back)}
        if free:
            model.add(starts[out] >= starts[front] + self._time("F", stage))
            model.add(starts[into] >= starts[out] + time).only_enforce_if(away)
            model.add(starts[back] >= starts[into] + time).only_enforce_if(away)
        else:
            self._after(out, starts[front] + self._time("F", stage), front)
            self._after(into, starts[out] + time, out)
            self._after(back, starts[into] + time, into)
        return away

    def _in_order(self, stage: int) -> None:
        """Require that every kind of work of a stage runs its micro-batches in order, as they are interchangeable."""
        for kind in "FIWOR":
            for number in range(1, self.micro_batches):
                now, before = Work(kind, stage, number), Work(kind, stage, number - 1)
                if now in self.start and before in self.start and not (self._side(now) and self._side(before)):
                    # Lanes keep the lengths of works; a backward pass may be whole or split.
                    gap = self._time(kind, stage) if kind in "FI" else 0
                    self.model.add(self.start[now] >= self.start[before] + gap)

    def order(self, solver: Any) -> Order:
        """Return the order that the solver found, made safe for every timing (``guarded``).

        Args:
            solver: solver after a successful run of this model.
        """
        times: dict[Work, tuple[float, float]] = {}
        for work, start in self.start.items():
            key = work.stage, work.micro_batch
            whole = _value(solver, self.whole.get(key, True))
            if (work.kind in "OR" and not _value(solver, self.away[key])) or (work.kind == "W" and whole):
                continue
            run = Work("B", *key) if work.kind == "I" and whole else work
            begin = start if isinstance(start, int) else solver.value(start)
            times[run] = begin, begin + self.times[run.kind, run.stage]
        lanes = [
            tuple(
                sorted(
                    (w for w in times if self.layout.places[w.stage] == place and (w.kind in "OR") is host),
                    key=times.__getitem__,
                )
            )
            for host in (False, True)
            for place in range(self.layout.size)
        ]
        compute, host = tuple(lanes[: self.layout.size]), tuple(lanes[self.layout.size :])
        return guarded(self.layout, Order(compute, host if any(host) else ()), times, self.costs)


def _value(solver: Any, literal: Any) -> bool:
    """Return a fixed boolean, or the value of a variable in the solution."""
    return literal if isinstance(literal, bool) else solver.boolean_value(literal)
