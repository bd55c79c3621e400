"""Measurement of the links between the processes of a run.

Messages are sent between pairs of ranks. Every rank is in at most one pair at a time, so that pairs do not disturb each
other unless that is measured. Measured are, within a few seconds:

* inside a node: latency and rate of one pair, in one direction and in both, and of all pairs of the node together;
* between nodes: the same values, for every node with some other nodes in turn. A node's rate is the one with its best
  partner, so that a slow node does not make its partners look slow;
* with NCCL: collectives in the groups that strategies use, and the GPU memory of a communicator;
* to the host: copies between a GPU and pinned memory;
* devices: the rate of matrix products, if there are GPUs or several kinds of devices;
* to a disk, if a folder is given: writing and reading a file.
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
"""Most other nodes with which every node is measured."""
TRIAL_BYTES = 1 << 18
LARGEST_BYTES = 1 << 26
LARGEST_CUDA_BYTES, MOST_TIMES, COPIED_BYTES = 1 << 28, 10, 1 << 27
"""Sizes for GPUs: bytes of the largest message, most messages in a row, and bytes copied to and from the host. Messages
are large and sent several times, because a single small one is over before the host notices."""
SECONDS = 0.15
LOOPBACK_SECONDS = 0.03
"""Seconds that one measurement of a rate should take (``SECONDS``), and on a loopback (``LOOPBACK_SECONDS``), whose
rate depends on free CPU cores."""
SHARED_BELOW = 0.7
"""A link counts as shared if pairs that send together get less than this share of the rate of a single pair."""
TRIES = 3
"""Number of measurements of a link in both directions; the best one counts, because TCP's acknowledgements wait behind
data."""
ODD = 1.5
"""A rate that is this many times below the median is reported."""

BOOT, NETWORK = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/net")
"""Files that identify the current boot of this machine, and the network namespace of this process."""

Pair = tuple[int, int]


@dataclass(frozen=True)
class Rates:
    """Rates of one node's link to other nodes, in bytes per second."""

    sent: float
    received: float
    latency_s: float


@dataclass(frozen=True)
class Probe:
    """Result of the measurements.

    Args:
        machine: nodes, links and devices, with measured rates.
        rates: rates of every node's link; empty for one node.
        findings: sentences about unusual results. Empty if all messages pass a loopback, whose rate depends on free
            cores.
        loopback: sentence about nodes that are on one machine, or ``""``.
    """

    machine: Machine
    rates: tuple[Rates, ...]
    findings: tuple[str, ...]
    loopback: str = ""


def probe(world: World) -> Probe:
    """Measure links and the speeds of devices; call on all ranks, all of which get equal results."""
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
    """Return an identifier of this process's network stack, which processes of one machine (or container) share.

    Messages between processes with equal identifiers do not pass a network."""
    try:
        return f"{BOOT.read_text().strip()} {NETWORK.readlink()}"
    except OSError:  # not Linux
        return platform.node()


