"""From which length on transfers hide: the clock's answer, and the formulas beside it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from transformers import LlamaConfig

from model_requests import request_for
from plan_requests import plan_request, step_of
from tawpipe.plan.answer.longest import Longest, LongestRow
from tawpipe.plan.cost.hiding import EXPOSED, hides_from, keys_hide_from, weights_hide_from
from tawpipe.plan.cost.measure import machine_of
from tawpipe.plan.cost.predict import predict
from tawpipe.plan.cost.profile import size_of
from tawpipe.plan.cost.request import PlanRequest
from tawpipe.plan.machine.machine import Device, uniform
from tawpipe.simulate import BlockCost, LinkModel, Seconds

LLAMA_8B = LlamaConfig(
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=2,
    num_attention_heads=32,
    num_key_value_heads=8,
    vocab_size=1000,
    max_position_embeddings=1 << 24,
)
LAYER = BlockCost(Seconds(0.0, 1e-4, 1e-7), Seconds(0.0, 3e-4, 3e-7))


@pytest.mark.parametrize(
    ("gbit", "weights", "keys"),
    [
        (10, 344e3, 1.28e6),
        (400, 38e3, 32e3),
        pytest.param(100, 93e3, 128e3, marks=pytest.mark.slow),
    ],
)
def test_the_formulas_on_two_nodes_of_eight_devices(tmp_path, gbit, weights, keys):
    """A layer of Llama-3.1-8B at 400 TFLOP/s, which is half of the peak."""
    LLAMA_8B.save_pretrained(tmp_path)
    machine = machine_of(f"2x8@{gbit}gbit", device=Device("some", 80 << 30, flops=800e12))
    asked = request_for(str(tmp_path), machine, sequence_length=4096, global_batch=16)
    assert asked.key_value_bytes == 4096
    assert weights_hide_from(asked) == pytest.approx(weights, rel=0.03)
    assert keys_hide_from(asked) == pytest.approx(keys, rel=0.03)


def asked_of(nodes: int = 2) -> PlanRequest:
    machine = uniform(nodes, 2, between=LinkModel(2e5, 1e-5), inside=LinkModel(1e8), device=Device())
    made = plan_request(machine, global_batch=2 * nodes, sequence_length=1 << 16, size=size_of([1 << 16]))
    ends = made.profile.blocks[0]
    layers = [LAYER] * (len(made.profile.blocks) - 2)
    return replace(made, profile=replace(made.profile, blocks=(ends, *layers, ends)), key_value_bytes=16)


def test_the_clock_says_where_a_step_waits_no_more():
    asked = asked_of()
    step = step_of(asked, "tawpipe-spread")
    played = {n: predict(asked.with_length(n), step) for n in (100, 200, 400, 800, 1600, 3200, 6400)}
    shares = [one.exposed_communication_s / one.step_seconds for one in played.values()]
    assert shares[0] > EXPOSED > shares[-1]
    found = hides_from(lambda n: predict(asked.with_length(n), step), 100, 6400, 0.02)
    assert found is not None
    for tokens, hidden in ((found, True), (round(found * 0.97), False)):
        made = predict(asked.with_length(tokens), step)
        assert (made.exposed_communication_s < EXPOSED * made.step_seconds) is hidden
    assert hides_from(lambda n: predict(asked.with_length(n), step), 10, 100, 0.02) is None


def longest_of(asked: PlanRequest) -> Longest:
    step = step_of(asked, "tawpipe-spread")
    return Longest(asked, (LongestRow("tawpipe-spread", asked.sequence_length, "", asked, step, predict(asked, step)),))


def test_the_answer_is_said_where_something_passes_between_nodes():
    found = longest_of(asked_of())
    assert found.hiding["strategy"] == "tawpipe-spread" and 100 < found.hiding["tokens"] < 6400
    assert f"{found.hiding['tokens']:,} tokens" in found.hides and "context parallelism over all 4" in found.hides
    alone = longest_of(asked_of(1))
    assert alone.hides == "" and alone.hiding == {} and weights_hide_from(asked_of(1)) is None
    assert '"hides_from": null' in alone.json_text()
    assert keys_hide_from(replace(asked_of(), key_value_bytes=0)) is None


def test_nothing_is_said_of_weights_where_seconds_do_not_grow_with_tokens():
    """On a busy machine short blocks that are timed may seem to take equally long."""
    asked = asked_of()
    flat = BlockCost(Seconds(1e-9), Seconds(3e-9))
    ends, layers = asked.profile.blocks[0], [flat] * (len(asked.profile.blocks) - 2)
    asked = replace(asked, profile=replace(asked.profile, blocks=(ends, *layers, ends)))
    assert weights_hide_from(asked) is None
    found = longest_of(asked)
    assert '"document_in_a_node": null' in found.json_text()
    assert "by formula" not in found.hides and found.hides.endswith("by the clock)")
