"""Plans for serving: the formula of a lap and what the clock plays, how many groups, and which way is taken."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from schedules import llama
from tawpipe.errors import UserError
from tawpipe.plan.machine.machine import Machine, uniform
from tawpipe.schedule.actions import Op
from tawpipe.schedule.buffers import ids
from tawpipe.schedule.decode_steps import build_decode_steps
from tawpipe.schedule.pipelines.layout import Layout
from tawpipe.schedule.spec import BlockSpec, ModelSpec, UnitSpec
from tawpipe.serving.held import WeightBytes
from tawpipe.serving.pass_costs import estimated_passes
from tawpipe.serving.planner import (
    PassCost,
    ServePlan,
    ServeRequest,
    ServeWay,
    best_chunk,
    decode_step_seconds,
    fullest_bytes,
)
from tawpipe.simulate import BlockCost, CostModel, LinkModel, MicroBatchSize, Seconds, play
from tawpipe.topology import Topology

MS = 1e-3
BYTES = 100


def machine(nodes: int, hop_s: float, rate: float = math.inf) -> Machine:
    return uniform(nodes, 1, between=LinkModel(rate, hop_s), inside=LinkModel(math.inf))


def request(nodes: int = 4, hop_s: float = 5 * MS, layer_s: float = 10 * MS, **more: Any) -> ServeRequest:
    """Layers that take ``layer_s`` on up to 8 tokens, and a hundredth of that for each token more."""
    layer = PassCost(((0.0, layer_s), (8.0, layer_s), (108.0, 2 * layer_s)))
    costs = (PassCost(), *[layer] * 4, PassCost())
    asked = {"users": 32, "context": 256, "boundary_bytes": BYTES, "key_bytes": 16.0, **more}
    return ServeRequest(llama(4), costs, machine(nodes, hop_s, asked.pop("rate", math.inf)), **asked)


def played(way: ServeWay, *, chunk: int = 0) -> tuple[float, float]:
    """Seconds of a lap in the middle, and of a pass there, by the clock; layers are as of ``request``.

    Args:
        chunk: that every pass has.
    """
    asked, size = way.request, way.stages.stages
    schedule = build_decode_steps(asked.model, Topology.grid(size, 1), way.groups, way.stages)
    layer = BlockCost(Seconds(asked.costs[1].seconds(way.slots + chunk)))
    costs = CostModel(
        (BlockCost(), *[layer] * 4, BlockCost()),
        asked.machine.between,
        asked.machine.inside,
        size=MicroBatchSize(way.slots + chunk, 1),
        boundary_bytes=int(asked.boundary_bytes),
    )
    timeline = play(schedule, costs, steps=8)
    spans = [span for rank in schedule.played for span in timeline.spans(rank, step=timeline.steady_step)]
    begin = min(span.start for span in spans if ids(0) in span.action.reads and span.action.op is Op.FORWARD)
    drawn = max(span.end for span in spans if ids(0) in span.action.writes)  # on the first stage
    return timeline.step_seconds, drawn - begin


@pytest.mark.parametrize("hop_s", [0.1 * MS, 5 * MS, 25 * MS])
@pytest.mark.parametrize("rate", [math.inf, 125e3])
def test_simulated_token_time_equals_the_formula(hop_s, rate):
    for groups in (1, 2, 4, 6, 8, 11, 14, 16):
        way = ServeWay(request(hop_s=hop_s, rate=rate), 1, Layout.even(6, 4), groups, 4)
        token_s, _ = played(way)
        assert token_s == pytest.approx(way.token_s, rel=0.02)


@pytest.mark.parametrize("hop_s", [0.1 * MS, 5 * MS, 25 * MS])
def test_simulated_time_to_the_first_token_equals_the_formula(hop_s):
    for groups in (1, 4, 8, 14):
        for chunks in (1, 5):
            way = ServeWay(request(hop_s=hop_s, context=32), 1, Layout.even(6, 4), groups, 4, -(-32 // chunks))
            lap_s, last_s = played(way, chunk=way.chunk)
            assert (chunks - 1) * lap_s / groups + last_s == pytest.approx(way.first_s, rel=0.02)


def test_unequal_stages_wait_for_the_slowest():
    way = ServeWay(request(), 1, Layout(6, (0, 2, 4), (0, 1, 2)), 5, 4)
    assert way.stage_seconds() == pytest.approx([10 * MS, 20 * MS, 10 * MS])
    assert played(way)[0] == pytest.approx(way.token_s, rel=0.02) == pytest.approx(100 * MS, rel=0.02)
    asked = replace(way, request=request(context=16), chunk=16)
    assert played(asked, chunk=16)[1] == pytest.approx(asked.first_s, rel=0.02)


def test_number_of_groups_grows_with_the_latency_up_to_its_gain():
    def groups(hop_s: float) -> int:
        plan = ServePlan(request(hop_s=hop_s, users=48))
        return next(way.groups for way in plan.ways if way.stages.stages == 4)

    assert [groups(hop_s) for hop_s in (0.0, 5 * MS, 25 * MS)] == [4, 6, 6], "no more than keep passes at 8 users"
    stages, hops = [10 * MS] * 4, [5 * MS] * 4
    rates = {g: g / decode_step_seconds(stages, [0.0] * 4, hops, g) for g in range(1, 17)}
    assert rates[6] / rates[4] == pytest.approx(1.5)
    assert max(rates.values()) == pytest.approx(rates[6]), "more than that gain nothing"


def test_best_chunk_at_most_doubles_the_time_of_a_pass():
    way = ServeWay(request(context=4096), 1, Layout.even(6, 4), 4, 8)
    assert best_chunk(way) == 64  # 100 tokens more take as long again
    assert best_chunk(replace(way, request=request(context=16))) == 16
    assert best_chunk(ServeWay(request(context=4096, rate=1e3), 1, Layout.even(6, 4), 4, 8)) == 8, (
        "the link is the limit"
    )


def test_serve_plan_prefers_one_machine_then_replicas_then_stages():
    many = request(users=512, boundary_bytes=0.01, key_bytes=0.0)  # of whom a device alone takes much longer
    assert ServePlan(request(users=8)).reason.startswith("one machine: ")
    assert ServePlan(many).reason.startswith("replicas: one copy on each of 4 devices")
    tight = ServePlan(replace(many, memory_bytes=2900))  # a quarter of the layers, and the embedding
    assert tight.chosen is not None
    assert tight.reason.startswith("pipeline: 4 stages: it does not fit")
    nothing = ServePlan(replace(many, memory_bytes=1000))
    assert nothing.chosen is None
    assert "nothing fits: 512 users" in nothing.reason


@pytest.mark.parametrize(
    ("users", "hop_s"),
    [(8, 0.1 * MS), (40, 5 * MS), (200, 25 * MS), pytest.param(8, 25 * MS, marks=pytest.mark.slow)],
)
def test_planned_number_of_groups_is_the_fastest_simulated(users, hop_s):
    ways = [way for way in ServePlan(request(hop_s=hop_s, users=users)).ways if way.stages.stages == 4]
    (way,) = ways
    others = (replace(way, groups=groups, slots=-(-users // groups)) for groups in range(1, min(16, users) + 1))
    assert played(way)[0] <= 1.03 * min(played(other)[0] for other in others)


def shape(layers: int, layer: float, ends: float) -> ModelSpec:
    """A model by the parameters of a layer, and of the embedding and the head each."""
    sizes = [ends, *[layer] * layers, ends]
    kinds = ["embedding", *["layer"] * layers, "head"]
    blocks = tuple(BlockSpec((number,), kind) for number, kind in enumerate(kinds))
    return ModelSpec(blocks, tuple(UnitSpec(int(size), False, (number,)) for number, size in enumerate(sizes)))


def in_16_bits(model: ModelSpec) -> WeightBytes:
    widths = (2.0,) * len(model.units)
    return WeightBytes(widths, widths, widths)


MODELS = {  # in bf16: 2.5, 16 and 141 GB; keys and values of a layer and token: 2, 4 and 4 kB
    "1B": (shape(16, 61e6, 263e6), 2048, 2048),
    "8B": (shape(32, 218e6, 525e6), 4096, 4096),
    "70B": (shape(80, 856e6, 1051e6), 8192, 4096),
}
DEVICES = {"H100": (989e12, 3.35e12, 75), "4090": (165e12, 1.008e12, 22), "L4": (121e12, 0.3e12, 22)}
WRITTEN = [
    ("1B", "H100", 1, 64, 4096, "one machine"),
    ("1B", "H100", 4, 1, 4096, "one machine"),  # a copy more is no use to one user
    ("1B", "H100", 4, 64, 4096, "replicas"),  # a quarter of the keys and values to read
    ("1B", "L4", 4, 256, 2048, "replicas"),
    ("8B", "H100", 1, 1, 8192, "one machine"),
    ("8B", "H100", 2, 64, 4096, "replicas"),
    ("8B", "4090", 2, 1, 8192, "one machine"),  # 17 of 22 GiB, and no stage reads its weights sooner
    ("8B", "4090", 2, 8, 4096, "replicas"),
    ("8B", "4090", 2, 16, 8192, "pipeline"),  # 25 GB with half of the users
    ("8B", "4090", 1, 16, 8192, "none"),
    ("8B", "L4", 4, 32, 4096, "replicas"),  # 16 and 4 GB
    ("8B", "L4", 4, 64, 8192, "pipeline"),
    ("70B", "H100", 1, 1, 4096, "none"),
    ("70B", "H100", 2, 1, 4096, "pipeline"),
    ("70B", "H100", 4, 16, 8192, "pipeline"),
    ("70B", "4090", 4, 1, 4096, "none"),
    ("70B", "4090", 8, 4, 8192, "pipeline"),
    ("70B", "L4", 8, 4, 8192, "pipeline"),
    ("70B", "L4", 8, 64, 8192, "none"),  # 172 GB of keys and values
    ("70B", "H100", 8, 128, 4096, "pipeline"),
]


@pytest.mark.parametrize(("model", "device", "devices", "users", "context", "verdict"), WRITTEN)
def test_serve_plans_reach_the_recorded_verdicts(model, device, devices, users, context, verdict):
    spec, hidden, keys = MODELS[model]
    flops, rate, gib = DEVICES[device]
    asked = ServeRequest(
        spec,
        estimated_passes(spec, flops=flops, memory_rate=rate, weights=in_16_bits(spec), key_width=keys),
        machine(devices, 0.1 * MS, 1.25e9),
        users,
        context,
        2 * hidden,
        keys,
        memory_bytes=gib << 30,
    )
    assert ServePlan(asked).spelled_out()["verdict"] == verdict


def test_serve_memory_is_weights_caches_and_buffers():
    asked = request(system_bytes=7)
    (home,) = {unit.numel for unit in asked.model.units if unit.blocks == (2,)}
    way = ServeWay(asked, 1, Layout(6, (0, 1, 5), (0, 1, 2)), 2, 4, 16)
    padded = 4 * -(-home // 8) * 8
    assert way.memory_bytes == 2 * padded + 4 * (2 * 4 * 256 * 16) + 4 * 2 * (4 + 16) * BYTES + 7


def test_estimated_pass_is_bound_by_weight_reads_then_by_compute():
    costs = estimated_passes(llama(1), flops=2e6, memory_rate=1e6, weights=in_16_bits(llama(1)), key_width=7.0)
    assert costs[1].seconds(1) == pytest.approx(333 * 2 / 0.7e6)
    assert costs[1].seconds(64) == pytest.approx(2 * 333 * 64 / 1e6)
    assert costs[1].seconds(1, 100) - costs[1].seconds(1) == pytest.approx(100 * 7 / 0.7e6)
    assert costs[0].seconds(64) == 0


def test_quantized_weights_speed_up_few_tokens_and_slow_down_many():
    units = len(llama(1).units)
    few = WeightBytes(*((width,) * units for width in (1.0, 0.5, 4.5)))
    wide, costs = (
        estimated_passes(llama(1), flops=1e12, memory_rate=1e6, weights=weights, key_width=0.0)[1]
        for weights in (in_16_bits(llama(1)), few)
    )
    for tokens in (1, 8, 16):
        assert costs.seconds(tokens) == pytest.approx(wide.seconds(tokens) / 4)
    for tokens in (17, 64, 4096):
        assert costs.seconds(tokens) == pytest.approx(wide.seconds(tokens) * 4.5 / 2)


def test_serve_memory_counts_the_bytes_of_each_unit():
    asked, way = request(), Layout.even(6, 1)
    widths = tuple(float(place) for place in range(len(asked.model.units)))
    numbers = [sum(unit.numel * width for unit, width in zip(asked.model.units, widths, strict=True)), 4 * 1000.0]
    assert sum(numbers) <= fullest_bytes(asked.model, way, widths, 1000.0) <= 1.1 * sum(numbers)


def test_impossible_users_and_context_are_refused():
    with pytest.raises(UserError, match="--users"):
        request(users=0)
    with pytest.raises(UserError, match="--context"):
        request(context=1)
