"""What the positions of a pipeline do, and a clock for it that knows nothing but stages.

The clock here is what searches for schedules ask thousands of times; what it finds is then played by the one clock of
the house (simulate/clock.py), which knows links, lanes and actions, and proved like every schedule.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter
from typing import Any, NamedTuple

from tawpipe.schedule.pipelines.layout import Layout

KINDS = "FBIWOR"
ROUNDING = 1e-9
"""Sums of floats may exceed a limit of memory by this share of it."""


class Work(NamedTuple):
    """One stage on one micro-batch.

    Args:
        kind: ``F`` forward; ``B`` backward, with its recomputation; ``I`` and ``W`` its parts for the gradients of
            inputs and of weights; ``O`` and ``R``, on the link to the host's memory: what F keeps goes there, and comes
            back.
        micro_batch: its number in its pipeline, from 0.
    """

    kind: str
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.stage}.{self.micro_batch}"

    @classmethod
    def parse(cls, text: str) -> Work:
        """The inverse of ``str``.

        Raises:
            ValueError: something else.
        """
        stage, _, number = text[1:].partition(".")
        if not text or text[0] not in KINDS:
            raise ValueError(f"{text!r} is no work")
        return cls(text[0], int(stage), int(number))


@dataclass(frozen=True)
class Order:
    """What every position does, in order.

    Args:
        compute: by position, F, B, I and W.
        host: by position, O and R; empty where nothing goes to the host's memory.
        after: a work that waits for the end of one on the other lane of its position, because of memory: F and R of O
            or B, I, W. All else that a work waits for follows from what it is (``needs``).
    """

    compute: tuple[tuple[Work, ...], ...]
    host: tuple[tuple[Work, ...], ...] = ()
    after: Mapping[Work, Work] = field(default_factory=dict)

    def __str__(self) -> str:
        lanes = ("|".join(" ".join(map(str, works)) for works in some) for some in (self.compute, self.host))
        return ";".join((*lanes, " ".join(f"{work}>{other}" for work, other in sorted(self.after.items()))))

    @classmethod
    def parse(cls, text: str) -> Order:
        """The inverse of ``str``.

        Raises:
            ValueError: something else.

        >>> order = Order.parse("F0.0 F0.1 B0.0 B0.1|F1.0 B1.0 F1.1 B1.1;O0.0 R0.0|;F0.1>O0.0")
        >>> order.host[0][1], order.host[1], str(order) == str(Order.parse(str(order)))
        (Work(kind='R', stage=0, micro_batch=0), (), True)
        """

        def lanes(part: str) -> tuple[tuple[Work, ...], ...]:
            return tuple(tuple(map(Work.parse, lane.split())) for lane in part.split("|")) if part else ()

        compute, host, after = text.split(";")
        pairs = (pair.partition(">") for pair in after.split())
        return cls(lanes(compute), lanes(host), {Work.parse(work): Work.parse(other) for work, _, other in pairs})

    @property
    def micro_batches(self) -> int:
        """Of the pipeline."""
        return 1 + max((work.micro_batch for works in self.compute for work in works), default=-1)

    @property
    def lanes(self) -> list[tuple[int, tuple[Work, ...]]]:
        """(position, works in order) of everything that runs one by one."""
        return [*enumerate(self.compute), *enumerate(self.host)]


@dataclass(frozen=True)
class BlockTimes:
    """One block on one micro-batch; times in any unit, memory in any other.

    Args:
        backward_input: with the recomputation.
        kept: memory from its forward pass to its backward pass (B or I).
        kept_for_weights: memory from I to W.
        resident: memory of its weights, gradients and optimizer state.
        stays: of ``kept``, what never goes to the host's memory: all of a block or nothing.
    """

    forward: float
    backward_input: float
    backward_weight: float
    kept: float = 1.0
    kept_for_weights: float = 0.0
    resident: float = 0.0
    stays: float = 0.0

    @property
    def moves(self) -> float:
        """Of ``kept``, what may go to the host's memory."""
        return self.kept - self.stays


TIMES: dict[str, Callable[[BlockTimes], float]] = {
    "F": attrgetter("forward"),
    "B": lambda block: block.backward_input + block.backward_weight,
    "I": attrgetter("backward_input"),
    "W": attrgetter("backward_weight"),
}


@dataclass(frozen=True)
class PipelineCosts:
    """Everything that a search for a schedule is given.

    Args:
        blocks: of the model, the embedding first and the head last.
        hop: time of a boundary activation, or of its gradient, from one position to another; links do not get in each
            other's way.
        link: of that, how long it would pass its node's link alone; 0 where that is ``hop``.
        pace: multiplies the times of every position; empty for 1.
        memory: of a position, in which its blocks' weights are resident and inputs are kept.
        host: time of a unit of memory on a position's link to its host; one transfer at a time, either way.
        near_hop: like ``hop``, between two positions of one node.
        nodes: the node of every position; empty where each is on one of its own.
    """

    blocks: tuple[BlockTimes, ...]
    hop: float = 0.0
    pace: tuple[float, ...] = ()
    memory: float = math.inf
    host: float = 0.0
    near_hop: float = 0.0
    nodes: tuple[int, ...] = ()
    link: float = 0.0

    def travel(self, source: int, target: int) -> Any:
        """Time of a boundary from one position to another; none if they are the same."""
        if source == target:
            return 0
        return self.near_hop if self.nodes and self.nodes[source] == self.nodes[target] else self.hop

    def paced(self, time: float, position: int) -> float:
        """A time of blocks on a position."""
        return (self.pace[position] if self.pace else 1.0) * time

    def moves(self, block: int) -> bool:
        """True if what a block keeps may go to the host's memory."""
        return self.blocks[block].moves > 0

    def stages(self, layout: Layout) -> StageCosts:
        """By stage of a layout."""
        return StageCosts(layout, self)


