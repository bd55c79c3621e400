"""Short orders under a memory limit by a solver: what is offloaded, and when everything runs.

The problem is taken from OptPipe (arXiv 2510.05186) and solved with CP-SAT of OR-Tools. Every position has one lane for
computing and one for the link to the CPU memory. A backward pass is whole or in two parts. The memory stays within its
limit at every time. The makespan is minimised.

Results are never trusted: an order is made safe for every timing (``guarded``), its maximum memory is counted
(``peak``), and its time is computed by ``play``.
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
"""Maximum product of stages and micro-batches that is solved as a whole."""
WINDOW = 0.1
"""Time limit of a window, in the solver's deterministic time."""
LEAST = WINDOW / 10
"""Deterministic time charged for a window at least, as the solver does not count all of its work."""
CALM, ROUNDS, DRAWS = 0.25, 30, 8
"""Limits of the search for robust orders: share of the time, windows (``ROUNDS``), and plays with delays
(``DRAWS``)."""
JITTER = 0.1
"""Maximum share by which a work's time varies in these plays."""


@dataclass(frozen=True)
class Solved:
    """Result of a solver.

    Args:
        order: best order found.
        makespan: its makespan by ``play``.
        bound: proven lower bound of the makespan of any order.
        variables: number of variables in the largest model.
        constraints: number of constraints in the largest model.
        seconds: seconds that the search took.
        status: result in words, for example "optimal" or "within 2.0%".
        history: (seconds after the start, makespan) of every improvement.
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
        """Share of the makespan by which it may exceed the best possible one."""
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
    """Search with CP-SAT for a short order within ``costs.memory``. The result is never longer than ``start``.

    Takes about ``seconds``, or less if the order is proven optimal.

    Args:
        layout: stages and their positions.
        costs: times and memory of the blocks.
        micro_batches: number of micro-batches.
        start: order to begin with; the fastest of ``heuristics`` if None.
        seconds: time limit.
        workers: number of threads of the solver.
        seed: random seed.
        deterministic: limit in the solver's deterministic time. The result is then equal on every machine, with one
            worker and if ``seconds`` suffice.
        split: allow backward passes in two parts, I and W. Always allowed if ``start`` has them.

    Raises:
        UserError: no order fits in the memory, ``start`` exceeds it, or OR-Tools is not installed.
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
    """Return a function that gives each work a random factor for its time, at most ``JITTER`` off 1."""
    return lambda work: random.Random(f"{seed} {work}").uniform(1 - JITTER, 1 + JITTER)


class _Solving:
    """Search for a better order: the best order so far, its budget, and the methods that improve it."""

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
        """Set the end time of the following search, and its limit in the solver's deterministic time."""
        self.until, self.work = until, work

    @property
    def left(self) -> float:
        """Seconds left of the granted time."""
        return self.until - time.perf_counter()

    @property
    def done(self) -> bool:
        """True if the best order is proven optimal or the granted time is spent."""
        return self.length <= self.least * (1 + 1e-6) or self.spent

    @property
    def spent(self) -> bool:
        """True if the granted time is spent."""
        return self.left <= 0.05 or self.work <= 0

    def _run(self, model: Model, seconds: float, work: float, *, whole: bool) -> tuple[Any, Any]:
        """Solve a model, keep its order if it is better, and return the solver and its status.

        Args:
            model: the model.
            seconds: time limit.
            work: limit in the solver's deterministic time.
            whole: True for the whole problem, False for a window, for which slow presolve steps are switched off.
        """
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
        """Keep ``order`` as the best one, unless it is longer than the best or exceeds the memory limit."""
        length = makespan(play(self.layout, order, self.costs))
        if length > min(self.most, self.length * (1 + 1e-9)):
            return
        if all(fits(self.costs, most) for most in peak(self.layout, order, self.costs)):
            if length < self.length * (1 - 1e-9):
                self.history.append((time.perf_counter() - self.begin, length))
            self.order, self.length = order, length

    def whole(self, share: float) -> None:
        """Solve the whole problem as one model; update the best order and the proven lower bound.

        Args:
            share: share of the remaining time to use.
        """
        if self.done:
            return
        model = Model(self.layout, self.costs, self.micro_batches, self.split, self.order)
        solver, _ = self._run(model, self.left * share, self.work * share, whole=True)
        proved = solver.best_objective_bound * model.ticks.unit / model.ticks.stretch
        self.least = max(self.least, min(proved, self.length))

    def windows(self, share: float = 1.0) -> None:
        """Improve random windows of the best order, one after another, until the time is used or the order is optimal.

        Windows become wider while the solver solves them completely, and else narrower.

        Args:
            share: share of the remaining time to use.
        """
        width, until, work = 0.2, self.left * (1 - share), self.work * (1 - share)
        while not self.done and self.left > until and (self.work > work or math.isinf(self.work)):
            window = self._window(width)
            model = Model(self.layout, self.costs, self.micro_batches, self.split, self.order, window)
            _, status = self._run(model, self.left, WINDOW, whole=False)
            width = min(1.0, width * 1.1) if status == self.cp.OPTIMAL else max(0.05, width * 0.9)

    def _window(self, width: float) -> tuple[int, int]:
        """Return begin and end of a random window of the best order in ticks.

        Args:
            width: share of the makespan.
        """
        rounded = Rounded.of(self.layout, self.costs, self.length)
        length = makespan(play(self.layout, self.order, rounded))
        first = int(self.random.uniform(-width / 2, 1 - width / 2) * length)
        return max(0, first), int(first + width * length)

    def settle(self) -> None:
        """Replace the best order by equally short ones whose time suffers less from random delays of works.

        Works in random windows are moved as early as possible, which leaves time before the works that depend on them.
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
        """Return the mean makespan of an order in ``DRAWS`` simulations with randomly changed times of works."""
        draws = (play(self.layout, order, self.costs, shaken(seed)) for seed in range(DRAWS))
        return statistics.mean(map(makespan, draws))

    def solved(self) -> Solved:
        """Return the best order found, with its lower bound and the statistics of the search."""
        least = min(self.least, self.length)
        gap = 1 - least / self.length
        words = "optimal" if gap < 1e-6 else f"within {gap:.1%}"
        seconds = time.perf_counter() - self.begin
        return Solved(self.order, self.length, least, *self.sizes, seconds, words, tuple(self.history))
