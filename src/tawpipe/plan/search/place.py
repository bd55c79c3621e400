"""Homes of units under ``striped`` and ``whole`` when units or links are uneven.

Units live on the nodes in turn by default. Weights come in exchanges, in which every node receives one visit's units,
each node a different visit (schedule/routes/staggered.py); gradients leave likewise. An exchange is over when its
busiest link is done, and which link that is follows from the homes: to be found are those with the least sum over all
exchanges. That sum is near to what the clock says of a step that waits for links, and what a link carries in all is
not: where an embedding is as large as eight layers, the links' totals are little more than half of it.

Where nodes, links and layers are alike, homes in turn are kept: with an embedding of eight layers' size they were
within 1 % of the best that there is. Elsewhere units are moved one by one while that gains something. Whether a step is
faster for it, the clock decides.

Where devices differ in memory, every device keeps no more than it has room for.
"""

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
"""Loads that one look at all moves of all units adds up, beyond which none is looked at: it would take minutes."""
SWEEPS = 5
PRECISION = 0.002
"""Least relative gain for which a unit is moved."""


@dataclass(frozen=True)
class Homes:
    """Homes, and what each way to find them leads to.

    Args:
        of_unit: of every unit the node (``striped``) or the rank (``whole``); empty for homes in turn.
        seconds: by way, of all exchanges of a step.
        note: why no others are looked for, or "".
    """

    of_unit: tuple[int, ...]
    seconds: dict[str, float]
    note: str = ""

    def __str__(self) -> str:
        said = ", ".join(f"{name} {span(seconds)}" for name, seconds in self.seconds.items())
        return f"transfers between nodes with homes {said}" + (f"; {self.note}" if self.note else "")


