"""Orders under a limit of memory by a solver: what is offloaded, and when everything runs, so that a step is short.

The problem is that of OptPipe (arXiv 2510.05186), given to CP-SAT of OR-tools: one lane for computing and one for the
host's link on every position, a backward pass whole or in its two parts, memory within the limit at every time, and
the makespan minimised. What it finds is never taken on trust: it is made safe for every timing (``guarded``), its
worst memory is counted (``peak``), and its time is what ``play`` says.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tawpipe.errors import UserError
from tawpipe.extras import install_hint
from tawpipe.orders.bounds import bound
from tawpipe.orders.fitting import fastest, heuristics, smallest
from tawpipe.orders.solver.constraints import Model
from tawpipe.orders.solver.rounded import Rounded
from tawpipe.schedule.pipelines.layout import Layout
from tawpipe.schedule.pipelines.memory import fits, peak
from tawpipe.schedule.pipelines.work import Order, PipelineCosts, Work, makespan, play
from tawpipe.schedule.refusal import MemoryOfPosition

__all__ = ["Solved", "heuristics", "peak", "solve"]

WHOLE = 40
"""Stages times micro-batches that are solved at once."""
WINDOW = 0.1
"""The solver's own seconds for a window."""
LEAST = WINDOW / 10
"""That count for one at least, for what the solver does not count."""
CALM, ROUNDS, DRAWS = 0.25, 30, 8
"""For the search for what delays cost least: share of the time, windows at most, and plays with delays."""
JITTER = 0.1
"""Share of a work's time by which it may be off in these."""


@dataclass(frozen=True)
class Solved:
    """What a solver found.

    Args:
        makespan: by ``play``.
        bound: proved: no order takes less.
        variables: of the model.
        constraints: of the model.
        status: in words.
        history: (seconds after the start, makespan) of every better order, in the solver's rounded times.
    """

    order: Order
    makespan: float
    bound: float
    variables: int
    constraints: int
    seconds: float
    status: str
    history: tuple[tuple[float, float], ...] = ()

    @property
    def gap(self) -> float:
        """Share of the makespan that may be too much."""
        return max(0.0, 1 - self.bound / self.makespan)


def solve(
    layout: Layout,
    costs: PipelineCosts,
    micro_batches: int,
    start: Order | None = None,
    *,
    seconds: float,
    workers: int = 1,
    seed: int = 0,
    deterministic: float | None = None,
    split: bool = True,
) -> Solved:
    """A short order within ``costs.memory``, never longer than ``start``.

    Args:
        start: an order to begin with; the fastest of ``heuristics`` if None.
        seconds: at most.
        deterministic: at most so much work by the solver's own count, so that the result is the same on every machine
            (with one worker, if ``seconds`` are enough).
        split: backward passes may be split into I and W; so they may if ``start`` does so.

    Raises:
        UserError: a limit that nothing meets, a start that exceeds it, or no OR-tools.
    """
    begin = time.perf_counter()
    smallest(layout, costs)
    if start is None:
        start = fastest(layout, costs, micro_batches, split=split)
    split = split or any(work.kind == "W" for works in start.compute for work in works)
    worst = max(peak(layout, start, costs))
    if not fits(costs, worst):
        expected = f"at least {worst:.6g}, what the order given needs"
        raise UserError("memory of a position", costs.memory, expected, need=MemoryOfPosition())
    work = math.inf if deterministic is None else deterministic
    search = _Solving(layout, costs, micro_batches, split, start, begin, workers, seed)
    search.grant(begin + seconds * (1 - CALM), work * (1 - CALM))
    if layout.stages * micro_batches > WHOLE:
        search.windows(0.5)
    search.whole(0.6)
    search.windows()
    search.grant(min(begin + seconds, time.perf_counter() + seconds * CALM), work * CALM)
    search.settle()
    return search.solved()


def shaken(seed: int) -> Callable[[Work], float]:
    """How many times as long a work takes: up to ``JITTER`` more or less, at random."""
    return lambda work: random.Random(f"{seed} {work}").uniform(1 - JITTER, 1 + JITTER)


