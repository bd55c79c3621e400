"""Laps in the executor: every pass meets every stage in one order, messages may be short, all ranks stop together."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from given_time import GivenTime, given_time
from schedules import llama
from tawpipe.errors import RunError
from tawpipe.model.units import ParameterSlot, Unit
from tawpipe.runtime.compute.step_input import DecodeInput
from tawpipe.runtime.executor import Executor
from tawpipe.runtime.frame import Frame
from tawpipe.runtime.homes.storage import Storage
from tawpipe.runtime.transport.transport import Transport
from tawpipe.runtime.world import World
from tawpipe.schedule.actions import Action
from tawpipe.schedule.buffers import Buffer, block_input, ids, layer_cache
from tawpipe.schedule.decode_steps import build_decode_steps
from tawpipe.schedule.step import Schedule
from tawpipe.topology import Topology

ROOM = 64


class CountedPasses:
    """Passes that carry their number, whether they are the last, and as much again as chance says.

    Args:
        last: number of the first pass that is the last.
    """

    def __init__(self, schedule: Schedule, last: int, *, fails: int = -1) -> None:
        self.groups, self.last, self.fails = len(schedule.micro_batches), last, fails
        self.head = len(schedule.model.blocks) - 1
        self.held: dict[Buffer, list[int]] = {}
        self.seen: dict[Buffer, list[int]] = {}
        """By cache the passes that have met it."""
        self.drawn: list[int] = []

    def forward(self, action: Action, frame: Frame[DecodeInput]) -> None:
        group, block = action.micro_batch, action.block
        if block == 0:
            self.drawn += self.held.pop(ids(group), [])[:1]
            number = frame.inputs.number * self.groups + group
            frame.inputs.last |= number >= self.last
            carried = [number, int(number >= self.last), *[7] * random.randrange(ROOM - 2)]
        else:
            carried = self.held.pop(block_input(group, block))
        if carried[0] == self.fails and block == self.head:
            raise ValueError("a stage that fails")
        if layer_cache(block) in action.writes:
            self.seen.setdefault(layer_cache(block), []).append(carried[0])
        self.held[ids(group) if block == self.head else block_input(group, block + 1)] = carried

    def prepare(self, action: Action, frame: Frame[DecodeInput]) -> None:
        frame.inputs.last |= bool(self.held[action.reads[0]][1])

    def travel(self, action: Action, frame: Frame[DecodeInput]) -> None:
        sent = {t.buffer: torch.tensor(self.held.pop(t.buffer)) for t in action.transfers if t.send}
        self.held |= {buffer: tensor.tolist() for buffer, tensor in frame.transport.exchange(action, sent).items()}

    def receive_buffers(self, action: Action, frame: Frame[DecodeInput]) -> dict[Buffer, Tensor]:
        return {buffer: torch.zeros(ROOM, dtype=torch.long) for buffer in action.writes}


def executor_of(world: World, schedule: Schedule, compute: Any, delay: Callable[[str], Any] | None = None) -> Executor:
    units = [
        Unit(n, f"u{n}", False, (ParameterSlot(f"u{n}", (u.numel,), 0, u.numel),), u.blocks, u.numel)
        for n, u in enumerate(schedule.model.units)
    ]
    types: Any = {"compute_dtype": torch.float32, "master_dtype": torch.float32}
    return Executor(
        world.rank,
        compute=compute,
        storage=Storage(units, schedule.homes, world.rank, device=world.device, **types),
        transport=Transport(world.nodes, world.rank, [schedule], device=world.device, strict=True),
        optimizers=None,
        reduce_dtype=torch.float32,
        delay=delay,
    )


def delays(seed: int) -> Callable[[str], Callable[[], float]]:
    """Seconds to wait before each action of a lane."""
    dice = random.Random(seed)
    return lambda lane: lambda: dice.choice([0.0, 0.0, 0.002]) * dice.random()


def looped(world: World, groups: int, last: int) -> dict[str, Any]:
    """In a worker: two loops, one after the other, with a delay here and there."""
    schedule = build_decode_steps(llama(world.size, tied=True), world.nodes, groups)
    compute: Any = CountedPasses(schedule, last)
    executor = executor_of(world, schedule, compute, delays(world.rank))
    laps = [executor.loop(schedule)]
    first = {str(name): passes for name, passes in compute.seen.items()}, list(compute.drawn)
    for held in (compute.seen, compute.drawn, compute.held):
        held.clear()
    laps.append(executor.loop(schedule))
    again = {str(name): passes for name, passes in compute.seen.items()}, list(compute.drawn)
    executor.close()
    executor.transport.close()
    return {"laps": laps, "first": first, "again": again}


@pytest.mark.parametrize(("ranks", "groups", "last"), [(1, 3, 7), (2, 1, 0), (3, 4, 9), (3, 2, 11)])
def test_every_stage_runs_all_passes_in_order_and_stops_after_one_step(pool, ranks, groups, last):
    laps = last // groups + 2  # that of the pass which is the last, and the one that was issued with it
    everything = list(range(laps * groups))
    for rank, found in enumerate(pool.run(f"{__name__}:looped", ranks, 1, groups=groups, last=last)):
        assert found["laps"] == [laps, laps]
        for passes, drawn in (found["first"], found["again"]):
            assert list(passes.values()) == [everything]
            assert drawn == (everything[:-groups] if rank == 0 else [])


def failing(world: World) -> str:
    """In a worker: a stage fails in the third lap."""
    schedule = build_decode_steps(llama(world.size), world.nodes, 2)
    executor = executor_of(world, schedule, CountedPasses(schedule, 1000, fails=5))
    try:
        executor.loop(schedule)
    except Exception as error:
        with pytest.raises(RunError):
            executor.loop(schedule)
        # By its end, when the answer is out, others learn of it: receives that are under way keep connections open.
        threading.Timer(1.5, os._exit, (1,)).start()
        return str(error)
    return "went on"


def test_failing_stage_ends_the_decode_loop_on_every_rank(pool):
    *others, last = pool.run_once(f"{__name__}:failing", 2, 1)
    assert last == "a stage that fails" and "went on" not in others


class IdlePasses(CountedPasses):
    """Waits for requests before each lap, for two thirds of the watchdog's limit."""

    time: GivenTime

    def forward(self, action: Action, frame: Frame[DecodeInput]) -> None:
        if action.block == action.micro_batch == 0:
            self.time.looked()
            self.time.now += 0.6
            self.time.looked()
        super().forward(action, frame)


def test_idle_decode_loop_never_exceeds_the_watchdog_limit(monkeypatch):
    schedule, ended = build_decode_steps(llama(1), Topology.grid(1, 1), 2), list[str]()
    world = World(schedule.topology, 0, torch.device("cpu"), None)
    passes = IdlePasses(schedule, 13)
    passes.time = given_time(monkeypatch)
    executor = executor_of(world, schedule, passes)
    executor.watchdog.limit_s, executor.watchdog._own_end = 0.9, lambda: ended.append("ended")
    assert executor.loop(schedule) == 8
    assert passes.time.now > 4 and ended == []
    executor.close()
