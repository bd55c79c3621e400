"""A better order for a pipeline while it trains: some steps are timed, a solver looks beside the run, and what it finds
is swapped in between two steps.

Only what is made for costs is improved so (``solved``). Orders change when an addition happens and nothing else: the
numbers are the same, but for the last bits of sums. All ranks time the same steps, look at the same ones, and swap
before the same one.
"""

from __future__ import annotations

import time
from statistics import fmean

from tawpipe.console import Console
from tawpipe.orders.improve import Improved, Improvement, measured
from tawpipe.pipeline.pipeline import Pipeline
from tawpipe.runtime.watch.recording import Recording
from tawpipe.runtime.world import World
from tawpipe.schedule.actions import Action, Op
from tawpipe.schedule.pipelines.layout import Layout
from tawpipe.schedule.pipelines.made import SolvedPipeline, held_at_once
from tawpipe.schedule.pipelines.memory import fits
from tawpipe.schedule.pipelines.strategy import ActivationPipeline
from tawpipe.schedule.pipelines.work import Order
from tawpipe.schedule.strategies.table import strategies

TIMED = range(2, 5)
"""Steps of this run that are timed: the first ones warm up."""
LOOK_EVERY = 5
"""Steps between two looks at whether something was found: a word between all ranks each."""
SOLVE_S = 60.0
WORTH = 0.005
"""Share of a step's time below which an order stays."""
KINDS = {Op.FORWARD: "F", Op.BACKWARD: "B", Op.BACKWARD_INPUT: "I", Op.BACKWARD_WEIGHT: "W"}
MOVES = {Op.OFFLOAD: "O", Op.RELOAD: "R"}


class Improving:
    """What the loop asks before and after every step.

    Args:
        rows: of a step.
        steps: that this run does; 0 to leave it out.
    """

    def __init__(self, pipeline: Pipeline, world: World, console: Console, *, rows: int, steps: int) -> None:
        self._pipeline, self._world, self._console, self._rows = pipeline, world, console, rows
        self._search: Improvement | None = None
        self._recordings: list[Recording] = []
        self._done = 0
        """Steps of this run."""
        self.active = steps > TIMED.stop + LOOK_EVERY and _can_improve(pipeline, rows)

    def recording(self, step: int) -> Recording | None:
        """What takes down the times of the next step, where it is one of those that are timed."""
        if not self.active or self._done not in TIMED:
            return None
        self._recordings.append(Recording(self._world.device, step))
        return self._recordings[-1]

    def after(self, step: int) -> None:
        """Look for something better, or swap it in; on all ranks."""
        self._done += 1
        if not self.active:
            return
        if self._done == TIMED.stop:
            self._begin()
        elif self._done > TIMED.stop and (self._done - TIMED.stop) % LOOK_EVERY == 0:
            self._look(step)

    def close(self) -> None:
        """End the search."""
        if self._search is not None:
            self._search.close()

    def _begin(self) -> None:
        pipeline = self._pipeline
        pipeline.drain()
        schedule = pipeline.schedule(self._rows)
        strategy = schedule.step.strategy
        assert isinstance(strategy, ActivationPipeline)
        shape = strategy.shape_of(schedule.step)
        mine = seconds_of([recording.spans() for recording in self._recordings], shape.layout)
        self._recordings.clear()
        everyone = self._world.together(lambda: [[*key, value] for key, value in mine.items()])
        if self._world.rank == 0:
            count = len(schedule.step.micro_batches[0])
            seconds: dict[tuple[int, str, int], list[float]] = {}
            for rank, rows in enumerate(everyone):
                for kind, stage, value in rows:
                    seconds.setdefault((shape.positions.position(rank), kind, stage), []).append(value)
            costs = measured(shape.layout, shape.costs, {key: fmean(values) for key, values in seconds.items()})
            self._search = Improvement(shape.layout, costs, count, shape.order_of(count), seconds=SOLVE_S)

    def _look(self, step: int) -> None:
        improved = self._search.poll() if self._search else None
        worth = improved is not None and improved.gain >= WORTH and self._fits(Order.parse(improved.order))
        ended = self._search is not None and (improved is not None or not self._search.running)
        word = "" if not ended else improved.order if worth and improved is not None else "nothing"
        word = self._world.broadcast_text(word)
        if not word:
            return
        self.active = False
        self.close()
        if word != "nothing":
            begin = time.perf_counter()
            self._pipeline.reorder(self._rows, Order.parse(word))
            self._say(step, improved, time.perf_counter() - begin)
        elif self._world.rank == 0:
            status = f": {improved.status}" if improved is not None else ""
            self._console.line(f"step {step}: the pipeline keeps its order; no better one was found{status}")

    def _fits(self, order: Order) -> bool:
        """True within the limit of memory, what is on its way between positions included."""
        step = self._pipeline.schedule(self._rows).step
        assert isinstance(step.strategy, ActivationPipeline)
        shape = step.strategy.shape(step.model, step.topology)
        return fits(shape.costs, held_at_once(step, shape, order))

    def _say(self, step: int, improved: Improved | None, took_s: float) -> None:
        if improved is not None:
            self._console.line(
                f"step {step}: new pipeline order, {improved.gain:.1%} shorter by measured times "
                f"({improved.status}; found in {improved.seconds:.0f} s during training, swapped in "
                f"{took_s:.1f} s)"
            )


def _can_improve(pipeline: Pipeline, rows: int) -> bool:
    if not isinstance(strategies()[pipeline.settings.strategy], SolvedPipeline):
        return False
    step = pipeline.schedule(rows).step
    return len({len(of_rank) for of_rank in step.micro_batches}) == 1


def seconds_of(steps: list[list[tuple[str, float, float]]], layout: Layout) -> dict[tuple[str, int], float]:
    """Seconds of every kind of work on every stage of this rank, the mean over steps and micro-batches.

    Args:
        steps: (action, begin, end) of every action.
    """
    of_block: dict[tuple[str, int], list[float]] = {}
    for spans in steps:
        for text, begin, end in spans:
            action = Action.parse(text)
            if (kind := KINDS.get(action.op) or MOVES.get(action.op)) is not None:
                of_block.setdefault((kind, action.block), []).append(end - begin)
    of_stage: dict[tuple[str, int], float] = {}
    for kind in "FBIWOR":
        for stage in range(layout.stages):
            blocks = layout.blocks_of(stage)
            mine = [fmean(of_block[kind, block]) for block in blocks if (kind, block) in of_block]
            if kind == "I" and mine:  # the embedding and the head have theirs whole
                mine += [fmean(of_block["B", block]) for block in blocks if ("B", block) in of_block]
            if kind == "B" and any(("I", block) in of_block for block in blocks):
                continue
            if mine:
                of_stage[kind, stage] = sum(mine)
    return of_stage
