"""``tawpipe doctor``: what is here, and how fast its links are.

Alone it tells about this machine; on several processes, started by torchrun or by itself with --nproc, it measures the
links between them and writes the file that `tawpipe plan` and `tawpipe train` read.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from tawpipe.errors import UserError

FILE = "tawpipe-topology.yaml"
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


def doctor(argv: Sequence[str]) -> int:
    """Runs ``tawpipe doctor`` with the words ``argv`` and returns the exit code."""
    from tawpipe.launch.gpus import find_gpus
    from tawpipe.launch.launcher import in_this_process, launch, local_shape, started_by_local_launcher
    from tawpipe.topology import LaunchEnvironment

    arguments = _parser().parse_args(argv)
    for name in ("nproc", "nodes"):
        if (value := getattr(arguments, name)) is not None and value < 1:
            raise UserError(f"--{name}", value, "at least 1")
    if started_by_local_launcher() or LaunchEnvironment.read(os.environ) is not None:
        return _examine(arguments)
    gpus = find_gpus() if arguments.device != "cpu" else ()
    shape = local_shape(arguments.nodes, arguments.nproc or (len(gpus) or 1), num_gpus=len(gpus))
    if shape.nproc == 1:
        with in_this_process(gpus=gpus):
            return _examine(arguments)
    return launch([sys.executable, "-m", "tawpipe", "doctor", *argv], shape, gpus=gpus)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tawpipe doctor",
        description="Says what is installed and what devices there are; on several processes or nodes also measures "
        "the links between them, which takes a few seconds, and writes a topology file. On several machines: "
        "torchrun --nnodes N --nproc-per-node L ... -m tawpipe doctor",
    )
    parser.add_argument("--nproc", type=int, metavar="N", help="processes to start here (default: one for each GPU)")
    parser.add_argument("--nodes", type=int, metavar="N", help="virtual nodes that they are grouped into")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--out", default=FILE, metavar="FILE", help=f"the topology file (default: {FILE})")
    return parser


def _examine(arguments: argparse.Namespace) -> int:
    from tawpipe.console import Console
    from tawpipe.plan.machine import save_machine
    from tawpipe.plan.probe import probe
    from tawpipe.runtime.world import connect

    out = Path(arguments.out)
    if out.is_dir() or not out.parent.is_dir():
        raise UserError("--out", arguments.out, "a file in a folder that exists")
    world = connect(device=arguments.device)
    console = Console(world.rank)
    console.plan(list(_software()), title="software")
    console.plan(list(_machine(world)), title="machine")
    console.plan([(name, os.environ[name]) for name in VARIABLES if name in os.environ], title="launcher")
    console.topology(str(world.nodes))
    found = probe(world)
    rows = list(_links(found))
    console.plan(rows, title="links")
    for finding in found.findings:
        console.line(f"odd: {finding}")
    if world.rank == 0:
        notes = f"{world.nodes}, measured by tawpipe doctor"
        save_machine(found.machine, out, notes="\n".join([notes, *found.findings]))
    console.line(f"wrote {out}")
    world.leave()
    return 0


def _software():
    import torch

    yield "python", platform.python_version()
    for name in PACKAGES:
        try:
            yield name, importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            yield name, "not installed"
    if torch.cuda.is_available():
        yield "CUDA", str(torch.version.cuda)
        from torch.cuda import nccl

        yield "NCCL", ".".join(map(str, nccl.version()))


def _machine(world):
    import torch

    from tawpipe.plan.probe import free_memory

    if world.device.type == "cuda":
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            memory = f"{properties.total_memory / 2**30:.1f} GiB"
            yield (
                f"GPU {index}",
                f"{properties.name}, {memory}, compute capability {properties.major}.{properties.minor}",
            )
    else:
        yield "device", f"CPU, {os.cpu_count()} processors"
    yield "free memory", f"{free_memory() / 2**30:.1f} GiB"
    yield (
        "shared memory",
        f"{shutil.disk_usage('/dev/shm').free / 2**30:.1f} GiB" if Path("/dev/shm").is_dir() else "none",
    )
    yield "system", f"{platform.system()} {platform.release()}, {platform.machine()}"


def _links(found):
    machine = found.machine
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
    for node, rates in enumerate(found.rates):
        yield f"node {node}", f"sends {rates.sent * 8 / 1e9:.3g}, receives {rates.received * 8 / 1e9:.3g} Gbit/s"
    if not found.rates and max(machine.nodes) == 1:
        yield "links", "none: a single process"
