"""The timed workload: its two ends, what is frozen, layers that differ, and the stages that rivals make of them."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tawpipe.errors import UserError
from tawpipe.schedule.proof.verify import verify
from tawpipe.schedule.sizes.footprint import Widths
from tawpipe.simulate import LinkModel, play
from tawpipe.topology import Topology
from tawpipe_lab import ours
from tawpipe_lab.bounds import schedule_bounds, schedule_bytes, shipped_bounds, workload_costs, workload_model
from tawpipe_lab.mixes import MIXES
from tawpipe_lab.rivals.stages import balanced_cuts, stages_of
from tawpipe_lab.rivals.timed_modules import TimedChain, TimedLayer, TimedTask
from tawpipe_lab.sleeper import BusyTime
from tawpipe_lab.suite import read_suite
from tawpipe_lab.workload import TimedWorkload, from_spelled_out, spell_out

PLAIN = TimedWorkload(4, 4_000, 0.1, 0.2, 0.1, 8, 100)
ENDS = replace(PLAIN, embedding_bytes=8_000, head_bytes=8_080, head_s=0.3)
FROZEN = replace(PLAIN, frozen_bytes=40_000)
TIED = replace(ENDS, head_bytes=0, tied=True)


@pytest.mark.parametrize("workload", [ENDS, TIED], ids=["two", "tied"])
@pytest.mark.parametrize("row", ["tawpipe-spread", "tawpipe-whole", "hsdp-ours", "flat", "weipipe"])
def test_every_strategy_schedules_embedding_and_head(workload, row):
    schedule = ours.schedule_of(row, workload, Topology.grid(2, 2), {})
    verify(schedule)
    assert sum(unit.numel for unit in schedule.model.units) * 4 == 16_000 + 8_000 + (0 if workload.tied else 8_080)


def test_embedding_and_head_times_are_part_of_step_and_bounds():
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


def test_rival_parts_and_stages_cover_the_whole_model():
    task = TimedTask(ENDS, BusyTime())
    assert [part.weight.numel() for part in task.parts() if isinstance(part, TimedLayer)] == [2000, *[1000] * 4, 2020]
    cut = []
    for index in range(4):
        stage = task.stage(stages_of("1f1b", ENDS.split(2), 4, 1).blocks_of(index), parts_per_layer=2)
        assert isinstance(stage, TimedChain)
        cut += [layer.weight.numel() for layer in stage.layers if isinstance(layer, TimedLayer)]
    assert cut == [2000, *[500] * 8, 2020]
    assert ENDS.split(2).compute_s == pytest.approx(ENDS.compute_s)


def test_impossible_tied_ends_are_refused():
    with pytest.raises(UserError, match="tied"):
        replace(ENDS, tied=True)
    with pytest.raises(UserError, match="rivals"):
        TimedTask(TIED, BusyTime())


def test_frozen_weights_are_sent_and_have_no_gradients():
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


UNEVEN = replace(
    PLAIN,
    pattern="ab a",
    kinds={
        "a": {"backward_weight_s": 0.5, "linear_bytes": 48},
        "b": {"forward_s": 1.0, "layer_bytes": 8_000},
        "embedding": {"forward_s": 0.05},
        "head": {"forward_s": 2.0, "backward_input_s": 0.25},
    },
)


def test_layer_kinds_differ_in_schedules_simulated_times_and_rivals():
    a, b, plain = 0.1 + 0.2 + 0.5, 1.0 + 0.2 + 0.1, 0.1 + 0.2 + 0.1
    assert [part.seconds for part in UNEVEN.parts] == pytest.approx([0.05, a, b, plain, a, 2.25])
    assert UNEVEN.compute_s == pytest.approx(8 * (0.05 + 2 * a + b + plain + 2.25))
    assert [unit.numel for unit in workload_model(UNEVEN).units] == [1000, 2000, 1000, 1000]
    costs = workload_costs(UNEVEN, between=LinkModel(1e9), inside=LinkModel(1e9))
    for block, part in enumerate(UNEVEN.block_parts):
        assert costs.forward_s(0, block, 0) + costs.backward_s(0, block, 0) == pytest.approx(part.seconds)
        assert costs.backward_weight_s(0, block, 0) == pytest.approx(part.backward_weight_s)
    whole = [one for one in TimedTask(UNEVEN, BusyTime()).parts() if isinstance(one, TimedLayer)]
    assert [one.part for one in whole] == list(UNEVEN.parts)
    cut = UNEVEN.split(2)
    assert cut.pattern == "aabb  aa" and cut.compute_s == pytest.approx(UNEVEN.compute_s)
    assert [part.linear_bytes for part in cut.layer_parts] == [24, 24, 0, 0, 0, 0, 24, 24]
    assert UNEVEN.faster(4).compute_s == pytest.approx(UNEVEN.compute_s / 4)
    assert from_spelled_out(json.loads(json.dumps(spell_out(UNEVEN)))) == UNEVEN


def test_layers_without_recomputation_keep_their_graph():
    kept = replace(UNEVEN, graph_bytes=2200, kinds={**UNEVEN.kinds, "b": {**UNEVEN.kinds["b"], "graph_bytes": 202}})
    assert [part.graph_bytes for part in kept.layer_parts] == [2200, 202, 2200, 2200]
    assert [part.graph_bytes for part in UNEVEN.layer_parts] == [UNEVEN.activation_bytes] * 4
    blocks = ours.pipeline_costs(kept, "none:2,full").blocks
    assert [block.kept for block in blocks] == [0, 1, 1, 22, 22, 1]
    for block, part, again in zip(blocks[1:-1], kept.layer_parts, (1, 1, 0, 0), strict=True):
        assert block.backward_input == round(1e6 * (part.backward_input_s - (1 - again) * part.forward_s))
    link, knobs = LinkModel(1e9), {"recompute": "none"}
    for row in ("1f1b-ours", "zero-bubble"):  # backward passes whole, and in two parts
        schedule = ours.schedule_of(row, replace(PLAIN, graph_bytes=2200), Topology.grid(2, 1), knobs)
        bounds = schedule_bounds(schedule, workload_costs(PLAIN, between=link, inside=link))
        assert bounds.compute_s == pytest.approx(8 * 2 * (0.4 - 0.1))


@pytest.mark.parametrize(
    ("change", "setting"),
    [
        ({"pattern": "ab"}, "pattern"),
        ({"pattern": "aaaa"}, "kinds"),
        ({"kinds": {"a": {"seconds": 1}}}, "kinds.a"),
        ({"kinds": {"head": {"layer_bytes": 1}}}, "kinds.head"),
    ],
)
def test_impossible_layer_patterns_are_refused(change, setting):
    with pytest.raises(UserError) as caught:
        replace(UNEVEN, **change)
    assert caught.value.setting == setting


@given(st.lists(st.integers(1, 9), min_size=1, max_size=9), st.data())
def test_balanced_cuts_minimize_the_largest_part(costs, data):
    parts = data.draw(st.integers(1, len(costs)))

    def largest(cuts):
        return max(sum(costs[a:b]) for a, b in itertools.pairwise((*cuts, len(costs))))

    others = ((0, *rest) for rest in itertools.combinations(range(1, len(costs)), parts - 1))
    cuts = balanced_cuts(costs, parts)
    assert cuts[0] == 0 and len(set(cuts)) == parts and cuts == sorted(cuts)
    assert largest(cuts) == min(map(largest, others))


def test_stages_balanced_by_cost_include_embedding_and_head():
    """A long head is a stage of its own; one that is nothing goes with the last layer."""
    assert str(stages_of("1f1b", UNEVEN, 3, 1, "cost")) == "0,3,5@0,1,2"
    assert str(stages_of("zbv", PLAIN, 2, 2, "cost")) == str(stages_of("zbv", PLAIN, 2, 2)) == "0,2,3,4@0,1,1,0"
    assert str(stages_of("1f1b", UNEVEN, 3, 1)) == "0,3,4@0,1,2"
    # The second rank: its own stage for all micro-batches, and that before it once forward and once backward.
    link, own = LinkModel(1e30), 0.8 + 1.3
    bound = shipped_bounds("1f1b", replace(UNEVEN, kinds={**UNEVEN.kinds, "head": {}}), Topology.grid(2, 1), link)
    assert bound.compute_s == pytest.approx(8 * (0.05 + own))
    assert bound.dependency_s == pytest.approx(max(8 * (0.05 + own), 8 * 1.2 + 0.05 + own))


def test_layer_mix_of_a_suite_equals_its_model():
    blocks = MIXES["nemotron"](9)
    cell = {"name": "c", "nodes": 2, "local": 2, "rate": "none"}
    workload = {"mix": {"model": "nemotron", "tick_s": 0.5}, "layers": 9, "micro_batches": 8}
    workload |= {"layer_bytes": 4, "activation_bytes": 4}
    suite = {"name": "x", "cells": [{**cell, "workload": workload}], "strategies": [{"strategy": "1f1b"}]}
    read = read_suite(suite).cells[0].workload
    assert isinstance(read, TimedWorkload)
    for part, block in zip(read.block_parts, blocks, strict=True):
        own = (block.forward, block.backward_input, block.backward_weight)
        assert (2 * part.forward_s, 2 * part.backward_input_s, 2 * part.backward_weight_s) == pytest.approx(own)
    with pytest.raises(UserError, match="nemotron"):
        read_suite({**suite, "cells": [{**cell, "workload": {**workload, "mix": {"model": "x", "tick_s": 1}}}]})
    for nothing in ({}, {"workload": None}, {"workload": "mix"}):
        with pytest.raises(UserError, match="workload"):
            read_suite({**suite, "cells": [{**cell, **nothing}]})
