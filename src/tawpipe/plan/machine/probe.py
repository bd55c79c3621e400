"""Measures the links of the processes that are there.

Messages go between pairs of ranks, every rank in at most one pair at a time, so that pairs do not disturb each other
unless that is the request. What is asked, in a few seconds altogether:

* inside a node: latency and rate of a pair alone, both ways at once, and of all pairs of the node at once;
* between nodes: the same, for every node with some others in turn; a node's rate is that of its best partner, so that
  one slow node does not make its partners look slow;
* under NCCL the collectives that strategies use, in groups like theirs, and what a communicator takes of a GPU;
* to the host: copies between a GPU and pinned memory;
* of devices: how fast each multiplies matrices, where there are GPUs or several kinds of devices;
* to a disk, where a folder is named: a file that is written and read.
"""

from __future__ import annotations

import math
import os
import platform
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from tawpipe.errors import UserError
from tawpipe.plan.machine.devices import Device
from tawpipe.plan.machine.machine import Machine
from tawpipe.plan.machine.speeds import kind_of, speeds_measured, timed
from tawpipe.runtime.homes.host_memory import free_memory, is_the_hosts
from tawpipe.runtime.memory import taken_outside_torch
from tawpipe.runtime.transport.transport import NEAR_BLOCKS, far_blocks, make_group, uses_nccl
from tawpipe.runtime.world import World
from tawpipe.simulate import LinkModel

ROUNDS = 6
"""Every node is measured with at most so many others."""
TRIAL_BYTES = 1 << 18
LARGEST_BYTES = 1 << 26
LARGEST_CUDA_BYTES, MOST_TIMES, COPIED_BYTES = 1 << 28, 10, 1 << 27
"""On a GPU messages are large, and sent several times in a row: one is over before the host has looked."""
SECONDS = 0.15
LOOPBACK_SECONDS = 0.03
"""Seconds that a measurement of a rate should take; and that of a loopback, which is as fast as processors are free."""
SHARED_BELOW = 0.7
"""A link is shared if pairs that are busy together get less than this share of what one gets alone."""
ODD = 1.5
"""A rate that is so many times below the median is named."""

BOOT, NETWORK = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/net")
"""A word for this start of this machine, and the network stack of this process on it."""

Pair = tuple[int, int]


@dataclass(frozen=True)
class Rates:
    """Rates of one node's link to others, bytes per second."""

    sent: float
    received: float
    latency_s: float


@dataclass(frozen=True)
class Probe:
    """The result of the measurements.

    Args:
        rates: of every node's link, empty for one node.
        findings: what is odd, in sentences. Nothing is where all messages take a loopback, which is as fast as the
            processors are free.
        loopback: a sentence on nodes that are on one machine; mostly empty.
    """

    machine: Machine
    rates: tuple[Rates, ...]
    findings: tuple[str, ...]
    loopback: str = ""


def probe(world: World) -> Probe:
    """Measure; call on all ranks, which get the same plan."""
    ruler = _Ruler(world)
    nodes = world.nodes.nodes
    inside, inside_notes = _inside(ruler, nodes)
    between, of, rates, notes = _between(ruler, nodes)
    host, known = host_link(world), machine_unprobed(world)
    machine = replace(known, between=between, inside=inside, between_of=of, host=host)
    if uses_nccl(world.device) and world.size > 1:
        machine = with_collectives(machine, world)
    machine, slow = speeds_measured(machine, world)
    apart, words = loopback(world.gather_texts(network_stack()), nodes)
    return Probe(machine, rates, (*inside_notes, *notes, *slow) if apart else (), words)


def network_stack() -> str:
    """A word that differs between processes whose messages to each other leave their machine, or their container."""
    try:
        return f"{BOOT.read_text().strip()} {NETWORK.readlink()}"
    except OSError:  # not Linux
        return platform.node()


