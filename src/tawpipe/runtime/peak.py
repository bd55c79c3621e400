"""Measures the most memory that tensors take while something runs, transient ones and the scratch of kernels included.

On CUDA torch's allocator keeps the count; of what the process takes of the device that is the smallest of four numbers
(runtime/memory.py). On the CPU the profiler is told of every block that torch's allocator gives
and takes back on the calling thread, and the sum is taken here.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch.autograd.profiler import profile, record_function

from tawpipe.runtime.executor import Executor


@dataclass(frozen=True)
class Peak:
    """Bytes of tensors before, during and after one part of what was run.

    Args:
        before, most, after: more than before the first part; ``most`` at the highest.
    """

    before: int
    most: int
    after: int


def peaks(parts: Sequence[Callable[[], object]], device: torch.device) -> list[Peak]:
    """Run ``parts`` one after another on this thread; what each of them took.

    On the CPU, what was allocated before and is freed in a part is not seen: let the first part allocate it.
    """
    return _on_cuda(parts, device) if device.type == "cuda" else _on_cpu(parts)


def _on_cuda(parts: Sequence[Callable[[], object]], device: torch.device) -> list[Peak]:
    there, peaks = torch.cuda.memory_allocated(device), list[Peak]()
    for part in parts:
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        part()
        most, after = torch.cuda.max_memory_allocated(device), torch.cuda.memory_allocated(device)
        peaks.append(Peak(before - there, most - there, after - there))
    return peaks


def peak_of_step(executor: Executor, step: Callable[[], object]) -> int:
    """The most that tensors take in a step of a pipeline that was drained, besides those that are there before it."""
    if executor.device.type == "cuda":
        return _of_step_on_cuda(executor, step)
    watch = Allocations()
    executor.on_compute(watch.start)
    step()
    executor.drain()
    executor.on_compute(watch.stop)
    return watch.most


def _of_step_on_cuda(executor: Executor, step: Callable[[], object]) -> int:
    before = torch.cuda.memory_allocated(executor.device)
    torch.cuda.reset_peak_memory_stats(executor.device)
    step()
    executor.drain()
    return torch.cuda.max_memory_allocated(executor.device) - before


class Allocations:
    """What torch's allocator for the CPU gives to one thread and takes back, from ``start`` to ``stop``, both on it."""

    def __init__(self) -> None:
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or it says on standard error that it starts and stops
        self._profile = profile(profile_memory=True)

    def start(self) -> None:
        self._profile.__enter__()

    def stop(self) -> None:
        self._profile.__exit__(None, None, None)

    @property
    def _events(self) -> list[Any]:
        assert self._profile.kineto_results is not None
        return self._profile.kineto_results.events()

    @property
    def _changes(self) -> list[tuple[int, int]]:
        """Times, and the bytes that were given or taken back."""
        return sorted((event.start_ns(), event.nbytes()) for event in self._events if event.name() == "[memory]")

    @property
    def most(self) -> int:
        """Bytes that were held at the highest."""
        return max(accumulate(size for _, size in self._changes), default=0)

    def peaks(self, names: Sequence[str]) -> list[Peak]:
        """What was taken until the end of each ``record_function`` of these names, from the end of the one before."""
        ends = {event.name(): event.start_ns() + event.duration_ns() for event in self._events if event.name() in names}
        changes, peaks, held, at = self._changes, list[Peak](), 0, 0
        for name in names:
            before = most = held
            while at < len(changes) and changes[at][0] <= ends[name]:
                held += changes[at][1]
                most = max(most, held)
                at += 1
            peaks.append(Peak(before, most, held))
        return peaks


def _on_cpu(parts: Sequence[Callable[[], object]]) -> list[Peak]:
    names = [f"tawpipe.peak.{number}" for number in range(len(parts))]
    allocations = Allocations()
    allocations.start()
    try:
        for name, part in zip(names, parts, strict=True):
            with record_function(name):
                part()
    finally:
        allocations.stop()
    return allocations.peaks(names)
