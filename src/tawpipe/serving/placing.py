"""Placing: sending weights once from their homes in training to the ranks that will compute with them for a while.

Every unit is split into shards at its homes. Each shard goes directly to every rank that needs the unit, from the
nearest copy. A shard that is already on the rank does not move. With D nodes of equal shares, each stage receives (1 -
1/D) of its weights over its link.

Each rank has one EXCHANGE for every unit that it sends or receives, in the order of the units on all ranks. A thread
that blocks in each exchange can therefore not deadlock.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tawpipe.schedule.actions import Action, Lane, Transfer, exchange
from tawpipe.schedule.buffers import Kind, Pool, home_weight, pooled
from tawpipe.schedule.link_traffic import LinkTraffic
from tawpipe.schedule.placement import Home
from tawpipe.schedule.settings import ScheduleSettings
from tawpipe.schedule.spec import ModelSpec
from tawpipe.schedule.step import Schedule, StepSpec, Strategy
from tawpipe.topology import Topology


@dataclass(eq=False)
class Placing(Strategy):
    """Strategy that sends weights once from their homes to the ranks that need them.

    Args:
        homes: homes of all units in the training strategy.
        wanted: for every rank, the units that it needs whole.
    """

    homes: tuple[Home, ...]
    wanted: tuple[tuple[int, ...], ...]

    name = "placing"
    summary = "weights go from their homes to the ranks that are to compute with them"
    travels = frozenset((Kind.WEIGHT,))
    candidate = False
    one_order = True

    def place(self, model: ModelSpec, topology: Topology, homes: tuple[int, ...] = ()) -> tuple[Home, ...]:
        return self.homes

    def moves(self, topology: Topology) -> Iterator[tuple[int, int, int, int]]:
        """Yield (unit, shard, source rank, target rank) of all transfers, in the order of the units.

        A rank gets no shard that it holds already. The source is a holder in the target's node, if there is one."""
        for unit, home in enumerate(self.homes):
            for target in (rank for rank, units in enumerate(self.wanted) if unit in units):
                for shard in range(len(home.ranks)):
                    holders = [copy[shard] for copy in home.copies]
                    near = [rank for rank in holders if topology.node_of(rank) == topology.node_of(target)]
                    if target not in holders:
                        yield unit, shard, (near or holders)[0], target

    def traffic(self, step: StepSpec, *, training: bool) -> tuple[LinkTraffic, ...]:
        """Return (sent, received) of each node: the number of elements that cross its link to other nodes."""
        counts = [[0, 0] for _ in range(step.topology.num_nodes)]
        for unit, _, source, target in self.moves(step.topology):
            ends = step.topology.node_of(source), step.topology.node_of(target)
            if ends[0] != ends[1]:
                for way, node in enumerate(ends):
                    counts[node][way] += self.homes[unit].shard_size
        return tuple(LinkTraffic(sent, received) for sent, received in counts)

    def build(self, step: StepSpec, *, training: bool = True, ranks: Sequence[int] | None = None) -> Schedule:
        """Build the schedule: for every rank, one EXCHANGE for each unit that it sends or receives."""
        assert not training, "nothing is trained when weights are placed"
        world = range(step.topology.world_size)
        parts: list[dict[int, list[Transfer]]] = [{} for _ in world]
        for unit, shard, source, target in self.moves(step.topology):
            parts[source].setdefault(unit, []).append(Transfer(True, target, unit, home_weight(unit)))
            parts[target].setdefault(unit, []).append(Transfer(False, source, unit, pooled(f"W{unit}", shard)))
        moved = lambda transfers: exchange(Lane.INTER_W, tuple(transfers), "world")  # noqa: E731
        programs = tuple(tuple(moved(transfers) for _, transfers in sorted(part.items())) for part in parts)
        pools = tuple(tuple(self._pools(program)) for program in programs)
        return Schedule(self.name, step, programs, pools, training=False, placed=self.wanted)

    def _pools(self, program: tuple[Action, ...]) -> Iterator[Pool]:
        """Yield a buffer pool for each unit of which ``program`` receives shards.

        The pool has a place for every shard of the unit. Places of shards that are not received stay unused."""
        for unit in dict.fromkeys(buffer.pool for action in program for buffer in action.writes):
            home = self.homes[int(unit[1:])]
            yield Pool(unit, Kind.WEIGHT, len(home.ranks), home.shard_size)


def build_placing(
    model: ModelSpec, topology: Topology, homes: tuple[Home, ...], wanted: Sequence[Sequence[int]]
) -> Schedule:
    """Build the schedule that sends every rank the units that it needs.

    Args:
        model: sizes of the units.
        topology: the ranks and their nodes.
        homes: homes of all units in training.
        wanted: for every rank, the units that it needs whole.
    """
    strategy = Placing(homes, tuple(tuple(sorted(units)) for units in wanted))
    settings = strategy.settle(ScheduleSettings(strategy=strategy.name, micro_batches_per_visit=1))
    nobody = ((),) * topology.world_size
    return strategy.build(StepSpec(strategy, model, topology, settings, nobody, losses=nobody), training=False)
