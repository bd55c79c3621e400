"""The time that a step may take before a run is given up, which follows from what steps are known to take.

A step lasts a tenth of a second or half an hour: no fixed limit finds a hang soon and lets every healthy step live. So
the limit is ``FACTOR`` times the longest of what is known, and what a user sets is the least that it may be.
"""

from __future__ import annotations

from tawpipe.model.flops import peak_flops

FACTOR = 10.0
SOON_S = 60.0
"""Seconds for which ranks may wait for a script that does something else between two steps, before they report it."""
UTILISATION = 0.3
"""Share of a device's peak that an estimate counts on."""
RECOMPUTED = 4 / 3
"""FLOPs with full recomputation, over those without."""
SLOWER = 16.0
"""Times that devices are slower in other types than in bf16: fp32 and fp64 on an A100 or H100."""
CPU_FLOPS = 2e10
"""Of a process that computes on a CPU, a second: less than a core does, as processes may share one."""
LINK_BYTES_PER_S = 1.25e9
"""10 Gbit/s, for bytes that cross the links between nodes one after another."""


class StepLimit:
    """The limit of a step.

    Args:
        least_s: as the user has set it.

    ``predicted_s`` is what a plan says of a step, ``estimated_s`` what FLOPs and bytes say where no step has ended yet;
    0 where not known.

    >>> limit = StepLimit(300.0)
    >>> limit.took(70.0)
    >>> limit.seconds
    700.0
    """

    def __init__(self, least_s: float) -> None:
        self.least_s = least_s
        self.predicted_s = self.estimated_s = self._first_s = self._slowest_s = 0.0

    def took(self, seconds: float) -> None:
        """A step has taken so long. The first one has the set-up in it: it counts only until another has ended."""
        if not self._first_s:
            self._first_s = seconds
        else:
            self._slowest_s = max(self._slowest_s, seconds)

    @property
    def known_s(self) -> float:
        """Seconds of a step, as far as they are known; 0 if nothing is."""
        return max(self.predicted_s, self._slowest_s or self._first_s or self.estimated_s)

    @property
    def lasting_s(self) -> float:
        """``known_s`` by what no later step replaces: a plan, and steps without set-up."""
        return max(self.predicted_s, self._slowest_s)

    @property
    def seconds(self) -> float:
        return max(self.least_s, FACTOR * self.known_s)

    @property
    def report_s(self) -> float:
        """Seconds after which a step is reported, where nothing ends it: ``seconds`` until a step without set-up has
        ended; from then on ``FACTOR`` times what steps take, but at least ``SOON_S`` where ``least_s`` is more.
        """
        return max(min(self.least_s, SOON_S), FACTOR * self.known_s) if self._slowest_s else self.seconds


def estimate_s(flops: float, link_bytes: float, *, device_name: str, dtype: str) -> float:
    """Seconds of a step on a device, of which nothing but its name is known; computing is left out where that is not.

    Args:
        flops: of the rank that has most to compute, recomputation not counted.
        link_bytes: over the busiest link between nodes.

    >>> round(estimate_s(2.9e16, 0, device_name="NVIDIA H100 80GB HBM3", dtype="bfloat16"))
    130
    >>> round(estimate_s(3e12, 0, device_name="cpu", dtype="float32"))
    200
    """
    if device_name == "cpu":
        return flops * RECOMPUTED / CPU_FLOPS + link_bytes / LINK_BYTES_PER_S
    peak = peak_flops(device_name, "bfloat16")
    computing = flops * RECOMPUTED / (UTILISATION * peak) * (1 if dtype == "bfloat16" else SLOWER) if peak else 0.0
    return computing + link_bytes / LINK_BYTES_PER_S
