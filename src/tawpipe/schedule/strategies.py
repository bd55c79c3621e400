"""The table of strategies: every way to move weights that the runtime, the clock, the plan and the lab know.

A new strategy is one class in one file. ``register`` puts it into the table, and it is run, timed, proved, drawn,
planned and measured like the others (docs/add-a-strategy.md). A package can bring some by the entry point
``tawpipe.strategies``; ``--import MODULE`` brings some to a command.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path

from tawpipe.errors import UserError
from tawpipe.schedule.actions import Lane
from tawpipe.schedule.buffers import Kind
from tawpipe.schedule.pipelines.made import Generated, SolvedPipeline, ZeroBubble
from tawpipe.schedule.pipelines.strategy import Interleaved, OneForwardOneBackward
from tawpipe.schedule.placement import Home
from tawpipe.schedule.residency import STREAMING
from tawpipe.schedule.routes.collective import CollectiveRoute, Hop
from tawpipe.schedule.routes.ring import place_on_ring, ring_traffic
from tawpipe.schedule.routes.route import Route, Tour
from tawpipe.schedule.routes.staggered import ExchangeRoute
from tawpipe.schedule.routes.weipipe import build_weipipe
from tawpipe.schedule.sets import in_sets
from tawpipe.schedule.settings import ScheduleSettings, check_values
from tawpipe.schedule.spec import ModelSpec
from tawpipe.schedule.step import LinkTraffic, Schedule, StepSpec, Strategy
from tawpipe.schedule.weight_strategy import WeightStrategy
from tawpipe.topology import Topology


def inside(lane: Lane, collective: str) -> Hop:
    """A collective between the ranks of a node."""
    return Hop(lane, "node", collective, far=False)


def between(lane: Lane, collective: str) -> Hop:
    """A collective between the nodes, over a rail."""
    return Hop(lane, "rail", collective, far=True)


class Spread(WeightStrategy):
    """TawPipe with every unit over all devices: a gather over each rail, then one inside each node.

    Stripe l * nodes + n is on local rank l of node n, so that gathering over a rail, then inside the node, puts the
    stripes in order.
    """

    name = "tawpipe-spread"
    summary = "every unit over all processes: it crosses each slow link once, then is gathered inside the node"
    one_order = True

    def home(self, topology: Topology, numel: int, block: int, at: int | None) -> Home:
        return Home.over(tuple(node[i] for i in range(topology.local_size) for node in topology.nodes), numel)

    def route(self, rank: int, tour: Tour) -> Route:
        across, within = tour.step.topology.num_nodes > 1, tour.step.topology.local_size > 1
        there = [between(Lane.INTER_W, "all_gather")] * across + [inside(Lane.GATHER, "all_gather")] * within
        back = [inside(Lane.REDUCE, "reduce_scatter")] * within + [between(Lane.INTER_G, "reduce_scatter")] * across
        return CollectiveRoute(rank, tour, there=there, back=back)

    def slices_busy(self, step: StepSpec) -> int | None:
        in_slices = step.topology.num_nodes > 1 and step.topology.local_size > 1
        return min(step.settings.look_ahead, STREAMING - 1) if in_slices else None

    def unit_traffic(self, topology: Topology, home: Home, node: int) -> LinkTraffic:
        """(1 - 1/D) of the unit in and out, on D nodes."""
        return LinkTraffic(*[home.padded * (topology.num_nodes - 1) // topology.num_nodes] * 4)

    def stand_ins(self, topology: Topology, *, inside_is_even: bool) -> tuple[int, ...]:
        return (0,)


class Step(Spread):
    """Hierarchical ZeRO (AsyncHZP): a node keeps what it has pulled, and sends gradients home once a step."""

    name = "tawpipe-step"
    summary = "as tawpipe-spread, with weights kept in the node and gradients added up there for the whole step"
    defaults = {"step_cache": "all", "gradients_scope": "step"}


class Striped(Spread):
    """TawPipe with every unit over the devices of one node: staggered sends, then a gather inside each node."""

    name = "tawpipe-striped"
    summary = "every unit over the processes of one node, which sends it to the others"
    one_order = False

    def home(self, topology: Topology, numel: int, block: int, at: int | None) -> Home:
        return Home.over(topology.nodes[block % topology.num_nodes if at is None else at], numel)

    def places(self, topology: Topology) -> int:
        return topology.num_nodes

    def route(self, rank: int, tour: Tour) -> Route:
        if tour.step.topology.num_nodes == 1:  # one hop of collectives
            return super().route(rank, tour)
        return ExchangeRoute(rank, tour, whole=False)

    def unit_traffic(self, topology: Topology, home: Home, node: int) -> LinkTraffic:
        """All of the unit into every node but its home."""
        if topology.node_of(home.ranks[0]) == node:
            away = home.padded * (topology.num_nodes - 1)
            return LinkTraffic(weights_sent=away, gradients_received=away)
        return LinkTraffic(weights_received=home.padded, gradients_sent=home.padded)

    def stand_ins(self, topology: Topology, *, inside_is_even: bool) -> tuple[int, ...]:
        return ()


class Whole(Striped):
    """TawPipe as in its paper (AAAI 2026): a unit on one device, sent to one device of each other node, broadcast."""

    name = "tawpipe-whole"
    carrier_computes = True
    summary = "every unit on one process, which sends it to one process of every other node, as in the paper"

    def home(self, topology: Topology, numel: int, block: int, at: int | None) -> Home:
        node, local = block % topology.num_nodes, block // topology.num_nodes % topology.local_size
        return Home.over((topology.nodes[node][local] if at is None else at,), numel)

    def places(self, topology: Topology) -> int:
        return topology.world_size

    def route(self, rank: int, tour: Tour) -> Route:
        if tour.step.topology.world_size == 1:
            return CollectiveRoute(rank, tour, there=[], back=[])
        return ExchangeRoute(rank, tour, whole=True)

    def slices_busy(self, step: StepSpec) -> int | None:
        """The device that a unit is sent to computes from where it arrives. Only a cache gives it a place of its own,
        which has to last as long as the copies that others keep: for all units.
        """
        several = step.topology.num_nodes > 1 and step.topology.local_size > 1
        return step.settings.look_ahead if several and step.step_cache else None

    def check(self, step: StepSpec) -> None:
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
        topology = tour.step.topology
        several, far = topology.world_size > 1, topology.num_nodes > 1
        there = [Hop(Lane.INTER_W, "world", "all_gather", far)] * several
        back = [Hop(Lane.INTER_G, "world", "reduce_scatter", far)] * several
        return CollectiveRoute(rank, tour, there=there, back=back)

    def unit_traffic(self, topology: Topology, home: Home, node: int) -> LinkTraffic:
        """(P - 1)/P of the unit past each node, in a ring of P ranks."""
        return LinkTraffic(*[home.padded * (topology.world_size - 1) // topology.world_size] * 4)

    def stand_ins(self, topology: Topology, *, inside_is_even: bool) -> tuple[int, ...]:
        return (0,) if inside_is_even else ()  # ranks at the ends of a node send less inside it than those between them

    def check(self, step: StepSpec) -> None:
        super().check(step)
        compression = step.settings.gradients_compression
        if compression != "none" and step.topology.local_size > 1:
            reason = "every process would send to every other, which is more than the ring sends in full"
            raise UserError("schedule.gradients_compression", compression, f"none under {self.name}: {reason}")


_PLAIN_SUM = "between nodes it sums up in an all-reduce, in the type of the gradients"


class Hybrid(WeightStrategy):
    """HSDP: one copy of everything per node; gradients are summed between the copies.

    Stripes divide by the number of nodes, so that an all-reduce between these cuts them evenly.
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
        across, within = tour.step.topology.num_nodes > 1, tour.step.topology.local_size > 1
        back = [inside(Lane.REDUCE, "reduce_scatter")] * within + [between(Lane.INTER_G, "all_reduce")] * across
        return CollectiveRoute(rank, tour, there=[inside(Lane.GATHER, "all_gather")] * within, back=back)

    def unit_traffic(self, topology: Topology, home: Home, node: int) -> LinkTraffic:
        """No weights, and 2(1 - 1/D) of the gradient in and out, on D nodes."""
        return LinkTraffic(0, 0, *[2 * home.padded * (topology.num_nodes - 1) // topology.num_nodes] * 2)

    def stand_ins(self, topology: Topology, *, inside_is_even: bool) -> tuple[int, ...]:
        return (0,)


_PASSED_ON = "numbers pass every process, and would be rounded each time"


class WeiPipe(Spread):
    """WeiPipe-Interleave (PPoPP 2025): weights and gradients go round a ring of all devices. On one device there is no
    ring, and it is as any other strategy.
    """

    name = "weipipe"
    summary = "weights and gradients go round a ring of all processes"
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
        super().place(model, topology, homes)  # looks at homes
        return place_on_ring(model, topology)

    def build(self, step: StepSpec, *, training: bool = True, ranks: Sequence[int] | None = None) -> Schedule:
        if step.topology.world_size == 1:
            return super().build(step, training=training, ranks=ranks)
        assert ranks is None, "no rank stands for another on a ring"
        return build_weipipe(step, training=training)

    def traffic(self, step: StepSpec, *, training: bool) -> tuple[LinkTraffic, ...] | None:
        return (LinkTraffic(),) if step.topology.num_nodes == 1 else ring_traffic(step, training=training)

    def stand_ins(self, topology: Topology, *, inside_is_even: bool) -> tuple[int, ...]:
        return ()

    def check(self, step: StepSpec) -> None:
        super().check(step)
        ahead = step.settings.look_ahead
        if ahead < 1 and step.topology.world_size > 1:
            reason = "a stage's weights arrive while others are sent"
            raise UserError("schedule.look_ahead", ahead, f"at least 1 under {self.name}: {reason}")


STRATEGIES: dict[str, Strategy] = {}
"""Name -> strategy, in the order in which they are listed everywhere."""


def register(strategy: Strategy) -> Strategy:
    """Put a strategy into the table, in place of one of the same name; returns it."""
    STRATEGIES[strategy.name] = strategy
    return strategy


for _strategy in (Spread(), Step(), Striped(), Whole(), Flat(), Hybrid(), WeiPipe()):
    register(_strategy)
for _strategy in (OneForwardOneBackward(), Interleaved(), ZeroBubble(), Generated(), SolvedPipeline()):
    register(_strategy)


IMPORTS = "TAWPIPE_IMPORT"
"""Variable that names the modules of ``--import``, separated as in PATH, for the processes that a command starts."""


def import_strategies(modules: Sequence[str]) -> None:
    """Import modules, or .py files, that bring strategies; here, and in every process that this one starts.

    Raises:
        UserError: one that is not there, or that cannot be imported.
    """
    for module in modules:
        path = Path(module)
        name = path.stem if path.suffix == ".py" else module
        folder = str(path.parent.absolute()) if path.suffix == ".py" else str(Path.cwd())
        if folder not in sys.path:
            sys.path.insert(0, folder)
        try:
            importlib.import_module(name)
        except Exception as error:
            expected = "a module, or a .py file, that can be imported"
            raise UserError("--import", module, f"{expected} ({type(error).__name__}: {error})") from error
    known = filter(None, os.environ.get(IMPORTS, "").split(os.pathsep))
    named = [str(Path(module).absolute()) if module.endswith(".py") else module for module in modules]
    os.environ[IMPORTS] = os.pathsep.join(dict.fromkeys((*known, *named)))


@cache
def _bring() -> None:
    """Import what installed packages and the command that started this process bring, once."""
    for point in entry_points(group="tawpipe.strategies"):
        point.load()
    import_strategies([module for module in os.environ.get(IMPORTS, "").split(os.pathsep) if module])


def strategies() -> dict[str, Strategy]:
    """The table, with what installed packages bring."""
    _bring()
    return dict(STRATEGIES)


def find(name: str) -> Strategy:
    """A strategy by its name.

    Raises:
        UserError: there is none of that name.
    """
    known = strategies()
    if name not in known:
        raise UserError("schedule.strategy", name, f"one of {', '.join(strategies())}")
    return known[name]


def strategy_of(schedule: ScheduleSettings | Strategy | Schedule | str) -> tuple[Strategy, ScheduleSettings]:
    """What a library user means by ``schedule``: a strategy, which need not be in the table, and settings for it.

    Raises:
        UserError: something else, or no such strategy.
    """
    if isinstance(schedule, Schedule):
        return schedule.step.strategy, schedule.step.settings
    name = schedule if isinstance(schedule, str) else schedule.name if isinstance(schedule, Strategy) else None
    settings = ScheduleSettings(strategy=name) if name is not None else schedule
    if not isinstance(settings, ScheduleSettings):
        raise UserError("schedule", schedule, "ScheduleSettings, a Strategy, the name of one, or a Schedule")
    strategy = schedule if isinstance(schedule, Strategy) else find(settings.strategy)
    return strategy, settings


def shares_of(
    count: int, topology: Topology, settings: ScheduleSettings, strategy: Strategy | None = None
) -> tuple[tuple[int, ...], ...]:
    """Micro-batches 0..count-1 for every rank.

    Args:
        strategy: one that is not in the table, in place of ``settings.strategy``.

    Raises:
        UserError: settings that these nodes cannot have.
    """
    return (strategy or find(settings.strategy)).share(count, topology, settings)


def step_of(
    model: ModelSpec,
    topology: Topology,
    settings: ScheduleSettings,
    micro_batches: tuple[tuple[int, ...], ...],
    *,
    strategy: Strategy | None = None,
    shared: int | None = None,
) -> StepSpec:
    """A step to be scheduled, with its settings checked.

    Args:
        topology: the real one; nodes must be equally large, see ``Topology.evened``.
        strategy: one that is not in the table, in place of ``settings.strategy``.
        shared: see ``StepSpec``.

    Raises:
        UserError: a setting that cannot work for this model on these nodes.
    """
    strategy = (strategy or find(settings.strategy)).configured(settings)
    settings = replace(strategy.settle(settings), strategy=strategy.name)
    check_values(settings)
    step = StepSpec(strategy, model, strategy.view(topology), settings, micro_batches, shared)
    layers, offloaded = model.num_layers, settings.offloaded_layers
    if not 0 <= offloaded <= layers:
        raise UserError("schedule.offloaded_layers", offloaded, f"0 to {layers}, the layers of the model")
    strategy.check(step)
    if step.sequence_ranks > 1 and not settings.sequence_chunk and any(map(step.saves, range(layers + 1))):
        expected = "full with sequence_ranks, or selective if sequence_chunk is set as well"
        raise UserError("schedule.recompute", settings.recompute, expected)
    if settings.keep_mib and (settings.sequence_chunk or any(map(step.saves, range(layers + 1)))):
        expected = "0 where rows run in chunks, or recompute says what layers keep"
        raise UserError("schedule.keep_mib", settings.keep_mib, expected)
    if settings.sequence_chunk and any(step.saves(block) is Kind.GRAPH for block in range(1, layers + 1)):
        expected = "full or selective with sequence_chunk: a graph is of all chunks, and as large as without them"
        raise UserError("schedule.recompute", settings.recompute, expected)
    if not settings.sequence_chunk and any(step.saves(block) for block in range(1, offloaded + 1)):
        expected = "layers that recompute everything: what the others keep instead of their input stays on the device"
        raise UserError("schedule.offloaded_layers", offloaded, expected)
    if step.step_cache and not settings.reuse:
        raise UserError("schedule.step_cache", settings.step_cache, "0 without reuse: nothing is used again")
    assert len(micro_batches) == topology.world_size and step.topology.is_even
    _ = strategy.share(0, step.topology, settings)  # the view of the strategy may know smaller nodes
    _ = step.homes  # and whether units can live there
    return step


def build(step: StepSpec, *, training: bool = True, ranks: Sequence[int] | None = None) -> Schedule:
    """The schedule of a step.

    Args:
        training: False for one forward pass with its loss.
        ranks: those whose programs are made, all by default; see ``Strategy.build``.

    Raises:
        UserError: nothing in the model is trainable.
    """
    if training and not any(unit.trainable for unit in step.model.units):
        raise UserError("--model", "no trainable parameter", "at least one parameter must require a gradient")
    return in_sets(step.strategy.build(step, training=training, ranks=ranks))
