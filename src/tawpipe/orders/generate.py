"""Layouts made for a model's costs: partition, placement and order tuned together, similar to AdaPtis (Guo et al.).

A plan is judged by the order that is made for it. The search starts from the best of many plans and continues from the
best neighbour that it has not continued from before, even if that neighbour is worse.

Idle times decide what it tries first. If they differ between positions by more than the smallest layer takes, layers
move to another stage. If positions are idle mostly before their first and after their last work, stages move to another
position. Otherwise both are tried. A lower bound, which needs no playing, selects promising neighbours. The search ends
after a number of played works, not after a time, so that all ranks find the same result.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import pairwise

from tawpipe.errors import UserError
from tawpipe.orders.arrange import HOPEFUL, ROUNDS, arrange, began, justified, published
from tawpipe.orders.moves import Moves, StagePlan
from tawpipe.orders.order_memory import whole_stages
from tawpipe.orders.passes import Passes, TimedOrder
from tawpipe.orders.ticks import Ticks
from tawpipe.schedule.pipelines.layout import Layout
from tawpipe.schedule.pipelines.limits import BUDGET, filling, searched
from tawpipe.schedule.pipelines.work import Order, PipelineCosts, makespan, play
from tawpipe.schedule.refusal import LeastLayers

MOST = 1_000_000
"""Minimum budget of works for starting plans and finalists, which are examined in any case."""
STAGES = 6
"""Maximum number of stages on a position."""
STAGE_PENALTY = 2000
"""An additional stage on every position must save 1/2000 of the time, for costs that no simulation here includes."""
WIDTH = 6
"""Number of neighbours played before the search continues from the best of them."""
POOL = 100
"""Maximum number of neighbours of each kind whose bound is computed. Those that fit in memory with the least load
count."""
UNFIT = 8
"""Number of works that examining a plan without enough memory costs of the budget."""
PATIENCE = 8
"""Number of steps without a better plan before the search returns to the best plan it has not continued from."""
SUNK = 10
BEGINNINGS = 3
FINALISTS = 4


@lru_cache(maxsize=64)
def generate(
    costs: PipelineCosts, positions: int, micro_batches: int, *, split: bool = True, budget: int = BUDGET
) -> Layout:
    """Return the layout with the shortest step that a search finds.

    Its order is ``arrange(layout, costs, micro_batches)``. By the simulated time of the stages, it is never slower than
    1F1B, interleaved 1F1B or zero bubble with equal numbers of layers or balanced times, if these fit in memory.
    Results are cached.

    Args:
        costs: times and memory of the blocks.
        positions: number of pipeline positions.
        micro_batches: number of micro-batches.
        split: allow backward passes in two parts, for inputs and for weights.
        budget: number of listed works after which the search ends. With 0, only layouts of published orders are
            compared.

    Raises:
        UserError: there are fewer layers than positions, or no layout that was tried fits in memory.

    >>> from tawpipe.schedule.pipelines.work import BlockTimes
    >>> end, layer = BlockTimes(0, 0, 0), BlockTimes(1, 1, 1)
    >>> str(generate(PipelineCosts((end, *[layer] * 6, BlockTimes(3, 3, 3))), 3, 6, budget=20_000))
    '0,4,7@0,1,2'
    """
    if len(costs.blocks) - 2 < positions:
        expected = f"at least {positions}, one for every position; or a pipeline of {max(1, len(costs.blocks) - 2)}"
        raise UserError("layers of the model", len(costs.blocks) - 2, expected, need=LeastLayers(positions))
    most = max(MOST, budget)
    if micro_batches > searched(positions):  # longer orders repeat the period of this one
        micro_batches, most = filling(positions), budget
    search = _Search(costs, positions, micro_batches, split)
    fixed = list(fixed_layouts(search.moves, positions))
    begun = [StagePlan(layout.cuts, layout.places) for layout in fixed]
    for plan in (*begun, *search.moves.starts()) if budget else begun:
        if search.spent <= most or plan in begun:
            for eased in search.eased(plan):
                search.score(eased)
    if not budget and (plans := search.best(1)):
        return Layout(len(costs.blocks), *plans[0])
    for plan in search.best(SUNK):
        search.score(search.sunk(plan))
    spent = search.spent
    for number, plan in enumerate(search.best(BEGINNINGS), 1):
        search.walk(plan, spent + max(0, budget - spent) * number // BEGINNINGS)
    finalists = [Layout(len(costs.blocks), *plan) for plan in search.best(FINALISTS)]
    best: tuple[int, Layout] | None = None
    refused = None
    left = most
    for layout in dict.fromkeys([*finalists, *fixed]):
        if best is not None and left <= 0:
            break
        try:
            if best is not None and layout in fixed:
                orders = published(layout, costs, micro_batches, split)
                if all(best[0] <= search.time(layout, order) for order in orders):
                    continue
            left -= 2 * ROUNDS * HOPEFUL * 3 * layout.stages * micro_batches
            time = search.time(layout, arrange(layout, costs, micro_batches, split=split))
        except UserError as error:
            refused = error
            continue
        if best is None or time < best[0]:
            best = time, layout
    if best is None:
        assert refused is not None
        raise refused
    return best[1]


def fixed_layouts(moves: Moves, positions: int) -> Iterator[Layout]:
    """Yield the layouts of the published orders, each with equal numbers of layers and then with balanced loads.

    They have one stage on every position, two to four stages in rounds, or two stages in a V. Layouts with more stages
    than layers are left out."""
    for stages, folded in ((1, False), (2, False), (2, True), (3, False), (4, False)):
        if positions * stages <= min(moves.blocks - 2, moves.most):
            layout = Layout.even(moves.blocks, positions, stages, folded=folded)
            yield layout
            yield Layout(moves.blocks, *moves.balanced(StagePlan(layout.cuts, layout.places)))


class _Search:
    """State of the search: plans, their scores and bounds, and the works spent so far."""

    def __init__(self, costs: PipelineCosts, positions: int, micro_batches: int, split: bool) -> None:
        self.costs = costs
        self.ticks, self.split, self.micro_batches = Ticks.of(costs), split, micro_batches
        self.moves = Moves(self.ticks, positions, micro_batches, STAGES * positions)
        whole = self.moves.total[0]
        self.smallest = micro_batches * min(b - a for a, b in pairwise(whole[1:-1]))
        depths = sorted({1, (positions + 1) // 2, positions})
        self.memory = [Moves.of_memory(self.ticks, positions, self.moves.most, depth) for depth in depths]
        self.penalty = whole[-1] * micro_batches // positions // positions // STAGE_PENALTY
        self.enough = self._least(micro_batches) * 1001 // 1000 + positions * self.penalty
        self.scores: dict[StagePlan, int | None] = {}
        self.gone_on: set[StagePlan] = set()
        self.spent = 0
        self._idle: dict[StagePlan, tuple[bool, bool]] = {}
        self._bounds: dict[StagePlan, tuple[int, int]] = {}

    def score(self, plan: StagePlan) -> int | None:
        """Return the simulated makespan of a plan plus a penalty per stage, in ticks; None if it does not fit.

        It does not fit if the memory cannot hold one micro-batch. A plan is simulated only the first time. The works of
        the simulation are added to ``spent``."""
        if plan not in self.scores:
            layout = Layout(self.moves.blocks, *plan)
            stages = self.ticks.stages(layout)
            try:
                passes = Passes(stages, self.micro_batches, whole_stages(stages, self.split))
            except UserError:
                self.scores[plan] = None
                return None
            timed = justified(passes, began(passes, 0, self.micro_batches), rounds=1)
            self.spent += (3 if math.isinf(self.ticks.memory) else 6) * len(passes.works)
            self.scores[plan] = timed.makespan + self.penalty * layout.stages
            self._idle[plan] = self._diagnosis(passes, timed)
        return self.scores[plan]

    def holds(self, plan: StagePlan) -> bool:
        """Return True if every position has enough memory for one micro-batch."""
        return math.isinf(self.ticks.memory) or max(self.memory[0].loads(plan)) <= self.ticks.memory

    def eased(self, plan: StagePlan) -> Iterable[StagePlan]:
        """Return the plan, and variants with cuts moved so that several micro-batches fit in memory if possible.

        The plan itself is left out if it does not fit."""
        eased = [moves.balanced(plan, self.ticks.memory) for moves in self.memory]
        return dict.fromkeys([plan] * self.holds(plan) + eased)

    def time(self, layout: Layout, order: Order) -> int:
        """Simulate a layout in a given order with the exact costs; return its makespan plus the penalty, in ticks."""
        times = play(layout, order, self.costs)
        return round(makespan(times) * self.ticks.scale) + self.penalty * layout.stages

    def best(self, number: int) -> list[StagePlan]:
        """Return the ``number`` simulated plans with the smallest scores, the best first."""
        return sorted((plan for plan, score in self.scores.items() if score is not None), key=self._key)[:number]

    def walk(self, plan: StagePlan, limit: int) -> None:
        """Score neighbours of a plan, then neighbours of the best of these, and so on; results are kept in ``scores``.

        Ends when ``spent`` reaches ``limit`` works, or when nothing better is possible. After ``PATIENCE`` steps
        without a better plan, it continues from the best plan that it has not continued from."""
        best, without = self._key(plan), 0
        self.gone_on.add(plan)
        while self.spent < limit and best[0] > self.enough:
            step = self._step(plan, best[0])
            if step is None or without > PATIENCE:
                left = [other for other in self.best(len(self.scores)) if other not in self.gone_on]
                if not left:
                    return
                step, without = left[0], PATIENCE // 2
            plan = step
            self.gone_on.add(plan)
            without = 0 if self._key(plan) < best else without + 1
            best = min(best, self._key(plan))

    def sunk(self, plan: StagePlan) -> StagePlan:
        """Move to the neighbour with the lowest bound, again and again, while it decreases; return the last plan.

        Nothing is simulated."""
        while True:
            limit = max(self.moves.loads(plan)) * 51 // 50
            options = (*self.moves.shifts(plan, limit), *self.moves.placements(plan, limit))
            better = min((self._bound(other)[1], other) for other in (*self._lightest(options), plan))
            if better[1] == plan:
                return plan
            plan = better[1]

    def _step(self, plan: StagePlan, best: int) -> StagePlan | None:
        """Score promising neighbours; return the best one that the search has not continued from, or None.

        Args:
            plan: plan to leave.
            best: score to undercut. The first neighbour with a smaller score is returned at once.
        """
        self.spent += 1000
        limit = (best - self.penalty * len(plan.cuts)) // self.micro_batches
        layers, edges = self._idle[plan]
        kinds = [self._lightest(self.moves.shifts(plan, limit)), self._lightest(self.moves.placements(plan, limit))]
        chosen: list[StagePlan] = []
        for kind in [kinds[0], kinds[1]] if layers else [kinds[1], kinds[0]] if edges else [kinds[0] + kinds[1]]:
            hopeful = [other for other in kind if other not in self.gone_on and self._bound(other)[0] < best]
            played = 0
            for other in sorted(hopeful, key=lambda other: (self._bound(other)[1], other)):
                if other not in self.scores:
                    if played == WIDTH:
                        continue
                    played += 1
                score = self.score(other)
                if score is not None:
                    chosen.append(other)
                    if score < best:
                        return other
        return min(chosen, key=self._key, default=None)

    def _least(self, micro_batches: int) -> int:
        """Return a time that no layout undercuts, in ticks.

        It is the mean work of a position, or the work of the position that holds the largest block. It is 0 if
        positions have different speeds.
        """
        if self.ticks.pace:
            return 0
        before, whole = self.moves.forward[0], self.moves.total[0]
        alone = (at + micro_batches * (b - a) for at, (a, b) in zip(before, pairwise(whole), strict=False))
        return max(whole[-1] * micro_batches // self.moves.positions, *alone)

    def _lightest(self, options: Iterable[tuple[int, StagePlan]]) -> list[StagePlan]:
        """Return the plans with the smallest loads that fit in memory, at most ``POOL``.

        Each plan that does not fit adds ``UNFIT`` works to ``spent``.

        Args:
            options: (largest load, plan) of each plan.
        """
        lightest: list[StagePlan] = []
        for _, plan in sorted(options):
            if len(lightest) == POOL:
                break
            if self.holds(plan):
                lightest.append(plan)
            else:
                self.spent += UNFIT
        return lightest

    def _key(self, plan: StagePlan) -> tuple[int, StagePlan]:
        """Return the sorting key of a played plan: its score, then the plan itself."""
        return self.scores[plan] or 0, plan

    def _bound(self, plan: StagePlan) -> tuple[int, int]:
        """Return a lower bound of a plan's score, and a number by which plans are sorted. Results are stored.

        The number combines the largest and the mean bound of the positions."""
        if plan not in self._bounds:
            bounds, penalty = self.moves.bounds(plan), self.penalty * len(plan.cuts)
            self._bounds[plan] = max(bounds) + penalty, 8 * max(bounds) + sum(bounds) // len(bounds) + 9 * penalty
        return self._bounds[plan]

    def _diagnosis(self, passes: Passes, timed: TimedOrder) -> tuple[bool, bool]:
        """Return two flags that tell which kind of neighbour to try first.

        Returns:
            (True if idle times of positions differ by more than the smallest layer takes, True if most idle time is
            before the first or after the last work of positions)
        """
        loads, starts = (
            self.moves.loads(StagePlan(passes.stages.layout.cuts, passes.stages.layout.places)),
            passes.starts(timed),
        )
        idle = [timed.makespan - self.micro_batches * load for load in loads]
        edges = sum(timed.makespan - timed.ends[lane[-1]] + starts[lane[0]] for lane in timed.lanes)
        return max(idle) - min(idle) > self.smallest, 2 * edges > sum(idle)
