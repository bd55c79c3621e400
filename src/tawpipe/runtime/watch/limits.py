"""Time limit of a step, after which a run is given up, derived from known durations of steps.

A step takes a tenth of a second or half an hour. No fixed limit detects a hang early and never ends a healthy step. So
the limit is ``FACTOR`` times the longest known duration. The user's setting is its lower bound.
"""

from __future__ import annotations

from tawpipe.model.flops import peak_flops

FACTOR = 10.0
SOON_S = 60.0
"""Seconds that ranks may wait for a script that does other work between two steps, before they report it."""
UTILISATION = 0.3
"""Share of a device's peak FLOP rate that an estimate assumes."""
RECOMPUTED = 4 / 3
"""Ratio of FLOPs with full recomputation to FLOPs without."""
SLOWER = 16.0
"""Factor by which devices are slower in other dtypes than in bf16: fp32 and fp64 on an A100 or H100."""
CPU_FLOPS = 2e10
"""FLOPs per second of a process that computes on a CPU: fewer than of a core, as processes may share one."""
LINK_BYTES_PER_S = 1.25e9
"""10 Gbit/s, in bytes per second, for data sent over the links between nodes."""


class StepLimit:
    """Time limit of a step.

    ``predicted_s`` is the duration of a step in a plan. ``estimated_s`` is an estimate from FLOPs and bytes, used until
    a step has ended. Both are 0 if unknown.

    Args:
        least_s: Lower bound in seconds, set by the user.

    >>> limit = StepLimit(300.0)
    >>> limit.took(70.0)
    >>> limit.seconds
    700.0
    """

    def __init__(self, least_s: float) -> None:
        self.least_s = least_s
        self.predicted_s = self.estimated_s = self._first_s = self._slowest_s = 0.0

    def took(self, seconds: float) -> None:
        """Record that a step took ``seconds``.

        The first step includes the set-up. It counts only until another step has ended.
        """
        if not self._first_s:
            self._first_s = seconds
        else:
            self._slowest_s = max(self._slowest_s, seconds)

    @property
    def known_s(self) -> float:
        """Longest known duration of a step in seconds; 0 if nothing is known."""
        return max(self.predicted_s, self._slowest_s or self._first_s or self.estimated_s)

    @property
    def lasting_s(self) -> float:
        """Longest duration in seconds from values that stay valid: the plan, and steps without set-up."""
        return max(self.predicted_s, self._slowest_s)

    @property
    def seconds(self) -> float:
        """Time limit of a step in seconds: ``FACTOR`` times the known duration, at least ``least_s``."""
        return max(self.least_s, FACTOR * self.known_s)

    @property
    def report_s(self) -> float:
        """Seconds after which a late step is reported, in runs that it does not end.

        Equal to ``seconds`` until a step without set-up has ended. Afterwards ``FACTOR`` times the known duration, but
        at least the smaller of ``least_s`` and ``SOON_S``.
        """
        return max(min(self.least_s, SOON_S), FACTOR * self.known_s) if self._slowest_s else self.seconds


def estimate_s(flops: float, link_bytes: float, *, device_name: str, dtype: str) -> float:
    """Return the estimated seconds of a step on a device of which only the name is known.

    Computing counts as 0 if the device's peak is unknown.

    Args:
        flops: FLOPs of the rank that computes most, without recomputation.
        link_bytes: Bytes over the busiest link between nodes.
        device_name: Name of the device, or ``cpu``.
        dtype: Compute dtype.

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
