"""Recorded times of the actions of a step.

On the CPU, a lane's thread reads the clock before and after an action. On CUDA, a pair of events is recorded around its
kernels: the times are the device's, and recording never waits. They are read after the step has been drained.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import torch

FORMAT = 1


class Recording:
    """Times of the actions of one step of one rank.

    Args:
        device: Device of the lanes.
        step: Number of the step, for the file.
    """

    def __init__(self, device: torch.device, step: int) -> None:
        self._cuda, self.step = device.type == "cuda", step
        self._spans: dict[int, tuple] = {}
        self._texts: dict[int, str] = {}
        self._zero_s = time.time() - time.perf_counter()
        if self._cuda:
            torch.cuda.synchronize(device)
            self._zero = torch.cuda.Event(enable_timing=True)
            self._zero.record()
            self._zero_s = time.time()

    def around(self, index: int, text: str, run: Callable[[], None]) -> Callable[[], None]:
        """Return a function that calls ``run`` and records its times under action ``index``."""
        self._texts[index] = text

        def on_cpu() -> None:
            begin = time.perf_counter()
            run()
            self._spans[index] = (begin, time.perf_counter())

        def on_cuda() -> None:
            events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            events[0].record()
            run()
            events[1].record()
            self._spans[index] = events

        return on_cuda if self._cuda else on_cpu

    def spans(self) -> list[tuple[str, float, float]]:
        """Return (action, begin, end) in program order, with times in seconds of the system clock.

        Call it after the step has been drained.
        """
        spans = []
        for index, (begin, end) in sorted(self._spans.items()):
            if self._cuda:
                begin, end = (self._zero.elapsed_time(event) / 1e3 for event in (begin, end))
            spans.append((self._texts[index], begin + self._zero_s, end + self._zero_s))
        return spans

    def write(self, folder: Path, *, rank: int, node: int) -> None:
        """Write the file of this rank into ``folder``, in the form that ``report.bars`` reads."""
        folder.mkdir(parents=True, exist_ok=True)
        content = {"format": FORMAT, "rank": rank, "node": node, "step": self.step, "spans": self.spans()}
        (folder / f"rank-{rank:05}.json").write_text(json.dumps(content), encoding="utf-8")
