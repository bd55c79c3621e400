"""Work items of a pipeline, costs of its stages, and a simple clock that knows nothing but stages.

Searches for schedules use this clock thousands of times. Their results are then simulated by the full clock
(simulate/clock.py), which knows links, lanes and actions, and are proved like every schedule.
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
"""Share by which sums of floats may exceed a limit of memory."""


class Work(NamedTuple):
    """A work item: one stage on one micro-batch.

    Args:
        kind: ``F`` forward; ``B`` backward, with its recomputation; ``I`` and ``W`` its two parts, for the gradients of
            inputs and of weights; ``O`` offload of what F keeps to CPU memory, and ``R`` reload of it.
        stage: index of the stage.
        micro_batch: number of the micro-batch in its pipeline, from 0.
    """

    kind: str
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.stage}.{self.micro_batch}"

    @classmethod
    def parse(cls, text: str) -> Work:
        """Return the work item whose text form (``str(work)``) is ``text``.

        Raises:
            ValueError: ``text`` is not the text of a work item.
        """
        stage, _, number = text[1:].partition(".")
        if not text or text[0] not in KINDS:
            raise ValueError(f"{text!r} is no work")
        return cls(text[0], int(stage), int(number))


@dataclass(frozen=True)
class Order:
    """Work items of every position of a pipeline, in the order in which they run.

    Args:
        compute: for every position the items F, B, I and W in order.
        host: for every position the items O and R in order; empty if nothing is offloaded.
        after: item -> item on the other lane of its position whose end it must wait for, to limit memory: F and R wait
            for O, B, I or W. All other waits follow from the items themselves (``needs``).
    """

    compute: tuple[tuple[Work, ...], ...]
    host: tuple[tuple[Work, ...], ...] = ()
    after: Mapping[Work, Work] = field(default_factory=dict)

    def __str__(self) -> str:
        lanes = ("|".join(" ".join(map(str, works)) for works in some) for some in (self.compute, self.host))
        return ";".join((*lanes, " ".join(f"{work}>{other}" for work, other in sorted(self.after.items()))))

    @classmethod
    def parse(cls, text: str) -> Order:
        """Return the order whose text form (``str(order)``) is ``text``.

        Raises:
            ValueError: ``text`` is not the text of an order.

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
        """Number of micro-batches in this order."""
        return 1 + max((work.micro_batch for works in self.compute for work in works), default=-1)

    @property
    def lanes(self) -> list[tuple[int, tuple[Work, ...]]]:
        """(Position, items in order) of every lane: first all lanes that compute, then all host lanes."""
        return [*enumerate(self.compute), *enumerate(self.host)]


@dataclass(frozen=True)
class BlockTimes:
    """Times of one block on one micro-batch, in any unit, and its memory, in any other unit.

    Args:
        forward: time of the forward pass.
        backward_input: time of the backward pass for inputs, including the recomputation.
        backward_weight: time of the backward pass for weights.
        kept: memory from the forward pass to the backward pass (B or I).
        kept_for_weights: memory from I to W.
        resident: memory of the block's weights, gradients and optimizer state.
        stays: part of ``kept`` that is never offloaded: for a block all of it or nothing.
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
        """Part of ``kept`` that may be offloaded."""
        return self.kept - self.stays


TIMES: dict[str, Callable[[BlockTimes], float]] = {
    "F": attrgetter("forward"),
    "B": lambda block: block.backward_input + block.backward_weight,
    "I": attrgetter("backward_input"),
    "W": attrgetter("backward_weight"),
}


@dataclass(frozen=True)
class PipelineCosts:
    """Costs for which a search makes a pipeline's schedule.

    Args:
        blocks: costs of all blocks of the model, from the embedding to the head.
        hop: time of a boundary activation, or its gradient, from one position to another. Links do not slow each other.
        pace: factor for the times of every position; empty if all are 1.
        memory: memory of a position, for the weights of its blocks and for what is kept.
        host: time of one unit of memory on a position's link to its host; one transfer at a time, in either direction.
        near_hop: as ``hop``, between two positions of one node.
        nodes: node of every position; empty if each is on a node of its own.
        link: time of a boundary activation on its node's link, if no other transfer uses the link; 0 if equal to
            ``hop``.
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
        """Return the time of sending a boundary activation between two positions; 0 if they are equal."""
        if source == target:
            return 0
        return self.near_hop if self.nodes and self.nodes[source] == self.nodes[target] else self.hop

    def paced(self, time: float, position: int) -> float:
        """Return ``time`` multiplied by the pace of ``position``."""
        return (self.pace[position] if self.pace else 1.0) * time

    def moves(self, block: int) -> bool:
        """Return True if what ``block`` keeps may be offloaded."""
        return self.blocks[block].moves > 0

    def stages(self, layout: Layout) -> StageCosts:
        """Return the costs of every stage of ``layout``: sums over its blocks, with the pace of its position."""
        return StageCosts(layout, self)


