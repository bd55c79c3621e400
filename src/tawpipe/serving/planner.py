"""Serving, planned: how a model's tokens are had soonest for some users, on one device, on copies of it, or in stages.

A pass takes a block the seconds of its tokens (``PassCost``), and from stage to stage its bytes over a link. Passes of
G groups follow each other through P stages, so that a group's next token comes after

    max(sum of stages + sum of hops, G x the slowest stage or message)

With few groups stages wait for the links; with many a group waits for the others. So the latency of the links says how
many groups there should be, and not the number of stages.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from tawpipe.console import columns
from tawpipe.errors import UserError
from tawpipe.plan.machine.machine import Machine
from tawpipe.schedule.laps import Laps
from tawpipe.schedule.pipelines.layout import Layout
from tawpipe.schedule.spec import ModelSpec
from tawpipe.simulate.cost_model import ID_BYTES
from tawpipe.topology import Topology

GROUPS = 4
"""Groups for each stage, at most, that a plan tries."""
CHUNKS = tuple(2**n for n in range(13))
"""Tokens of a prompt that may ride on a pass."""
LONGER = 2.0
"""Times as long as without it that a pass with a chunk may take: all users of its group wait for it."""
SIMPLER = 1.05
"""Times as long as the least that a token may take where that needs fewer stages."""
HAND_S = 7e-4
"""Seconds of a hop besides the link's: threads that wake one after the other, and the calls of a transfer. Measured on
CPUs (benchmarks/results/README.md#serving-serving)."""
ROOMS = 4
"""Passes for which a process has room besides caches, for each group: what comes, what goes, and what it computes."""


TOLD = ("kind", "replicas", "groups", "slots", "chunk", "token_s", "first_s", "tokens_per_s", "memory_bytes", "fits")
"""What ``--json`` says of a way besides its stages."""


@dataclass(frozen=True)
class PassCost:
    """Seconds of a block on a pass.

    Args:
        points: (tokens, seconds), ascending; between them and behind the last two seconds grow evenly. With few tokens
            they are those of reading the weights.
        key_s: for each token whose keys and values are read besides.
    """

    points: tuple[tuple[float, float], ...] = ((0.0, 0.0),)
    key_s: float = 0.0

    def seconds(self, tokens: float, keys: float = 0.0) -> float:
        """
        >>> PassCost(((1, 2.0), (8, 2.0), (16, 4.0))).seconds(4), PassCost(((1, 2.0), (9, 4.0))).seconds(13)
        (2.0, 5.0)
        """
        if not tokens:
            return 0.0
        places, seconds = zip(*self.points, strict=True)
        taken = float(np.interp(tokens, places, seconds))
        if tokens > places[-1] and len(places) > 1:
            slope = (seconds[-1] - seconds[-2]) / (places[-1] - places[-2])
            taken += max(0.0, slope) * (tokens - places[-1])
        return taken + self.key_s * keys


@dataclass(frozen=True)
class ServeRequest:
    """A model to be served, and on what.

    Args:
        costs: of every block.
        users: whose tokens come at the same time.
        context: tokens of a user's prompt and answer.
        boundary_bytes: of a token between two stages.
        key_bytes: of a layer's keys and values of a token.
        weight_bytes: of an element of each unit; 2 where it is empty.
        memory_bytes: of a device; 0 for no limit.
        system_bytes: of a device that the driver and libraries take, or of a process.
        source: of ``costs``, in words.
        why_not_staged: the reason why its layers cannot be on other devices than the embedding; mostly empty.
        hand_s: of a hop besides the link's; 0 for the formula alone.
    """

    model: ModelSpec
    costs: tuple[PassCost, ...]
    machine: Machine
    users: int
    context: int
    boundary_bytes: float
    key_bytes: float
    weight_bytes: tuple[float, ...] = ()
    memory_bytes: int = 0
    system_bytes: int = 0
    source: str = ""
    why_not_staged: str = ""
    hand_s: float = 0.0

    def __post_init__(self) -> None:
        for name, least in (("users", 1), ("context", 2)):
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                raise UserError(f"--{name}", value, f"a whole number from {least}")

    def link_of(self, source: int, target: int) -> tuple[float, float]:
        """(seconds for a byte, seconds besides) from one rank to another."""
        topology, machine = self.machine.topology, self.machine
        ends = {topology.node_of(source), topology.node_of(target)}
        between = [machine.between_of.get(node, machine.between) for node in ends]
        links = between if len(ends) > 1 else [machine.inside]
        return max(1 / link.bytes_per_s for link in links), self.hand_s + max(link.latency_s for link in links)


def fullest_bytes(model: ModelSpec, stages: Layout, weight_bytes: Sequence[float], cache_bytes: float) -> float:
    """Weights, and keys and values, of the stage that has most of both.

    Args:
        weight_bytes: of an element of each unit.
        cache_bytes: of a layer.
    """
    homes, most = Laps(stages).place(model, Topology.grid(stages.stages, 1)), 0.0
    for rank in range(stages.stages):
        widths = zip(homes, weight_bytes, strict=True)
        weights = sum(home.padded * width for home, width in widths if home.index(rank) is not None)
        layers = sum(model.blocks[block].kind == "layer" for block in stages.blocks_of(rank))
        most = max(most, weights + layers * cache_bytes)
    return most


def lap_seconds(stages: Sequence[float], messages: Sequence[float], latencies: Sequence[float], groups: int) -> float:
    """Seconds after which a group passes again: those of a token.

    Args:
        stages: seconds of each.
        messages: seconds that each message holds its link, the last of them with the drawn tokens.
        latencies: of each message besides.

    >>> lap_seconds([0.01] * 4, [0.0] * 4, [0.005] * 4, 6), lap_seconds([0.01] * 4, [0.0] * 4, [0.005] * 4, 8)
    (0.06, 0.08)
    """
    return max(sum((*stages, *messages, *latencies)), groups * max((*stages, *messages)))


@dataclass(frozen=True)
class ServeWay:
    """A way to serve: ``replicas`` pipelines side by side, each of ``stages.stages`` devices.

    Args:
        slots: of each group.
        chunk: tokens of a prompt that ride on a pass.
    """

    request: ServeRequest = field(repr=False)
    replicas: int
    stages: Layout
    groups: int
    slots: int
    chunk: int = 0

    def stage_seconds(self, chunk: int = 0) -> list[float]:
        """Seconds of each stage on a pass of a whole group, and a chunk; contexts are full."""
        request, blocks = self.request, self.request.model.blocks
        keys = (self.slots + chunk) * request.context

        def of(block: int) -> float:
            rows = self.slots + (chunk if blocks[block].kind != "head" else 0)
            return request.costs[block].seconds(rows, keys if blocks[block].kind == "layer" else 0)

        return [sum(map(of, self.stages.blocks_of(stage))) for stage in range(self.stages.stages)]

    def hops(self, chunk: int = 0) -> tuple[list[float], list[float]]:
        """Seconds for which messages hold their links, and latencies, round the stages of the slowest pipeline."""
        size, request = self.stages.stages, self.request
        if size == 1:
            return [0.0], [0.0]
        amounts = [(self.slots + chunk) * request.boundary_bytes] * (size - 1) + [self.slots * ID_BYTES]
        rounds = []
        for first in range(0, self.replicas * size, size):
            links = [request.link_of(first + place, first + (place + 1) % size) for place in range(size)]
            held = [amount * per_byte for amount, (per_byte, _) in zip(amounts, links, strict=True)]
            rounds.append((held, [latency for _, latency in links]))
        return max(rounds, key=lambda of: sum(of[0]) + sum(of[1]))

    @cached_property
    def token_s(self) -> float:
        """Seconds from one token of a user to the next."""
        return lap_seconds(self.stage_seconds(), *self.hops(), self.groups)

    @cached_property
    def first_s(self) -> float:
        """Seconds from when the first chunk of a prompt as long as the context begins to its first token, while every
        pass has a chunk: on the mean, whichever group it begins with. Chunks follow each other from pass to pass, and
        the last one goes through all stages; behind the first stage it waits for a slower one, as those before it do.
        """
        times, (held, latencies) = self.stage_seconds(self.chunk), self.hops(self.chunk)
        lap = lap_seconds(times, held, latencies, self.groups)
        through = sum((*times, *held, *latencies)) if times[0] == max((*times, *held)) else lap
        return through + (-(-self.request.context // max(1, self.chunk)) - 1) * lap / self.groups

    @property
    def tokens_per_s(self) -> float:
        """Of all users."""
        return self.request.users / self.token_s

    @cached_property
    def memory_bytes(self) -> int:
        """Of the fullest device: weights, caches of all its slots, and rooms of passes."""
        request, room = self.request, self.groups * self.slots * self.request.context
        rooms = ROOMS * self.groups * (self.slots + self.chunk) * request.boundary_bytes
        widths = request.weight_bytes or (2.0,) * len(request.model.units)
        held = fullest_bytes(request.model, self.stages, widths, room * request.key_bytes)
        return math.ceil(held + rooms) + request.system_bytes

    @property
    def fits(self) -> bool:
        return not self.request.memory_bytes or self.memory_bytes <= self.request.memory_bytes

    @property
    def kind(self) -> str:
        """One of ``one machine``, ``replicas`` and ``pipeline``."""
        return "pipeline" if self.stages.stages > 1 else "replicas" if self.replicas > 1 else "one machine"


def best_chunk(way: ServeWay) -> int:
    """The largest chunk with which no stage takes more than ``LONGER`` times as long, at most the context."""
    usual = max((*way.stage_seconds(), *way.hops()[0]))
    sizes = [size for size in CHUNKS if size <= way.request.context]
    fitting = [size for size in sizes if max((*way.stage_seconds(size), *way.hops(size)[0])) <= LONGER * usual]
    return max(fitting, default=1)


def ways(request: ServeRequest) -> Iterator[ServeWay]:
    """Of every number of replicas and stages the fastest number of groups, the fewest of those that are as fast; those
    that fit if any does.
    """
    world, blocks = request.machine.world_size, len(request.model.blocks)
    shapes = [(1, 1), *((world // size, size) for size in range(1, world + 1) if world % size == 0)]
    for replicas, size in dict.fromkeys(shapes):
        if size > request.model.num_layers or (size > 1 and request.why_not_staged):
            continue
        users, stages = -(-request.users // replicas), Layout.even(blocks, size)
        groups = range(1, min(users, GROUPS * size if size > 1 else 1) + 1)
        bare = [ServeWay(request, replicas, stages, number, -(-users // number)) for number in groups]
        tried = [replace(way, chunk=best_chunk(way)) for way in bare]
        fitting = [way for way in tried if way.fits] or tried
        least = min(way.token_s for way in fitting)
        yield next(way for way in fitting if way.token_s <= least * (1 + 1e-9))


@dataclass(frozen=True)
class ServePlan:
    """The ways to serve, and the one to take."""

    request: ServeRequest

    @cached_property
    def ways(self) -> tuple[ServeWay, ...]:
        return tuple(ways(self.request))

    @cached_property
    def chosen(self) -> ServeWay | None:
        """Of the ways that are nearly as fast as the fastest that with the fewest stages; None if none fits."""
        fitting = [way for way in self.ways if way.fits]
        least = min((way.token_s for way in fitting), default=0.0)
        good = [way for way in fitting if way.token_s <= SIMPLER * least]
        return min(good, key=lambda way: (way.stages.stages, way.replicas), default=None)

    @property
    def reason(self) -> str:
        """The verdict in a sentence or two."""
        way, request = self.chosen, self.request
        if way is None:
            least = min(self.ways, key=lambda way: way.memory_bytes)
            return (
                f"nothing fits: {request.users} users with {request.context:,} tokens need "
                f"{least.memory_bytes / 2**30:.1f} GiB of a device in {least.stages.stages} stages; fewer users, a "
                "shorter context, or more devices"
            )
        if way.kind == "one machine":
            return "one machine: the model and its users fit one device, where vLLM or llama.cpp is faster"
        if way.kind == "replicas":
            return f"replicas: one copy on each of {way.replicas} devices; vLLM on each, behind a load balancer"
        copies = f", {way.replicas} of them in parallel" if way.replicas > 1 else ""
        smaller = any(other.fits for other in self.ways if other.stages.stages < way.stages.stages)
        why = "its tokens come sooner than with fewer stages" if smaller else "it does not fit fewer devices"
        return f"pipeline: {way.stages.stages} stages{copies}: {why}"

    def table(self) -> Iterator[str]:
        """A line for every way."""
        rows = [("way", "stages", "groups", "slots", "chunk", "token", "first token", "tokens/s", "memory")]
        for way in self.ways:
            memory = f"{way.memory_bytes / 2**30:.1f} GiB" + ("" if way.fits else ", too much")
            name = f"{way.kind}, {way.replicas}" if way.replicas > 1 else way.kind
            numbers = f"{way.stages.stages}", f"{way.groups}", f"{way.slots}", f"{way.chunk}"
            times = f"{1e3 * way.token_s:.1f} ms", f"{way.first_s:.2f} s", f"{way.tokens_per_s:,.0f}"
            rows.append((name, *numbers, *times, memory))
        return columns(rows)

    def spelled_out(self) -> dict:
        """Plain data, for ``--json``."""
        ways = [
            {name: getattr(way, name) for name in TOLD} | {"stages": way.stages.stages, "chosen": way == self.chosen}
            for way in self.ways
        ]
        asked = {"users": self.request.users, "context": self.request.context, "costs": self.request.source}
        return {**asked, "verdict": self.chosen.kind if self.chosen else "none", "reason": self.reason, "ways": ways}
