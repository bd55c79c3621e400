"""Computing speeds of devices relative to each other; and a timer for short operations on a device.

Devices of one kind count as equally fast, by the median of their rates. A single device that is slow at the moment of
measuring does not get less work."""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from tawpipe.job_limits import processors
from tawpipe.plan.machine.machine import Machine
from tawpipe.runtime.dtype import computes_in_bfloat16
from tawpipe.runtime.world import World

PRODUCT = 512, 4096
"""Rows of the square matrices that are multiplied to measure a CPU, and a GPU."""
SECONDS, MOST_TIMES = 0.1, 100
"""Seconds for which matrices are multiplied in one measurement, and the most products in it."""
AS_FAST, SLOW = 0.95, 1.15
"""``AS_FAST``: kinds of devices whose speed is at least this share of the fastest count as equally fast. ``SLOW``: a
device that takes this many times as long as its kind is reported."""


def speeds_measured(machine: Machine, world: World) -> tuple[Machine, list[str]]:
    """Measure the speed of every kind of device; return the machine with these speeds, and notes on slow devices.

    Must be called on all ranks. CPUs are not measured if all are of one kind, because processes share them; the machine
    is then returned unchanged."""
    kinds = world.gather_texts(kind_of(world.device))
    if world.device.type != "cuda" and len(set(kinds)) == 1:
        return machine, []
    return with_speeds(machine, kinds, world.gather_numbers(products_per_s(world)))


def kind_of(device: torch.device) -> str:
    """Return a text that is equal for devices that are expected to be equally fast."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        model = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):  # not Linux, or no model name
        model = platform.machine()
    return f"{model}, {processors()}"


def products_per_s(world: World) -> float:
    """Measure and return how many matrix products this rank's device computes per second, while all ranks compute.

    Must be called on all ranks."""
    device, cuda = world.device, world.device.type == "cuda"
    dtype = torch.bfloat16 if cuda and computes_in_bfloat16(device) else torch.float32
    factors = torch.ones(2, *[PRODUCT[cuda]] * 2, dtype=dtype, device=device)

    def multiply() -> torch.Tensor:
        return factors[0] @ factors[1]

    times = int(min(MOST_TIMES, max(1, SECONDS / max(1e-6, min(timed(multiply, device) for _ in range(3))))))
    world.barrier()
    return 1 / max(1e-9, statistics.median(timed(multiply, device, times) for _ in range(3)))


def with_speeds(machine: Machine, kinds: Sequence[str], rates: Sequence[float]) -> tuple[Machine, list[str]]:
    """Return the machine with the median speed of every kind of device, and notes on devices slower than their kind.

    Speeds are relative to the fastest kind.

    Args:
        machine: the machine.
        kinds: kind of every rank's device.
        rates: products per second of every rank.
    """
    of_kind = {kind: statistics.median(rates[r] for r, other in enumerate(kinds) if other == kind) for kind in kinds}
    fastest = max(of_kind.values())
    speeds = {kind: round(rate / fastest, 3) if rate < fastest * AS_FAST else 1.0 for kind, rate in of_kind.items()}
    devices = tuple(replace(each, speed=speeds[kind]) for each, kind in zip(machine.device_of, kinds, strict=False))
    notes = [
        f"rank {rank} is {of_kind[kind] / rate:.2g} times as slow as other devices of its kind ({kind})"
        for rank, (kind, rate) in enumerate(zip(kinds, rates, strict=True))
        if rate * SLOW < of_kind[kind]
    ]
    return replace(machine, device=devices[0] if devices else machine.device, device_of=devices), notes


def timed(run: Callable[[], object], device: torch.device, times: int = 1) -> float:
    """Run ``run`` ``times`` times in a row, wait until the device has finished, and return the mean seconds.

    On a GPU the time is taken between two events of the current stream."""
    if device.type != "cuda":
        begin = time.perf_counter()
        for _ in range(times):
            run()
        return (time.perf_counter() - begin) / times
    torch.cuda.synchronize(device)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(times):
        run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / times