def loopback(stacks: Sequence[str], nodes: Sequence[Sequence[int]]) -> tuple[bool, str]:
    """Return True if nodes are on different machines, and a sentence about nodes that share a machine.

    The first result is True for a single node, too. The sentence is ``""`` if no nodes share a machine.

    >>> loopback(["a", "a", "b"], [[0], [1], [2]])
    (True, 'nodes 0 and 1 are on one machine: their link is the loopback, not a network')

    Args:
        stacks: ``network_stack`` of every rank.
        nodes: ranks of every node.
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
    """Yield at most ``rounds`` rounds of pairs: each member has a partner, and no pair repeats.

    The circle method is used. With an odd ``count`` one member has no partner in each round.

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
    """Timer of messages between pairs of ranks; its methods are called on all ranks."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._buffers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        loopback = world.device.type == "cpu" and world.machines.num_nodes == 1
        self._seconds, self._on_cuda = LOOPBACK_SECONDS if loopback else SECONDS, world.device.type == "cuda"

    def latency(self, pairs: Sequence[Pair], times: int = 20) -> list[float]:
        """Measure the one-way seconds of a small message for every pair, while all pairs send.

        Args:
            pairs: pairs of ranks.
            times: number of round trips that are timed.
        """
        return self._all(pairs, lambda first, peer: self._ping(first, peer, times) / times / 2)

    def rate(self, pairs: Sequence[Pair], *, forth: bool, back: bool) -> list[float]:
        """Measure the bytes per second in one direction for every pair, while all pairs send at the same time.

        A first exchange determines how many bytes take about the wanted time.

        Args:
            pairs: pairs of ranks.
            forth: True if the first rank of each pair sends.
            back: True if the second rank of each pair sends.
        """
        trial = self._all(pairs, lambda first, peer: self._stream(first, peer, TRIAL_BYTES, forth, back))
        slowest = max(trial, default=1e-9)
        most = LARGEST_CUDA_BYTES if self._on_cuda else LARGEST_BYTES
        wanted = TRIAL_BYTES * self._seconds / max(slowest, 1e-9)
        size = int(self.world.gather_numbers(float(min(most, max(TRIAL_BYTES, int(wanted)))))[0])
        times = MOST_TIMES if self._on_cuda and size == most else 1
        seconds = self._all(pairs, lambda first, peer: self._stream(first, peer, size, forth, back, times))
        return [size / max(taken, 1e-9) for taken in seconds]

    def _all(self, pairs: Sequence[Pair], run: Callable[[bool, int], float]) -> list[float]:
        """Run ``run`` on both ranks of every pair; return the seconds of the slower rank, on all ranks.

        Waits for all ranks before and afterwards.

        Args:
            pairs: pairs of ranks; other ranks only wait.
            run: takes True on the first rank of a pair, and the rank of the partner; returns seconds.
        """
        own_pair = next((pair for pair in pairs if self.world.rank in pair), None)
        taken = 0.0
        self.world.barrier()
        if own_pair is not None:
            first = self.world.rank == own_pair[0]
            taken = run(first, own_pair[1] if first else own_pair[0])
        everyone = self.world.gather_numbers(taken)
        return [max(everyone[a], everyone[b]) for a, b in pairs]

    def _ping(self, first: bool, peer: int, times: int) -> float:
        """Exchange a small message with ``peer``, and return the seconds of ``times`` round trips.

        Args:
            first: True if this rank sends first.
            peer: rank of the partner.
            times: number of round trips; two more are made before, for warm-up.
        """
        message = torch.zeros(1, device=self.world.device)
        for counts in (False, True):
            begin = time.perf_counter()
            for _ in range(times if counts else 2):
                for sends in (first, not first):
                    (dist.send if sends else dist.recv)(message, peer)
            self._wait()
        return time.perf_counter() - begin

    def _stream(self, first: bool, peer: int, size: int, forth: bool, back: bool, times: int = 1) -> float:
        """Exchange ``size`` bytes with ``peer`` and return the mean seconds of ``times`` exchanges.

        A small exchange before that opens the connection.

        Args:
            first: True if this rank is the first of the pair.
            peer: rank of the partner.
            size: bytes in each direction.
            forth: True if the first rank sends.
            back: True if the second rank sends.
            times: number of exchanges that are timed.
        """
        sent, received = self._buffer_pair(size)
        sends, receives = (forth, back) if first else (back, forth)

        def exchange(count: int) -> None:
            """Exchange ``count`` bytes with ``peer`` and wait until they have passed."""
            # gloo moves both directions in turn if the send is posted first
            operations = [dist.P2POp(dist.irecv, received[:count], peer)] if receives else []
            operations += [dist.P2POp(dist.isend, sent[:count], peer)] if sends else []
            for work in dist.batch_isend_irecv(operations):
                work.wait()

        timed(lambda: exchange(TRIAL_BYTES // 4), self.world.device)  # opens the connection
        return timed(lambda: exchange(size), self.world.device, times)

    def _buffer_pair(self, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return two buffers of ``size`` bytes, to send and to receive; kept until another size is needed."""
        if size not in self._buffers:
            self._buffers = {size: tuple(torch.ones(size, dtype=torch.uint8, device=self.world.device) for _ in "ab")}  # type: ignore[dict-item]
        return self._buffers[size]

    def _wait(self) -> None:
        if self.world.device.type == "cuda":
            torch.cuda.synchronize(self.world.device)


def with_collectives(machine: Machine, world: World) -> Machine:
    """Measure all-gathers; return the machine with rates no higher than theirs.

    All groups of a kind gather at the same time. Their rate replaces the rate of pairs if it is lower. The memory that
    one communicator takes is set, too. Must be called on all ranks."""
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
    """Make groups as in a run, measure all-gathers in all of them at the same time, and remove the groups.

    Returns the bytes per second that a device sends in the slowest group, and the most GPU memory that NCCL takes for
    one communicator on any rank.

    Args:
        world: the processes.
        every: ranks of every group.
        blocks: NCCL thread blocks of a group, see ``make_group``.
        name: name of the kind of group.
    """
    device, members = world.device, len(every[0])
    piece = torch.ones(LARGEST_CUDA_BYTES // members, dtype=torch.uint8, device=device)
    together = torch.empty(piece.numel() * members, dtype=torch.uint8, device=device)
    before = taken_outside_torch(device)
    limit = timedelta(minutes=10)
    group = make_group(every, world.rank, device, timeout=limit, blocks=blocks, name=f"probe {name}")

    def gather() -> None:
        """Gather the pieces of the group's ranks and wait."""
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
    """Measure the links inside the nodes; return one link (the median of the nodes), and notes on slower nodes.

    Without nodes of several devices, nothing is measured and the link has no cost. Must be called on all ranks."""
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
        f"inside node {nodes.index(node)}: {_gbyte(node_rate)}, elsewhere {_gbyte(rate)}"
        for node, node_rate in zip(with_pairs, one_way, strict=True)
        if node_rate * ODD < rate
    ]
    if shared:  # on a shared link each message passes once, in either direction
        return LinkModel(max(rate, at_once * per_node), latency, full_duplex=True, shared=True), notes
    return LinkModel(rate, latency, full_duplex=both > SHARED_BELOW * rate, shared=False), notes