class StageCosts:
    """The costs of a layout's stages, in the numbers of those of its blocks.

    Args:
        seconds: time by (kind, stage).
        kept, kept_for_weights: by stage, memory of a micro-batch from F to B or I, and from I to W.
        moved: by stage, of what is kept the part that O takes away and R brings back.
        resident: by position, memory of weights, gradients and optimizer state.
    """

    def __init__(self, layout: Layout, costs: PipelineCosts) -> None:
        self.layout, self.costs = layout, costs
        self.kept, self.kept_for_weights = self._sums(attrgetter("kept")), self._sums(attrgetter("kept_for_weights"))
        self.moved = self._sums(attrgetter("moves"))
        resident = self._sums(attrgetter("resident"))
        self.resident = [sum(resident[stage] for stage in layout.stages_of(p)) for p in range(layout.size)]
        self.seconds: dict[tuple[str, int], Any] = {}
        for kind, time in TIMES.items():
            for stage, total in enumerate(self._sums(time)):
                self.seconds[kind, stage] = costs.paced(total, layout.places[stage])
        for stage, moved in enumerate(self.moved):
            self.seconds["O", stage] = self.seconds["R", stage] = costs.host * moved if moved else 0

    def _sums(self, of: Callable[[BlockTimes], float]) -> list[Any]:
        layout, blocks = self.layout, self.costs.blocks
        return [sum(of(blocks[block]) for block in layout.blocks_of(stage)) for stage in range(layout.stages)]

    @cached_property
    def taken(self) -> dict[tuple[str, int], Any]:
        """Memory from the start of a work on, by (kind, stage)."""
        kinds = {"F": self.kept, "R": self.moved, "I": self.kept_for_weights}
        return {(kind, stage): kinds[kind][stage] if kind in kinds else 0 for kind, stage in self.seconds}

    @cached_property
    def given(self) -> dict[tuple[str, int], Any]:
        """Memory that is free again after the end of a work, by (kind, stage)."""
        kinds = {"B": self.kept, "I": self.kept, "O": self.moved, "W": self.kept_for_weights}
        return {(kind, stage): kinds[kind][stage] if kind in kinds else 0 for kind, stage in self.seconds}

    @cached_property
    def rooms(self) -> list[Any]:
        """By position, memory besides what is resident; below zero where that alone is too much."""
        return [self.costs.memory - resident for resident in self.resident]

    @cached_property
    def limits(self) -> list[float]:
        """The same, and what sums of floats may exceed the memory by."""
        return [self.costs.memory * (1 + ROUNDING) - resident for resident in self.resident]

    @property
    def micro_batch(self) -> list[Any]:
        """By position, what one micro-batch keeps."""
        return [sum(self.kept[stage] for stage in self.layout.stages_of(p)) for p in range(self.layout.size)]

    def levels(self, works: Iterable[Work]) -> list[Any]:
        """What a lane alone has taken less what it has given back, by state: see memory.py."""
        levels = [0]
        for work in works:
            running = levels[-1] + self.taken[work.kind, work.stage]
            levels += [running, running - self.given[work.kind, work.stage]]
        return levels


def needs(work: Work, stages: int) -> Iterator[tuple[Work, ...]]:
    """What has to be done before, on whichever position: of each tuple the one that the order has."""
    kind, stage, m = work.kind, work.stage, work.micro_batch
    if kind == "F" and stage > 0:
        yield (Work("F", stage - 1, m),)
    if kind in "BIO":
        yield (Work("F", stage, m),)
    if kind in "BI":
        yield (Work("R", stage, m),)
        if stage < stages - 1:
            yield Work("B", stage + 1, m), Work("I", stage + 1, m)
    if kind == "W":
        yield (Work("I", stage, m),)
    if kind == "R":
        yield (Work("O", stage, m),)


def play(
    layout: Layout, order: Order, costs: PipelineCosts, slower: Callable[[Work], float] = lambda _: 1
) -> dict[Work, tuple[float, float]]:
    """(start, end) of every work.

    Args:
        slower: how many times as long a work takes.

    Raises:
        ValueError: the order waits for itself.
    """
    lanes, seconds = order.lanes, costs.stages(layout).seconds
    known = {work for _, works in lanes for work in works}
    times: dict[Work, tuple[float, float]] = {}
    at, free = [0] * len(lanes), [0.0] * len(lanes)
    moved = True
    while moved:
        moved = False
        for lane, (place, works) in enumerate(lanes):
            while at[lane] < len(works):
                work, ready = works[at[lane]], free[lane]
                waits = [need for choice in needs(work, layout.stages) for need in choice if need in known]
                if (other := order.after.get(work)) is not None:
                    waits.append(other)
                if any(need not in times for need in waits):
                    break
                for need in waits:
                    ready = max(ready, times[need][1] + costs.travel(layout.places[need.stage], place))
                free[lane] = ready + seconds[work.kind, work.stage] * slower(work)
                times[work] = ready, free[lane]
                at[lane] += 1
                moved = True
    if len(times) < len(known):
        stuck = ", ".join(str(works[at[lane]]) for lane, (_, works) in enumerate(lanes) if at[lane] < len(works))
        raise ValueError(f"these wait for ever: {stuck}")
    return times


def makespan(times: Mapping[Work, tuple[float, float]]) -> float:
    """The end of the last work."""
    return max((end for _, end in times.values()), default=0.0)
