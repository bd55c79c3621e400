"""Memory that will not suffice ends a run before its first step, with a way out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tawpipe.errors import UserError
from tawpipe.model.chain import Chain
from tawpipe.plan.machine import Device, Machine
from tawpipe.plan.measure import Asked
from tawpipe.runtime.world import World
from tawpipe.schedule.settings import ScheduleSettings
from tawpipe.simulate import LinkModel
from tawpipe.topology import Topology
from tawpipe.train import memory
from tawpipe.train.config import TrainConfig
from tawpipe.train.decided import BatchShape
from tawpipe.train.planned import Planning
from tawpipe.train.run_model import RunModel

ALONE = World(Topology.grid(1, 1), 0, torch.device("cpu"), None)
FREE = LinkModel(float("inf"))
CONFIG = TrainConfig(
    model="tiny",
    global_batch=4,
    micro_batch=2,
    sequence_length=256,
    dtype="float32",
    schedule=ScheduleSettings(recompute="none", micro_batches_per_visit=2),
)


BATCH = BatchShape.of(CONFIG, "split", 1)


@pytest.fixture(scope="module")
def chain() -> Chain:
    return RunModel(CONFIG).followed(500)[1]


def check(
    monkeypatch, chain: Chain, *, memory_bytes: int, schedule: ScheduleSettings = CONFIG.schedule
) -> memory.Needs | None:
    machine = Machine((1,), FREE, FREE, device=Device("CPU", memory_bytes))
    monkeypatch.setattr(memory, "machine_unprobed", lambda _: machine)
    asked = Asked(256, 4, 2, dtype=torch.float32, settings=CONFIG.schedule, profile="measure")
    return memory.check_memory(Planning(ALONE, chain, asked), schedule, BATCH)[0]


def test_a_run_that_needs_more_than_there_is_is_refused_with_what_fits(monkeypatch, chain):
    asked, limit = {}, 0

    def ask(*args: Any, timed: bool = True, **rest: Any) -> Any:
        """Measured once: what the process already holds changes while the tests run."""
        if timed not in asked:
            asked[timed] = real(*args, timed=timed, **rest)[0]
        system = asked[False].system_bytes
        return replace(asked[timed], memory_bytes=limit, system_bytes=system), ""

    real = Planning.ask
    monkeypatch.setattr(Planning, "ask", ask)
    needs = check(monkeypatch, chain, memory_bytes=0)
    assert needs is not None and needs.parts["system"] > needs.parts["working"] > 0
    full = check(monkeypatch, chain, memory_bytes=0, schedule=replace(CONFIG.schedule, recompute="full"))
    assert full is not None and needs.device > full.device
    limit = (needs.device + full.device) // 2
    with pytest.raises(UserError) as refused:
        check(monkeypatch, chain, memory_bytes=limit)
    said = str(refused.value)
    assert said.startswith("memory: got 'a run that needs ") and "working" in said and "on every device" in said
    assert "--schedule.recompute full: " in said and "s a step" in said


def test_settings_that_cannot_work_are_left_to_those_who_know(monkeypatch, chain):
    wrong = ScheduleSettings(strategy="tawpipe-spread", homes="0,1")
    assert check(monkeypatch, chain, memory_bytes=1, schedule=wrong) is None
