"""Strategies that move weights to the activations: TawPipe with its placements, flat sharding, HSDP and WeiPipe.

Each strategy is one class; ``WeightStrategy`` has the common code (docs/add-a-strategy.md).
"""

from __future__ import annotations

from collections.abc import Sequence

from tawpipe.errors import UserError
from tawpipe.schedule.actions import Lane
from tawpipe.schedule.link_traffic import LinkTraffic
from tawpipe.schedule.placement import Home
from tawpipe.schedule.routes.collective import CollectiveRoute, Hop
from tawpipe.schedule.routes.residency import STREAMING
from tawpipe.schedule.routes.ring import place_on_ring, ring_traffic
from tawpipe.schedule.routes.route import Route, Tour
from tawpipe.schedule.routes.staggered import ExchangeRoute
from tawpipe.schedule.routes.weipipe import build_weipipe
from tawpipe.schedule.spec import ModelSpec
from tawpipe.schedule.step import Schedule, StepSpec
from tawpipe.schedule.strategies.weight_strategy import WeightStrategy
from tawpipe.topology import Topology


def inside(lane: Lane, collective: str) -> Hop:
    """Return a hop with a collective between all ranks of a node."""
    return Hop(lane, "node", collective, far=False)


def between(lane: Lane, collective: str) -> Hop:
    """Return a hop with a collective between nodes, among the ranks of a rail."""
    return Hop(lane, "rail", collective, far=True)


