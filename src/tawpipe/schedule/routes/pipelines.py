"""The programs of activation pipelines: weights stay, activations travel. For the clock; nothing here runs them.

``1f1b`` (Narayanan et al., PipeDream-flush), ``interleaved-1f1b`` (Narayanan et
al., Megatron-LM: several stages per rank, micro-batches in groups of as many as there are ranks) and ``zero-bubble``
(Qi et al.: two stages per rank in the shape of a V, gradients of weights apart from those of inputs, filled in).

Layers are shared evenly by the stages; the embedding joins the first and the head the last. The pipeline goes over all
ranks, over the nodes, or over the devices of each node; the ranks that then hold the same stage share its micro-batches
and keep one copy of its optimizer state together (ZeRO-1): they gather its weights at the step's beginning and reduce
its gradients at the end.

The order of every rank is made first, with unit times for forward, backward and weights. Transfers take the place of
their time in it. It is one order for all ranks, so that a lane that waits for the other side waits for something that
comes before: no deadlock, although a send holds its lane until its receive is there.

What is left out: the exchange of a tied embedding's gradient between the first and the last stage.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf

from tawpipe.errors import UserError
from tawpipe.schedule.actions import Action, Lane, Op, Transfer, exchange
from tawpipe.schedule.blocks import backward, forward
from tawpipe.schedule.buffers import Buffer, Kind, block_input, home_gradient, home_weight, input_gradient, pooled
from tawpipe.schedule.placement import Home, padded_stripe
from tawpipe.schedule.spec import ModelSpec
from tawpipe.schedule.step import Pool, Schedule, StepSpec
from tawpipe.schedule.step_end import StepEnd
from tawpipe.topology import Topology

PIPELINES = ("1f1b", "interleaved-1f1b", "zero-bubble")
AXES = ("world", "nodes", "locals")
"""What a pipeline goes over: all ranks, the nodes, the devices of a node."""
UNIT_TIMES = {"F": 1.0, "B": 3.0, "I": 2.0, "W": 1.0}
"""Forward; backward with recomputation; its part for inputs; its part for weights."""


@dataclass(frozen=True)
class Work:
    """One stage on one micro-batch.

    Args:
        kind: ``F``, ``B``, or the parts of a backward pass, ``I`` and ``W``.
        micro_batch: its number in its pipeline, from 0.
    """

    kind: str
    stage: int
    micro_batch: int


def build_pipeline(kind: str, step: StepSpec, shape: Stages) -> Schedule:
    """One step.

    Args:
        kind: one of ``PIPELINES``.

    Raises:
        UserError: fewer layers than stages, or a number of micro-batches that the order does not know.
    """
    topology = step.topology
    replicas = topology.world_size // shape.size
    count = len([m for own in step.micro_batches for m in own])
    if count % replicas:
        raise UserError("micro-batches", count, f"a multiple of the {replicas} pipelines side by side")
    each = count // replicas
    if kind == "interleaved-1f1b" and each % shape.size:
        raise UserError("micro-batches", each, f"a multiple of the {shape.size} ranks of the pipeline")
    times = _times(shape, _orders(kind, shape, each))
    workers = [_Worker(step, shape, rank, each, times) for rank in range(topology.world_size)]
    last = shape.stages - 1
    shares = tuple(tuple(map(worker.number, range(each))) if last in worker.stages else () for worker in workers)
    step = replace(step, micro_batches=shares)
    programs, pools = [], []
    for worker in workers:
        end = StepEnd(worker.rank, step, training=True)
        programs.append(tuple(end.close(tuple(worker.program()))))
        pools.append(worker.pools())
    return Schedule(step.strategy.name, step, tuple(programs), tuple(pools))


@dataclass(frozen=True)
class Stages:
    """Stages and ranks.

    Args:
        per_rank: stages of every rank.
        folded: stages go back the way they came: the first and the last one are on the same rank.
    """

    topology: Topology
    axis: str
    per_rank: int
    folded: bool

    @cached_property
    def size(self) -> int:
        """Ranks of one pipeline."""
        topology = self.topology
        return {"world": topology.world_size, "nodes": topology.num_nodes, "locals": topology.local_size}[self.axis]

    @property
    def stages(self) -> int:
        return self.size * self.per_rank

    def place(self, stage: int) -> int:
        """The position in a pipeline that has a stage."""
        turn, at = divmod(stage, self.size)
        return self.size - 1 - at if self.folded and turn % 2 else at

    def position(self, rank: int) -> int:
        """Of a rank in its pipeline."""
        if self.axis == "world":
            return self.topology.group("world", 0).index(rank)
        return self.topology.node_of(rank) if self.axis == "nodes" else self.topology.local_of(rank)

    def replica(self, rank: int) -> int:
        """Which of the pipelines side by side a rank is in."""
        if self.axis == "world":
            return 0
        return self.topology.local_of(rank) if self.axis == "nodes" else self.topology.node_of(rank)

    def rank(self, position: int, replica: int) -> int:
        if self.axis == "world":
            return self.topology.group("world", 0)[position]
        node, local = (position, replica) if self.axis == "nodes" else (replica, position)
        return self.topology.nodes[node][local]

    @property
    def group(self) -> str:
        """Of the ranks that hold the same stages."""
        return {"world": "", "nodes": "node", "locals": "rail"}[self.axis]

    def holders(self, position: int) -> tuple[int, ...]:
        """The ranks that hold the stages of a position, in the order of their group."""
        one = self.rank(position, 0)
        return self.topology.group(self.group, one) if self.group else (one,)


# orders


def _orders(kind: str, shape: Stages, count: int) -> list[list[Work]]:
    """What every position computes, in order."""
    if kind == "1f1b":
        return [list(_one_f_one_b(shape.size, position, count)) for position in range(shape.size)]
    if kind == "interleaved-1f1b":
        return [list(_interleaved(shape, position, count)) for position in range(shape.size)]
    return _zero_bubble(shape, count)


def _one_f_one_b(size: int, position: int, count: int) -> Iterator[Work]:
    """
    >>> [f"{t.kind}{t.micro_batch}" for t in _one_f_one_b(3, 1, 4)]
    ['F0', 'F1', 'B0', 'F2', 'B1', 'F3', 'B2', 'B3']
    """
    ahead = min(count, size - 1 - position)
    for m in range(ahead):
        yield Work("F", position, m)
    for m in range(count - ahead):
        yield Work("F", position, ahead + m)
        yield Work("B", position, m)
    for m in range(count - ahead, count):
        yield Work("B", position, m)


def _interleaved(shape: Stages, position: int, count: int) -> Iterator[Work]:
    size, chunks = shape.size, shape.per_rank

    def task(kind: str, number: int) -> Work:
        group, within = divmod(number, size * chunks)
        chunk, at = divmod(within, size)
        chunk = chunk if kind == "F" else chunks - 1 - chunk
        return Work(kind, chunk * size + position, group * size + at)

    total = count * chunks
    ahead = min(total, (size - 1 - position) * 2 + (chunks - 1) * size)
    for n in range(ahead):
        yield task("F", n)
    for n in range(total - ahead):
        yield task("F", ahead + n)
        yield task("B", n)
    for n in range(total - ahead, total):
        yield task("B", n)


def _zero_bubble(shape: Stages, count: int) -> list[list[Work]]:
    """Greedy, with unit times: gradients of inputs first, then forward passes, then gradients of weights, of which no
    more wait than two for every rank. Micro-batches begin as long as a rank holds fewer than 1F1B does on its first.
    """
    most = 2 * shape.size
    done: dict[Work, float] = {}
    orders: list[list[Work]] = [[] for _ in range(shape.size)]
    free, held = [0.0] * shape.size, [0] * shape.size
    waiting: list[deque[Work]] = [deque() for _ in range(shape.size)]
    heads: list[dict[tuple[str, int], int]] = [
        {(kind, s): 0 for s in range(shape.stages) if shape.place(s) == p for kind in "FI"} for p in range(shape.size)
    ]

    def choice(p: int) -> tuple[float, int, int, int, int, Work] | None:
        """What rank ``p`` would do next."""
        found = []
        for (kind, stage), m in heads[p].items():
            task = Work(kind, stage, m)
            if m == count or (kind == "F" and stage < shape.size and held[p] >= most):
                continue
            ready = max((done.get(one, inf) for one in _needs(task, shape.stages)), default=0.0)
            if ready < inf:
                found.append((max(free[p], ready), 0 if kind == "I" else 1, -stage, m, p, task))
        if waiting[p]:
            task = waiting[p][0]
            rank = -1 if len(waiting[p]) >= most else 2
            found.append((free[p], rank, 0, task.micro_batch, p, task))
        return min(found, key=lambda one: one[:5]) if found else None

    best = [choice(p) for p in range(shape.size)]
    while ready := [one for one in best if one is not None]:
        at, _, _, _, p, task = min(ready, key=lambda one: one[:5])
        done[task] = free[p] = at + UNIT_TIMES[task.kind]
        orders[p].append(task)
        if task.kind == "W":
            waiting[p].popleft()
        else:
            heads[p][task.kind, task.stage] += 1
            held[p] += 1 if task.kind == "F" else -1
            if task.kind == "I":
                waiting[p].append(Work("W", task.stage, task.micro_batch))
        near = [stage for stage in (task.stage - 1, task.stage + 1) if 0 <= stage < shape.stages]
        for q in {p, *(shape.place(stage) for stage in near)}:
            best[q] = choice(q)
    assert all(m == count for own in heads for m in own.values()), "a V that waits for itself"
    return orders


def _needs(task: Work, stages: int) -> Iterator[Work]:
    """What has to be done before, on whichever rank; ``B`` and ``I`` stand for one another."""
    kind, stage, m = task.kind, task.stage, task.micro_batch
    if kind == "F" and stage > 0:
        yield Work("F", stage - 1, m)
    if kind in "BI":
        yield Work("F", stage, m)
        if stage < stages - 1:
            yield Work(kind, stage + 1, m)
    if kind == "W":
        yield Work("I", stage, m)


def _times(shape: Stages, orders: list[list[Work]]) -> dict[Work, tuple[float, float]]:
    """(start, end) of all tasks, with unit times and transfers that take none."""
    found: dict[Work, tuple[float, float]] = {}
    at, free = [0] * shape.size, [0.0] * shape.size
    moved = True
    while moved:
        moved = False
        for p, order in enumerate(orders):
            while at[p] < len(order):
                task = order[at[p]]
                needed = list(_needs(task, shape.stages))
                if any(one not in found for one in needed):
                    break
                start = max([free[p], *(found[one][1] for one in needed)])
                free[p] = start + UNIT_TIMES[task.kind]
                found[task] = start, free[p]
                at[p] += 1
                moved = True
    assert all(at[p] == len(order) for p, order in enumerate(orders)), "an order waits for itself"
    return found


# programs


def _stage_blocks(model: ModelSpec, stages: int, stage: int) -> list[int]:
    layers = len(model.blocks) - 2
    own = [1 + layer for layer in range(layers) if layer * stages // layers == stage]
    return [*([0] if stage == 0 else []), *own, *([layers + 1] if stage == stages - 1 else [])]


def place_on_stages(model: ModelSpec, shape: Stages) -> tuple[Home, ...]:
    """The homes: every unit over the ranks that hold its (first) block.

    Raises:
        UserError: fewer layers than stages.
    """
    if model.num_layers < shape.stages:
        expected = f"at least {shape.stages}, one per stage"
        raise UserError(f"pipeline over {shape.size} ranks", f"{model.num_layers} layers", expected)
    stage_of = {b: s for s in range(shape.stages) for b in _stage_blocks(model, shape.stages, s)}
    homes = []
    for unit in model.units:
        ranks = shape.holders(shape.place(stage_of[unit.blocks[0]]))
        homes.append(Home(ranks, padded_stripe(unit.numel, len(ranks))))
    return tuple(homes)


class _Worker:
    """One rank's program."""

    def __init__(
        self, step: StepSpec, shape: Stages, rank: int, count: int, times: dict[Work, tuple[float, float]]
    ) -> None:
        self.step, self.shape, self.rank, self.count, self.times = step, shape, rank, count, times
        self.model, self.homes = step.model, step.homes
        model, homes = self.model, self.homes
        self.position, self.replica = shape.position(rank), shape.replica(rank)
        self.stages = [s for s in range(shape.stages) if shape.place(s) == self.position]
        self.blocks = {s: _stage_blocks(model, shape.stages, s) for s in self.stages}
        self.several = len(shape.holders(self.position)) > 1
        self.units = sorted({u for own in self.blocks.values() for b in own for u in model.blocks[b].units})
        self.homed = [u for u in self.units if homes[u].index(rank) is not None]
        """A tied embedding lives with the first stage; the last one uses it from its own copy."""
        self.started: set[int] = set()

    def number(self, m: int) -> int:
        """The global index of the pipeline's micro-batch ``m``."""
        return self.replica * self.count + m

    def _is_home(self, unit: int) -> bool:
        return self.homes[unit].index(self.rank) is not None and not self.several

    def _weights(self, unit: int) -> Buffer:
        return home_weight(unit) if self._is_home(unit) else pooled(f"W{unit}", 0)

    def _gradient(self, unit: int) -> Buffer:
        return home_gradient(unit) if self._is_home(unit) else pooled(f"G{unit}", 0)

    def pools(self) -> tuple[Pool, ...]:
        found = []
        for unit in self.units:
            padded, stripe = self.homes[unit].padded, self.homes[unit].stripe
            if not self._is_home(unit):
                found.append(Pool(f"W{unit}", Kind.WEIGHT, 1, padded))
                if self.model.units[unit].trainable:
                    found.append(Pool(f"G{unit}", Kind.GRADIENT, 1, padded))
            if self.several and unit in self.homed and self.model.units[unit].trainable:
                found.append(Pool(f"R{unit}", Kind.GRADIENT, 1, stripe))
        return tuple(found)

    def program(self) -> Iterator[Action]:
        lane = Lane.GATHER if self.shape.group == "node" else Lane.INTER_W
        for unit in self.homed if self.several else ():
            reads, writes = (home_weight(unit),), (self._weights(unit),)
            yield Action(Op.COLLECTIVE, lane, reads, writes, unit=unit, collective="all_gather", group=self.shape.group)
        for _, _, actions in sorted(self._events(), key=lambda event: event[:2]):
            yield from actions
        lane = Lane.REDUCE if self.shape.group == "node" else Lane.INTER_G
        for unit in reversed(self.homed) if self.several else ():
            if self.model.units[unit].trainable:
                reads, writes = (self._gradient(unit),), (pooled(f"R{unit}", 0),)
                yield Action(
                    Op.COLLECTIVE, lane, reads, writes, unit=unit, collective="reduce_scatter", group=self.shape.group
                )
                yield Action(Op.ADD, lane, writes, (home_gradient(unit),), unit=unit)

    def _events(self) -> Iterator[tuple[float, tuple, list[Action]]]:
        """(time, what breaks ties alike on all ranks, actions)."""
        for task, (start, end) in self.times.items():
            mine = task.stage in self.blocks
            if mine:
                yield start, (1, task.micro_batch, task.stage, task.kind), list(self._compute(task))
            step = 1 if task.kind == "F" else -1
            other = task.stage + step
            if task.kind == "W" or not 0 <= other < self.shape.stages:
                continue
            if self.shape.place(other) == self.shape.place(task.stage):
                continue
            if mine or other in self.blocks:
                ties = (0, task.micro_batch, task.stage, task.kind)
                yield end, ties, [self._transfer(task, other, send=mine)]

    def _transfer(self, task: Work, other: int, *, send: bool) -> Action:
        m, away = self.number(task.micro_batch), task.kind == "F"
        edge = max(task.stage, other)
        border = _stage_blocks(self.model, self.shape.stages, edge)[0]
        buffer = (block_input if away else input_gradient)(m, border)
        peer = self.shape.rank(self.shape.place(other if send else task.stage), self.replica)
        lane, group = (Lane.INTER_W if away else Lane.INTER_G), "world"
        return exchange(lane, (Transfer(send, peer, border, buffer),), group)

    def _compute(self, task: Work) -> Iterator[Action]:
        m, own = self.number(task.micro_batch), self.blocks[task.stage]
        if task.kind == "F":
            for block in own:
                if self.model.blocks[block].kind != "head":
                    weights = [self._weights(u) for u in self.model.blocks[block].units]
                    yield forward(self.step, block, m, weights)
            return
        for block in reversed(own):
            spec = self.model.blocks[block]
            if not spec.needs_backward and spec.kind != "head":
                continue
            gradients = {}
            for unit in self.model.trainable_units(block):
                gradients[unit] = (self._gradient(unit), unit in self.started)
            if task.kind != "I":
                self.started.update(gradients)
            reads = spec.backward_reads_weights or spec.kind == "head"
            weights = [self._weights(u) for u in spec.units] if reads else []
            if task.kind == "B":
                yield from backward(self.step, block, [m], weights, gradients)
            elif task.kind == "I":
                whole = next(backward(self.step, block, [m], weights, {}))
                graph = () if spec.kind != "layer" else (Buffer(Kind.GRAPH, (m, block)),)
                yield replace(whole, op=Op.BACKWARD_INPUT, writes=(*whole.writes, *graph))
            elif spec.kind == "layer":
                sums = tuple(buffer for buffer, _ in gradients.values())
                before = tuple(buffer for buffer, more in gradients.values() if more)
                graph = Buffer(Kind.GRAPH, (m, block))
                yield Action(
                    Op.BACKWARD_WEIGHT, Lane.COMPUTE, (graph, *before), sums, (graph,), block=block, micro_batch=m
                )
            elif gradients:
                yield Action(
                    Op.BACKWARD_WEIGHT,
                    Lane.COMPUTE,
                    tuple(buffer for buffer, more in gradients.values() if more),
                    tuple(buffer for buffer, _ in gradients.values()),
                    block=block,
                    micro_batch=m,
                )