def _between(
    ruler: _Ruler, nodes: Sequence[Sequence[int]]
) -> tuple[LinkModel, dict[int, LinkModel], tuple[Rates, ...], list[str]]:
    """Measure the links between nodes, pair by pair, in several rounds; call on all ranks.

    Returns the usual link, links of single nodes that differ, the rates of every node, and notes on unusual nodes. With
    one node nothing is measured and the link has no cost."""
    count = len(nodes)
    if count == 1:
        return LinkModel(float("inf")), {}, (), []
    sent, received, both, at_once = ([0.0] * count for _ in range(4))
    latency = [float("inf")] * count
    for matches in tournament(count, ROUNDS):
        pairs = [(nodes[a][0], nodes[b][0]) for a, b in matches]
        for (a, b), seconds in zip(matches, ruler.latency(pairs), strict=True):
            latency[a], latency[b] = min(latency[a], seconds), min(latency[b], seconds)
        for forth in (True, False):
            for (a, b), rate in zip(matches, ruler.rate(pairs, forth=forth, back=not forth), strict=True):
                source, target = (a, b) if forth else (b, a)
                sent[source], received[target] = max(sent[source], rate), max(received[target], rate)
        for _ in range(TRIES):
            for (a, b), rate in zip(matches, ruler.rate(pairs, forth=True, back=True), strict=True):
                both[a], both[b] = max(both[a], rate), max(both[b], rate)
        every = [(x, y) for a, b in matches for x, y in zip(nodes[a], nodes[b], strict=False)]
        rates = dict(zip(every, ruler.rate(every, forth=True, back=False), strict=True))
        for a, b in matches:
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
    """Measure and return the link between a GPU and its host, with the rate in each direction of the slowest rank.

    All ranks copy in both directions at the same time, because they share the host's memory, and homes in host memory
    pass in both at once. Must be called on all ranks. On a CPU the link has no cost."""
    if world.device.type != "cuda":
        return LinkModel(float("inf"))
    here, host_tensors = (
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
            host_tensors[0].copy_(here[0], non_blocking=True)
        with torch.cuda.stream(up):
            here[1].copy_(host_tensors[1], non_blocking=True)
        torch.cuda.synchronize(world.device)
        seconds = time.perf_counter() - begin
    return LinkModel(COPIED_BYTES / max(world.gather_numbers(seconds)), 1e-5, shared=False)


def probe_files(folder: str, size: int = 1 << 28) -> tuple[LinkModel, int]:
    """Write and read a temporary file in ``folder``; return the link to its disk, and the free bytes.

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
            if hasattr(os, "posix_fadvise"):  # otherwise the file is read from the page cache
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
    """Measure the disk under ``folder`` on every machine; return the machine with the worst numbers.

    These are the lowest rate and the fewest free bytes of all machines. One process of each machine measures; must be
    called on all ranks. Nodes on one machine share its disk. The machine is returned unchanged if a disk cannot be
    measured."""
    rate, free = math.inf, math.inf
    if world.machines.local_of(world.rank) == 0:
        try:
            link, free = probe_files(folder)
            rate = link.bytes_per_s
        except UserError:  # raised again when the run makes its files
            rate = 0.0
    rate, free = min(world.gather_numbers(rate)), min(world.gather_numbers(free))
    shared = max(len(node) for node in world.machines.nodes) / max(machine.nodes)  # nodes that share one machine
    if not rate:
        return machine
    return replace(machine, files=LinkModel(rate / shared, full_duplex=False), files_bytes=int(free / shared))


def machine_unprobed(world: World) -> Machine:
    """Return the machine with its devices and memory, but links without cost; call on all ranks.

    Nothing is measured. Memory is the least of all devices, of each kind of device, and of all nodes. On a CPU a
    process may use the memory that it already has and its share of the machine's free memory. Nodes on one machine
    share the host's memory."""
    on_machine = len(world.machines.nodes[world.machines.node_of(world.rank)])
    share, host = free_memory() / on_machine, 0
    if world.device.type == "cuda":
        memory = float(torch.cuda.get_device_properties(world.device).total_memory)
        if is_the_hosts(world.device) and share:  # memory of other processes is not available
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
    """Return the bytes of memory that this process holds, shared libraries included; 0 if unknown."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):  # no Linux
        return 0


def _gbit(rate: float) -> str:
    return f"{rate * 8 / 1e9:.3g} Gbit/s"


def _gbyte(rate: float) -> str:
    return f"{rate / 1e9:.3g} GB/s"
