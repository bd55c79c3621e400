"""What every layer keeps for its backward pass, chosen with stages and order: everything, attention's results or its
input alone; on the device, or for a while in the host's memory.

A choice is found by annealing (keeping.py), which ends after so many tries and not after seconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import product

from tawpipe.errors import UserError
from tawpipe.schedule.pipelines.layout import Layout
from tawpipe.schedule.pipelines.search.arrange import arrange
from tawpipe.schedule.pipelines.search.drafts import Keeping
from tawpipe.schedule.pipelines.search.keeping import Annealing
from tawpipe.schedule.pipelines.search.moves import Moves, StagePlan
from tawpipe.schedule.pipelines.search.ticks import Ticks
from tawpipe.schedule.pipelines.work import Order, PipelineCosts, makespan, play


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