class StageCosts:
    """Costs of a layout's stages, as sums over their blocks.

    Attributes:
        seconds: (kind, stage) -> time.
        kept: for every stage the memory of a micro-batch from F to B or I.
        kept_for_weights: for every stage the memory of a micro-batch from I to W.
        moved: for every stage the part of ``kept`` that O offloads and R reloads.
        resident: for every position the memory of weights, gradients and optimizer state.
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
        """Return for every stage the sum of ``of(block)`` over its blocks."""
        layout, blocks = self.layout, self.costs.blocks
        return [sum(of(blocks[block]) for block in layout.blocks_of(stage)) for stage in range(layout.stages)]

    @cached_property
    def taken(self) -> dict[tuple[str, int], Any]:
        """(Kind, stage) -> memory that a work item allocates at its start."""
        kinds = {"F": self.kept, "R": self.moved, "I": self.kept_for_weights}
        return {(kind, stage): kinds[kind][stage] if kind in kinds else 0 for kind, stage in self.seconds}

    @cached_property
    def frees(self) -> dict[tuple[str, int], Any]:
        """(Kind, stage) -> memory that a work item frees at its end."""
        kinds = {"B": self.kept, "I": self.kept, "O": self.moved, "W": self.kept_for_weights}
        return {(kind, stage): kinds[kind][stage] if kind in kinds else 0 for kind, stage in self.seconds}

    @cached_property
    def free_memory(self) -> list[Any]:
        """Memory limit of every position minus its resident memory; negative if resident memory alone is too much."""
        return [self.costs.memory - resident for resident in self.resident]

    @cached_property
    def limits(self) -> list[float]:
        """Memory limit of every position, enlarged by the tolerance ``ROUNDING``, minus its resident memory."""
        return [self.costs.memory * (1 + ROUNDING) - resident for resident in self.resident]

    @property
    def micro_batch(self) -> list[Any]:
        """For every position, the memory that one micro-batch keeps there from its forward to its backward passes."""
        return [sum(self.kept[stage] for stage in self.layout.stages_of(p)) for p in range(self.layout.size)]

    def levels(self, works: Iterable[Work]) -> list[Any]:
        """Return the memory that the items ``works`` of one lane hold in each state of the lane.

        States are: before the first item, then during and after each item. Memory that items of the other lane take or
        free is not counted, so that numbers may be negative."""
        levels = [0]
        for work in works:
            running = levels[-1] + self.taken[work.kind, work.stage]
            levels += [running, running - self.frees[work.kind, work.stage]]
        return levels


def needs(work: Work, stages: int) -> Iterator[tuple[Work, ...]]:
    """Yield, for each dependency of ``work``, a tuple of alternatives: work items that can fulfil it.

    ``work`` may start when, of every tuple, the item that the order contains has ended. A backward pass, for example,
    waits for ``B`` or ``I`` of the next stage. A tuple of which the order contains no item (such as ``R`` without
    offloading) is no dependency. The items may be on any position.

    Args:
        work: the work item.
        stages: number of stages.
    """
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
    """Simulate ``order`` and return (start, end) of every work item, each started as early as possible.

    Memory limits are ignored, and transfers do not slow each other.

    Args:
        layout: the stages and their positions.
        order: the order to simulate.
        costs: times of blocks and transfers, whose unit is that of the result.
        slower: function that returns a factor for the time of a work item.

    Raises:
        ValueError: the order has a deadlock.
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
    """Return the end of the last work item; 0 if there is none."""
    return max((end for _, end in times.values()), default=0.0)
