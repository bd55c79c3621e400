"""Search for what layers keep, with stages and order, by simulated annealing with many quickly made orders.

A layer keeps everything, the results of attention, or only its input, on the device or for a while in the CPU memory.
The search (``choose``) ends after a number of tries, not after a time.

A draft is judged by one order: a pass forward in time within the memory limit, then one backward and one forward. The
result depends strongly on two choices: where backward passes are split (between its parts, a layer keeps more than
before), and how many micro-batches are in flight. So a draft includes them, like its cuts and what every layer keeps.
The order of a neighbour starts from the order of the draft before it.

If the activations of a stage wait in the CPU memory, the passes count only buffers for transfers. Afterwards the
transfers are added to the order, and their time and memory count.
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
from tawpipe.orders.order_memory import whole_stages
from tawpipe.orders.passes import Passes, TimedOrder
from tawpipe.orders.ticks import Ticks
from tawpipe.schedule.pipelines.layout import Layout
from tawpipe.schedule.pipelines.work import Order, PipelineCosts, StageCosts, makespan, play

WARM, COLD = 4e-3, 1e-5
"""Share of the step time by which a worse draft is typically accepted, at the beginning and at the end of the
search."""
HOPELESS, NEAR = 1.2, 1.01
"""A first pass that is longer than an acceptable result by this factor is not improved. ``NEAR`` is the factor for a
pass that starts from a neighbour's order."""
LEAN = 0.05
"""Share of the mean work of positions that is added to the step time. Of equally long steps, the one that computes less
wins."""
STARTS = 4
"""Number of sizes of the first group of layers, which keeps less, among the starting drafts."""
STAGES = 6
"""Maximum number of stages on a position."""


