"""What every layer keeps for its backward pass, chosen with stages and order: everything, attention's results or its
input alone; on the device, or for a while in the host's memory.

A choice is judged by the order that is made for it. From the best beginnings a search goes on to better neighbours: a
layer that keeps more or less, on one stage or on all, a layer in another stage, a layer whose memory may go to the
host. Between two such walks stages are made anew for what layers keep. A bound that costs no playing says which are
worth it. It ends after so many orders, and not after seconds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, product

from tawpipe.errors import UserError
from tawpipe.schedule.pipelines.layout import Layout
from tawpipe.schedule.pipelines.limits import QUICK
from tawpipe.schedule.pipelines.memory import fits, peak
from tawpipe.schedule.pipelines.search.arrange import arrange
from tawpipe.schedule.pipelines.search.bounds import bound
from tawpipe.schedule.pipelines.search.fitting import patterns, round_trips
from tawpipe.schedule.pipelines.search.generate import generate
from tawpipe.schedule.pipelines.search.listing import with_host
from tawpipe.schedule.pipelines.search.moves import Moves, StagePlan
from tawpipe.schedule.pipelines.search.ticks import Ticks
from tawpipe.schedule.pipelines.work import Order, PipelineCosts, makespan, play

BEGINNINGS = 3
"""Shapes from which the search goes on: the best choices of different ones."""
FIRST = 0.8
"""Of the orders, those that are made before stages are made anew."""
FLYING = (1.0, 1.3)
"""Times as many micro-batches under way as 1F1B has, for which beginnings are made."""
LENT = (1.05, 1.15, 1.3)
"""Of the limit of memory, what orders are made for which keep some of it in the host's."""
GAIN = 1e-4
"""Share of a step's time below which nothing is better."""


@dataclass(frozen=True)
class Keeping:
    """What layers keep, and the stages that they are in.

    Args:
        keeps: for every block what its backward pass computes again, as in ``ScheduleSettings.recompute``.
        moving: blocks whose memory may go to the host's.
    """

    layout: Layout
    keeps: tuple[str, ...]
    moving: frozenset[int] = frozenset()

    @property
    def recompute(self) -> str:
        """The setting that says so, from the last layer backwards."""
        runs = [(how, len([*same])) for how, same in groupby(reversed(self.keeps[1:-1]))]
        return ",".join([*(f"{how}:{count}" for how, count in runs[:-1]), runs[-1][0]])


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
    orders: int,
    with_host: int = 0,
    begin: Keeping | None = None,
) -> Kept:
    """The shortest step that a search finds; never longer than the best with all layers alike in one of the layouts.

    Args:
        options: by what layers compute again their costs, which differ in times and memory of blocks alone.
        layouts: to begin with.
        orders: that are made before the search ends, besides those of the beginnings.
        with_host: orders with memory in the host that are made after that; each takes longer.
        begin: a choice to go on from, in the place of all others.

    Raises:
        UserError: memory for no choice.
    """
    search = _Choosing(options, micro_batches)
    refused: UserError | None = None
    if begin is not None:
        search.judge(begin)
        layouts = ()
    beginnings = [layout for given in layouts for layout in (given, search.balanced(given))]
    for begun in dict.fromkeys(beginnings):
        uniform = [Keeping(begun, (how,) * begun.blocks) for how in options]
        for choice in dict.fromkeys((*uniform, *search.fitted(begun))):
            try:
                search.judge(choice)
            except UserError as error:
                refused = error
    if not search.found:
        assert refused is not None
        raise refused
    by_places: dict[tuple[int, ...], Keeping] = {}
    for choice in search.best(len(search.found)):
        by_places.setdefault(choice.layout.places, choice)
    hopeful, before = [*by_places.values()][:BEGINNINGS], search.made
    for number, choice in enumerate(hopeful, 1):
        search.walk(choice, search.neighbours, before + int(orders * FIRST * number / len(hopeful)))
    if orders:
        search.walk(search.laid_out(search.best(1)[0]), search.neighbours, before + orders)
    if with_host and math.isfinite(search.costs.host):
        search.walk(search.best(1)[0], search.with_more_moving, search.made + with_host)
    return search.found[search.best(1)[0]]


