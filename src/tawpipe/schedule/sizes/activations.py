"""The memory of activations that a schedule's programs take, action by action."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType

from tawpipe.schedule.actions import Action, Lane, Op
from tawpipe.schedule.buffers import STAYING, Buffer, Kind
from tawpipe.schedule.step import Schedule

Shares = Mapping[tuple[Kind, int], float]
"""Of activations by kind and micro-batch: the share of what their kind takes. All of it where nothing is said."""
ALIKE: Shares = MappingProxyType({})


def size_in(sizes: Mapping[Kind, int], shares: Shares, buffer: Buffer) -> int:
    """Bytes of an activation."""
    size = sizes.get(buffer.kind, 0)
    return round(size * shares.get((buffer.kind, buffer.at[0]), 1.0)) if shares and size else size


def peak_activations(schedule: Schedule, rank: int, sizes: Mapping[Kind, int] | None = None) -> int:
    """The most that a program keeps at one time for backward passes.

    Args:
        sizes: of one activation of a kind; by default 1 for each input of a block and each gradient of one, so that
            these are counted.
    """
    sizes = {Kind.INPUT: 1, Kind.INPUT_GRADIENT: 1, Kind.RELOADED: 1} if sizes is None else sizes
    if STAYING.issuperset(sizes):
        return _staying(schedule, rank, sizes)
    return max((held for _, held in activations_held(schedule, rank, sizes)), default=0)


def _staying(schedule: Schedule, rank: int, sizes: Mapping[Kind, int]) -> int:
    """What activations take whose places are there for the whole run."""
    staying = {buffer for action in schedule.programs[rank] for buffer in action.writes if buffer.kind in STAYING}
    return sum(sizes.get(buffer.kind, 0) for buffer in staying)


def activations_held(
    schedule: Schedule, rank: int, sizes: Mapping[Kind, int], shares: Shares = ALIKE
) -> Iterator[tuple[Action, int]]:
    """Every action of a program, and what is kept while it runs: what it writes and what it frees included.

    What is received has its memory from when its lane is free, before its turn: it is posted at once. What is sent
    is there until the computation is over that runs beside.
    """
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
