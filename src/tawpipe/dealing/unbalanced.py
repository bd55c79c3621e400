"""Assignments of documents that ignore the time that they take, for comparison with balanced steps (balance.py)."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

from tawpipe.dealing.balance import LayerTime, Pack, Packs


def in_rows(lengths: Sequence[int], world_size: int, row: int, work: LayerTime) -> Packs:
    """Concatenate the documents, cut them into rows of ``row`` tokens, and assign the rows to ranks in turn.

    In the result, each part of a document in a row counts as a document."""
    pieces, rows, free = list[int](), list[list[int]](), 0
    for length in lengths:
        while length:
            if not free:
                rows.append([])
                free = row
            part = min(free, length)
            rows[-1].append(len(pieces))
            pieces.append(part)
            free, length = free - part, length - part
    return _rounds(rows, pieces, world_size, work)


def in_turn(lengths: Sequence[int], world_size: int, row: int, work: LayerTime) -> Packs:
    """Pack whole documents into rows of ``row`` tokens by best fit, and assign the rows to ranks in turn."""
    rows, free = list[list[int]](), list[tuple[int, int]]()
    for number in sorted(range(len(lengths)), key=lambda number: -lengths[number]):
        at = bisect_left(free, (lengths[number], -1))
        left, place = free.pop(at) if at < len(free) else (row, len(rows))
        if place == len(rows):
            rows.append([])
        rows[place].append(number)
        insort(free, (left - lengths[number], place))
    return _rounds(sorted(rows, key=min), lengths, world_size, work)


def _rounds(rows: Sequence[Sequence[int]], lengths: Sequence[int], world_size: int, work: LayerTime) -> Packs:
    """Return rows as ``Packs``, with ``world_size`` rows in each round; the last round is filled up with empty ones."""
    packs = [Pack(tuple(row)) for row in rows] + [Pack(())] * (-len(rows) % world_size)
    rounds = tuple(tuple(packs[at : at + world_size]) for at in range(0, len(packs), world_size))
    return Packs((), rounds, 1, tuple(lengths), work)