class _Choosing:
    """Choices that have been judged."""

    def __init__(self, options: Mapping[str, PipelineCosts], micro_batches: int) -> None:
        self.options, self.micro_batches = options, micro_batches
        self.costs = next(iter(options.values()))
        self.names = [*options]
        self.found: dict[Keeping, Kept] = {}
        self.seen: set[Keeping] = set()
        self.made = 0

    def best(self, number: int) -> list[Keeping]:
        return sorted(self.found, key=lambda choice: self.found[choice].makespan)[:number]

    def costs_of(self, choice: Keeping) -> PipelineCosts:
        blocks = []
        for number, how in enumerate(choice.keeps):
            block = self.options[how].blocks[number]
            blocks.append(replace(block, stays=0.0 if number in choice.moving else block.kept))
        host = self.costs.host if choice.moving else math.inf
        return replace(self.costs, blocks=tuple(blocks), host=host)

    def judge(self, choice: Keeping, most: float = math.inf) -> float:
        """The time of a step with a choice; no end where that is ``most`` or more for sure.

        Raises:
            UserError: there is no memory for it.
        """
        if choice in self.found:
            return self.found[choice].makespan
        costs = self.costs_of(choice)
        if choice in self.seen:
            return math.inf
        if most < math.inf and bound(choice.layout, costs, self.micro_batches, split=True) >= most:
            return math.inf
        self.seen.add(choice)
        self.made += 1
        orders = [*self._orders(choice.layout, costs)]
        if not orders:
            return math.inf
        length, order = min(
            ((makespan(play(choice.layout, order, costs)), order) for order in orders), key=lambda pair: pair[0]
        )
        self.found[choice] = Kept(choice, costs, order, length)
        return length

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

    def laid_out(self, choice: Keeping) -> Keeping:
        """The choice with stages that are made for it, if a step is shorter then."""
        layout = generate(self.costs_of(choice), choice.layout.size, self.micro_batches, budget=QUICK)
        other = replace(choice, layout=layout)
        return min((choice, other), key=lambda option: self._judged(option, math.inf))

    def fitted(self, layout: Layout) -> Iterator[Keeping]:
        """Of two options as many layers of every position with the one that keeps more as 1F1B leaves room for, or
        orders with more under way.
        """
        table = {how: costs.blocks for how, costs in self.options.items()}
        flying = round_trips(layout, self.costs)
        rooms = self.costs.stages(layout).rooms
        for factor, more, less in product(FLYING, self.names, self.names):
            keeps = [more] * layout.blocks
            for place in range(layout.size):
                stages = layout.stages_of(place)
                there = [(factor * flying[stage], block) for stage in stages for block in layout.blocks_of(stage)]
                total = sum(times * table[more][block].kept for times, block in there)
                for times, block in there:
                    saved = times * (table[more][block].kept - table[less][block].kept)
                    if total > rooms[place] and saved > 0:
                        keeps[block], total = less, total - saved
            if less in keeps:
                yield Keeping(layout, tuple(keeps))

    def neighbours(self, choice: Keeping) -> Iterator[Keeping]:
        """A layer that keeps otherwise, on a stage, on all or on two positions; a layer in the stage beside its own."""
        layout, keeps = choice.layout, choice.keeps
        layers = range(1, layout.blocks - 1)
        stages = [[block for block in layout.blocks_of(s) if block in layers] for s in range(layout.stages)]
        for a, b in product(self.names, repeat=2):
            if a == b:
                continue
            firsts = [next((block for block in blocks if keeps[block] == a), None) for blocks in stages]
            there = [block for block in firsts if block is not None]
            yield from (self._changed(choice, [block], b) for block in there)
            if len(there) > 1:
                yield self._changed(choice, there, b)
        for border in range(1, layout.stages):
            for step in (-1, 1):
                cuts = list(layout.cuts)
                cuts[border] += step
                if cuts[border - 1] < cuts[border] < (*cuts, layout.blocks - 1)[border + 1] and cuts[border] > 1:
                    yield replace(choice, layout=replace(layout, cuts=tuple(cuts)))

    def with_more_moving(self, choice: Keeping) -> Iterator[Keeping]:
        """A layer of a stage, or of all but the last, more whose memory may go, and which keeps more then."""
        layout, keeps = choice.layout, choice.keeps
        size = {how: sum(block.kept for block in self.options[how].blocks) for how in self.names}
        firsts = []
        for stage in range(layout.stages - 1):
            left = [block for block in layout.blocks_of(stage) if block > 0 and block not in choice.moving]
            firsts += [min(left, key=lambda block: size[keeps[block]])] if left else []
        for blocks in (*([block] for block in firsts), *([firsts] if len(firsts) > 1 else [])):
            moving = replace(choice, moving=choice.moving | set(blocks))
            yield moving
            for how in self.names:
                if any(size[how] > size[keeps[block]] for block in blocks):
                    yield self._changed(moving, blocks, how)

    def _changed(self, choice: Keeping, blocks: Sequence[int], how: str) -> Keeping:
        return replace(choice, keeps=tuple(how if b in blocks else before for b, before in enumerate(choice.keeps)))

    def walk(self, choice: Keeping, around: Callable[[Keeping], Iterable[Keeping]], until: int) -> None:
        """On to a better neighbour, as long as there is one and fewer orders have been made. What was better is tried
        again first.
        """
        first = 0
        while self.made < until:
            length = self.found[choice].makespan * (1 - GAIN)
            options = [*around(choice)]
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
