"""What layers keep, with stages and order, by simulated annealing: many quick orders instead of a few good ones.

A layer keeps everything, attention's results or its input alone, on the device or for a while in the host's memory. The
search (``choose``) ends after a number of tries and not after seconds.

A draft is judged by one order: a pass in time under the limit of memory, and one backward and forward in time. So much
depends on where backward passes are parted (between its parts a layer keeps more than before them) and on how many
micro-batches are under way that these belong to a draft, like its cuts and what every layer keeps. A neighbour's order
begins with that of the draft before it. A stage whose layers' memory waits in the host's takes none in such a pass but
places for what is on its way; then the works of the host's link are added, and their time and memory count.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice, pairwise, product

from tawpipe.errors import UserError
from tawpipe.orders.arrange import ROUNDS, arrange, began, joined, justified, policies
from tawpipe.orders.bounds import bound
from tawpipe.orders.drafts import SPARE, Draft, Judged, Keeping
from tawpipe.orders.listing import with_host
from tawpipe.orders.moves import Moves, StagePlan
from tawpipe.orders.passes import Passes, TimedOrder
from tawpipe.orders.room import whole_stages
from tawpipe.orders.ticks import Ticks
from tawpipe.schedule.pipelines.layout import Layout
from tawpipe.schedule.pipelines.work import Order, PipelineCosts, StageCosts, makespan, play

WARM, COLD = 4e-3, 1e-5
"""Share of a step's time by which a worse draft is accepted, about, in the beginning and in the end."""
HOPELESS, NEAR = 1.2, 1.01
"""Times as long as what would be accepted: a first pass after which no second one is made; the same for a pass that
begins with the order of a neighbour."""
LEAN = 0.05
"""Of the mean work of positions, what is added to the time of a step: of equal steps the one that computes less."""
STARTS = 4
"""Shares of the layers that keep less, the first ones, in the drafts that annealing may begin with."""
STAGES = 6
"""Of a position, at most."""


