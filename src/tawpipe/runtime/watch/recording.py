"""The times at which the actions of a step really ran.

On the CPU a lane's thread notes the time around an action. On CUDA a pair of events is recorded around its kernels, so
that the time is the device's, and recording costs no wait; the times are read when the step has been drained.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import torch

FORMAT = 1


class Recording:
    """One step of one rank.

    Args:
        device: what the lanes run on.
        step: its number, for the file.
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
        """``run`` with its times noted as those of action ``index``."""
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
        """(action, begin, end) in the order of the program, in seconds of the machine's clock. After the step."""
        spans = []
        for index, (begin, end) in sorted(self._spans.items()):
            if self._cuda:
                begin, end = (self._zero.elapsed_time(event) / 1e3 for event in (begin, end))
            spans.append((self._texts[index], begin + self._zero_s, end + self._zero_s))
        return spans

    def write(self, folder: Path, *, rank: int, node: int) -> None:
        """The file of this rank, see ``report.bars``."""
        folder.mkdir(parents=True, exist_ok=True)
        content = {"format": FORMAT, "rank": rank, "node": node, "step": self.step, "spans": self.spans()}
        (folder / f"rank-{rank:05}.json").write_text(json.dumps(content), encoding="utf-8")
