"""A better order for a pipeline that is already training: looked for beside it, in a process of its own.

The costs are those that were measured in the first steps. The solver (orders/solver/solve.py) begins with
the order that runs, or with a fixed way that is better by those costs. It has a low priority and an end, and knows
nothing but numbers: what it finds comes back as text, which every rank reads alike. Where it fails, training goes on as
it is.
"""

from __future__ import annotations

import contextlib
import logging
import os
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

from tawpipe.schedule.pipelines.layout import Layout
from tawpipe.schedule.pipelines.work import BlockTimes, Order, PipelineCosts, makespan, play
from tawpipe.worker import Worker

logger = logging.getLogger(__name__)

GRACE_S = 300.0
"""For the worker to start and to end, besides its time for solving."""
NICENESS = 10
PARTS = {"F": "forward", "I": "backward_input", "W": "backward_weight"}


@dataclass(frozen=True)
class Improved:
    """What was found.

    Args:
        order: as text (``Order.parse``).
        before: makespan of the order that ran, by the measured costs.
        after: of this one.
        bound: proved: no order takes less.
        status: the solver's, in words.
        seconds: that it took.
    """

    order: str
    before: float
    after: float
    bound: float
    status: str
    seconds: float

    @property
    def gain(self) -> float:
        """Share of a step's time."""
        return 1 - self.after / self.before


def measured(
    layout: Layout, costs: PipelineCosts, seconds: Mapping[tuple[int, str, int], float], hop: float | None = None
) -> PipelineCosts:
    """Costs whose times are those measured, and whose memory is that of ``costs``.

    A stage's time is shared among its blocks as it was, as is that of a B among its parts where these were not measured
    themselves. What was not measured is scaled like what was, in the median.

    Args:
        seconds: by (position, kind, stage), of one micro-batch; kinds as in ``Work``. O and R say what the host's link
            takes, in their median.
        hop: of a boundary, if measured.
    """
    table, known = costs.stages(layout), dict[tuple[str, int], float]()
    for (_, kind, stage), value in seconds.items():
        expected = table.moved[stage] if kind in "OR" else table.seconds[kind, stage]
        if value > 0 and expected:  # an embedding alone is expected to take no time
            known[kind, stage] = value
    scales = [value / table.seconds[key] for key, value in known.items() if key[0] in "FBIW"]
    usual = statistics.median(scales or [1.0])
    blocks: list[BlockTimes] = []
    for stage in range(layout.stages):
        before = {kind: table.seconds[kind, stage] for kind in "FBIW"}
        times = {kind: known.get((kind, stage), usual * before[kind]) for kind in "FIW"}
        if ("B", stage) in known and not {("I", stage), ("W", stage)} <= known.keys():
            times |= {kind: known["B", stage] * before[kind] / before["B"] for kind in "IW"}
        of_stage = [costs.blocks[block] for block in layout.blocks_of(stage)]
        for kind, part in PARTS.items():
            total = sum(getattr(block, part) for block in of_stage)
            of_stage = [
                replace(block, **{part: times[kind] * getattr(block, part) / total if total else 0.0})
                for block in of_stage
            ]
        blocks += of_stage
    links = [value / table.moved[stage] for (kind, stage), value in known.items() if kind in "OR"]
    return replace(
        costs,
        blocks=tuple(blocks),
        hop=costs.hop * usual if hop is None else hop,
        near_hop=costs.near_hop * usual,
        pace=(),
        host=statistics.median(links) if links else costs.host * usual,
    )


class Improvement:
    """``solve`` beside the training. Start it, poll it between steps, close it at the end.

    Args:
        costs: of the run (``measured``).
        start: the order that runs.
        seconds: for solving.
    """

    def __init__(
        self, layout: Layout, costs: PipelineCosts, micro_batches: int, start: Order, *, seconds: float
    ) -> None:
        self._end = time.monotonic() + seconds + GRACE_S
        self._worker: Worker | None = None
        self._improved: Improved | None = None
        try:
            self._worker = Worker()
            self._worker.ask(answer, layout, costs, micro_batches, start, seconds)
        except OSError as error:
            logger.warning("the pipeline keeps its order: no solver could be started (%s)", error)
            self.close()

    @property
    def running(self) -> bool:
        """True while something may still be found."""
        return self._worker is not None

    def poll(self) -> Improved | None:
        """The improvement, once it is there; does not wait. None before, and also later if nothing better exists."""
        if self._worker is None:
            return self._improved
        if not self._worker.ready:
            if time.monotonic() > self._end:
                logger.warning("the pipeline keeps its order: the solver does not end")
                self.close()
            return None
        try:
            improved: Improved = self._worker.answer()
            self._improved = improved if improved.after < improved.before else None
        except (EOFError, OSError):
            code = self._worker.process.wait()
            logger.warning("the pipeline keeps its order: the solver failed with exit code %d", code)
        self.close()
        return self._improved

    def close(self) -> None:
        """End the search. May be called more than once."""
        if self._worker is not None:
            self._worker.close()
            self._worker = None

    def __enter__(self) -> Improvement:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def answer(layout: Layout, costs: PipelineCosts, micro_batches: int, start: Order, seconds: float) -> Improved:
    """Solve, in the worker of an ``Improvement``."""
    from tawpipe.orders.fitting import heuristics
    from tawpipe.orders.solver.solve import solve

    with contextlib.suppress(OSError):
        os.nice(NICENESS)
    before = makespan(play(layout, start, costs))
    fixed = heuristics(layout, costs, micro_batches)
    best = min((start, *fixed.values()), key=lambda order: makespan(play(layout, order, costs)))
    solved = solve(layout, costs, micro_batches, best, seconds=seconds)
    return Improved(str(solved.order), before, solved.makespan, solved.bound, solved.status, solved.seconds)
