"""Look at a GPU: versions, the allocator's setting, streams that wait for each other, and the ceilings of its speed.

    python -m gpu.device

Prints lines of JSON.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import torch
import transformers

from gpu.common import say, seconds_of
from tawpipe.runtime.homes.host_memory import host_zeros
from tawpipe.runtime.world import connect

PRODUCTS = ((8192, 8192, 8192), (4096, 8192, 2048), (16384, 8192, 2048), (8192, 14336, 4096), (32768, 14336, 4096))
STREAMS = {"high": (20, -1), "usual": (4, 0)}
"""Name -> how many streams, and their priority: about those of a pipeline's lanes and of NCCL."""
CYCLES = int(1.2e8)
"""Cycles of a kernel that keeps a stream busy for some 60 ms."""


def versions(device: torch.device) -> None:
    """Print versions of everything."""
    cuda: Any = torch.cuda
    say(
        torch=torch.__version__,
        transformers=transformers.__version__,
        python=sys.version.split()[0],
        device=torch.cuda.get_device_name(device),
        capability=torch.cuda.get_device_capability(device),
        cudnn=torch.backends.cudnn.version(),
        nccl=cuda.nccl.version(),
        cpus=os.cpu_count(),
    )


def allocator(device: torch.device) -> None:
    """Print whether the allocator's segments grow, which ``connect`` asks for after torch was imported."""
    torch.empty(1 << 26, device=device)
    grows = any(segment.get("is_expandable") for segment in torch.cuda.memory_snapshot())
    asked = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF")
    say(allocator="expandable" if grows else "NOT expandable", asked=asked)


def shared_connections(device: torch.device) -> dict[str, list[str]]:
    """Return for every stream the others that wait while it waits, though nothing says so."""
    blocker, shared = torch.cuda.Stream(device), dict[str, list[str]]()
    streams = {
        f"{kind}{number}": torch.cuda.Stream(device, priority=priority)
        for kind, (count, priority) in STREAMS.items()
        for number in range(count)
    }
    values = {name: torch.zeros(8, device=device) for name in streams}
    torch.cuda.synchronize(device)
    for name, held in streams.items():
        with torch.cuda.stream(blocker):
            torch.cuda._sleep(CYCLES)
            over = blocker.record_event()
        held.wait_event(over)
        ends = dict[str, torch.Event]()
        for other in (name, *(other for other in streams if other != name)):
            with torch.cuda.stream(streams[other]):
                values[other].add_(1)
                ends[other] = streams[other].record_event()
        time.sleep(0.02)
        late = [other for other, end in ends.items() if other != name and not end.query()]
        if late and not over.query():
            shared[name] = late
        torch.cuda.synchronize(device)
    return shared


def ceilings(device: torch.device) -> None:
    """Print rates of products and copies, and what a launch takes."""
    for m, n, k in PRODUCTS:
        one, other = (torch.randn(*shape, device=device, dtype=torch.bfloat16) for shape in ((m, k), (n, k)))
        seconds, _ = seconds_of(lambda one=one, other=other: one @ other.T, device)
        say(product=[m, n, k], tflops=round(2 * m * n * k / seconds / 1e12, 1))
    source = torch.empty(1 << 30, dtype=torch.uint8, device=device)
    target, part = torch.empty_like(source), source[: 1 << 28]
    say(device_copy_gb_s=round(2 * len(source) / seconds_of(lambda: target.copy_(source), device)[0] / 1e9))
    pinned = torch.empty(len(part), dtype=torch.uint8, pin_memory=True)
    begin = time.perf_counter()
    locked = host_zeros((1 << 30,), torch.uint8, device, "state")[: len(part)]
    say(seconds_to_lock_1_gib=round(time.perf_counter() - begin, 2))
    copies = {
        "up, pinned": lambda: part.copy_(pinned, non_blocking=True),
        "up, registered": lambda: part.copy_(locked, non_blocking=True),
        "down": lambda: pinned.copy_(part, non_blocking=True),
    }
    say(host_gb_s={name: round(len(part) / seconds_of(run, device)[0] / 1e9, 1) for name, run in copies.items()})
    little = torch.zeros(16, device=device)
    say(microseconds_of_a_launch=round(seconds_of(lambda: little.add_(1), device, least_s=0.02)[1] * 1e6, 1))


def main() -> None:
    """Print everything about the GPU of this process."""
    device = connect(device="cuda").device
    versions(device)
    allocator(device)
    say(streams_that_wait_for_others=shared_connections(device) or "none")
    ceilings(device)


if __name__ == "__main__":
    main()
