"""A layout made for a model's costs: partition, placement and order tuned together, in the way of AdaPtis (Guo et al.).

A plan is judged by the order that is made for it. From the best of many beginnings a search goes on to the best
neighbour that it has not gone on from, even if that is worse. What it tries first follows from where positions are
idle: if that differs between positions by more than the smallest layer takes, layers move to another stage; if it is
more before the first and after the last work than in between, stages move to another position; else either. A bound
that costs no playing says which neighbours are worth it. It ends after so much work that is played, and not after
seconds: all ranks find the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import pairwise

from tawpipe.errors import UserError
from tawpipe.orders.arrange import HOPEFUL, ROUNDS, arrange, began, justified, published
from tawpipe.orders.moves import Moves, StagePlan
from tawpipe.orders.passes import Passes, TimedOrder
from tawpipe.orders.room import whole_stages
from tawpipe.orders.ticks import Ticks
from tawpipe.schedule.pipelines.layout import Layout
from tawpipe.schedule.pipelines.limits import BUDGET, filling, searched
from tawpipe.schedule.pipelines.work import Order, PipelineCosts, makespan, play
from tawpipe.schedule.refusal import LeastLayers

MOST = 1_000_000
"""The same for what is looked at in any case."""
STAGES = 6
"""Of a position, at most."""
STAGE_PENALTY = 2000
"""A stage more of every position has to win one part in so many: it costs what no clock here knows."""
WIDTH = 6
"""Neighbours played before the search goes on to the best of them."""
POOL = 100
"""Neighbours of either kind whose bound is looked at, those with the smallest load, for which there is memory."""
UNFIT = 8
"""Works in whose place a plan is looked at that has no memory."""
PATIENCE = 8
"""Steps without a better plan before the search goes back to the best one that it has not gone on from."""
SUNK = 10
BEGINNINGS = 3
FINALISTS = 4


@lru_cache(maxsize=64)
def generate(
    costs: PipelineCosts, positions: int, micro_batches: int, *, split: bool = True, budget: int = BUDGET
) -> Layout:
    """The layout of the shortest step that a search finds; its order is ``arrange(layout, costs, micro_batches)``.

    By the stages' clock it is never behind 1F1B, interleaved 1F1B or zero bubble with stages of equally many layers or
    of balanced times, as far as the memory lets these be.

    Args:
        split: whether a backward pass may be parted into that for inputs and that for weights.
        budget: works that are put into lists; it ends soon after. With 0 the layout is one of a published order.

    Raises:
        UserError: fewer blocks than positions, or memory for no layout that was tried.

    >>> from tawpipe.schedule.pipelines.work import BlockTimes
    >>> end, layer = BlockTimes(0, 0, 0), BlockTimes(1, 1, 1)
    >>> str(generate(PipelineCosts((end, *[layer] * 6, BlockTimes(3, 3, 3))), 3, 6, budget=20_000))
    '0,4,7@0,1,2'
    """
    if len(costs.blocks) - 2 < positions:
        expected = f"at least {positions}, one for every position; or a pipeline of {max(1, len(costs.blocks) - 2)}"
        raise UserError("layers of the model", len(costs.blocks) - 2, expected, need=LeastLayers(positions))
    most = max(MOST, budget)
    if micro_batches > searched(positions):  # the order goes on as it does with fewer
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
    """Those of the published orders: a stage on every position, two and more in rounds, two in a V; with equally many
    layers, and with cuts such that the loads are balanced.
    """
    for stages, folded in ((1, False), (2, False), (2, True), (3, False), (4, False)):
        if positions * stages <= min(moves.blocks - 2, moves.most):
            layout = Layout.even(moves.blocks, positions, stages, folded=folded)
            yield layout
            yield Layout(moves.blocks, *moves.balanced(StagePlan(layout.cuts, layout.places)))


class _Search:
    """Plans and what is known of them."""

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
        """The makespan with what stages cost beyond it; None where memory holds no micro-batch."""
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
        """True if every position has memory for a micro-batch."""
        return math.isinf(self.ticks.memory) or max(self.memory[0].loads(plan)) <= self.ticks.memory

    def eased(self, plan: StagePlan) -> Iterable[StagePlan]:
        """A plan and, where memory is too little for some micro-batches in each of its positions, those to which moving
        its cuts leads there.
        """
        eased = [moves.balanced(plan, self.ticks.memory) for moves in self.memory]
        return dict.fromkeys([plan] * self.holds(plan) + eased)

    def time(self, layout: Layout, order: Order) -> int:
        """A score by the clock itself."""
        times = play(layout, order, self.costs)
        return round(makespan(times) * self.ticks.scale) + self.penalty * layout.stages

    def best(self, number: int) -> list[StagePlan]:
        """Of all that have been played, those of the smallest scores."""
        return sorted((plan for plan, score in self.scores.items() if score is not None), key=self._key)[:number]

    def walk(self, plan: StagePlan, limit: int) -> None:
        """Go on from a plan until so much has been spent."""
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
        """A plan from which no change lowers the bound."""
        while True:
            limit = max(self.moves.loads(plan)) * 51 // 50
            options = (*self.moves.shifts(plan, limit), *self.moves.placements(plan, limit))
            better = min((self._bound(other)[1], other) for other in (*self._lightest(options), plan))
            if better[1] == plan:
                return plan
            plan = better[1]

    def _step(self, plan: StagePlan, best: int) -> StagePlan | None:
        """The best neighbour that the search has not gone on from, among the most hopeful ones."""
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
        """No layout takes less: the mean work of a position, and what the position of any one block has to do."""
        if self.ticks.pace:
            return 0
        before, whole = self.moves.forward[0], self.moves.total[0]
        alone = (at + micro_batches * (b - a) for at, (a, b) in zip(before, pairwise(whole), strict=False))
        return max(whole[-1] * micro_batches // self.moves.positions, *alone)

    def _lightest(self, options: Iterable[tuple[int, StagePlan]]) -> list[StagePlan]:
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
        return self.scores[plan] or 0, plan

    def _bound(self, plan: StagePlan) -> tuple[int, int]:
        """(no score is smaller, what it is compared by: the largest bound, and a little the mean one)."""
        if plan not in self._bounds:
            bounds, penalty = self.moves.bounds(plan), self.penalty * len(plan.cuts)
            self._bounds[plan] = max(bounds) + penalty, 8 * max(bounds) + sum(bounds) // len(bounds) + 9 * penalty
        return self._bounds[plan]

    def _diagnosis(self, passes: Passes, timed: TimedOrder) -> tuple[bool, bool]:
        """(idle times differ by more than the smallest layer takes, they are at the edges rather than inside)."""
        loads, starts = (
            self.moves.loads(StagePlan(passes.stages.layout.cuts, passes.stages.layout.places)),
            passes.starts(timed),
        )
        idle = [timed.makespan - self.micro_batches * load for load in loads]
        edges = sum(timed.makespan - timed.ends[lane[-1]] + starts[lane[0]] for lane in timed.lanes)
        return max(idle) - min(idle) > self.smallest, 2 * edges > sum(idle)
