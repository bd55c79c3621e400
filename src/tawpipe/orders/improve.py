"""Search for a better order of a pipeline while it trains, in a process of its own.

It uses the costs that were measured in the first steps. The solver (orders/solver/solve.py) starts from the running
order, or from a fixed strategy that is better by the measured costs. The process has a low priority and a time limit,
and works only with numbers. Its result is sent as text, which every rank parses to the same order. If the search fails,
training continues with its present order.
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
"""Seconds that the process may take to start and to end, in addition to its time for solving."""
NICENESS = 10
PARTS = {"F": "forward", "I": "backward_input", "W": "backward_weight"}


@dataclass(frozen=True)
class Improved:
    """Result of the search.

    Args:
        order: new order as text (``Order.parse``).
        before: makespan of the running order, by the measured costs.
        after: makespan of the new order, by the measured costs.
        bound: proven lower bound of the makespan of any order.
        status: status of the solver for the user, for example "optimal".
        seconds: seconds that the search took.
    """

    order: str
    before: float
    after: float
    bound: float
    status: str
    seconds: float

    @property
    def gain(self) -> float:
        """Share of the step time that the new order saves."""
        return 1 - self.after / self.before


def measured(
    layout: Layout, costs: PipelineCosts, seconds: Mapping[tuple[int, str, int], float], hop: float | None = None
) -> PipelineCosts:
    """Return a copy of ``costs`` with measured times instead of the expected ones. Memory stays as it is.

    The time of a stage is divided among its blocks in proportion to their earlier times. So is the time of a B among
    its two parts if they were not measured. Times that were not measured are scaled by the median ratio of the measured
    ones.

    Args:
        layout: stages and their positions.
        costs: expected costs.
        seconds: measured seconds of one micro-batch by (position, kind, stage), with kinds as in ``Work``. O and R give
            the speed of the link to the CPU memory, as their median.
        hop: measured seconds of a transfer between positions, or None.
    """
    table, known = costs.stages(layout), dict[tuple[str, int], float]()
    for (_, kind, stage), value in seconds.items():
        expected = table.moved[stage] if kind in "OR" else table.seconds[kind, stage]
        if value > 0 and expected:  # an embedding alone has an expected time of zero
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
    """Run of the solver in another process. Start it, poll it between steps, and close it at the end.

    A warning is logged if the process cannot be started.

    Args:
        layout: stages and their positions.
        costs: costs of the run (``measured``).
        micro_batches: number of micro-batches.
        start: running order.
        seconds: time limit of the solver.
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
        """True while the search process runs."""
        return self._worker is not None

    def poll(self) -> Improved | None:
        """Return the better order if it has been found, else None. Does not wait.

        None is returned while the search runs, and also later if it failed or found nothing better. The process is
        ended when it has answered, failed or exceeded its time limit."""
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
        """Stop the search and its process. Can be called more than once."""
        if self._worker is not None:
            self._worker.close()
            self._worker = None

    def __enter__(self) -> Improvement:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def answer(layout: Layout, costs: PipelineCosts, micro_batches: int, start: Order, seconds: float) -> Improved:
    """Lower the priority of this process, search for a better order, and return it with its statistics.

    Runs in the process of an ``Improvement``. If nothing better is found, the returned order is as long as the present
    one.

    Args:
        layout: stages and their positions.
        costs: measured costs.
        micro_batches: number of micro-batches.
        start: running order.
        seconds: time limit of the solver.
    """
    from tawpipe.orders.fitting import heuristics
    from tawpipe.orders.solver.solve import solve

    with contextlib.suppress(OSError):
        os.nice(NICENESS)
    before = makespan(play(layout, start, costs))
    fixed = heuristics(layout, costs, micro_batches)
    best = min((start, *fixed.values()), key=lambda order: makespan(play(layout, order, costs)))
    solved = solve(layout, costs, micro_batches, best, seconds=seconds)
    return Improved(str(solved.order), before, solved.makespan, solved.bound, solved.status, solved.seconds)