def find_homes(request: PlanRequest, step: StepSpec) -> Homes | None:
    """Homes for these units and links; None where there is nothing to choose.

    Args:
        step: homes in its settings are not looked at.
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
    if task.fits(moved):  # or not, under ``whole``, where not every device has what its node has on average
        ways[ONE_BY_ONE] = moved
    seconds = {name: task.seconds(homes) for name, homes in ways.items()}
    best = min(ways, key=lambda name: seconds[name])
    given = best != IN_TURN or bool(request.absent)
    return Homes(task.spelled(ways[best]) if given else (), seconds)


def homes_by_memory(request: PlanRequest, step: StepSpec) -> tuple[int, ...]:
    """Homes that leave every device as much of its memory as the others; empty where they have as much, or units are
    not placed one by one.
    """
    placed = isinstance(step.strategy, WeightStrategy) and step.strategy.places(request.topology)
    if not placed or not request.absent or request.topology.num_nodes == 1:
        return ()
    task = _Task(request, step)
    return task.spelled(task.by_memory())


def _is_even(request: PlanRequest) -> bool:
    model = request.model
    layers = {sum(model.units[u].numel for u in block.units) for block in model.blocks if block.kind == "layer"}
    machine = request.machine
    links = {request.costs.node_link(node) for node in range(len(machine.nodes))}
    even = request.topology == machine.topology and not request.absent
    return len(layers) == 1 and len(links) == 1 and even


@dataclass(frozen=True)
class _Exchange:
    """An exchange of weights or gradients.

    Args:
        arrivals: (node, unit): whose weights that node receives, or whose gradient it sends.
        times: how often it occurs in a step.
    """

    weights: bool
    arrivals: tuple[tuple[int, int], ...]
    times: int


def _counts(step: StepSpec) -> Counter[tuple[bool, tuple[tuple[int, int], ...]]]:
    """How often every exchange occurs, as ``_Exchange`` has them."""
    assert isinstance(step.strategy, WeightStrategy)  # as ``find_homes`` has seen
    tour, nodes = step.strategy.tour(step), step.topology.num_nodes
    coming = [tuple(unit for unit, stay in visit.items() if not stay.held) for visit in tour.residency.arriving]
    counts = Counter((True, arrivals) for arrivals in _staggered(coming, nodes))
    rounds = [
        [step.model.trainable_units(v.block) for v in tour.visits if v.round == r and v.gradient_index is not None]
        for r in range(step.rounds)
    ]
    if step.settings.gradients_scope == "step":  # at the last visit of a unit, of which a tied one has two
        rounds = [_first_of_each(rounds[-1][::-1])[::-1]]
    for leaving in rounds:
        counts.update((False, arrivals) for arrivals in _staggered(leaving, nodes))
    return counts


class _Task:
    """Homes as nodes of the schedule, of which a machine may have several; what they cost; which are allowed.

    Attributes:
        machine_of: of every node.
        rates: bytes per second of every machine's link.
        sizes: bytes of every unit on its way, as gradients and as weights.
        kept: bytes at home of every unit, all stripes together; in the host's memory where all homes are there.
        limits: bytes at home of every device, or of its share of the host: as many as with homes in turn, or what a
            limit of memory leaves.
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
        # Devices with links of their own send their stripes at the same time; a whole unit leaves over one of them.
        self.rates = [link.node_rate(1 if self.whole else size) for link, size in zip(links, sizes, strict=True)]
        self.full_duplex = [link.full_duplex for link in links]
        weights, gradients = far_widths(step.settings, widths)
        self.sizes = tuple([home.padded * width for home in homes] for width in (gradients, weights))
        level = step.settings.host_homes
        all_in_host = level == "all"  # devices keep nothing, and hosts have room for some units only
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
        if all_in_host and request.has_host:  # 0 bytes of a host are not known
            self.limits += max(0, request.machine.host_bytes - needs.host) / max(request.machine.nodes)
        elif request.absent:
            besides = needs.device - (self.limits.max() if all_in_host else needs.parts["homes"])
            self.limits = np.maximum(0, request.memory_bytes - besides - np.array(request.absent, float))
        else:
            self.limits += max(0, request.memory_bytes - needs.device)

    def link_of(self, exchange: _Exchange, node: int, home: int) -> tuple[int, int] | None:
        """The machines that send and receive; None if there is nothing to send between machines."""
        here, there = self.machine_of[home], self.machine_of[node]
        if here == there:
            return None
        return (here, there) if exchange.weights else (there, here)

    def busiest(self, exchange: _Exchange, homes: Sequence[int]) -> float:
        """Seconds of one exchange; units without a home (-1) are left out."""
        loads = [[0.0, 0.0] for _ in self.rates]
        for node, unit in exchange.arrivals:
            link = self.link_of(exchange, node, homes[unit]) if homes[unit] >= 0 else None
            for direction, machine in enumerate(link or ()):
                loads[machine][direction] += self.sizes[exchange.weights][unit] / self.rates[machine]
        return max(max(two) if full else sum(two) for two, full in zip(loads, self.full_duplex, strict=True))

    def seconds(self, homes: Sequence[int]) -> float:
        return sum(exchange.times * self.busiest(exchange, homes) for exchange in self.exchanges)

    def fits(self, homes: Sequence[int]) -> bool:
        return bool((self.device_bytes(homes) <= self.limits * (1 + 1e-9)).all())

    def device_bytes(self, homes: Sequence[int]) -> np.ndarray:
        """Bytes at home, by rank."""
        at_home = np.zeros(self.topology.world_size)
        if self.whole:
            ranks = self.usual if tuple(homes) == self.in_turn else self.spelled(homes)
            np.add.at(at_home, list(ranks), self.kept)
        else:
            for unit, node in enumerate(homes):
                at_home[list(self.topology.nodes[node])] += self.kept[unit] / self.topology.local_size
        return at_home

    def spelled(self, homes: Sequence[int]) -> tuple[int, ...]:
        """The numbers of places. Where a unit lives on one device these are ranks: in a node the largest unit goes
        first, to the one that has most room left.
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
        """Loads that one look at all moves adds up."""
        return self.topology.num_nodes * sum(len(exchange.arrivals) ** 2 for exchange in self.exchanges)

    @cached_property
    def room(self) -> list[float]:
        """Bytes at home on every node, of whose devices each keeps as much as the others unless units are whole."""
        of_nodes = [self.limits[list(node)] for node in self.topology.nodes]
        return [float(some.sum() if self.whole else some.min() * len(some)) for some in of_nodes]

    def by_memory(self) -> tuple[int, ...]:
        """The largest unit first, to the node that has most room left."""
        left, homes = list(self.room), [0] * len(self.kept)
        for unit in np.argsort(-self.kept, kind="stable"):
            homes[unit] = max(range(len(left)), key=lambda node: left[node])
            left[homes[unit]] -= self.kept[unit]
        return tuple(homes)

    def one_by_one(self) -> tuple[int, ...]:
        """In turn from the node with which that is best; then the moves of one unit each that gain something."""
        nodes = self.topology.num_nodes
        turns = [tuple((home + first) % nodes for home in self.in_turn) for first in range(nodes)]
        homes = list(min((homes for homes in turns if self.fits(homes)), key=self.seconds, default=self.by_memory()))
        kept = np.bincount(homes, weights=self.kept, minlength=nodes)
        of_unit = [
            [exchange for exchange in self.exchanges if any(u == unit for _, u in exchange.arrivals)]
            for unit in range(len(homes))
        ]

        def seconds(unit: int, node: int) -> float:
            before, homes[unit] = homes[unit], node
            waiting = sum(exchange.times * self.busiest(exchange, homes) for exchange in of_unit[unit])
            homes[unit] = before
            return waiting

        for _ in range(SWEEPS):
            moved = False
            for unit, size in enumerate(self.kept):
                here = homes[unit]
                there = [n for n in range(nodes) if n == here or kept[n] + size <= self.room[n]]
                costs = {node: seconds(unit, node) for node in there}
                best = min(there, key=lambda node: costs[node])
                if costs[best] < costs[here] * (1 - PRECISION):
                    homes[unit], moved = best, True
                    kept[here] -= size
                    kept[best] += size
            if not moved:
                break
        return tuple(homes)


def _staggered(visits: Sequence[tuple[int, ...]], nodes: int) -> list[tuple[tuple[int, int], ...]]:
    """(node, unit) of every exchange.

    >>> _staggered([(7,), (8,)], 2)
    [((0, 7),), ((0, 8), (1, 7)), ((1, 8),)]
    """
    return [
        tuple((node, unit) for node, index in visits_of_exchange(t, nodes, len(visits)) for unit in visits[index])
        for t in range(number_of_exchanges(nodes, len(visits)))
    ]


def _first_of_each(visits: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    seen: set[int] = set()
    firsts = []
    for units in visits:
        firsts.append(tuple(unit for unit in units if unit not in seen))
        seen |= set(units)
    return firsts