class Spread(WeightStrategy):
    """TawPipe with every unit sharded over all devices: an all-gather over each rail, then one inside each node.

    Shard l * nodes + n has its home on local rank l of node n. So a gather over a rail, then inside the node, puts the
    shards in order.
    """

    name = "tawpipe-spread"
    summary = "every unit over all processes: it crosses each slow link once, then is gathered inside the node"
    one_order = True
    sums_on_rings = True

    def home(self, topology: Topology, numel: int, block: int, at: int | None) -> Home:
        return Home.over(tuple(node[i] for i in range(topology.local_size) for node in topology.nodes), numel)

    def route(self, rank: int, tour: Tour) -> Route:
        """Return a route with an all-gather over the rail and one inside the node, and reduce-scatters back."""
        across, within = tour.step.topology.num_nodes > 1, tour.step.topology.local_size > 1
        gather_hops = [between(Lane.INTER_W, "all_gather")] * across + [inside(Lane.GATHER, "all_gather")] * within
        back = [inside(Lane.REDUCE, "reduce_scatter")] * within + [between(Lane.INTER_G, "reduce_scatter")] * across
        return CollectiveRoute(rank, tour, gather_hops=gather_hops, back=back)

    def shards_busy(self, step: StepSpec) -> int | None:
        """Return the number of visits for which a received shard may still be in use after its own visit.

        It is the prefetch depth, but at most ``STREAMING - 1``. None on one node, or if nodes have one device."""
        in_shards = step.topology.num_nodes > 1 and step.topology.local_size > 1
        return min(step.settings.look_ahead, STREAMING - 1) if in_shards else None

    def why_not_exact(self, step: StepSpec) -> str:
        """Return the reason why weights cannot be sent as changes if not all units stay in the node.

        Returns ``""`` if all do (``step_cache: all``)."""
        if step.step_cache < len(step.model.units):
            return "a node drops what it has gathered; schedule.step_cache all keeps it, as tawpipe-step does"
        return ""

    def unit_traffic(self, topology: Topology, home: Home, node: int) -> LinkTraffic:
        """Return (1 - 1/D) of the unit's elements for each of the four numbers, on D nodes."""
        return LinkTraffic(*[home.padded * (topology.num_nodes - 1) // topology.num_nodes] * 4)

    def stand_ins(self, topology: Topology, *, inside_is_even: bool) -> tuple[int, ...]:
        return (0,)


class Step(Spread):
    """Hierarchical ZeRO: a node keeps the weights that it has received, and sends gradients home once per step."""

    name = "tawpipe-step"
    summary = "as tawpipe-spread, with weights kept in the node and gradients added up there for the whole step"
    defaults = {"step_cache": "all", "gradients_scope": "step"}


class NodeSharded(Spread):
    """TawPipe with every unit sharded over the devices of one node: staggered sends, then gathers inside nodes."""

    name = "tawpipe-striped"
    summary = "every unit over the processes of one node, which sends it to the others"
    usual = False
    one_order = False
    sums_on_rings = False

    def home(self, topology: Topology, numel: int, block: int, at: int | None) -> Home:
        return Home.over(topology.nodes[block % topology.num_nodes if at is None else at], numel)

    def places(self, topology: Topology) -> int:
        return topology.num_nodes

    def why_not_exact(self, step: StepSpec) -> str:
        return "units go from their node to each of the others, in messages of one size"

    def route(self, rank: int, tour: Tour) -> Route:
        """Return a route of staggered exchanges between nodes; on one node, a route of collectives."""
        if tour.step.topology.num_nodes == 1:  # one node: one hop of collectives
            return super().route(rank, tour)
        return ExchangeRoute(rank, tour, whole=False)

    def unit_traffic(self, topology: Topology, home: Home, node: int) -> LinkTraffic:
        """Return the link traffic of ``node`` for one unit, in elements.

        The node of its home sends the weights to all others and receives their gradients. Any other node receives the
        weights once and sends the gradient once."""
        if topology.node_of(home.ranks[0]) == node:
            away = home.padded * (topology.num_nodes - 1)
            return LinkTraffic(weights_sent=away, gradients_received=away)
        return LinkTraffic(weights_received=home.padded, gradients_sent=home.padded)

    def stand_ins(self, topology: Topology, *, inside_is_even: bool) -> tuple[int, ...]:
        return ()


class Whole(NodeSharded):
    """TawPipe as in its paper (AAAI 2026): a unit is whole on one device.

    The unit is sent to one device of every other node, which broadcasts it.
    """

    name = "tawpipe-whole"
    summary = "every unit on one process, which sends it to one process of every other node, as in the paper"

    def home(self, topology: Topology, numel: int, block: int, at: int | None) -> Home:
        node, local = block % topology.num_nodes, block // topology.num_nodes % topology.local_size
        return Home.over((topology.nodes[node][local] if at is None else at,), numel)

    def places(self, topology: Topology) -> int:
        return topology.world_size

    def computes_in_place(self, topology: Topology) -> bool:
        return True

    def route(self, rank: int, tour: Tour) -> Route:
        """Return a route of staggered exchanges of whole units; on one rank, a route without transfers."""
        if tour.step.topology.world_size == 1:
            return CollectiveRoute(rank, tour, gather_hops=[], back=[])
        return ExchangeRoute(rank, tour, whole=True)

    def shards_busy(self, step: StepSpec) -> int | None:
        """Return the prefetch depth if received units are cached, else None.

        The device that receives a unit computes from the buffer in which it arrives. Only a cache has separate buffers.
        They must last as long as the copies of the other ranks, so the cache must hold all units."""
        several = step.topology.num_nodes > 1 and step.topology.local_size > 1
        return step.settings.look_ahead if several and step.step_cache else None

    def check(self, step: StepSpec) -> None:
        """Check the settings as ``Strategy.check`` does, and that ``step_cache`` is 0 or all.

        Raises:
            UserError: a setting does not work.
        """
        super().check(step)
        if 0 < step.step_cache < len(step.model.units):
            raise UserError("schedule.step_cache", step.settings.step_cache, f"0 or all under {self.name}")


class Flat(WeightStrategy):
    """Flat sharding (FSDP, ZeRO-3): one group of all ranks."""

    name = "flat"
    summary = "every unit over all processes alike, gathered by all of them at once (FSDP, ZeRO-3)"
    one_order = True
    refusals = {
        "step_cache": "there is no group that could keep slices between one rank and all of them",
        "gradients_scope": "there is no group in which gradients could add up between one rank and all of them",
    }

    def home(self, topology: Topology, numel: int, block: int, at: int | None) -> Home:
        return Home.over(topology.group("world", 0), numel)

    def route(self, rank: int, tour: Tour) -> Route:
        """Return a route with one all-gather and one reduce-scatter over all ranks."""
        topology = tour.step.topology
        several, far = topology.world_size > 1, topology.num_nodes > 1
        gather_hops = [Hop(Lane.INTER_W, "world", "all_gather", far)] * several
        back = [Hop(Lane.INTER_G, "world", "reduce_scatter", far)] * several
        return CollectiveRoute(rank, tour, gather_hops=gather_hops, back=back)

    def unit_traffic(self, topology: Topology, home: Home, node: int) -> LinkTraffic:
        """Return (P - 1)/P of the unit's elements for each of the four numbers: a ring of P ranks."""
        return LinkTraffic(*[home.padded * (topology.world_size - 1) // topology.world_size] * 4)

    def stand_ins(self, topology: Topology, *, inside_is_even: bool) -> tuple[int, ...]:
        return (0,) if inside_is_even else ()  # ranks at the ends of a node send less inside it

    def check(self, step: StepSpec) -> None:
        """Check the settings as ``Strategy.check`` does, and refuse gradients in 8 bits if nodes have several ranks.

        Raises:
            UserError: a setting does not work.
        """
        super().check(step)
        compression = step.settings.gradients_compression
        if compression not in ("none", "exact") and step.topology.local_size > 1:
            reason = "every process would send to every other, which is more than the ring sends in full"
            raise UserError("schedule.gradients_compression", compression, f"none under {self.name}: {reason}")


_PLAIN_SUM = "between nodes it sums up in an all-reduce, in the type of the gradients"


class Hybrid(WeightStrategy):
    """HSDP: one copy of everything in every node; gradients are summed between the copies.

    Shards are divisible by the number of nodes, so that an all-reduce between nodes cuts them evenly.
    """

    name = "hsdp"
    summary = "a copy of everything in every node; only gradients cross the slow links"
    one_order = True
    defaults = {"gradients_scope": "step"}
    refusals = {
        "step_cache": "every node has its own home of every unit and pulls nothing",
        "weights_compression": _PLAIN_SUM,
        "gradients_compression": _PLAIN_SUM,
    }

    def home(self, topology: Topology, numel: int, block: int, at: int | None) -> Home:
        ranks, *others = topology.nodes
        return Home.over(ranks, numel, multiple=topology.num_nodes, replicas=tuple(others))

    def route(self, rank: int, tour: Tour) -> Route:
        """Return a route with collectives inside the node, and an all-reduce of gradients over the rail."""
        across, within = tour.step.topology.num_nodes > 1, tour.step.topology.local_size > 1
        back = [inside(Lane.REDUCE, "reduce_scatter")] * within + [between(Lane.INTER_G, "all_reduce")] * across
        return CollectiveRoute(rank, tour, gather_hops=[inside(Lane.GATHER, "all_gather")] * within, back=back)

    def unit_traffic(self, topology: Topology, home: Home, node: int) -> LinkTraffic:
        """Return 0 for weights, and 2(1 - 1/D) of the unit's elements for gradients sent and received, on D nodes."""
        return LinkTraffic(0, 0, *[2 * home.padded * (topology.num_nodes - 1) // topology.num_nodes] * 2)

    def stand_ins(self, topology: Topology, *, inside_is_even: bool) -> tuple[int, ...]:
        return (0,)


_PASSED_ON = "numbers pass every process, and would be rounded each time"


class WeiPipe(Spread):
    """WeiPipe-Interleave (PPoPP 2025): weights and gradients travel round a ring of all devices.

    On one device there is no ring, and the strategy behaves as ``Spread``.
    """

    name = "weipipe"
    summary = "weights and gradients go round a ring of all processes"
    usual = False
    sums_on_rings = False
    refusals = {
        "step_cache": "every rank is a group of its own, and weights go on to the next as soon as they were used",
        "gradients_scope": "gradients add up on their way round the ring, for the whole step already",
        "weights_compression": _PASSED_ON,
        "gradients_compression": _PASSED_ON,
        "offloaded_layers": "its passes of two rounds overlap, and would need each other's places",
        "sequence_ranks": "its processes are at different layers at any time, and would wait for each other",
        "keep_mib": "its passes of two rounds overlap, and each would take it",
    }

    def place(self, model: ModelSpec, topology: Topology, homes: tuple[int, ...] = ()) -> tuple[Home, ...]:
        super().place(model, topology, homes)  # checks `homes`
        return place_on_ring(model, topology)

    def why_not_exact(self, step: StepSpec) -> str:
        return "no node keeps what goes round the ring"

    def build(self, step: StepSpec, *, training: bool = True, ranks: Sequence[int] | None = None) -> Schedule:
        """Return the schedule of a step on the ring; on one device, the schedule of ``Spread``.

        Raises:
            UserError: the step has no micro-batch.
        """
        if step.topology.world_size == 1:
            return super().build(step, training=training, ranks=ranks)
        if not any(step.micro_batches):
            raise UserError("batch", "0 rows", f"at least one under {self.name}: nothing goes round its ring")
        return build_weipipe(step, training=training)

    def traffic(self, step: StepSpec, *, training: bool) -> tuple[LinkTraffic, ...] | None:
        return (LinkTraffic(),) if step.topology.num_nodes == 1 else ring_traffic(step, training=training)

    def stand_ins(self, topology: Topology, *, inside_is_even: bool) -> tuple[int, ...]:
        return ()

    def check(self, step: StepSpec) -> None:
        """Check the settings as ``Strategy.check`` does; several devices need a prefetch depth of at least 1.

        Raises:
            UserError: a setting does not work.
        """
        super().check(step)
        prefetch = step.settings.look_ahead
        if prefetch < 1 and step.topology.world_size > 1:
            reason = "a stage's weights arrive while others are sent"
            raise UserError("schedule.look_ahead", prefetch, f"at least 1 under {self.name}: {reason}")
