"""Memory of a rank in the course of a step, for the figure in the page of a plan."""

from __future__ import annotations

from collections.abc import Mapping

from tawpipe.schedule.buffers import Kind
from tawpipe.simulate.timeline import Timeline


def memory_over_time(
    timeline: Timeline, rank: int, activation_bytes: Mapping[Kind, int], fixed: int
) -> tuple[list[float], list[float]]:
    """Seconds since the step began, and GiB from then on.

    Activations are held from the begin of the action that makes them to the end of the one that frees them.

    Args:
        activation_bytes: of one of every kind, see ``Schedule.peak_activations``; those on the host do not count.
        fixed: bytes that are held all the time: homes, buffers, what a block computes with.
    """
    spans = list(timeline.spans(rank, step=timeline.steady_step))
    zero = min((span.begin for span in spans), default=0.0)
    events: list[tuple[float, int]] = []
    for span in spans:
        for buffers, when, sign in ((span.action.writes, span.begin, 1), (span.action.frees, span.end, -1)):
            size = sum(activation_bytes.get(one.kind, 0) for one in buffers if one.kind is not Kind.OFFLOADED)
            if size:
                events.append((when - zero, sign * size))
    seconds, held, total = [0.0], [fixed / 2**30], fixed
    for when, size in sorted(events):
        total += size
        if when == seconds[-1]:
            held[-1] = total / 2**30
        else:
            seconds.append(when)
            held.append(total / 2**30)
    return seconds, held
