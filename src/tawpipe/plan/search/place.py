"""Choice of homes for units under ``striped`` and ``whole`` when units or links are uneven.

By default units live on the nodes in turn (round-robin). Weights are sent in exchanges. In one exchange every node
receives the units of one visit, each node of a different visit (schedule/routes/staggered.py). Gradients are sent back
in the same way.

An exchange ends when its busiest link is done. The homes decide which link that is. The search minimises the sum of
these times over all exchanges. For a step that waits for links, this sum is close to the simulated time. The total
traffic of the links is not: with an embedding as large as eight layers it is little more than half of the sum.

Where nodes, links and layers are equal, round-robin homes are kept: with an embedding as large as eight layers they
were within 1 % of the optimum. Elsewhere units are moved one by one while the sum decreases. The simulation then
decides whether a step is faster.

Where devices differ in memory, no device gets more than fits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import isfinite

import numpy as np

from tawpipe.console import span
from tawpipe.plan.cost.predict import PLAYED_ROUNDS, memory_quickly, shortened
from tawpipe.plan.cost.request import PlanRequest
from tawpipe.schedule.routes.staggered import number_of_exchanges, visits_of_exchange
from tawpipe.schedule.sizes.footprint import far_widths
from tawpipe.schedule.step import StepSpec
from tawpipe.schedule.strategies.weight_strategy import WeightStrategy

IN_TURN, BY_MEMORY, ONE_BY_ONE = "in turn", "by memory", "moved one by one"
MOST_WORK = 10_000_000
"""Most link loads that one pass over all moves of all units may add up. Beyond it no homes are searched, because the
search would take minutes."""
SWEEPS = 5
PRECISION = 0.002
"""Smallest relative gain for which a unit is moved."""


@dataclass(frozen=True)
class Homes:
    """Chosen homes, with the time that each method of choosing them leads to.

    Args:
        of_unit: for every unit its node (``striped``) or rank (``whole``); empty for homes in turn.
        seconds: for every method, seconds of all exchanges of a step.
        note: reason why no other homes are searched, or ``""``.
    """

    of_unit: tuple[int, ...]
    seconds: dict[str, float]
    note: str = ""

    def __str__(self) -> str:
        times = ", ".join(f"{name} {span(seconds)}" for name, seconds in self.seconds.items())
        return f"transfers between nodes with homes {times}" + (f"; {self.note}" if self.note else "")


def find_homes(request: PlanRequest, step: StepSpec) -> Homes | None:
    """Search the homes of single units with which a step's exchanges between nodes are fastest.

    Returns None if the strategy has no choice of homes, or on one node. ``Homes.of_unit`` is empty if the usual homes
    (in turn) are the best, and ``Homes.note`` tells why if none are searched.

    Args:
        request: the request.
        step: the step; homes in its settings are ignored.
    """
    placed = isinstance(step.strategy, WeightStrategy) and step.strategy.places(request.topology)
    if not placed or request.topology.num_nodes == 1:
        return None
    task = _Task(request, step)
    usual = {IN_TURN: task.seconds(task.in_turn)}
    if _is_even(request):
        return Homes((), usual, note="nodes, links and layers are equal")
    if not usual[IN_TURN] or not all(map(isfinite, task.rates)):
        return Homes((), usual, note="no link between nodes takes time")
    if task.work > MOST_WORK:
        return Homes((), usual, note=f"others are not tried on {request.topology.num_nodes} nodes")
    ways = {IN_TURN: task.in_turn} if task.fits(task.in_turn) else {}
    ways |= {BY_MEMORY: task.by_memory()} if request.absent else {}
    moved = task.one_by_one()
    if task.fits(moved):  # may fail under ``whole``: one device can exceed the average of its node
        ways[ONE_BY_ONE] = moved
    seconds = {name: task.seconds(homes) for name, homes in ways.items()}
    best = min(ways, key=lambda name: seconds[name])
    needs_homes = best != IN_TURN or bool(request.absent)
    return Homes(task.spelled(ways[best]) if needs_homes else (), seconds)


def homes_by_memory(request: PlanRequest, step: StepSpec) -> tuple[int, ...]:
    """Return homes that fill all devices to an equal share of their memory, as the setting ``homes`` writes them.

    Empty if all devices have equal memory, or if the strategy does not place units one by one."""
    placed = isinstance(step.strategy, WeightStrategy) and step.strategy.places(request.topology)
    if not placed or not request.absent or request.topology.num_nodes == 1:
        return ()
    task = _Task(request, step)
    return task.spelled(task.by_memory())


def _is_even(request: PlanRequest) -> bool:
    """Return True if all layers, all links between nodes and all nodes are equal, so that no homes can be better."""
    model = request.model
    layers = {sum(model.units[u].numel for u in block.units) for block in model.blocks if block.kind == "layer"}
    machine = request.machine
    links = {request.costs.node_link(node) for node in range(len(machine.nodes))}
    even = request.topology == machine.topology and not request.absent
    return len(layers) == 1 and len(links) == 1 and even


@dataclass(frozen=True)
class _Exchange:
    """Exchange of weights or gradients between nodes.

    Args:
        weights: True for weights, False for gradients.
        arrivals: pairs of node and unit: the node receives the unit's weights, or sends its gradient.
        times: number of times the exchange occurs in a step.
    """

    weights: bool
    arrivals: tuple[tuple[int, int], ...]
    times: int


def _counts(step: StepSpec) -> Counter[tuple[bool, tuple[tuple[int, int], ...]]]:
    """Return how often each exchange between nodes occurs in a step.

    Keys are (``_Exchange.weights``, ``_Exchange.arrivals``)."""
    assert isinstance(step.strategy, WeightStrategy)  # ensured by ``find_homes``
    tour, nodes = step.strategy.tour(step), step.topology.num_nodes
    coming = [tuple(unit for unit, stay in visit.items() if not stay.held) for visit in tour.residency.arriving]
    counts = Counter((True, arrivals) for arrivals in _staggered(coming, nodes))
    rounds = [
        [step.model.trainable_units(v.block) for v in tour.visits if v.round == r and v.gradient_index is not None]
        for r in range(step.rounds)
    ]
    if step.settings.gradients_scope == "step":  # gradients leave at a unit's last visit
        rounds = [_first_of_each(rounds[-1][::-1])[::-1]]
    for leaving in rounds:
        counts.update((False, arrivals) for arrivals in _staggered(leaving, nodes))
    return counts


class _Task:
    """Cost and memory limits of homes, where a home is a node of the schedule. A machine may have several such nodes.

    Attributes:
        usual: for every unit its rank with homes in turn.
        in_turn: for every unit its node with homes in turn.
        machine_of: for every node its machine.
        rates: bytes per second of every machine's link.
        sizes: bytes of every unit while it travels, as gradients and as weights.
        kept: bytes of every unit at home, all shards together; in host memory if all homes are there.
        limits: bytes that the homes on each rank may occupy, on its device or in its share of the host. Without a
            memory limit these are the largest bytes that homes in turn occupy.
    """

    def __init__(self, request: PlanRequest, step: StepSpec) -> None:
        topology, model, widths = request.topology, request.model, request.widths
        step = replace(step, settings=replace(step.settings, homes=""))
        homes = step.homes
        self.topology, self.whole = topology, step.strategy.places(topology) > topology.num_nodes
        self.usual = tuple(home.ranks[0] for home in homes)
        self.in_turn = tuple(topology.node_of(rank) for rank in self.usual)
        self.machine_of = [request.machine.topology.node_of(node[0]) for node in topology.nodes]
        sizes = request.machine.nodes
        links = [request.costs.node_link(machine) for machine in range(len(sizes))]
        # Devices with their own links send their shards at the same time; a whole unit is sent over one of these links.
        self.rates = [link.node_rate(1 if self.whole else size) for link, size in zip(links, sizes, strict=True)]
        self.full_duplex = [link.full_duplex for link in links]
        weights, gradients = far_widths(step.settings, widths)
        self.sizes = tuple([home.padded * width for home in homes] for width in (gradients, weights))
        level = step.settings.host_homes
        all_in_host = level == "all"  # devices keep nothing, and host memory is the limit
        self.kept = np.array(
            [
                unit.numel * widths.on_device(number, None if all_in_host else level, trainable=unit.trainable)
                for number, unit in enumerate(model.units)
            ]
        )

        short, longer, left = shortened(request, step, PLAYED_ROUNDS)
        counts, more = _counts(short), _counts(longer) if left else Counter()
        counts.update({what: round(left * (number - counts[what])) for what, number in more.items()})
        self.exchanges = [_Exchange(*what, times) for what, times in counts.items() if what[1]]

        self.limits = np.full(topology.world_size, self.device_bytes(self.in_turn).max())
        needs = memory_quickly(request, step) if request.memory_bytes else None
        if needs is None:
            return
        if all_in_host and request.has_host:  # host_bytes is 0 if unknown
            self.limits += max(0, request.machine.host_bytes - needs.host) / max(request.machine.nodes)
        elif request.absent:
            besides = needs.device - (self.limits.max() if all_in_host else needs.parts["homes"])
            self.limits = np.maximum(0, request.memory_bytes - besides - np.array(request.absent, float))
        else:
            self.limits += max(0, request.memory_bytes - needs.device)

    def link_of(self, exchange: _Exchange, node: int, home: int) -> tuple[int, int] | None:
        """Return (sending machine, receiving machine) for one unit in an exchange; None if both are one machine.

        Args:
            exchange: weights go from the home to the node, gradients from the node to the home.
            node: node that receives the unit's weights, or sends its gradient.
            home: node of the unit's home.
        """
        here, peer = self.machine_of[home], self.machine_of[node]
        if here == peer:
            return None
        return (here, peer) if exchange.weights else (peer, here)

    def busiest(self, exchange: _Exchange, homes: Sequence[int]) -> float:
        """Return the seconds for which the busiest link is busy in one exchange.

        Units without a home (-1) are ignored."""
        loads = [[0.0, 0.0] for _ in self.rates]
        for node, unit in exchange.arrivals:
            link = self.link_of(exchange, node, homes[unit]) if homes[unit] >= 0 else None
            for direction, machine in enumerate(link or ()):
                loads[machine][direction] += self.sizes[exchange.weights][unit] / self.rates[machine]
        return max(max(two) if full else sum(two) for two, full in zip(loads, self.full_duplex, strict=True))

    def seconds(self, homes: Sequence[int]) -> float:
        """Return the seconds of all exchanges of a step with these homes."""
        return sum(exchange.times * self.busiest(exchange, homes) for exchange in self.exchanges)

    def fits(self, homes: Sequence[int]) -> bool:
        """Return True if every rank's homes are within its memory limit."""
        return bool((self.device_bytes(homes) <= self.limits * (1 + 1e-9)).all())

    def device_bytes(self, homes: Sequence[int]) -> np.ndarray:
        """Return for every rank the bytes that its homes occupy, if unit ``u`` has its home on node ``homes[u]``."""
        at_home = np.zeros(self.topology.world_size)
        if self.whole:
            ranks = self.usual if tuple(homes) == self.in_turn else self.spelled(homes)
            np.add.at(at_home, list(ranks), self.kept)
        else:
            for unit, node in enumerate(homes):
                at_home[list(self.topology.nodes[node])] += self.kept[unit] / self.topology.local_size
        return at_home

    def spelled(self, homes: Sequence[int]) -> tuple[int, ...]:
        """Return the setting ``homes`` for units with these nodes: node or rank of every unit.

        For sharded units these are the nodes themselves. For whole units a rank is chosen inside each node: the largest
        unit first, on the rank with the most free memory.

        Args:
            homes: node of every unit.
        """
        if not self.whole:
            return tuple(homes)
        had, ranks = np.zeros(self.topology.world_size), [0] * len(homes)
        for unit in np.argsort(-self.kept, kind="stable"):
            ranks[unit] = min(self.topology.nodes[homes[unit]], key=lambda rank: had[rank] - self.limits[rank])
            had[ranks[unit]] += self.kept[unit]
        return tuple(ranks)

    @property
    def work(self) -> int:
        """Approximate work of trying all moves of all units once: number of link loads that are added up."""
        return self.topology.num_nodes * sum(len(exchange.arrivals) ** 2 for exchange in self.exchanges)

    @cached_property
    def capacities(self) -> list[float]:
        """Bytes that homes on every node may occupy; sharded units fill all devices of a node equally."""
        of_nodes = [self.limits[list(node)] for node in self.topology.nodes]
        return [float(some.sum() if self.whole else some.min() * len(some)) for some in of_nodes]

    def by_memory(self) -> tuple[int, ...]:
        """Return a node for every unit: the largest unit first, each on the node with the most free memory."""
        left, homes = list(self.capacities), [0] * len(self.kept)
        for unit in np.argsort(-self.kept, kind="stable"):
            homes[unit] = max(range(len(left)), key=lambda node: left[node])
            left[homes[unit]] -= self.kept[unit]
        return tuple(homes)

    def one_by_one(self) -> tuple[int, ...]:
        """Search homes: start with the best round-robin order, and move single units while exchanges get faster.

        Returns a node for every unit. Each pass moves every unit to the node with the fastest exchanges, among nodes
        with enough memory. It stops after ``SWEEPS`` passes or when no move gains ``PRECISION``."""
        nodes = self.topology.num_nodes
        turns = [tuple((home + first) % nodes for home in self.in_turn) for first in range(nodes)]
        homes = list(min((homes for homes in turns if self.fits(homes)), key=self.seconds, default=self.by_memory()))
        kept = np.bincount(homes, weights=self.kept, minlength=nodes)
        of_unit = [
            [exchange for exchange in self.exchanges if any(u == unit for _, u in exchange.arrivals)]
            for unit in range(len(homes))
        ]

        def seconds(unit: int, node: int) -> float:
            """Return the seconds of all exchanges that contain ``unit``, if its home were ``node``."""
            before, homes[unit] = homes[unit], node
            waiting = sum(exchange.times * self.busiest(exchange, homes) for exchange in of_unit[unit])
            homes[unit] = before
            return waiting

        for _ in range(SWEEPS):
            moved = False
            for unit, size in enumerate(self.kept):
                here = homes[unit]
                options = [n for n in range(nodes) if n == here or kept[n] + size <= self.capacities[n]]
                costs = {node: seconds(unit, node) for node in options}
                best = min(options, key=lambda node: costs[node])
                if costs[best] < costs[here] * (1 - PRECISION):
                    homes[unit], moved = best, True
                    kept[here] -= size
                    kept[best] += size
            if not moved:
                break
        return tuple(homes)


def _staggered(visits: Sequence[tuple[int, ...]], nodes: int) -> list[tuple[tuple[int, int], ...]]:
    """Return, for every exchange, its pairs (node, unit): node n takes part with its visit t - n in exchange t.

    >>> _staggered([(7,), (8,)], 2)
    [((0, 7),), ((0, 8), (1, 7)), ((1, 8),)]

    Args:
        visits: units of every visit.
        nodes: number of nodes.
    """
    return [
        tuple((node, unit) for node, index in visits_of_exchange(t, nodes, len(visits)) for unit in visits[index])
        for t in range(number_of_exchanges(nodes, len(visits)))
    ]


def _first_of_each(visits: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Return the units of every visit without units that an earlier visit contains."""
    seen: set[int] = set()
    firsts = []
    for units in visits:
        firsts.append(tuple(unit for unit in units if unit not in seen))
        seen |= set(units)
    return firsts
