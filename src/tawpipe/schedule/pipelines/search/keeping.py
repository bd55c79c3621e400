"""What layers keep, with stages and order, by simulated annealing: many quick orders instead of a few good ones.

A draft is judged by one order: a pass in time under the limit of memory, and one backward and forward in time. So much
depends on where backward passes are parted (between its parts a layer keeps more than before them) and on how many
micro-batches are under way that these belong to a draft, like its cuts and what every layer keeps.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import groupby, pairwise, product

from tawpipe.errors import UserError
from tawpipe.schedule.pipelines.layout import Layout
from tawpipe.schedule.pipelines.search.arrange import ROUNDS, began, joined, justified, policies
from tawpipe.schedule.pipelines.search.bounds import bound
from tawpipe.schedule.pipelines.search.passes import Passes, TimedOrder
from tawpipe.schedule.pipelines.search.room import whole_stages
from tawpipe.schedule.pipelines.search.ticks import Ticks
from tawpipe.schedule.pipelines.work import Order, PipelineCosts

WARM, COLD = 4e-3, 1e-5
"""Share of a step's time by which a worse draft is accepted, about, in the beginning and in the end."""
HOPELESS = 1.2
"""Times as long as what would be accepted: a first pass after which no second one is made."""
STARTS = 4
"""Shares of the layers that keep less, the first ones, in the drafts that annealing may begin with."""
STAGES = 6
"""Of a position, at most."""


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

    def costs(self, options: Mapping[str, PipelineCosts]) -> PipelineCosts:
        """The costs of it, by those with all layers alike; with no host where nothing moves."""
        blocks = []
        for number, how in enumerate(self.keeps):
            block = options[how].blocks[number]
            blocks.append(replace(block, stays=0.0 if number in self.moving else block.kept))
        costs = next(iter(options.values()))
        return replace(costs, blocks=tuple(blocks), host=costs.host if self.moving else math.inf)


@dataclass(frozen=True)
class Draft:
    """A choice, and how an order is made for it.

    Args:
        parted: by stage, whether gradients of weights are computed apart, where memory holds that.
        policy: see ``arrange.policies``.
    """

    choice: Keeping
    parted: tuple[bool, ...]
    policy: tuple[int, int]