class _Solving:
    """The best order so far, and ways to look for a better one."""

    def __init__(
        self,
        layout: Layout,
        costs: PipelineCosts,
        micro_batches: int,
        split: bool,
        start: Order,
        begin: float,
        workers: int,
        seed: int,
    ) -> None:
        try:
            from ortools.sat.python import cp_model
        except ImportError as error:
            raise UserError("schedule.strategy", "solved", f"OR-tools installed: {install_hint('plan')}") from error
        self.cp = cp_model
        self.layout, self.costs, self.micro_batches, self.split = layout, costs, micro_batches, split
        self.begin, self.workers = begin, workers
        self.until, self.work = begin, 0.0
        self.random = random.Random(seed)
        self.order = start
        self.length = self.most = makespan(play(layout, start, costs))
        self.least = bound(layout, costs, micro_batches, split=split)
        self.history = [(time.perf_counter() - begin, self.length)]
        self.sizes = 0, 0

    def grant(self, until: float, work: float) -> None:
        """An end for what follows, and how much of the solver's own time it may take."""
        self.until, self.work = until, work

    @property
    def left(self) -> float:
        """Seconds."""
        return self.until - time.perf_counter()

    @property
    def done(self) -> bool:
        return self.length <= self.least * (1 + 1e-6) or self.spent

    @property
    def spent(self) -> bool:
        return self.left <= 0.05 or self.work <= 0

    def _run(self, model: Model, seconds: float, work: float, *, whole: bool) -> tuple[Any, Any]:
        solver = self.cp.CpSolver()
        parameters = solver.parameters
        parameters.max_time_in_seconds = max(0.05, seconds)
        parameters.max_deterministic_time = min(work, self.work)
        parameters.num_workers = self.workers
        parameters.interleave_search = whole and self.workers == 1
        if not whole:
            parameters.cp_model_probing_level = parameters.symmetry_level = parameters.linearization_level = 0
        parameters.random_seed = self.random.randrange(1 << 30)
        status = solver.solve(model.model)
        self.work -= max(LEAST, solver.response_proto.deterministic_time)
        proto = model.model.proto
        self.sizes = max(self.sizes, (len(proto.variables), len(proto.constraints)))
        if status in (self.cp.OPTIMAL, self.cp.FEASIBLE):
            self._take(model.order(solver))
        return solver, status

    def _take(self, order: Order) -> None:
        """The order, unless it takes longer than the best or needs more memory than there is."""
        length = makespan(play(self.layout, order, self.costs))
        if length > min(self.most, self.length * (1 + 1e-9)):
            return
        if all(fits(self.costs, most) for most in peak(self.layout, order, self.costs)):
            if length < self.length * (1 - 1e-9):
                self.history.append((time.perf_counter() - self.begin, length))
            self.order, self.length = order, length

    def whole(self, share: float) -> None:
        """Everything at once.

        Args:
            share: of the time that is left.
        """
        if self.done:
            return
        model = Model(self.layout, self.costs, self.micro_batches, self.split, self.order)
        solver, _ = self._run(model, self.left * share, self.work * share, whole=True)
        proved = solver.best_objective_bound * model.ticks.unit / model.ticks.stretch
        self.least = max(self.least, min(proved, self.length))

    def windows(self, share: float = 1.0) -> None:
        """Windows of the best order, one after the other, somewhere and as wide as can be solved.

        Args:
            share: of the time that is left.
        """
        width, until, work = 0.2, self.left * (1 - share), self.work * (1 - share)
        while not self.done and self.left > until and (self.work > work or math.isinf(self.work)):
            window = self._window(width)
            model = Model(self.layout, self.costs, self.micro_batches, self.split, self.order, window)
            _, status = self._run(model, self.left, WINDOW, whole=False)
            width = min(1.0, width * 1.1) if status == self.cp.OPTIMAL else max(0.05, width * 0.9)

    def _window(self, width: float) -> tuple[int, int]:
        """Somewhere in the best order, in ticks."""
        rounded = Rounded.of(self.layout, self.costs, self.length)
        length = makespan(play(self.layout, self.order, rounded))
        first = int(self.random.uniform(-width / 2, 1 - width / 2) * length)
        return max(0, first), int(first + width * length)

    def settle(self) -> None:
        """Of orders that take no longer, one that delays cost less.

        Windows are made as early as can be, which leaves time before what waits for them.
        """
        cost = self._shaken(self.order)
        for number in range(ROUNDS):
            if self.spent or cost <= self.length * (1 + 1e-6):
                return
            kept, length = self.order, self.length
            window = self._window((0.5, 0.3)[number % 2])
            model = Model(self.layout, self.costs, self.micro_batches, self.split, self.order, window, early=True)
            self._run(model, self.left, WINDOW, whole=False)
            now = self._shaken(self.order)
            if self.length >= length * (1 - 1e-9) and now >= cost:
                self.order, self.length = kept, length
            else:
                cost = now

    def _shaken(self, order: Order) -> float:
        """Mean makespan of a few plays with random delays."""
        draws = (play(self.layout, order, self.costs, shaken(seed)) for seed in range(DRAWS))
        return statistics.mean(map(makespan, draws))

    def solved(self) -> Solved:
        least = min(self.least, self.length)
        gap = 1 - least / self.length
        words = "optimal" if gap < 1e-6 else f"within {gap:.1%}"
        seconds = time.perf_counter() - self.begin
        return Solved(self.order, self.length, least, *self.sizes, seconds, words, tuple(self.history))
