"""``tawpipe doctor``: report the machine and the rates of its links, and write the topology file for plans and runs."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import torch
from torch.cuda import nccl

from tawpipe.console import Console
from tawpipe.environment import LaunchEnvironment
from tawpipe.errors import RunError
from tawpipe.job_limits import memory_left, processors
from tawpipe.model.files.missing import kernel_packages
from tawpipe.plan.machine.machine import Machine, load_machine, save_machine
from tawpipe.plan.machine.probe import Probe, free_memory, probe
from tawpipe.runtime.world import World, connect

PACKAGES = ("tawpipe", "torch", "transformers", "tokenizers", "datasets", "safetensors")
VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "GROUP_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "CUDA_VISIBLE_DEVICES",
    "NCCL_SOCKET_IFNAME",
    "GLOO_SOCKET_IFNAME",
    "NCCL_IB_DISABLE",
    "NCCL_DEBUG",
)
INTERFACES = Path("/sys/class/net")
LEAST = 10_000_000
"""Bytes that an interface must have sent during the measurement to count as the one that was used."""
FAR_BELOW = 0.6
"""Share of the rate that a network card claims. A measured rate below it is reported."""


def examine(out: Path | None, *, device: str) -> None:
    """Measure the links, and print software, machine and links on rank 0; call on all launched processes.

    The process group is left at the end.

    Args:
        out: path of the topology file that rank 0 writes; None to write none.
        device: device of the processes, as ``connect`` takes it.
    """
    world = connect(device=device)
    console = Console(world.rank)
    console.plan(list(software()), title="software")
    console.plan(list(_machine(world)), title="machine")
    if world.size > 1:
        console.plan([(name, os.environ[name]) for name in VARIABLES if name in os.environ], title="launcher")
    console.topology(str(world.nodes))
    before = sent_bytes()
    links = probe(world)
    console.plan([*_links(links), *_interfaces(world, before, links)], title="links")
    if links.machine.device_of:
        console.plan(list(_devices(links.machine)), title="devices")
    if links.loopback:
        console.line(f"note: {links.loopback}")
    for finding in links.findings:
        console.line(f"odd: {finding}")
    if world.size == 1:
        console.line("links are measured between processes: tawpipe doctor --nproc 2, or torchrun on every machine")
    if world.rank == 0 and out is not None:
        notes = [f"{world.nodes}, measured by tawpipe doctor", links.loopback, *links.findings]
        save_machine(links.machine, out, notes="\n".join(filter(None, notes)))
    console.line(f"wrote {out}" if out else "--out FILE saves this for tawpipe plan --topology FILE")
    world.leave()


def probe_machine(device: str) -> Machine | None:
    """Measure the machines on which this process was started, and return them.

    If no launcher started this process, the command ``tawpipe doctor`` is run and measures this machine with processes
    of its own. Returns None on all ranks but the first.

    Args:
        device: device of the processes, as ``connect`` takes it.

    Raises:
        RunError: the measurement failed.
    """
    if LaunchEnvironment.read(os.environ) is not None:
        world = connect(device=device)
        machine = probe(world).machine
        world.leave()
        return machine if world.rank == 0 else None
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "topology.yaml"
        command = [sys.executable, "-m", "tawpipe", "doctor", "--out", str(file), "--device", device]
        if code := subprocess.run(command, stdout=sys.stderr, check=False).returncode:
            raise RunError(f"links not measured: tawpipe doctor ended with {code}")
        return load_machine(file)


def software() -> Iterator[tuple[str, str]]:
    """Yield (name, version) of the software that a run needs.

    The version is ``not installed`` if a package is missing."""
    yield "python", platform.python_version()
    for name in PACKAGES:
        try:
            yield name, importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            yield name, "not installed"
    yield from kernel_packages()
    if torch.cuda.is_available():
        yield "CUDA", str(torch.version.cuda)
        yield "NCCL", ".".join(map(str, nccl.version()))


def _machine(world: World) -> Iterator[tuple[str, str]]:
    """Yield (name, text) for the devices, the free memory and the operating system of this machine."""
    if world.device.type == "cuda":
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            memory = f"{properties.total_memory / 2**30:.1f} GiB"
            yield (
                f"GPU {index}",
                f"{properties.name}, {memory}, compute capability {properties.major}.{properties.minor}",
            )
    else:
        yield "device", f"CPU, {processors()} of {os.cpu_count()} processors"
    free = free_memory(left := memory_left())
    limited = ", within the limits of this job's control groups" if left <= free else ""
    yield "free memory", f"{free / 2**30:.1f} GiB{limited}"
    yield (
        "shared memory",
        f"{shutil.disk_usage('/dev/shm').free / 2**30:.1f} GiB" if Path("/dev/shm").is_dir() else "none",
    )
    yield "system", f"{platform.system()} {platform.release()}, {platform.machine()}"


def _devices(machine: Machine) -> Iterator[tuple[str, str]]:
    """Yield (ranks, text) for every different device: its name, speed and memory."""
    for device in dict.fromkeys(machine.device_of):
        ranks = [str(rank) for rank, other in enumerate(machine.device_of) if other == device]
        memory = f", {device.memory_bytes / 2**30:.1f} GiB" if device.memory_bytes else ""
        yield f"ranks {', '.join(ranks)}", f"{device.name}, speed {device.speed:.3g}{memory}"


def _links(links: Probe) -> Iterator[tuple[str, str]]:
    """Yield (name, text) with rate and latency of every kind of link, and with the rates of each node."""
    machine = links.machine
    for name, link, several in (
        ("inside a node", machine.inside, max(machine.nodes) > 1),
        ("between nodes", machine.between, len(machine.nodes) > 1),
        ("to the host", machine.host, machine.device.name != "CPU"),
    ):
        if several:
            rate = f"{link.bytes_per_s / 1e9:.3g} GB/s ({link.bytes_per_s * 8 / 1e9:.3g} Gbit/s)"
            words = [
                rate,
                f"{link.latency_s * 1e6:.0f} us",
                "one for all devices of a node" if link.shared else "one per device",
            ]
            words += [] if link.full_duplex else ["both directions together"]
            yield name, ", ".join(words)
    for node, rates in enumerate(links.rates):
        yield f"node {node}", f"sends {rates.sent * 8 / 1e9:.3g}, receives {rates.received * 8 / 1e9:.3g} Gbit/s"
    if not links.rates and max(machine.nodes) == 1:
        yield "links", "none: a single process"


def _interfaces(world: World, before: Mapping[str, int], links: Probe) -> Iterator[tuple[str, str]]:
    """Yield (machine, text) about the network interface that each machine used for its traffic; call on all ranks.

    Yields nothing on one machine.

    Args:
        world: the processes.
        before: bytes that interfaces here had sent before links were measured.
        links: result of the measurement.
    """
    machines = world.machines
    if machines.num_nodes == 1:
        return
    texts = world.gather_texts(used_between(before, sent_bytes(), links.machine.between.bytes_per_s))
    for number, ranks in enumerate(machines.nodes):
        if words := texts[ranks[0]]:
            yield f"machine {number} uses", words


def sent_bytes(root: Path = INTERFACES) -> dict[str, int]:
    """Return the bytes that every network interface has sent, without the loopback.

    Empty if the system does not count them as Linux does."""
    counts = {}
    for path in sorted(root.glob("*/statistics/tx_bytes")):
        with suppress(OSError, ValueError):
            counts[path.parent.parent.name] = int(path.read_text())
    return {name: count for name, count in counts.items() if name != "lo"}


def claimed(name: str, root: Path = INTERFACES) -> float:
    """Return the bytes per second that a network card claims to carry, from the system; 0 if unknown."""
    with suppress(OSError, ValueError):
        return max(0, int((root / name / "speed").read_text())) * 1e6 / 8
    return 0.0


def used_between(before: Mapping[str, int], after: Mapping[str, int], reached: float, root: Path = INTERFACES) -> str:
    """Return a phrase about the interface that sent the most between two counts, or ``""`` if unknown.

    It compares the measured rate with what the card claims, and mentions another card that claims more.

    Args:
        before, after: bytes that every interface had sent, at the two counts.
        reached: measured bytes per second.
        root: directory with the system's counts.
    """
    grown = {name: count - before.get(name, count) for name, count in after.items()}
    if not grown:
        return ""
    name = max(grown, key=grown.__getitem__)
    if grown[name] < LEAST:
        return "not counted by the system: RDMA, for example over InfiniBand, bypasses its interfaces"
    rate = claimed(name, root)
    if not rate:
        return f"{name}, of unknown rate"
    words = f"{name}, rated {rate * 8 / 1e9:.3g} Gbit/s"
    if reached < FAR_BELOW * rate:
        words += f": {reached * 8 / 1e9:.3g} Gbit/s reached"
    fastest = max(after, key=lambda other: claimed(other, root))
    if claimed(fastest, root) > rate:
        words += f"; {fastest} has a higher rate (NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME)"
    return words
