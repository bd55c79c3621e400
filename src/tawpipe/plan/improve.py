"""A better order for a pipeline that is already training: looked for beside it, in a process of its own.

The costs are those that were measured in the first steps. The solver (schedule/pipelines/search/solve.py) begins with
the order that runs, or with a fixed way that is better by those costs. It has a low priority and an end, and knows
nothing but numbers: what it finds comes back as text, which every rank reads alike. Where it fails, training goes on as
it is.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import IO, Any

from tawpipe.schedule.pipelines.layout import Layout
from tawpipe.schedule.pipelines.times import parse_times, spell_times
from tawpipe.schedule.pipelines.work import BlockTimes, Order, PipelineCosts, makespan, play

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
        split: backward passes may be split.
    """

    def __init__(
        self,
        layout: Layout,
        costs: PipelineCosts,
        micro_batches: int,
        start: Order,
        *,
        seconds: float,
        seed: int = 0,
        split: bool = True,
    ) -> None:
        question = {
            "layout": str(layout),
            "blocks": layout.blocks,
            "costs": spell_times(costs),
            "micro_batches": micro_batches,
            "start": str(start),
            "seconds": seconds,
            "seed": seed,
            "split": split,
        }
        self._end = time.monotonic() + seconds + GRACE_S
        self._worker: subprocess.Popen[bytes] | None = None
        self._found: Improved | None = None
        # Files rather than pipes: an order may be longer than a pipe holds, and nobody waits at the other end.
        self._answer: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        with tempfile.TemporaryFile() as asked:
            asked.write(json.dumps(question).encode())
            asked.seek(0)
            command = [sys.executable, "-m", __name__]
            try:
                self._worker = subprocess.Popen(command, stdin=asked, stdout=self._answer, stderr=subprocess.DEVNULL)
            except OSError as error:
                logger.warning("the pipeline's order stays as it is: no solver could be started (%s)", error)

    @property
    def running(self) -> bool:
        """True while something may still be found."""
        return self._worker is not None

    def poll(self) -> Improved | None:
        """What was found, once it is there; does not wait. None before, and for ever if nothing better is found."""
        if self._worker is None:
            return self._found
        code = self._worker.poll()
        if code is None:
            if time.monotonic() > self._end:
                logger.warning("the pipeline's order stays as it is: the solver does not come to an end")
                self.close()
            return None
        self._worker = None
        self._answer.seek(0)
        try:
            improved = Improved(**json.loads(self._answer.read()))
        except (ValueError, TypeError):
            logger.warning("the pipeline's order stays as it is: the solver failed with exit code %d", code)
            return None
        self._found = improved if improved.after < improved.before else None
        return self._found

    def close(self) -> None:
        """End the search. May be called more than once."""
        if self._worker is not None:
            self._worker.kill()
            self._worker.wait()
            self._worker = None

    def __enter__(self) -> Improvement:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def answer(question: Mapping[str, Any]) -> Improved:
    """What ``Improvement`` asks its worker."""
    from tawpipe.schedule.pipelines.search.fitting import heuristics
    from tawpipe.schedule.pipelines.search.solve import solve

    layout = Layout.parse(question["layout"], question["blocks"])
    costs, start = parse_times(question["costs"]), Order.parse(question["start"])
    fixed = heuristics(layout, costs, question["micro_batches"], split=question["split"])
    best = min((start, *fixed.values()), key=lambda order: makespan(play(layout, order, costs)))
    solved = solve(
        layout,
        costs,
        question["micro_batches"],
        best,
        seconds=question["seconds"],
        seed=question["seed"],
        split=question["split"],
    )
    before = makespan(play(layout, start, costs))
    return Improved(str(solved.order), before, solved.makespan, solved.bound, solved.status, solved.seconds)


def main() -> None:
    """Answer one question."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the run itself knows what to do about it
    with contextlib.suppress(OSError):
        os.nice(NICENESS)
    print(json.dumps(asdict(answer(json.load(sys.stdin)))))


if __name__ == "__main__":
    main()