def loopback(stacks: Sequence[str], nodes: Sequence[Sequence[int]]) -> tuple[bool, str]:
    """Whether there is a network between any nodes, or just one node; and a sentence on nodes between which is none.

    >>> loopback(["a", "a", "b"], [[0], [1], [2]])
    (True, 'nodes 0 and 1 are on one machine: their link is the loopback, not a network')

    Args:
        stacks: of every rank.
    """
    at: dict[str, list[int]] = {}
    for number, node in enumerate(nodes):
        at.setdefault(stacks[node[0]], []).append(number)
    words = [
        (
            f"nodes {', '.join(map(str, some[:-1]))} and {some[-1]} are on one machine: their link is the "
            "loopback, not a network"
        )
        for some in at.values()
        if len(some) > 1
    ]
    return len(at) > 1 or len(nodes) == 1, "; ".join(words)


def tournament(count: int, rounds: int) -> Iterator[list[Pair]]:
    """Rounds in which everybody meets another one, nobody twice (the circle method); at most ``rounds`` of them.

    >>> [sorted(pairs) for pairs in tournament(4, 9)]
    [[(0, 3), (1, 2)], [(0, 2), (1, 3)], [(0, 1), (2, 3)]]
    """
    places = [*range(count), *([-1] if count % 2 else [])]
    for _ in range(min(rounds, len(places) - 1)):
        half = len(places) // 2
        pairs = zip(places[:half], reversed(places[half:]), strict=True)
        yield [(min(a, b), max(a, b)) for a, b in pairs if min(a, b) >= 0]
        places = [places[0], places[-1], *places[1:-1]]


