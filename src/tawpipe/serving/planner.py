"""Plan of a service: the layout with the least time per token for a number of users, on one device, copies or stages.

The time of a pass in a block follows from its number of tokens (``PassCost``). Between stages, its bytes cross a link.
Passes of G groups follow each other through P stages. The time from a group's token to its next one is

    max(sum of stages + sum of hops, G x the slowest stage or message)

With few groups, stages wait for the links. With many groups, a group waits for the other groups. So the latency of the
links determines the best number of groups, and the number of stages does not.
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
from tawpipe.schedule.decode_steps import DecodeSteps
from tawpipe.schedule.pipelines.layout import Layout
from tawpipe.schedule.spec import ModelSpec
from tawpipe.simulate.cost_model import ID_BYTES
from tawpipe.topology import Topology

GROUPS = 4
"""Maximum number of groups per stage that a plan tries."""
CHUNKS = tuple(2**n for n in range(13))
"""Numbers of prompt tokens in a pass that a plan tries."""
LONGER = 2.0
"""Maximum factor by which a chunk of a prompt may lengthen a pass, for which all users of its group wait."""
SIMPLER = 1.05
"""A layout with fewer stages is preferred if its time per token is at most the least time multiplied by this."""
HAND_S = 7e-4
"""Seconds of a hop in addition to the link's: threads that wake one after another, and the calls of a transfer.
Measured on CPUs (benchmarks/results/README.md#serving-serving)."""
PASS_BUFFERS = 4
"""Buffers for a pass in each process, for each group, in addition to KV caches: received, sent and computed data."""


TOLD = ("kind", "replicas", "groups", "slots", "chunk", "token_s", "first_s", "tokens_per_s", "memory_bytes", "fits")
"""Attributes of a layout that ``--json`` prints, in addition to its stages."""


@dataclass(frozen=True)
class PassCost:
    """Seconds that a block takes for a pass.

    Args:
        points: (tokens, seconds), in ascending order. Between two points, and beyond the last two, seconds are
            interpolated linearly. For few tokens they are the time to read the weights.
        key_s: additional seconds for each token whose keys and values are read.
    """

    points: tuple[tuple[float, float], ...] = ((0.0, 0.0),)
    key_s: float = 0.0

    def seconds(self, tokens: float, keys: float = 0.0) -> float:
        """Return the seconds for a pass of ``tokens`` tokens that reads the keys and values of ``keys`` tokens.

        An empty pass takes 0 seconds.

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
    """Model to serve, its users, and the machine.

    Args:
        model: sizes of the model's blocks and units.
        costs: costs of every block.
        machine: devices and links.
        users: number of users whose tokens are computed at the same time.
        context: tokens of a user's prompt and answer together.
        boundary_bytes: bytes of one token's hidden states between two stages.
        key_bytes: bytes of one token's keys and values in one layer.
        weight_bytes: bytes per element of each unit; 2 if empty.
        memory_bytes: memory of a device in bytes; 0 for no limit.
        system_bytes: bytes of a device, or of a process, that driver and libraries need.
        source: description of the origin of ``costs``.
        why_not_staged: reason why layers cannot be on other devices than the embedding; mostly empty.
        hand_s: seconds of a hop in addition to the link's; 0 for the formula alone.
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
        """Return (seconds per byte, latency in seconds per message) from rank ``source`` to rank ``target``.

        The latency includes ``hand_s``. If the ranks are in two nodes, the slower of the nodes' links counts."""
        topology, machine = self.machine.topology, self.machine
        ends = {topology.node_of(source), topology.node_of(target)}
        between = [machine.between_of.get(node, machine.between) for node in ends]
        links = between if len(ends) > 1 else [machine.inside]
        return max(1 / link.bytes_per_s for link in links), self.hand_s + max(link.latency_s for link in links)


def fullest_bytes(model: ModelSpec, stages: Layout, weight_bytes: Sequence[float], cache_bytes: float) -> float:
    """Return the bytes of weights, keys and values on the stage that needs the most memory.

    Args:
        model: sizes of the model's blocks and units.
        stages: blocks of each stage.
        weight_bytes: bytes per element of each unit.
        cache_bytes: bytes of the keys and values of one layer.
    """
    homes, most = DecodeSteps(stages).place(model, Topology.grid(stages.stages, 1)), 0.0
    for rank in range(stages.stages):
        widths = zip(homes, weight_bytes, strict=True)
        weights = sum(home.padded * width for home, width in widths if home.index(rank) is not None)
        layers = sum(model.blocks[block].kind == "layer" for block in stages.blocks_of(rank))
        most = max(most, weights + layers * cache_bytes)
    return most


def decode_step_seconds(
    stages: Sequence[float], messages: Sequence[float], latencies: Sequence[float], groups: int
) -> float:
    """Return the seconds from one pass of a group to its next pass, which is the time between two tokens of a user.

    Args:
        stages: seconds that each stage computes.
        messages: seconds that each message occupies its link. The last message holds the drawn tokens.
        latencies: further seconds of each message.
        groups: number of groups.

    >>> [decode_step_seconds([0.01] * 4, [0.0] * 4, [0.005] * 4, groups) for groups in (6, 8)]
    [0.06, 0.08]
    """
    return max(sum((*stages, *messages, *latencies)), groups * max((*stages, *messages)))


@dataclass(frozen=True)
class ServeWay:
    """Layout of a service: ``replicas`` pipelines side by side, each with ``stages.stages`` devices.

    Args:
        request: model, users and machine.
        replicas: number of pipelines.
        stages: blocks of each stage.
        groups: groups of users in each pipeline.
        slots: KV-cache slots of each group.
        chunk: prompt tokens in one pass.
    """

    request: ServeRequest = field(repr=False)
    replicas: int
    stages: Layout
    groups: int
    slots: int
    chunk: int = 0

    def stage_seconds(self, chunk: int = 0) -> list[float]:
        """Return the seconds of each stage for a pass with one token per slot of a group and ``chunk`` prompt tokens.

        All contexts are assumed to be full.
        """
        request, blocks = self.request, self.request.model.blocks
        keys = (self.slots + chunk) * request.context

        def of(block: int) -> float:
            rows = self.slots + (chunk if blocks[block].kind != "head" else 0)
            return request.costs[block].seconds(rows, keys if blocks[block].kind == "layer" else 0)

        return [sum(map(of, self.stages.blocks_of(stage))) for stage in range(self.stages.stages)]

    def hops(self, chunk: int = 0) -> tuple[list[float], list[float]]:
        """Return seconds that each message occupies its link, and latency of each message, in the slowest pipeline.

        The last message goes from the last stage back to the first one. Both lists are [0.0] for a single stage.

        Args:
            chunk: prompt tokens in a pass.
        """
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
        return decode_step_seconds(self.stage_seconds(), *self.hops(), self.groups)

    @cached_property
    def first_s(self) -> float:
        """Mean seconds from the first chunk of a prompt to the first token of its answer, while every pass has a chunk.

        The prompt is as long as the context. The mean is over the groups in which it can begin. Its chunks follow each
        other from pass to pass, and the last one goes through all stages. If a later stage is slower than the first
        one, the last chunk waits for that stage, as all earlier chunks do.
        """
        times, (held, latencies) = self.stage_seconds(self.chunk), self.hops(self.chunk)
        decode_step_s = decode_step_seconds(times, held, latencies, self.groups)
        through = sum((*times, *held, *latencies)) if times[0] == max((*times, *held)) else decode_step_s
        return through + (-(-self.request.context // max(1, self.chunk)) - 1) * decode_step_s / self.groups

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of all users together."""
        return self.request.users / self.token_s

    @cached_property
    def memory_bytes(self) -> int:
        """Bytes on the device that needs the most memory: weights, all KV caches, buffers of passes, and the system."""
        request, cache_tokens = self.request, self.groups * self.slots * self.request.context
        buffer_bytes = PASS_BUFFERS * self.groups * (self.slots + self.chunk) * request.boundary_bytes
        widths = request.weight_bytes or (2.0,) * len(request.model.units)
        held = fullest_bytes(request.model, self.stages, widths, cache_tokens * request.key_bytes)
        return math.ceil(held + buffer_bytes) + request.system_bytes

    @property
    def fits(self) -> bool:
        """True if every device has enough memory."""
        return not self.request.memory_bytes or self.memory_bytes <= self.request.memory_bytes

    @property
    def kind(self) -> str:
        """Name of the layout: ``one machine``, ``replicas`` or ``pipeline``."""
        return "pipeline" if self.stages.stages > 1 else "replicas" if self.replicas > 1 else "one machine"


def best_chunk(way: ServeWay) -> int:
    """Return the largest number of prompt tokens per pass that lengthens passes by at most ``LONGER`` times.

    The slowest stage or message with the chunk is compared with the slowest one without it. The result is at least 1
    and at most the context.
    """
    usual = max((*way.stage_seconds(), *way.hops()[0]))
    sizes = [size for size in CHUNKS if size <= way.request.context]
    fitting = [size for size in sizes if max((*way.stage_seconds(size), *way.hops(size)[0])) <= LONGER * usual]
    return max(fitting, default=1)


def ways(request: ServeRequest) -> Iterator[ServeWay]:
    """Yield the best layout for every number of replicas and stages in turn.

    A number of stages is left out if it exceeds the number of layers, or if the model cannot be split into stages. Best
    is the layout with the least time per token among those that fit in memory, or among all if none fits. Of equally
    fast layouts it is the one with the fewest groups."""
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
    """Layouts of a service, and the best of them.

    Args:
        request: model, users and machine.
    """

    request: ServeRequest

    @cached_property
    def ways(self) -> tuple[ServeWay, ...]:
        """Best layout for every number of replicas and stages."""
        return tuple(ways(self.request))

    @cached_property
    def chosen(self) -> ServeWay | None:
        """Layout with the fewest stages among those with nearly the least time per token; None if none fits."""
        fitting = [way for way in self.ways if way.fits]
        least = min((way.token_s for way in fitting), default=0.0)
        good = [way for way in fitting if way.token_s <= SIMPLER * least]
        return min(good, key=lambda way: (way.stages.stages, way.replicas), default=None)

    @property
    def reason(self) -> str:
        """Verdict of the plan in one or two sentences, for the user."""
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
        """Yield the lines of a table with one row per layout: the heading, then ``ways`` in their order."""
        rows = [("way", "stages", "groups", "slots", "chunk", "token", "first token", "tokens/s", "memory")]
        for way in self.ways:
            memory = f"{way.memory_bytes / 2**30:.1f} GiB" + ("" if way.fits else ", too much")
            name = f"{way.kind}, {way.replicas}" if way.replicas > 1 else way.kind
            numbers = f"{way.stages.stages}", f"{way.groups}", f"{way.slots}", f"{way.chunk}"
            times = f"{1e3 * way.token_s:.1f} ms", f"{way.first_s:.2f} s", f"{way.tokens_per_s:,.0f}"
            rows.append((name, *numbers, *times, memory))
        return columns(rows)

    def spelled_out(self) -> dict:
        """Return the request, the verdict and all layouts as a dict of plain values, for ``--json``."""
        ways = [
            {name: getattr(way, name) for name in TOLD} | {"stages": way.stages.stages, "chosen": way == self.chosen}
            for way in self.ways
        ]
        asked = {"users": self.request.users, "context": self.request.context, "costs": self.request.source}
        return {**asked, "verdict": self.chosen.kind if self.chosen else "none", "reason": self.reason, "ways": ways}
