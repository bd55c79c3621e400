"""Schedules freed of what their buffers impose."""

from __future__ import annotations

from dataclasses import replace

from tawpipe.schedule.actions import Action, Op, exchange
from tawpipe.schedule.buffers import Buffer, pooled
from tawpipe.schedule.step import Pool, Schedule


def unlimited_buffers(schedule: Schedule) -> Schedule:
    """The same actions in the same order, with a buffer of its own for everything that a pool's buffer held in turn.

    Every write that does not also read its buffer begins a new one. So no action waits for the readers of what was
    there before, and lanes run ahead as far as the data allow: look-ahead without a limit. Homes keep their names,
    because an update in place does wait for those who still read the weights before it. The next step uses the buffers
    again, a whole step later. The result is a schedule like any other, and ``verify`` holds for it.
    """
    made = [_rename(program, pools) for program, pools in zip(schedule.programs, schedule.pools, strict=True)]
    return replace(
        schedule,
        name=f"{schedule.name}, unlimited buffers",
        programs=tuple(program for program, _ in made),
        pools=tuple(pools for _, pools in made),
    )


def _rename(program: tuple[Action, ...], pools: tuple[Pool, ...]) -> tuple[tuple[Action, ...], tuple[Pool, ...]]:
    used = {pool.name: 0 for pool in pools}
    current: dict[Buffer, Buffer] = {}

    def fresh(buffer: Buffer) -> Buffer:
        if buffer.pool not in used:
            return buffer
        current[buffer] = pooled(buffer.pool, used[buffer.pool])
        used[buffer.pool] += 1
        return current[buffer]

    renamed = []
    for action in program:
        if action.op is Op.EXCHANGE:
            sends = {t.buffer: current.get(t.buffer, t.buffer) for t in action.transfers if t.send}
            parts = (replace(t, buffer=sends[t.buffer] if t.send else fresh(t.buffer)) for t in action.transfers)
            renamed.append(exchange(action.lane, tuple(parts), action.group, compression=action.compression))
            continue
        reads = tuple(current.get(one, one) for one in action.reads)
        writes = tuple(current.get(one, one) if one in action.reads else fresh(one) for one in action.writes)
        renamed.append(replace(action, reads=reads, writes=writes))
    return tuple(renamed), tuple(replace(pool, count=used[pool.name]) for pool in pools)