class Annealing:
    """Simulated annealing over drafts, with a fixed random seed.

    Args:
        options: for each recomputation option, the costs if all layers use it.
        micro_batches: number of micro-batches.
    """

    def __init__(self, options: Mapping[str, PipelineCosts], micro_batches: int) -> None:
        self.options, self.micro_batches = options, micro_batches
        self.names = [*options]
        self.random = random.Random(0)
        costs = next(iter(options.values()))
        ticks = Ticks.of(replace(costs, blocks=tuple(b for option in options.values() for b in option.blocks)))
        blocks = iter(ticks.blocks)
        self._moving = {how: [*islice(blocks, len(costs.blocks))] for how in options}
        self._staying = {
            how: [replace(b, stays=b.kept) for b in block_times] for how, block_times in self._moving.items()
        }
        self._ticks = replace(ticks, blocks=(), host=costs.host * ticks.scale / ticks.memory_scale)

    def best(self, layouts: Iterable[Layout], tries: int) -> Judged | None:
        """Return the best draft after ``tries`` attempts, or None if no starting draft fits in memory.

        Starting drafts do not count as attempts. With several layouts, half of the attempts start from the best
        starting draft of each layout. The others start from the best draft that these have found.

        Args:
            layouts: layouts of the starting drafts.
            tries: number of attempts.
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
        """Try ``tries`` random changes one after another, starting from ``here``; return the best draft found.

        A worse draft may become the next starting point; how much worse it may be decreases with time."""
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
        """Return the order of a judged draft. Without offloading, it is first improved by more passes."""
        if judged.order is not None:
            return judged.order
        passes = judged.passes
        return joined(passes, justified(passes, judged.timed, judged.draft.policy[0], ROUNDS))

    def judged(self, draft: Draft, most: float = math.inf, before: Judged | None = None) -> Judged | None:
        """Make a quick order for a draft; return None if it does not fit in memory or its energy is not below ``most``.

        Args:
            draft: the draft.
            most: energy that the result must stay below.
            before: judged draft of which this one is a neighbour. Its order is the starting point, if both have one
                policy.
        """
        layout, flying, moves = draft.choice.layout, draft.policy[0], any(draft.hosted)
        if draft.hosted[-1]:  # the input of the head is never offloaded
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
        """Ticks per unit of time."""
        return self._ticks.scale

    def _costs(self, draft: Draft) -> Ticks:
        """Return the costs of a draft in ticks."""
        layout, blocks = draft.choice.layout, []
        for stage, away in enumerate(draft.hosted):
            table = self._moving if away else self._staying
            blocks += [table[draft.choice.keeps[block]][block] for block in layout.blocks_of(stage)]
        return replace(self._ticks, blocks=tuple(blocks))

    def _hopeless(self, draft: Draft, costs: Ticks, stages: StageCosts, most: float) -> bool:
        """Return True if a lower bound of the step, or the time of transfers to the CPU, reaches ``most`` ticks."""
        layout = draft.choice.layout
        for place in range(layout.size) if any(draft.hosted) else ():
            if 2 * self.micro_batches * sum(stages.seconds["O", stage] for stage in layout.stages_of(place)) >= most:
                return True
        return bound(layout, costs, self.micro_batches, split=True) >= most

    def _without(self, draft: Draft, costs: Ticks, stages: StageCosts) -> Ticks:
        """Return a copy of ``costs`` in which offloaded activations take no memory, except buffers for their transfers.

        Args:
            draft: draft that says which stages are offloaded, and the number of buffers.
            costs: costs of the draft, in ticks.
            stages: costs of its stages.
        """
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
        """Add the transfers of offloaded activations to the draft's order; return the order, and its length in ticks.

        Returns (None, inf) if the order would be longer than ``most`` ticks or comes to a halt."""
        layout, costs, scale = draft.choice.layout, draft.chosen.costs(self.options), self._ticks.scale
        away = {(s, m) for s, moves in enumerate(draft.hosted) if moves for m in range(self.micro_batches)}
        order = with_host(layout, joined(passes, timed).compute, away, costs, most / scale)
        return order, makespan(play(layout, order, costs)) * scale if order else math.inf

    def _beginnings(self, layout: Layout) -> Iterator[Draft]:
        """Yield starting drafts without offloading, for all combinations of a few choices.

        All layers keep alike, or the first ones keep less. Backward passes are split in the first half of the stages,
        in the second half, in both or in none. Few or many micro-batches are in flight."""
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
        """Return a random neighbour of a draft, or None if the drawn kind of change is not possible.

        One of these changes at random: cuts, what layers keep, offloading, split backward passes, the policy of the
        order, or the position and number of stages."""
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
        """Move some neighbouring cuts by one layer, and sometimes change what a layer keeps.

        Returns None if the cuts cannot move.
        """
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
        """Return a copy of ``keeps`` in which a random layer keeps what its neighbour keeps, or any random choice.

        In the second case, another random layer sometimes takes over the former choice."""
        new, last = [*keeps], len(keeps) - 2
        block = self.random.randint(1, last)
        borders = [b for b in range(1, last) if keeps[b] != keeps[b + 1]]
        if borders and self.random.random() < 0.5:
            border = self.random.choice(borders)
            here, source = (border, border + 1) if self.random.random() < 0.5 else (border + 1, border)
            new[here] = keeps[source]
        else:
            new[block] = self.random.choice(self.names)
            if self.random.random() < 0.4:
                new[self.random.randint(1, last)] = keeps[block]
        return tuple(new)

    def _placed(self, draft: Draft) -> Draft | None:
        """Move a random stage to another position, split it in two, or join it with the next one.

        Returns None if this is not possible or changes nothing.
        """
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
    """Choice of stages and recomputation, with its order.

    Args:
        choice: stages, and what layers keep.
        costs: costs of this choice.
        order: order of its works.
        makespan: duration of a step by ``play``.
    """

    choice: Keeping
    costs: PipelineCosts
    order: Order
    makespan: float


def choose(options: Mapping[str, PipelineCosts], layouts: Iterable[Layout], micro_batches: int, *, tries: int) -> Kept:
    """Search stages, what each layer keeps, offloading and order together; return the choice with the shortest step.

    It is never longer than the best choice in which all layers keep alike in one of the given layouts.

    Args:
        options: for each recomputation option, the costs if all layers use it. They differ only in times and memory of
            blocks. Activations can be offloaded if the link to the CPU memory has a finite speed.
        layouts: starting layouts.
        micro_batches: number of micro-batches.
        tries: number of neighbours that annealing tries.

    Raises:
        UserError: no choice fits in memory.
    """
    costs = next(iter(options.values()))
    beginnings = dict.fromkeys(
        layout for initial in layouts for layout in (initial, _balanced(initial, costs, micro_batches))
    )
    offers: list[Kept] = []
    refused: UserError | None = None

    def offer(choice: Keeping, order: Order) -> None:
        """Add a choice and its order to the candidates."""
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
    """Return the layout with its cuts moved by single layers until no move makes the loads of positions more even."""
    moves = Moves(Ticks.of(costs), layout.size, micro_batches, layout.stages)
    return Layout(layout.blocks, *moves.balanced(StagePlan(layout.cuts, layout.places)))
