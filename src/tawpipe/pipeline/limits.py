"""Limits of a step's time, told to the watchdog, which reports or ends steps that take longer, and to the transport."""

from __future__ import annotations

from datetime import timedelta

import torch

from tawpipe.model.flops import chain_flops
from tawpipe.pipeline.batches import LocalBatch
from tawpipe.pipeline.local_rows import LocalRows
from tawpipe.pipeline.wiring import Wiring
from tawpipe.runtime.watch.limits import StepLimit, estimate_s
from tawpipe.schedule.sizes.footprint import Costs


class Limits:
    """The limit of a step's time; until ``watch`` a step beyond it is reported, and only communication is ended.

    Args:
        timeout: after which a communication fails at the earliest.
    """

    def __init__(self, wiring: Wiring, rows: LocalRows, timeout: timedelta) -> None:
        self.step = StepLimit(timeout.total_seconds())
        self._wiring, self._rows, self._watched = wiring, rows, False
        self._apply()

    def watch(self, least: timedelta) -> None:
        """Let the watchdog end steps, too, beyond so long or a multiple of what steps are known to take."""
        self.step.least_s, self._watched = least.total_seconds(), True
        self._apply()

    def took(self, seconds: float) -> None:
        """A step has taken so long."""
        before = self.step.seconds, self.step.report_s
        self.step.took(seconds)
        if (self.step.seconds, self.step.report_s) != before:
            self._apply()

    def estimate(self, local: LocalBatch, said: Costs) -> None:
        """Expect of the first step what its FLOPs and bytes say, where no plan has said it."""
        device, (lengths, share) = self._wiring.world.device, self._rows.busiest(local)
        self.step.estimated_s = estimate_s(
            (chain_flops(self._wiring.chain, lengths, at_most=True) or 0.0) * share,
            max(*said.link_sent_bytes, *said.link_received_bytes, 0),
            device_name=torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
            dtype=str(self._wiring.dtype).removeprefix("torch."),
        )
        self._apply()

    def _apply(self) -> None:
        watchdog = self._wiring.executor.watchdog
        watchdog.limit_s, watchdog.ends = self.step.seconds if self._watched else self.step.report_s, self._watched
        # The transport would end it without a word; it is there for what no watchdog sees. Two steps may be issued.
        self._wiring.transport.set_timeout(timedelta(seconds=2 * self.step.seconds + 30))
