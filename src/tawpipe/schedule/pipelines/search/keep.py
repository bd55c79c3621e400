"""What every layer keeps for its backward pass, chosen with stages and order: everything, attention's results or its
input alone; on the device, or for a while in the host's memory.

On the device a choice is found by annealing (keeping.py). From there a search goes on to better neighbours with a
layer's memory in the host's. It ends after so many tries and orders, and not after seconds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from tawpipe.errors import UserError
from tawpipe.schedule.pipelines.layout import Layout
from tawpipe.schedule.pipelines.memory import fits, peak
from tawpipe.schedule.pipelines.search.arrange import arrange
from tawpipe.schedule.pipelines.search.bounds import bound
from tawpipe.schedule.pipelines.search.fitting import patterns
from tawpipe.schedule.pipelines.search.keeping import Annealing, Keeping
from tawpipe.schedule.pipelines.search.listing import with_host
from tawpipe.schedule.pipelines.search.moves import Moves, StagePlan
from tawpipe.schedule.pipelines.search.ticks import Ticks
from tawpipe.schedule.pipelines.work import Order, PipelineCosts, makespan, play

LENT = (1.05, 1.15, 1.3)
"""Of the limit of memory, what orders are made for which keep some of it in the host's."""
GAIN = 1e-4
"""Share of a step's time below which nothing is better."""


@dataclass(frozen=True)
class Kept:
    """A choice with its order.

    Args:
        costs: of it.
        makespan: by ``play``.
    """

    choice: Keeping
    costs: PipelineCosts
    order: Order
    makespan: float


def choose(
    options: Mapping[str, PipelineCosts],
    layouts: Iterable[Layout],
    micro_batches: int,
    *,
    tries: int,
    with_host: int = 0,
    begin: Kept | None = None,
) -> Kept:
    """The shortest step that a search finds; never longer than the best with all layers alike in one of the layouts.

    Args:
        options: by what layers compute again their costs, which differ in times and memory of blocks alone.
        layouts: to begin with.
        tries: neighbours that annealing looks at.
        with_host: orders with memory in the host that are made after that; each takes longer.
        begin: a choice to go on from, in the place of all others.

    Raises:
        UserError: memory for no choice.
    """
    search = _Choosing(options, micro_batches)
    refused: UserError | None = None
    if begin is not None:
        search.found[begin.choice], layouts = begin, ()
    beginnings = dict.fromkeys(layout for given in layouts for layout in (given, search.balanced(given)))
    for begun, how in product(beginnings, options):
        try:
            search.judge(Keeping(begun, (how,) * begun.blocks))
        except UserError as error:
            refused = error
    annealing = Annealing(options, micro_batches)
    if (draft := annealing.best(beginnings, tries)) is not None:
        search.offer(draft.choice, annealing.order(draft))
    if not search.found:
        assert refused is not None
        raise refused
    if with_host and math.isfinite(search.costs.host):
        search.walk(search.best, search.made + with_host)
    return search.found[search.best]


class _Choosing:
    """Choices that have been judged."""

    def __init__(self, options: Mapping[str, PipelineCosts], micro_batches: int) -> None:
        self.options, self.micro_batches = options, micro_batches
        self.costs = next(iter(options.values()))
        self.found: dict[Keeping, Kept] = {}
        self.seen: set[Keeping] = set()
        self.made = 0

    @property
    def best(self) -> Keeping:
        return min(self.found, key=lambda choice: self.found[choice].makespan)

    def offer(self, choice: Keeping, *orders: Order) -> float:
        """The time of a step with a choice, in the shortest of all orders that it has been offered."""
        costs = choice.costs(self.options)
        times = [(makespan(play(choice.layout, order, costs)), order) for order in orders]
        length, order = min(times, key=lambda pair: pair[0])
        if choice not in self.found or length < self.found[choice].makespan:
            self.found[choice] = Kept(choice, costs, order, length)
        return self.found[choice].makespan

    def judge(self, choice: Keeping, most: float = math.inf) -> float:
        """The time of a step with a choice; no end where that is ``most`` or more for sure.

        Raises:
            UserError: there is no memory for it.
        """
        if choice in self.found:
            return self.found[choice].makespan
        costs = choice.costs(self.options)
        if choice in self.seen:
            return math.inf
        if most < math.inf and bound(choice.layout, costs, self.micro_batches, split=True) >= most:
            return math.inf
        self.seen.add(choice)
        self.made += 1
        orders = [*self._orders(choice.layout, costs)]
        return self.offer(choice, *orders) if orders else math.inf

    def _orders(self, layout: Layout, costs: PipelineCosts) -> Iterator[Order]:
        """Orders within the limit: with no work of the host's link, or made for more memory, of which some is lent."""
        if math.isinf(costs.host):
            yield from (arrange(layout, costs, self.micro_batches, split=split) for split in (True, False))
            return
        for lent, split in product(LENT, (True, False)):
            wide = arrange(layout, replace(costs, memory=costs.memory * lent), self.micro_batches, split=split)
            for away in patterns(layout, wide.compute, costs):
                order = with_host(layout, wide.compute, away, costs)
                if order is not None and all(fits(costs, most) for most in peak(layout, order, costs)):
                    yield order

    def balanced(self, layout: Layout) -> Layout:
        """The layout with loads as even as can be."""
        moves = Moves(Ticks.of(self.costs), layout.size, self.micro_batches, layout.stages)
        return Layout(layout.blocks, *moves.balanced(StagePlan(layout.cuts, layout.places)))

    def with_more_moving(self, choice: Keeping) -> Iterator[Keeping]:
        """A layer of a stage, or of all but the last, more whose memory may go, and which keeps more then."""
        layout, keeps = choice.layout, choice.keeps
        size = {how: sum(block.kept for block in costs.blocks) for how, costs in self.options.items()}
        firsts = []
        for stage in range(layout.stages - 1):
            left = [block for block in layout.blocks_of(stage) if block > 0 and block not in choice.moving]
            firsts += [min(left, key=lambda block: size[keeps[block]])] if left else []
        for blocks in (*([block] for block in firsts), *([firsts] if len(firsts) > 1 else [])):
            moving = replace(choice, moving=choice.moving | set(blocks))
            yield moving
            for how in size:
                if any(size[how] > size[keeps[block]] for block in blocks):
                    yield self._changed(moving, blocks, how)

    def _changed(self, choice: Keeping, blocks: Sequence[int], how: str) -> Keeping:
        return replace(choice, keeps=tuple(how if b in blocks else before for b, before in enumerate(choice.keeps)))

    def walk(self, choice: Keeping, until: int) -> None:
        """On to a better neighbour with more that may move, as long as there is one and fewer orders have been made.
        What was better is tried again first.
        """
        first = 0
        while self.made < until:
            length = self.found[choice].makespan * (1 - GAIN)
            options = [*self.with_more_moving(choice)]
            for number in range(len(options)):
                place = (first + number) % len(options)
                if self.made < until and self._judged(options[place], length) < length:
                    choice, first = options[place], place
                    break
            else:
                return

    def _judged(self, choice: Keeping, most: float) -> float:
        """The same as ``judge``, with no end where there is no memory."""
        try:
            return self.judge(choice, most)
        except UserError:
            return math.inf