class Annealing:
    """Drafts that have been judged.

    Args:
        options: by what layers compute again their costs.
    """

    def __init__(self, options: Mapping[str, PipelineCosts], micro_batches: int) -> None:
        self.options, self.micro_batches = options, micro_batches
        self.names = [*options]
        self.lengths: dict[Draft, float] = {}
        self.random = random.Random(0)

    def best(self, layouts: Iterable[Layout], tries: int) -> Draft | None:
        """The best draft after so many tries, those of the beginnings not counted; None if memory holds none."""
        draft, length = None, math.inf
        for begun in self._beginnings(layouts):
            if (time := self.length(begun, length)) < length:
                draft, length = begun, time
        if draft is None:
            return None
        best, least = draft, length
        for number in range(tries):
            warmth = WARM * (1 - number / tries) + COLD
            most = length * (1 - warmth * math.log(1 - self.random.random()))
            other = self._changed(draft)
            if other is not None and (time := self.length(other, most)) < most:
                draft, length = other, time
                if length < least:
                    best, least = draft, length
        return best

    def order(self, draft: Draft) -> Order:
        """A draft's order, with more passes than it was judged by."""
        passes = self._passes(draft)
        return joined(passes, justified(passes, began(passes, *draft.policy), draft.policy[0], ROUNDS))

    def length(self, draft: Draft, most: float = math.inf) -> float:
        """The time of a step by a quick order; no end where there is no memory, or it is far above ``most``."""
        if draft not in self.lengths:
            costs = draft.choice.costs(self.options)
            if most < math.inf and bound(draft.choice.layout, costs, self.micro_batches, split=True) >= most:
                return math.inf
            try:
                self.lengths[draft] = self._quickly(self._passes(draft, costs), draft, most)
            except UserError:
                self.lengths[draft] = math.inf
        return self.lengths[draft]

    def _quickly(self, passes: Passes, draft: Draft, most: float) -> float:
        costs = passes.stages.costs
        assert isinstance(costs, Ticks)
        timed: TimedOrder = began(passes, *draft.policy)
        if timed.makespan <= HOPELESS * most * costs.scale:
            timed = justified(passes, timed, draft.policy[0], rounds=1)
        return timed.makespan / costs.scale

    def _passes(self, draft: Draft, costs: PipelineCosts | None = None) -> Passes:
        stages = Ticks.of(costs or draft.choice.costs(self.options)).stages(draft.choice.layout)
        apart = zip(whole_stages(stages, True), draft.parted, strict=True)
        return Passes(stages, self.micro_batches, tuple(fits and wanted for fits, wanted in apart))

    def _beginnings(self, layouts: Iterable[Layout]) -> Iterator[Draft]:
        """With all layers alike, or less kept by the first ones; with few or many micro-batches under way."""
        kept = {how: sum(block.kept for block in costs.blocks) for how, costs in self.options.items()}
        for layout, more, less, part in product(layouts, self.names, self.names, range(STARTS)):
            if kept[less] > kept[more] or (more == less and part):
                continue
            first, half = 1 + (layout.blocks - 2) * part // STARTS, layout.stages // 2
            choice = Keeping(layout, (less,) * first + (more,) * (layout.blocks - first))
            for early, late, flying in product((True, False), (True, False), (3 * layout.size // 2, 3 * layout.size)):
                parted = (early,) * half + (late,) * (layout.stages - half)
                yield Draft(choice, parted, (min(flying, self.micro_batches), 1))

    def _changed(self, draft: Draft) -> Draft | None:
        """A neighbour at random; None if there is none of the kind."""
        draw, choice = self.random.random(), draft.choice
        if draw < 0.3:
            return self._with_cuts(draft)
        if draw < 0.65:
            return replace(draft, choice=replace(choice, keeps=self._kept(choice.keeps)))
        if draw < 0.85:
            stage = self.random.randrange(choice.layout.stages)
            parted = tuple(not apart if s == stage else apart for s, apart in enumerate(draft.parted))
            return replace(draft, parted=parted)
        if draw < 0.93:
            return replace(draft, policy=self.random.choice(policies(choice.layout.size, self.micro_batches)))
        return self._placed(draft)

    def _with_cuts(self, draft: Draft) -> Draft | None:
        """Some cuts beside each other a layer further, or a layer before; sometimes a layer keeps otherwise, too."""
        choice, layout = draft.choice, draft.choice.layout
        if layout.stages < 2:
            return None
        at = self.random.randrange(1, layout.stages)
        end = at if self.random.random() < 0.5 else self.random.randrange(1, layout.stages)
        step, cuts = self.random.choice((-1, 1)), [*layout.cuts]
        for border in range(min(at, end), max(at, end) + 1):
            cuts[border] += step
        if cuts[1] < 2 or any(a >= b for a, b in pairwise([*cuts, layout.blocks - 1])):
            return None
        keeps = self._kept(choice.keeps) if self.random.random() < 0.3 else choice.keeps
        return replace(draft, choice=replace(choice, layout=replace(layout, cuts=tuple(cuts)), keeps=keeps))

    def _kept(self, keeps: tuple[str, ...]) -> tuple[str, ...]:
        """A layer that keeps what its neighbour does, or anything, while another layer keeps what it did."""
        new, last = [*keeps], len(keeps) - 2
        block = self.random.randint(1, last)
        borders = [b for b in range(1, last) if keeps[b] != keeps[b + 1]]
        if borders and self.random.random() < 0.5:
            border = self.random.choice(borders)
            here, there = (border, border + 1) if self.random.random() < 0.5 else (border + 1, border)
            new[here] = keeps[there]
        else:
            new[block] = self.random.choice(self.names)
            if self.random.random() < 0.4:
                new[self.random.randint(1, last)] = keeps[block]
        return tuple(new)

    def _placed(self, draft: Draft) -> Draft | None:
        """A stage on another position, parted in two, or joined to the next."""
        choice, layout = draft.choice, draft.choice.layout
        stage, place = self.random.randrange(layout.stages), self.random.randrange(layout.size)
        cuts, places, parted, kind = [*layout.cuts], [*layout.places], [*draft.parted], self.random.randrange(3)
        if kind == 0:
            places[stage] = place
        elif kind == 1 and stage + 1 < layout.stages:
            for values in (cuts, places, parted):
                del values[stage + 1]
        elif kind == 2 and layout.stages < STAGES * layout.size and len(layout.blocks_of(stage)) > 3:
            cuts.insert(stage + 1, self.random.choice(layout.blocks_of(stage)[2:-1]))
            places.insert(stage + self.random.randrange(2), place)
            parted.insert(stage, parted[stage])
        if len(set(places)) < layout.size or places == [*layout.places]:
            return None
        changed = Layout(layout.blocks, tuple(cuts), tuple(places))
        return Draft(replace(choice, layout=changed), tuple(parted), draft.policy)
