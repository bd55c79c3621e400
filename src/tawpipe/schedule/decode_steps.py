"""Decoding: tokens travel through stages whose weights stay, in a schedule that is repeated without a barrier.

One *decode step* passes every *group* of requests once through all stages. A group is to a decode step what a
micro-batch is to a training step. The schedule does not depend on the requests: what a pass computes is in its header,
the first part of ``x.g.b``.

    first    FORWARD b0 | ids.g -> x.g.1 ctx.g    FORWARD b1 | x.g.1 ctx.g cache.1 -> x.g.2 cache.1    SEND x.g.2
    others   RECV x.g.2    PREPARE | x.g.2 -> ctx.g    FORWARD b2 | x.g.2 ctx.g cache.2 -> x.g.3 cache.2    SEND x.g.3
    last     ...    FORWARD head | x.g.N ctx.g -> ids.g    SEND ids.g, which the first one receives

``ids.g`` are the tokens that the last stage has sampled. It exists on the first rank before the first decode step, and
is empty then. ``cache.b`` is the KV cache of layer ``b`` for all slots of all groups, changed in place. The proof shows
that pass n finds n passes in it, on every rank, so that all stages see the passes in one order.

An executor's compute object needs the methods ``forward`` (for block 0: take ``ids.g`` and start the next pass),
``prepare``, ``travel`` and ``receive_buffers``. They get the number of the group as ``action.micro_batch``, and a
``DecodeInput`` as the step's input. gloo posts receives before the size of a message is known: ``receive_buffers``
allocates the largest pass. ``DecodeInput.last`` is set when a header marks a pass as the last one.
``Executor.loop`` always has two decode steps issued. So one more decode step follows the one with the last pass, and
then the loop ends.

All programs follow one sequence of events. In part d, rank r computes group d - r, and then the results are sent, the
last rank's ids first. So a thread that blocks in each of its actions never deadlocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tawpipe.errors import UserError
from tawpipe.schedule.actions import Action, Lane, Op, Transfer, exchange
from tawpipe.schedule.buffers import Buffer, Kind, block_input, context, home_weight, ids, layer_cache
from tawpipe.schedule.link_traffic import LinkTraffic
from tawpipe.schedule.pipelines.layout import Layout
from tawpipe.schedule.placement import Home, padded_shard
from tawpipe.schedule.settings import ScheduleSettings
from tawpipe.schedule.spec import ModelSpec
from tawpipe.schedule.step import Schedule, StepSpec, Strategy
from tawpipe.topology import Topology

LANES = (Lane.INTER_W, Lane.GATHER, Lane.INTER_G)
"""Lanes of transfers. What a rank receives and what it sends are on two different lanes."""


@dataclass(eq=False)
class DecodeSteps(Strategy):
    """Strategy of decoding: each unit is whole on every rank that computes with it, and nothing is trained.

    Args:
        stages: one stage for each rank, in the order of the ranks.
    """

    stages: Layout

    name = "laps"
    summary = "weights stay, tokens travel: one pass of every group through all stages, again and again"
    travels = frozenset((Kind.INPUT, Kind.IDS))
    axis = "world"
    candidate = False
    one_order = True

    def place(self, model: ModelSpec, topology: Topology, homes: tuple[int, ...] = ()) -> tuple[Home, ...]:
        """Return the home of every unit: whole on the first rank that uses it, with replicas on the others."""
        ranks, placed = topology.group("world", 0), list[Home]()
        for unit in model.units:
            first, *others = ((ranks[place],) for place in self.stages.positions_of(unit.blocks))
            placed.append(Home(first, padded_shard(unit.numel, 1), tuple(others)))
        return tuple(placed)

    def computes(self, step: StepSpec) -> Sequence[Sequence[int]]:
        order = step.topology.group("world", 0)
        return [self.stages.blocks_of(order.index(rank)) for rank in range(step.topology.world_size)]

    def traffic(self, step: StepSpec, *, training: bool) -> tuple[LinkTraffic, ...]:
        return (LinkTraffic(),) * step.topology.num_nodes

    def build(self, step: StepSpec, *, training: bool = True, ranks: Sequence[int] | None = None) -> Schedule:
        """Return the schedule of a decode step; ``training`` must be False."""
        assert not training, "nothing is trained in laps"
        world = range(step.topology.world_size)
        programs = tuple(tuple(_program(self, step, rank)) if ranks is None or rank in ranks else () for rank in world)
        return Schedule(self.name, step, programs, ((),) * len(world), training=False, looped=True)


def build_decode_steps(model: ModelSpec, topology: Topology, groups: int, stages: Layout | None = None) -> Schedule:
    """Return the schedule of one decode step, in which each of ``groups`` groups of requests passes all stages once.

    Args:
        model: sizes of the model.
        topology: the ranks; each is one stage.
        groups: number of groups.
        stages: blocks of every stage. By default all have nearly equal numbers of layers, the embedding is in the first
            stage, and the head is in the last.

    Raises:
        UserError: the model has fewer layers than ranks, ``groups`` is 0, or ``stages`` are not one for each rank in
            order.
    """
    world = topology.world_size
    stages = stages or Layout.even(len(model.blocks), world)
    if stages.places != tuple(range(world)) or stages.blocks != len(model.blocks):
        raise UserError(
            "stages of a lap", str(stages), f"{world} of {len(model.blocks)} blocks, on ranks in their order"
        )
    if groups < 1:
        raise UserError("groups of a lap", groups, "at least 1")
    strategy = DecodeSteps(stages)
    settings = strategy.settle(ScheduleSettings(strategy=strategy.name, micro_batches_per_visit=1))
    everyone = (tuple(range(groups)),) * world
    step = StepSpec(strategy, model, topology, settings, everyone, losses=((),) * world)
    return strategy.build(step, training=False)


def _program(strategy: DecodeSteps, step: StepSpec, rank: int) -> Iterator[Action]:
    """Yield the actions of ``rank`` in a decode step: it computes each group and passes it to the next stage.

    The last stage sends sampled tokens to the first stage, which receives them at the end of the step."""
    order, groups = step.topology.group("world", 0), len(step.micro_batches[rank])
    place, size = order.index(rank), len(order)
    before, after = order[place - 1], order[(place + 1) % size]
    blocks = strategy.computes(step)[rank]
    begin, end = blocks[0], blocks[-1] + 1
    for part in range(groups + size - 1):
        if 0 <= part - place < groups:
            yield from _compute(step.model, blocks, part - place)
        if size == 1:
            continue
        if place == 0 and (group := part - size + 1) >= 0:
            yield _move(ids(group), len(step.model.blocks), before, size - 1, size, send=False)
        if 0 <= (group := part - place) < groups:
            leaving = ids(group) if place == size - 1 else block_input(group, end)
            yield _move(leaving, end, after, place, size, send=True)
        if place and 0 <= (group := part - place + 1) < groups:
            yield _move(block_input(group, begin), begin, before, place - 1, size, send=False)


def _move(buffer: Buffer, border: int, peer: int, source: int, size: int, *, send: bool) -> Action:
    """Return the EXCHANGE action that sends or receives ``buffer`` between two neighbouring stages.

    Args:
        border: index of the block whose input is in the buffer; the number of blocks for sampled tokens.
        peer: global rank of the other side.
        source: stage that sends, out of ``size`` stages; the last one sends to the first. It determines the lane.
        send: True for the sender's side.
    """
    lane = LANES[2] if source == size - 1 and size % 2 else LANES[source % 2]
    return exchange(lane, (Transfer(send, peer, border, buffer),), "world")


def _compute(model: ModelSpec, blocks: Sequence[int], group: int) -> Iterator[Action]:
    """Yield a FORWARD of ``group`` for each of a stage's ``blocks``.

    A PREPARE comes first if the embedding is not among the blocks."""
    first, last = blocks[0], blocks[-1]
    if first:
        yield Action(Op.PREPARE, Lane.COMPUTE, (block_input(group, first),), (context(group),), micro_batch=group)
    for block in blocks:
        kind, weights = model.blocks[block].kind, tuple(map(home_weight, model.blocks[block].units))
        if kind == "embedding":
            reads, frees = (*weights, ids(group)), (ids(group),)
            writes = (block_input(group, 1), *[context(group)] * (len(blocks) > 1))
        else:
            inputs = (block_input(group, block), context(group))
            kept = (layer_cache(block),) if kind == "layer" else ()
            reads, frees = (*weights, *inputs, *kept), inputs if block == last else inputs[:1]
            writes = (ids(group) if kind == "head" else block_input(group, block + 1), *kept)
        yield Action(Op.FORWARD, Lane.COMPUTE, reads, writes, frees, block=block, micro_batch=group)
