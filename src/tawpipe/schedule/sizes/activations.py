"""Memory of the activations of a schedule's programs, action by action."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType

from tawpipe.schedule.actions import Action, Lane, Op
from tawpipe.schedule.buffers import STAYING, Buffer, Kind
from tawpipe.schedule.step import Schedule

Shares = Mapping[tuple[Kind, int], float]
"""(Kind, micro-batch) -> share of the usual size of this kind. Activations that are not in it have the usual size."""
ALIKE: Shares = MappingProxyType({})


def size_in(sizes: Mapping[Kind, int], shares: Shares, buffer: Buffer) -> int:
    """Return the bytes of an activation; 0 if ``sizes`` does not contain its kind.

    Args:
        sizes: usual bytes of every kind.
        shares: shares of the usual size, see ``Shares``.
        buffer: the activation.
    """
    size = sizes.get(buffer.kind, 0)
    return round(size * shares.get((buffer.kind, buffer.at[0]), 1.0)) if shares and size else size


def peak_activations(schedule: Schedule, rank: int, sizes: Mapping[Kind, int] | None = None) -> int:
    """Return the most bytes of activations that the program of ``rank`` holds at one time.

    Args:
        schedule: the schedule.
        rank: the rank.
        sizes: bytes of one activation of every kind; others are not counted. By default 1 for each block input and each
            gradient of one, so that the result is their number.
    """
    sizes = {Kind.INPUT: 1, Kind.INPUT_GRADIENT: 1, Kind.RELOADED: 1} if sizes is None else sizes
    if STAYING.issuperset(sizes):
        return _staying(schedule, rank, sizes)
    return max((held for _, held in activations_held(schedule, rank, sizes)), default=0)


def _staying(schedule: Schedule, rank: int, sizes: Mapping[Kind, int]) -> int:
    """Return the bytes of activation buffers of ``rank`` that stay allocated for the whole run."""
    staying = {buffer for action in schedule.programs[rank] for buffer in action.writes if buffer.kind in STAYING}
    return sum(sizes.get(buffer.kind, 0) for buffer in staying)


def activations_held(
    schedule: Schedule, rank: int, sizes: Mapping[Kind, int], shares: Shares = ALIKE
) -> Iterator[tuple[Action, int]]:
    """Yield every action of a program with the bytes of activations that are held while it runs.

    Activations that the action writes or frees are included. A received activation has memory from the end of the
    previous action on its lane, because receives are posted at once. Activations that are freed by a send count until
    the next action that is no EXCHANGE has ended."""
    program = schedule.programs[rank]
    passing = {kind: size for kind, size in sizes.items() if kind not in STAYING}
    total, taken, free = _staying(schedule, rank, sizes), [0] * len(program), dict[Lane, int]()
    for index, action in enumerate(program):
        posted = free.get(action.lane, 0) if action.op is Op.EXCHANGE else index
        for buffer in action.writes:
            if buffer.kind in passing and buffer not in action.reads:
                taken[posted] += size_in(passing, shares, buffer)
        free[action.lane] = index + 1
    leaving = 0
    for action, more in zip(program, taken, strict=True):
        total += more
        yield action, total
        for buffer in action.frees:
            leaving += size_in(passing, shares, buffer)
        if action.op is not Op.EXCHANGE:
            total, leaving = total - leaving, 0
