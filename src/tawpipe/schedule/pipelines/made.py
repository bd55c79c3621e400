"""The pipelines whose orders, or stages as well, are made for the costs of a model.

What makes them (search/) is imported when something is made: a run of any other strategy never does.
"""

from __future__ import annotations

from dataclasses import replace

from tawpipe.schedule.pipelines.layout import Layout
from tawpipe.schedule.pipelines.limits import QUICK, searched
from tawpipe.schedule.pipelines.periodic import Periodic
from tawpipe.schedule.pipelines.positions import Positions
from tawpipe.schedule.pipelines.strategy import ActivationPipeline
from tawpipe.schedule.pipelines.work import Order, PipelineCosts
from tawpipe.schedule.spec import ModelSpec
from tawpipe.schedule.step import StepSpec


class Made(ActivationPipeline):
    """A pipeline whose order is the shortest of those that ``arrange`` tries."""

    splits = True
    made = True

    def order(self, layout: Layout, costs: PipelineCosts, count: int) -> Order:
        from tawpipe.schedule.pipelines.search.arrange import arrange

        return arrange(layout, self.limited(layout, costs), count)

    def continuing(self, layout: Layout, costs: PipelineCosts) -> Periodic:
        """The order that goes on for more micro-batches than orders are looked for."""
        from tawpipe.schedule.pipelines.search.arrange import continuing

        return continuing(layout, self.limited(layout, costs))

    def limited(self, layout: Layout, costs: PipelineCosts) -> PipelineCosts:
        """Costs with as much memory as an order may use."""
        return costs

    def played_round(self, step: StepSpec, positions: Positions, each: int, rounds: int) -> tuple[int, int]:
        """What the order repeats, of one with more micro-batches than orders are looked for."""
        least = searched(positions.size) + 1
        if each <= least:
            return each, each
        layout = self.layout_of(step.model, positions.size)
        return least, self.continuing(layout, self.costs(step.model)).period


class ZeroBubble(Made):
    """Zero bubble on a V, or what is shorter for the costs at hand and keeps no more."""

    name = "zero-bubble"
    summary = "two stages on every device in the shape of a V, gradients of weights where there is time for them"

    def usual_layout(self, model: ModelSpec, size: int) -> Layout:
        return Layout.even(len(model.blocks), size, 2, folded=True)

    def usual_places(self, size: int, stages: int) -> tuple[int, ...]:
        return (*range(size), *reversed(range(size)))

    def limited(self, layout: Layout, costs: PipelineCosts) -> PipelineCosts:
        """What there is room for, and no more than the published order, whose positions have the activations of 2p
        stages and of one more while W runs, and what p of W wait for.
        """
        table = costs.stages(layout)
        kept, waiting, resident = max(table.kept), max(table.kept_for_weights), max(table.resident)
        most = resident + (2 * layout.size + 1) * kept + layout.size * waiting
        return replace(costs, memory=min(costs.memory, most))


class Generated(Made):
    """Stages, their places and their order made together."""

    name = "generated"
    summary = "a pipeline whose stages, their places and their order are made for the costs of the model's layers"
    searches_stages = True

    def usual_layout(self, model: ModelSpec, size: int) -> Layout:
        from tawpipe.schedule.pipelines.search.generate import generate

        Layout.even(len(model.blocks), size)  # refuses fewer layers than positions
        # Orders are made for any number of micro-batches, stages for so many; every rank repeats the search.
        return generate(self.costs(model), size, 4 * size, budget=QUICK)


class SolvedPipeline(Made):
    """1F1B or zero bubble within a limit of memory, offloading included; a solver may improve it."""

    name = "solved"
    summary = "a pipeline whose order, offloading included, is made for the memory that there is, and solved for it"
    improves = True

    def usual_layout(self, model: ModelSpec, size: int) -> Layout:
        return Layout.even(len(model.blocks), size)

    def order(self, layout: Layout, costs: PipelineCosts, count: int) -> Order:
        from tawpipe.schedule.pipelines.search.fitting import fastest

        return (
            self.continuing(layout, costs).of(count) if count > searched(layout.size) else fastest(layout, costs, count)
        )

    def continuing(self, layout: Layout, costs: PipelineCosts) -> Periodic:
        from tawpipe.schedule.pipelines.search.fitting import continuing

        return continuing(layout, costs)