class Annealing:
    """Drafts that are judged.

    Args:
        options: by what layers compute again their costs.
    """

    def __init__(self, options: Mapping[str, PipelineCosts], micro_batches: int) -> None:
        self.options, self.micro_batches = options, micro_batches
        self.names = [*options]
        self.random = random.Random(0)
        costs = next(iter(options.values()))
        ticks = Ticks.of(replace(costs, blocks=tuple(b for option in options.values() for b in option.blocks)))
        blocks = iter(ticks.blocks)
        self._moving = {how: [*islice(blocks, len(costs.blocks))] for how in options}
        self._staying = {how: [replace(b, stays=b.kept) for b in given] for how, given in self._moving.items()}
        self._ticks = replace(ticks, blocks=(), host=costs.host * ticks.scale / ticks.memory_scale)

    def best(self, layouts: Iterable[Layout], tries: int) -> Judged | None:
        """The best draft after so many tries, those of the beginnings not counted; None if memory holds none.

        Half of them go on from the best beginning of each layout, the others from the best that these have found.
        """
        begun = list[Judged]()
        for layout in layouts:
            here = None
            for draft in self._beginnings(layout):
                here = self.judged(draft, here.energy if here else math.inf) or here
            begun += [here] if here else []
        if not begun:
            return None
        first = tries // 2 if len(begun) > 1 else 0
        best = min((self._annealed(here, first // len(begun)) for here in begun), key=lambda one: one.length)
        return self._annealed(best, tries - first)

    def _annealed(self, here: Judged, tries: int) -> Judged:
        """The best after so many neighbours."""
        best = here
        for number in range(tries):
            warmth = WARM * (1 - number / tries) + COLD
            most = here.energy * (1 - warmth * math.log(1 - self.random.random()))
            other = self.changed(here.draft)
            if other is not None and (judged := self.judged(other, most, here)) is not None:
                here = judged
                if here.length < best.length:
                    best = here
        return best

    def order(self, judged: Judged) -> Order:
        """A draft's order, with more passes than it was judged by where nothing moves."""
        if judged.order is not None:
            return judged.order
        passes = judged.passes
        return joined(passes, justified(passes, judged.timed, judged.draft.policy[0], ROUNDS))

    def judged(self, draft: Draft, most: float = math.inf, before: Judged | None = None) -> Judged | None:
        """A draft with a quick order; None where there is no memory, or it takes ``most`` or longer.

        Args:
            before: what it is a neighbour of, whose order its own begins with.
        """
        layout, flying, moves = draft.choice.layout, draft.policy[0], any(draft.hosted)
        if draft.hosted[-1]:  # the head's own input stays
            return None
        costs = self._costs(draft)
        stages = costs.stages(layout)
        work = self.micro_batches * sum(stages.seconds[kind, s] for kind in "FB" for s in range(layout.stages))
        work *= LEAN / layout.size
        most -= work
        if most < math.inf and self._hopeless(draft, costs, stages, most):
            return None
        if moves:
            stages = self._without(draft, costs, stages).stages(layout)
        try:
            apart = zip(whole_stages(stages, True), draft.parted, strict=True)
        except UserError:
            return None
        passes = Passes(stages, self.micro_batches, tuple(fits and wanted for fits, wanted in apart))
        if before is None or before.draft.policy != draft.policy:
            timed, hopeless = began(passes, *draft.policy), HOPELESS
        else:
            timed, hopeless = passes.forward(before.urgency(passes), flying), NEAR
        if timed.makespan > hopeless * most:
            return None
        timed = justified(passes, timed, flying, rounds=1)
        if timed.makespan >= most:
            return None
        order, length = self._hosted(draft, passes, timed, most) if moves else (None, timed.makespan)
        return Judged(draft, passes, timed, length, length + work, order) if length < most else None

    @property
    def scale(self) -> float:
        """Ticks of a unit of time."""
        return self._ticks.scale

    def _costs(self, draft: Draft) -> Ticks:
        layout, blocks = draft.choice.layout, []
        for stage, away in enumerate(draft.hosted):
            table = self._moving if away else self._staying
            blocks += [table[draft.choice.keeps[block]][block] for block in layout.blocks_of(stage)]
        return replace(self._ticks, blocks=tuple(blocks))

    def _hopeless(self, draft: Draft, costs: Ticks, stages: StageCosts, most: float) -> bool:
        """True if no order can be as short, or the host's link cannot."""
        layout = draft.choice.layout
        for place in range(layout.size) if any(draft.hosted) else ():
            if 2 * self.micro_batches * sum(stages.seconds["O", stage] for stage in layout.stages_of(place)) >= most:
                return True
        return bound(layout, costs, self.micro_batches, split=True) >= most

    def _without(self, draft: Draft, costs: Ticks, stages: StageCosts) -> Ticks:
        """As if what moves took no memory but places for what is on its way."""
        layout, blocks = draft.choice.layout, [*costs.blocks]
        for place in range(layout.size):
            away = [stage for stage in layout.stages_of(place) if draft.hosted[stage]]
            for stage in away:
                for block in layout.blocks_of(stage):
                    blocks[block] = replace(blocks[block], kept=0, stays=0)
            if away:
                first, places = layout.cuts[away[0]], draft.spare * max(stages.moved[stage] for stage in away)
                blocks[first] = replace(blocks[first], resident=blocks[first].resident + places)
        return replace(costs, blocks=tuple(blocks))

    def _hosted(self, draft: Draft, passes: Passes, timed: TimedOrder, most: float) -> tuple[Order | None, float]:
        """The draft with works of the host's link, if these do not make it too long."""
        layout, costs, scale = draft.choice.layout, draft.chosen.costs(self.options), self._ticks.scale
        away = {(s, m) for s, moves in enumerate(draft.hosted) if moves for m in range(self.micro_batches)}
        order = with_host(layout, joined(passes, timed).compute, away, costs, most / scale)
        return order, makespan(play(layout, order, costs)) * scale if order else math.inf

    def _beginnings(self, layout: Layout) -> Iterator[Draft]:
        """With all layers alike, or less kept by the first ones; with few or many micro-batches under way."""
        kept = {how: sum(block.kept for block in costs.blocks) for how, costs in self.options.items()}
        for more, less, part in product(self.names, self.names, range(STARTS)):
            if kept[less] > kept[more] or (more == less and part):
                continue
            first, half = 1 + (layout.blocks - 2) * part // STARTS, layout.stages // 2
            choice = Keeping(layout, (less,) * first + (more,) * (layout.blocks - first))
            for early, late, flying in product((True, False), (True, False), (3 * layout.size // 2, 3 * layout.size)):
                parted = (early,) * half + (late,) * (layout.stages - half)
                yield Draft(choice, parted, (min(flying, self.micro_batches), 1), (False,) * layout.stages)

    def changed(self, draft: Draft) -> Draft | None:
        """A neighbour at random; None if there is none of the kind."""
        draw, choice = self.random.random(), draft.choice
        if draw < 0.3:
            return self._with_cuts(draft)
        if draw < 0.65:
            return replace(draft, choice=replace(choice, keeps=self._kept(choice.keeps)))
        if draw < 0.72 and math.isfinite(self._ticks.host) and choice.layout.stages > 1:
            stage = self.random.randrange(choice.layout.stages - 1)
            hosted = tuple(not away if s == stage else away for s, away in enumerate(draft.hosted))
            spare = self.random.choice(SPARE) if any(draft.hosted) and self.random.random() < 0.3 else draft.spare
            return replace(draft, hosted=hosted if spare == draft.spare else draft.hosted, spare=spare)
        if draw < 0.87:
            stage = self.random.randrange(choice.layout.stages)
            parted = tuple(not apart if s == stage else apart for s, apart in enumerate(draft.parted))
            return replace(draft, parted=parted)
        if draw < 0.94:
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
        cuts, places, parted, hosted, kind = (
            [*layout.cuts],
            [*layout.places],
            [*draft.parted],
            [*draft.hosted],
            self.random.randrange(3),
        )
        if kind == 0:
            places[stage] = place
        elif kind == 1 and stage + 1 < layout.stages:
            for values in (cuts, places, parted, hosted):
                del values[stage + 1]
        elif kind == 2 and layout.stages < STAGES * layout.size and len(layout.blocks_of(stage)) > 3:
            cuts.insert(stage + 1, self.random.choice(layout.blocks_of(stage)[2:-1]))
            places.insert(stage + self.random.randrange(2), place)
            parted.insert(stage, parted[stage])
            hosted.insert(stage, hosted[stage])
        if len(set(places)) < layout.size or places == [*layout.places]:
            return None
        changed = Layout(layout.blocks, tuple(cuts), tuple(places))
        return Draft(replace(choice, layout=changed), tuple(parted), draft.policy, tuple(hosted), draft.spare)


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


def choose(options: Mapping[str, PipelineCosts], layouts: Iterable[Layout], micro_batches: int, *, tries: int) -> Kept:
    """The shortest step that a search finds; never longer than the best with all layers alike in one of the layouts.

    Args:
        options: by what layers compute again their costs, which differ in times and memory of blocks alone. Memory goes
            to the host's where its link is not endlessly slow.
        layouts: to begin with.
        tries: neighbours that annealing looks at.

    Raises:
        UserError: memory for no choice.
    """
    costs = next(iter(options.values()))
    beginnings = dict.fromkeys(
        layout for given in layouts for layout in (given, _balanced(given, costs, micro_batches))
    )
    offers: list[Kept] = []
    refused: UserError | None = None

    def offer(choice: Keeping, order: Order) -> None:
        costs = choice.costs(options)
        offers.append(Kept(choice, costs, order, makespan(play(choice.layout, order, costs))))

    for layout, how, split in product(beginnings, options, (True, False)):
        alike = Keeping(layout, (how,) * layout.blocks)
        try:
            offer(alike, arrange(layout, alike.costs(options), micro_batches, split=split))
        except UserError as error:
            refused = error
    annealing = Annealing(options, micro_batches)
    if (judged := annealing.best(beginnings, tries)) is not None:
        offer(judged.draft.chosen, annealing.order(judged))
    if not offers:
        assert refused is not None
        raise refused
    return min(offers, key=lambda kept: kept.makespan)


def _balanced(layout: Layout, costs: PipelineCosts, micro_batches: int) -> Layout:
    """The layout with loads as even as can be."""
    moves = Moves(Ticks.of(costs), layout.size, micro_batches, layout.stages)
    return Layout(layout.blocks, *moves.balanced(StagePlan(layout.cuts, layout.places)))
