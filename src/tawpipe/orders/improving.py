"""Improvement of a pipeline's order while it trains.

Some steps are timed, a solver runs in another process, and a better order replaces the present one between two steps.
Only orders that are made for costs are improved (strategy ``solved``). A new order changes only when additions happen.
Results are the same, except for the last bits of sums. All ranks time the same steps, check for a result at the same
steps, and swap before the same step.
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
from tawpipe.schedule.pipelines.cost_based import SolvedPipeline, held_at_once
from tawpipe.schedule.pipelines.layout import Layout
from tawpipe.schedule.pipelines.memory import fits
from tawpipe.schedule.pipelines.strategy import ActivationPipeline
from tawpipe.schedule.pipelines.work import Order
from tawpipe.schedule.strategies.table import strategies

TIMED = range(2, 5)
"""Indices of this run's steps that are timed. Earlier steps warm up."""
LOOK_EVERY = 5
"""Number of steps between two checks for a result. Each check is a short message between all ranks."""
SOLVE_S = 60.0
WORTH = 0.005
"""Minimum share of the step time that a new order must save."""
KINDS = {Op.FORWARD: "F", Op.BACKWARD: "B", Op.BACKWARD_INPUT: "I", Op.BACKWARD_WEIGHT: "W"}
MOVES = {Op.OFFLOAD: "O", Op.RELOAD: "R"}


class Improving:
    """Improvement of the order for one run; the training loop calls it before and after every step.

    Args:
        pipeline: pipeline that trains.
        world: the processes.
        console: prints the result.
        rows: number of rows in a step.
        steps: number of steps of this run; 0 switches the improvement off.
    """

    def __init__(self, pipeline: Pipeline, world: World, console: Console, *, rows: int, steps: int) -> None:
        self._pipeline, self._world, self._console, self._rows = pipeline, world, console, rows
        self._search: Improvement | None = None
        self._recordings: list[Recording] = []
        self._done = 0
        """Number of steps that this run has done."""
        self.active = steps > TIMED.stop + LOOK_EVERY and _can_improve(pipeline, rows)

    def recording(self, step: int) -> Recording | None:
        """Return a new recording for the next step if that step is one of the timed steps, else None.

        The recording is kept here, and evaluated after the last timed step."""
        if not self.active or self._done not in TIMED:
            return None
        self._recordings.append(Recording(self._world.device, step))
        return self._recordings[-1]

    def after(self, step: int) -> None:
        """Count a step. After the last timed step, start the search; later, check for its result at some steps.

        A check every ``LOOK_EVERY`` steps is a message between all ranks. If a better order is found, all ranks swap to
        it here. Call on all ranks after every step.

        Args:
            step: number of the step, for the printed line.
        """
        self._done += 1
        if not self.active:
            return
        if self._done == TIMED.stop:
            self._begin()
        elif self._done > TIMED.stop and (self._done - TIMED.stop) % LOOK_EVERY == 0:
            self._look(step)

    def close(self) -> None:
        """Stop the search and its process, if one runs."""
        if self._search is not None:
            self._search.close()

    def _begin(self) -> None:
        """Gather the measured times on rank 0, and start the solver there. Call on all ranks.

        Waits until all actions of this rank have ended."""
        pipeline = self._pipeline
        pipeline.drain()
        schedule = pipeline.schedule(self._rows)
        strategy = schedule.step.strategy
        assert isinstance(strategy, ActivationPipeline)
        shape = strategy.shape_of(schedule.step)
        local_seconds = seconds_of([recording.spans() for recording in self._recordings], shape.layout)
        self._recordings.clear()
        everyone = self._world.together(lambda: [[*key, value] for key, value in local_seconds.items()])
        if self._world.rank == 0:
            count = len(schedule.step.micro_batches[0])
            seconds: dict[tuple[int, str, int], list[float]] = {}
            for rank, rows in enumerate(everyone):
                for kind, stage, value in rows:
                    seconds.setdefault((shape.positions.position(rank), kind, stage), []).append(value)
            costs = measured(shape.layout, shape.costs, {key: fmean(values) for key, values in seconds.items()})
            self._search = Improvement(shape.layout, costs, count, shape.order_of(count), seconds=SOLVE_S)

    def _look(self, step: int) -> None:
        """Send the result of rank 0, if it has one, to all ranks; they swap to the new order if it is worth it.

        Call on all ranks. After a result, or the failure of the search, this object is no longer ``active``."""
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
        """Return True if the order, with transfers between positions, stays within the memory limit."""
        step = self._pipeline.schedule(self._rows).step
        assert isinstance(step.strategy, ActivationPipeline)
        shape = step.strategy.shape(step.model, step.topology)
        return fits(shape.costs, held_at_once(step, shape, order))

    def _say(self, step: int, improved: Improved | None, took_s: float) -> None:
        """Print the new order's gain on rank 0, the only rank for which ``improved`` is not None."""
        if improved is not None:
            self._console.line(
                f"step {step}: new pipeline order, {improved.gain:.1%} shorter by measured times "
                f"({improved.status}; found in {improved.seconds:.0f} s during training, swapped in "
                f"{took_s:.1f} s)"
            )


def _can_improve(pipeline: Pipeline, rows: int) -> bool:
    """Return True if the strategy makes its order for costs and all ranks have equally many micro-batches."""
    if not isinstance(strategies()[pipeline.settings.strategy], SolvedPipeline):
        return False
    step = pipeline.schedule(rows).step
    return len({len(of_rank) for of_rank in step.micro_batches}) == 1


def seconds_of(steps: list[list[tuple[str, float, float]]], layout: Layout) -> dict[tuple[str, int], float]:
    """Return the seconds of every kind of work on every stage of this rank: the mean over steps and micro-batches.

    Args:
        steps: for each timed step, (action, begin, end) of every action.
        layout: stages and their positions.

    Returns:
        Seconds by (kind, stage).
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
            durations = [fmean(of_block[kind, block]) for block in blocks if (kind, block) in of_block]
            if kind == "I" and durations:  # embedding and head have a whole B instead
                durations += [fmean(of_block["B", block]) for block in blocks if ("B", block) in of_block]
            if kind == "B" and any(("I", block) in of_block for block in blocks):
                continue
            if durations:
                of_stage[kind, stage] = sum(durations)
    return of_stage