class _Ruler:
    """Times messages between pairs of ranks."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._buffers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        loopback = world.device.type == "cpu" and world.machines.num_nodes == 1
        self._seconds, self._on_cuda = LOOPBACK_SECONDS if loopback else SECONDS, world.device.type == "cuda"

    def latency(self, pairs: Sequence[Pair], times: int = 20) -> list[float]:
        """Seconds of a message of a few bytes one way, of every pair."""
        return self._all(pairs, lambda first, peer: self._ping(first, peer, times) / times / 2)

    def rate(self, pairs: Sequence[Pair], *, forth: bool, back: bool) -> list[float]:
        """Bytes per second in one direction, of every pair, all pairs at once."""
        trial = self._all(pairs, lambda first, peer: self._stream(first, peer, TRIAL_BYTES, forth, back))
        slowest = max(trial, default=1e-9)
        most = LARGEST_CUDA_BYTES if self._on_cuda else LARGEST_BYTES
        wanted = TRIAL_BYTES * self._seconds / max(slowest, 1e-9)
        size = int(self.world.gather_numbers(float(min(most, max(TRIAL_BYTES, int(wanted)))))[0])
        times = MOST_TIMES if self._on_cuda and size == most else 1
        seconds = self._all(pairs, lambda first, peer: self._stream(first, peer, size, forth, back, times))
        return [size / max(taken, 1e-9) for taken in seconds]

    def _all(self, pairs: Sequence[Pair], run: Callable[[bool, int], float]) -> list[float]:
        """``run`` on both ranks of every pair; the seconds of the slower one, of every pair, on all ranks."""
        mine = next((pair for pair in pairs if self.world.rank in pair), None)
        taken = 0.0
        self.world.barrier()
        if mine is not None:
            first = self.world.rank == mine[0]
            taken = run(first, mine[1] if first else mine[0])
        everyone = self.world.gather_numbers(taken)
        return [max(everyone[a], everyone[b]) for a, b in pairs]

    def _ping(self, first: bool, peer: int, times: int) -> float:
        message = torch.zeros(1, device=self.world.device)
        for counts in (False, True):
            begin = time.perf_counter()
            for _ in range(times if counts else 2):
                for sends in (first, not first):
                    (dist.send if sends else dist.recv)(message, peer)
            self._wait()
        return time.perf_counter() - begin

    def _stream(self, first: bool, peer: int, size: int, forth: bool, back: bool, times: int = 1) -> float:
        sent, received = self._room(size)
        sends, receives = (forth, back) if first else (back, forth)

        def exchange(count: int) -> None:
            operations = [dist.P2POp(dist.isend, sent[:count], peer)] if sends else []
            operations += [dist.P2POp(dist.irecv, received[:count], peer)] if receives else []
            for work in dist.batch_isend_irecv(operations):
                work.wait()

        timed(lambda: exchange(TRIAL_BYTES // 4), self.world.device)  # opens the connection
        return timed(lambda: exchange(size), self.world.device, times)

    def _room(self, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        if size not in self._buffers:
            self._buffers = {size: tuple(torch.ones(size, dtype=torch.uint8, device=self.world.device) for _ in "ab")}  # type: ignore[dict-item]
        return self._buffers[size]

    def _wait(self) -> None:
        if self.world.device.type == "cuda":
            torch.cuda.synchronize(self.world.device)


def with_collectives(machine: Machine, world: World) -> Machine:
    """The machine with the rates that gathers reach which all groups of a kind do at once, where these are below those
    of pairs, and with what a communicator takes. Call on all ranks.
    """
    topology, taken = world.topology, 0
    if topology.local_size > 1:
        rate, taken = collective(world, topology.nodes, NEAR_BLOCKS, "node")
        machine = replace(machine, inside=replace(machine.inside, bytes_per_s=min(machine.inside.bytes_per_s, rate)))
    if topology.num_nodes > 1:
        rails = [topology.rail(i) for i in range(topology.local_size)]
        rate, more = collective(world, rails, far_blocks(machine.far_share), "rail")
        slower, taken = min(1.0, rate / machine.far_share), max(taken, more)
        machine = replace(
            machine,
            between=replace(machine.between, bytes_per_s=slower * machine.between.bytes_per_s),
            between_of={
                n: replace(link, bytes_per_s=slower * link.bytes_per_s) for n, link in machine.between_of.items()
            },
        )
    takes = lambda device: replace(device, communicator_bytes=taken)  # noqa: E731
    return replace(machine, device=takes(machine.device), device_of=tuple(map(takes, machine.device_of)))


def collective(world: World, every: Sequence[Sequence[int]], blocks: int, name: str) -> tuple[float, int]:
    """Bytes per second that a device sends in gathers of some groups, made as a run's are, all at once, the slowest;
    and the bytes of a GPU that NCCL takes for one, the most of all ranks.
    """
    device, members = world.device, len(every[0])
    piece = torch.ones(LARGEST_CUDA_BYTES // members, dtype=torch.uint8, device=device)
    together = torch.empty(piece.numel() * members, dtype=torch.uint8, device=device)
    before = taken_outside_torch(device)
    limit = timedelta(minutes=10)
    group = make_group(every, world.rank, device, timeout=limit, blocks=blocks, name=f"probe {name}")

    def gather() -> None:
        work = dist.all_gather_into_tensor(together, piece, group=group, async_op=True)
        assert work is not None
        work.wait()

    once = max(world.gather_numbers(timed(gather, device)))
    taken = taken_outside_torch(device) - before
    times = int(min(MOST_TIMES, max(2, SECONDS / max(once, 1e-6))))
    seconds = max(world.gather_numbers(timed(gather, device, times)))
    dist.destroy_process_group(group)
    return (members - 1) * piece.numel() / max(seconds, 1e-9), int(max(world.gather_numbers(float(max(0, taken)))))


def _inside(ruler: _Ruler, nodes: Sequence[Sequence[int]]) -> tuple[LinkModel, list[str]]:
    """The link between devices of a node: the median of the nodes; those that are slower are named."""
    with_pairs = [node for node in nodes if len(node) > 1]
    if not with_pairs:
        return LinkModel(float("inf")), []
    alone = [(node[0], node[1]) for node in with_pairs]
    latency = statistics.median(ruler.latency(alone))
    one_way = ruler.rate(alone, forth=True, back=False)
    both = statistics.median(ruler.rate(alone, forth=True, back=True))
    together = [(node[i], node[i + 1]) for node in with_pairs for i in range(0, len(node) - 1, 2)]
    several = len(together) > len(alone)
    at_once = statistics.median(ruler.rate(together, forth=True, back=False)) if several else 0.0
    rate = statistics.median(one_way)
    shared = at_once < SHARED_BELOW * rate if several else ruler.world.device.type == "cpu"
    per_node = statistics.median(len(node) // 2 for node in with_pairs)
    notes = [
        f"inside node {nodes.index(node)}: {_gbyte(mine)}, elsewhere {_gbyte(rate)}"
        for node, mine in zip(with_pairs, one_way, strict=True)
        if mine * ODD < rate
    ]
    if shared:  # a message passes such a link once, whichever way it goes
        return LinkModel(max(rate, at_once * per_node), latency, full_duplex=True, shared=True), notes
    return LinkModel(rate, latency, full_duplex=both > SHARED_BELOW * rate, shared=False), notes


def _between(
    ruler: _Ruler, nodes: Sequence[Sequence[int]]
) -> tuple[LinkModel, dict[int, LinkModel], tuple[Rates, ...], list[str]]:
    """The link of every node to the others."""
    count = len(nodes)
    if count == 1:
        return LinkModel(float("inf")), {}, (), []
    sent, received, both = [0.0] * count, [0.0] * count, [0.0] * count
    latency = [float("inf")] * count
    at_once = [0.0] * count
    for met in tournament(count, ROUNDS):
        pairs = [(nodes[a][0], nodes[b][0]) for a, b in met]
        for (a, b), seconds in zip(met, ruler.latency(pairs), strict=True):
            latency[a], latency[b] = min(latency[a], seconds), min(latency[b], seconds)
        for forth in (True, False):
            for (a, b), rate in zip(met, ruler.rate(pairs, forth=forth, back=not forth), strict=True):
                source, target = (a, b) if forth else (b, a)
                sent[source], received[target] = max(sent[source], rate), max(received[target], rate)
        for (a, b), rate in zip(met, ruler.rate(pairs, forth=True, back=True), strict=True):
            both[a], both[b] = max(both[a], rate), max(both[b], rate)
        every = [(x, y) for a, b in met for x, y in zip(nodes[a], nodes[b], strict=False)]
        rates = dict(zip(every, ruler.rate(every, forth=True, back=False), strict=True))
        for a, b in met:
            total = sum(rates[pair] for pair in zip(nodes[a], nodes[b], strict=False))
            at_once[a], at_once[b] = max(at_once[a], total), max(at_once[b], total)
    alone = [min(pair) for pair in zip(sent, received, strict=True)]
    local = statistics.median(map(len, nodes))
    shared = local == 1 or statistics.median(at_once) < max(1.5, 0.5 * local) * statistics.median(alone)
    duplex = statistics.median(both) > SHARED_BELOW * statistics.median(alone)
    rates = [max(single, all_of_them) if shared else single for single, all_of_them in zip(alone, at_once, strict=True)]
    usual, delay = statistics.median(rates), statistics.median(latency)

    def link(rate: float) -> LinkModel:
        return LinkModel(rate, delay, full_duplex=duplex, shared=shared)

    odd = {n: link(rate) for n, rate in enumerate(rates) if not usual / 1.15 < rate < usual * 1.15}
    notes = [
        f"node {n}: link of {_gbit(rate)}, the others have {_gbit(usual)}"
        for n, rate in enumerate(rates)
        if rate * ODD < usual
    ]
    notes += [
        f"node {n} sends {_gbit(out)} and receives {_gbit(into)}: the two directions of its link differ"
        for n, (out, into) in enumerate(zip(sent, received, strict=True))
        if max(out, into) > ODD * min(out, into)
    ]
    notes += [
        f"node {n}: {seconds * 1e6:.0f} us for a small message, the others need {delay * 1e6:.0f} us"
        for n, seconds in enumerate(latency)
        if seconds > 3 * delay
    ]
    measured = tuple(Rates(*of_node) for of_node in zip(sent, received, latency, strict=True))
    return link(usual), odd, measured, notes


def host_link(world: World) -> LinkModel:
    """Between a GPU and its host in each direction, the slowest of the ranks while all of them copy in both: they share
    the host's memory, and homes that are there pass in both at once.
    """
    if world.device.type != "cuda":
        return LinkModel(float("inf"))
    here, there = (
        [torch.empty(COPIED_BYTES, dtype=torch.uint8, device=world.device) for _ in range(2)],
        [torch.empty(COPIED_BYTES, dtype=torch.uint8).pin_memory() for _ in range(2)],
    )
    down, up = torch.cuda.Stream(world.device), torch.cuda.Stream(world.device)
    seconds = 0.0
    for _ in range(2):
        world.barrier()
        torch.cuda.synchronize(world.device)
        begin = time.perf_counter()
        with torch.cuda.stream(down):
            there[0].copy_(here[0], non_blocking=True)
        with torch.cuda.stream(up):
            here[1].copy_(there[1], non_blocking=True)
        torch.cuda.synchronize(world.device)
        seconds = time.perf_counter() - begin
    return LinkModel(COPIED_BYTES / max(world.gather_numbers(seconds)), 1e-5, shared=False)


def probe_files(folder: str, size: int = 1 << 28) -> tuple[LinkModel, int]:
    """The rate of a folder's disk, by a file that is written and read, and the bytes that are free there.

    Raises:
        UserError: no file can be made there.
    """
    piece, count = os.urandom(1 << 22), size >> 22
    try:
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            begin = time.perf_counter()
            for _ in range(count):
                file.write(piece)
            os.fsync(file.fileno())
            if hasattr(os, "posix_fadvise"):  # or it would be read from memory
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            file.seek(0)
            while file.read(len(piece)):
                pass
            seconds = time.perf_counter() - begin
        return LinkModel(2 * count * len(piece) / seconds, full_duplex=False), shutil.disk_usage(folder).free
    except OSError as error:
        expected = f"a folder whose disk can be written to and measured ({error.strerror})"
        raise UserError("schedule.offload_dir", folder, expected) from error


def with_files(machine: Machine, world: World, folder: str) -> Machine:
    """The machine with the slowest and the fullest disk of a folder, measured by one process of every machine. Call on
    all ranks; as it was if some machine's cannot be measured.
    """
    rate, free = math.inf, math.inf
    if world.machines.local_of(world.rank) == 0:
        try:
            link, free = probe_files(folder)
            rate = link.bytes_per_s
        except UserError:  # it comes again, when the files of the run are made
            rate = 0.0
    rate, free = min(world.gather_numbers(rate)), min(world.gather_numbers(free))
    shared = max(len(node) for node in world.machines.nodes) / max(
        machine.nodes
    )  # by nodes that a machine is taken for
    if not rate:
        return machine
    return replace(machine, files=LinkModel(rate / shared, full_duplex=False), files_bytes=int(free / shared))


def machine_unprobed(world: World) -> Machine:
    """Nodes, and the memory of the device, of every kind, and of the node that have the least; links are free. Call on
    all ranks.

    On the CPU a process may use what it has already and its share of what is free on its machine. A host's memory is
    shared by the nodes that a machine is taken for.
    """
    on_machine = len(world.machines.nodes[world.machines.node_of(world.rank)])
    share, host = free_memory() / on_machine, 0
    if world.device.type == "cuda":
        memory = float(torch.cuda.get_device_properties(world.device).total_memory)
        if is_the_hosts(world.device) and share:  # what other processes have is not there
            memory = min(memory, share)
        name, host = torch.cuda.get_device_name(world.device), share * max(map(len, world.nodes.nodes))
    else:
        memory, name = share + resident_memory() if share else 0, "CPU"
    kinds, memories = world.gather_texts(kind_of(world.device)), world.gather_numbers(memory)
    device, device_of = Device(name, int(min(memories))), tuple[Device, ...]()
    if len(set(kinds)) > 1:
        least = {kind: int(min(m for m, other in zip(memories, kinds, strict=True) if other == kind)) for kind in kinds}
        names = world.gather_texts(name)
        device_of = tuple(Device(name, least[kind]) for name, kind in zip(names, kinds, strict=True))
        device = device_of[0]
    free = LinkModel(float("inf"))
    nodes = tuple(map(len, world.nodes.nodes))
    host_bytes = int(min(world.gather_numbers(host)))
    return Machine(nodes, free, free, device=device, host_bytes=host_bytes, device_of=device_of)


def resident_memory() -> int:
    """Bytes of memory that this process holds, shared libraries included; 0 where that is not known."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):  # no Linux
        return 0


def _gbit(rate: float) -> str:
    return f"{rate * 8 / 1e9:.3g} Gbit/s"


def _gbyte(rate: float) -> str:
    return f"{rate / 1e9:.3g} GB/s"
