"""Measurement of the peak memory of tensors while functions run, including temporary tensors and scratch of kernels.

On CUDA, torch's allocator counts the bytes: the smallest of the four counts in runtime/memory.py. On the CPU, torch's
profiler records each block that the allocator gives or takes back on the calling thread, and this module sums them.
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
    """Bytes of tensors before, during and after one measured function, above the bytes before the first function.

    Args:
        before, most, after: Bytes at its beginning, at its peak, and at its end.
    """

    before: int
    most: int
    after: int


def peaks(parts: Sequence[Callable[[], object]], device: torch.device) -> list[Peak]:
    """Run the functions ``parts`` one after another on this thread, and return the memory peak of each.

    On the CPU, memory that was allocated before the measurement and is freed in a part is not counted. Let the first
    part allocate it.
    """
    return _on_cuda(parts, device) if device.type == "cuda" else _on_cpu(parts)


def _on_cuda(parts: Sequence[Callable[[], object]], device: torch.device) -> list[Peak]:
    """Run ``parts``, and read the peak of each from torch's CUDA allocator."""
    baseline, peaks = torch.cuda.memory_allocated(device), list[Peak]()
    for part in parts:
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        part()
        most, after = torch.cuda.max_memory_allocated(device), torch.cuda.memory_allocated(device)
        peaks.append(Peak(before - baseline, most - baseline, after - baseline))
    return peaks


def peak_of_step(executor: Executor, step: Callable[[], object]) -> int:
    """Run ``step`` and wait for it; return the peak bytes of tensors above those that existed before.

    The executor must be drained before.
    """
    if executor.device.type == "cuda":
        return _of_step_on_cuda(executor, step)
    watch = Allocations()
    executor.on_compute(watch.start)
    step()
    executor.drain()
    executor.on_compute(watch.stop)
    return watch.most


def _of_step_on_cuda(executor: Executor, step: Callable[[], object]) -> int:
    """Run ``step``, wait for it, and return the peak bytes of torch's GPU allocator minus the bytes allocated before.

    Resets the allocator's peak statistics."""
    before = torch.cuda.memory_allocated(executor.device)
    torch.cuda.reset_peak_memory_stats(executor.device)
    step()
    executor.drain()
    return torch.cuda.max_memory_allocated(executor.device) - before


class Allocations:
    """Record of the CPU blocks that torch allocates and frees on one thread, from ``start`` to ``stop``.

    Call ``start`` and ``stop`` on that thread.
    """

    def __init__(self) -> None:
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # otherwise Kineto prints start and stop on standard error
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
        """Times in nanoseconds with the bytes allocated (positive) or freed (negative), in order of time."""
        return sorted((event.start_ns(), event.nbytes()) for event in self._events if event.name() == "[memory]")

    @property
    def most(self) -> int:
        """Largest number of bytes held at one time."""
        return max(accumulate(size for _, size in self._changes), default=0)

    def peaks(self, names: Sequence[str]) -> list[Peak]:
        """Return the peak of each ``record_function`` in ``names``, from the end of the one before to its own end."""
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
    """Run ``parts`` under torch's profiler, and return the peak of each."""
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
