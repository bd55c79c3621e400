"""The timed workload's two ends: an embedding and a head with bytes and seconds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tawpipe.errors import UserError
from tawpipe.lab import ours
from tawpipe.lab.bounds import schedule_bytes, shipped_bounds, workload_costs, workload_model
from tawpipe.lab.rivals.timed_modules import TimedChain, TimedLayer, TimedTask
from tawpipe.lab.sleeper import BusyTime
from tawpipe.lab.workload import TimedWorkload
from tawpipe.schedule.footprint import Widths
from tawpipe.schedule.proof.verify import verify
from tawpipe.simulate import LinkModel, play
from tawpipe.topology import Topology

PLAIN = TimedWorkload(4, 4_000, 0.1, 0.2, 0.1, 8, 100)
ENDS = replace(PLAIN, embedding_bytes=8_000, head_bytes=8_080, head_s=0.3)
FROZEN = replace(PLAIN, frozen_bytes=40_000)
TIED = replace(ENDS, head_bytes=0, tied=True)


@pytest.mark.parametrize("workload", [ENDS, TIED], ids=["two", "tied"])
@pytest.mark.parametrize("row", ["tawpipe-spread", "tawpipe-whole", "hsdp-ours", "flat", "weipipe"])
def test_every_strategy_moves_them(workload, row):
    schedule = ours.schedule_of(row, workload, Topology.grid(2, 2), {})
    verify(schedule)
    assert sum(unit.numel for unit in schedule.model.units) * 4 == 16_000 + 8_000 + (0 if workload.tied else 8_080)


def test_their_time_and_transfers_are_in_step_and_bounds():
    topology, between, inside = Topology.grid(2, 2), LinkModel(10_000), LinkModel(1e9)
    seconds = []
    for workload in (PLAIN, replace(ENDS, embedding_bytes=0, head_bytes=0), ENDS):
        costs = workload_costs(workload, between=between, inside=inside)
        schedule = ours.schedule_of("tawpipe-spread", workload, topology, {})
        bound = shipped_bounds("fsdp2", workload, topology, between)
        pipeline = shipped_bounds("1f1b", workload, topology, between)
        seconds.append((play(schedule, costs, steps=2).step_seconds, bound.dependency_s, pipeline.compute_s))
        assert bound.compute_s == pytest.approx(workload.compute_s / 4)
    assert all(a < b for a, b in zip(seconds[0], seconds[1], strict=True))
    assert seconds[1][2] == seconds[2][2] and all(a < b for a, b in zip(seconds[1][:2], seconds[2][:2], strict=True))
    assert workload_model(PLAIN).units == workload_model(replace(PLAIN, head_s=1.0)).units


def test_stages_and_parts_of_rivals_are_the_whole_model():
    task = TimedTask(ENDS, BusyTime())
    assert [part.weight.numel() for part in task.parts() if isinstance(part, TimedLayer)] == [2000, *[1000] * 4, 2020]
    cut = []
    for index in range(4):
        stage = task.stage(index, 4, parts_per_layer=2)
        assert isinstance(stage, TimedChain)
        cut += [layer.weight.numel() for layer in stage.layers if isinstance(layer, TimedLayer)]
    assert cut == [2000, *[500] * 8, 2020]
    assert ENDS.split(2).compute_s == pytest.approx(ENDS.compute_s)


def test_ends_that_cannot_be():
    with pytest.raises(UserError, match="tied"):
        replace(ENDS, tied=True)
    with pytest.raises(UserError, match="rivals"):
        TimedTask(TIED, BusyTime())


def test_what_is_frozen_travels_and_has_no_gradients():
    topology, link = Topology.grid(2, 2), LinkModel(10_000)
    for row, visits in (("tawpipe-spread", 2 * 2), ("tawpipe-step", 1), ("hsdp-ours", 0)):
        schedule = ours.schedule_of(row, FROZEN, topology, {"reuse": False} if visits > 1 else {})
        plain = ours.schedule_of(row, PLAIN, topology, {"reuse": False} if visits > 1 else {})
        sent, without = (schedule_bytes(one, topology, Widths(4, 4, 4, 0))[0][0] for one in (schedule, plain))
        assert sent - without == pytest.approx(visits * 4 * 40_000 / 2, rel=0.01), row  # stripes are padded
    for name, knobs, share in (
        ("fsdp2", {}, 3 / 4 * (2 + 2 * 3 / 4 - 1 / 4)),  # the first layer stays from round to round, the last in each
        ("fsdp2", {"keep_weights": True}, 3 / 4),
        ("fsdp2-hierarchical", {}, 1 / 2 * (2 + 2 * 3 / 4 - 1 / 4)),
        ("hsdp", {}, 0),
    ):
        moved, without = (shipped_bounds(name, one, topology, link, knobs).sent_bytes[0] for one in (FROZEN, PLAIN))
        assert moved - without == pytest.approx(share * 4 * 40_000), (name, knobs)
    layers = [part for part in TimedTask(FROZEN, BusyTime()).parts() if isinstance(part, TimedLayer)]
    assert all(sum(p.numel() for p in one.parameters() if not p.requires_grad) == 10_000 for one in layers)
