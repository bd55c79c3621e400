"""Relative speeds of devices as text, and the share of work for each speed so that all finish together."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Sequence

from tawpipe.errors import UserError

MOST_PROCESSES = 1_000_000
"""Most processes that one entry of a text may stand for."""


def parse_speeds(text: str) -> tuple[float, ...]:
    """Return the numbers of ``ScheduleSettings.device_speeds``, one per process.

    >>> parse_speeds("2x1, 0.5")
    (1.0, 1.0, 0.5)

    Raises:
        UserError: the text contains anything but numbers above 0 and counts.
    """
    speeds = list[float]()
    try:
        for word in filter(None, text.replace(" ", "").split(",")):
            count, _, speed = word.rpartition("x")
            if not 0 < float(speed) < math.inf or not 0 < int(count or 1) <= MOST_PROCESSES:
                raise ValueError(word)
            speeds += [float(speed)] * int(count or 1)
    except ValueError as error:
        expected = "a number above 0 for every process, as in 8x1,8x0.5"
        raise UserError("schedule.device_speeds", text, expected) from error
    return tuple(speeds)


def spell_speeds(speeds: Sequence[float]) -> str:
    """Return the text from which ``parse_speeds`` reads ``speeds``.

    >>> spell_speeds((1, 1, 0.5))
    '2x1,0.5'
    """
    runs = [(len(list(same)), f"{speed:.4g}") for speed, same in itertools.groupby(speeds)]
    return ",".join(f"{count}x{speed}" if count > 1 else speed for count, speed in runs)


def slowest_of(speeds: Sequence[float], ranks: int) -> tuple[float, ...]:
    """Return for every group of ``ranks`` neighbouring ranks the speed of its slowest rank."""
    return tuple(min(speeds[at : at + ranks]) for at in range(0, len(speeds), ranks))


def by_speed(count: int, speeds: Sequence[float], *, least: int = 0) -> list[int]:
    """Return how many of ``count`` equal works each device gets, so that all finish as early as possible.

    Args:
        count: number of works.
        speeds: speed of every device.
        least: works that every device gets in any case.

    >>> by_speed(6, (1, 0.5, 0.5)), by_speed(3, (1, 0.1, 0.1), least=1)
    ([3, 2, 1], [1, 1, 1])
    """
    sooner = (count - least * len(speeds)) / sum(speeds)
    """Time at which all devices would finish if works could be divided."""
    each = [max(least, int(sooner * speed - 1e-9)) for speed in speeds]
    ends = [((each[number] + 1) / speed, each[number], number) for number, speed in enumerate(speeds)]
    heapq.heapify(ends)  # of equal ends, the device with the fewest works is first
    for _ in range(count - sum(each)):
        _, _, number = ends[0]
        each[number] += 1
        heapq.heapreplace(ends, ((each[number] + 1) / speeds[number], each[number], number))
    return each
