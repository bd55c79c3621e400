"""Coding without loss in a plan: it is charged with its time, and chosen where a step is faster with it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from plan_requests import plan_request, profile, search_only, step_of
from tawpipe.model.chain import Chain
from tawpipe.model.files.build import build_model
from tawpipe.plan.answer.without_loss import without_loss
from tawpipe.plan.cost.coding import ELEMENTS, estimated, measured
from tawpipe.plan.cost.measure import Asked, request_of
from tawpipe.plan.cost.predict import memory_quickly, predict
from tawpipe.plan.cost.request import PlanRequest
from tawpipe.plan.machine.machine import Device, Machine, uniform
from tawpipe.plan.search.plan import Plan
from tawpipe.plan.search.plan_file import record_of, request_from
from tawpipe.plan.search.refine import codings
from tawpipe.runtime.transport.exact import coding_bytes
from tawpipe.schedule.sizes.footprint import Widths
from tawpipe.schedule.spec import change_width
from tawpipe.simulate import CodingTimes, LinkModel

FAST = CodingTimes(1e-12, (1e-12, 1e-12), (1e-12, 1e-12))
SLOW = CodingTimes(1e-2, (1e-2, 1e-2), (1e-2, 1e-2))
EXACT = {"weights_compression": "exact"}
BOTH = EXACT | {"gradients_compression": "exact"}


LINKS = {"between": LinkModel(1e4, 1e-5), "inside": LinkModel(1e8)}


def asked_with(coding: CodingTimes, machine: Machine | None = None, **changes) -> PlanRequest:
    machine = machine or uniform(2, 2, **LINKS, device=Device())
    return plan_request(machine, profile=replace(profile(), coding=coding), **changes)


def planned(asked: PlanRequest) -> Plan:
    return Plan.of(asked, search_only(asked, "tawpipe-step"))


def lines_of(asked: PlanRequest) -> list[str]:
    return list(without_loss(planned(asked)))


def test_exact_compression_is_chosen_only_where_it_shortens_a_step():
    fast, slow = (planned(asked_with(coding)) for coding in (FAST, SLOW))
    assert fast.chosen is not None and fast.chosen.step is not None and slow.chosen is not None
    (gains,) = without_loss(fast)
    assert gains.startswith("chosen: --schedule.") and "changes no number" in gains and "assuming 4.4 bits" in gains
    assert "--schedule.weights-compression exact" in gains and "--schedule.gradients-compression exact" in gains
    assert fast.chosen.seconds < 0.95 * slow.chosen.seconds
    chosen = fast.chosen.chosen_settings()
    assert chosen["weights_compression"] == chosen["gradients_compression"] == "exact"
    asked = asked_with(FAST)
    assert fast.chosen.prediction is not None
    assert memory_quickly(asked, fast.chosen.step).parts["buffers"] == fast.chosen.prediction.memory["buffers"]
    (loses,) = without_loss(slow)
    assert "is off" in loses and slow.chosen.chosen_settings()["weights_compression"] == "none"
    alone = uniform(1, 4, between=LinkModel(2e5), inside=LinkModel(1e8), device=Device())
    assert not lines_of(asked_with(FAST, machine=alone))


def test_exact_compression_is_not_chosen_without_memory_for_its_copies():
    asked = asked_with(FAST)
    fast, plain = (predict(asked, step_of(asked, "tawpipe-step", **given)) for given in (BOTH, {}))
    assert fast.peak_bytes > plain.peak_bytes
    tight = planned(replace(asked, memory_bytes=planned(asked_with(SLOW)).chosen.prediction.peak_bytes))  # type: ignore[union-attr]
    assert tight.chosen is not None and tight.chosen.chosen_settings()["weights_compression"] == "none"


def test_memory_on_a_gpu_includes_what_coding_takes_for_the_largest_shard():
    gpus = asked_with(FAST, machine=uniform(2, 2, **LINKS, device=Device("NVIDIA H100")))
    plain, exact = (memory_quickly(gpus, step_of(gpus, "tawpipe-step", **given)) for given in ({}, EXACT))
    largest = max(home.shard_size for home in step_of(gpus, "tawpipe-step").homes)
    assert exact.parts["apart"] - plain.parts.get("apart", 0) == coding_bytes(largest) > 9 * largest


def test_exact_compression_is_suggested_if_unmeasured_or_partly_chosen():
    (unknown,) = lines_of(asked_with(CodingTimes()))
    assert unknown.startswith("available without changing any number: --schedule.")
    assert "coding was not measured" in unknown
    (gpus,) = lines_of(asked_with(FAST, machine=uniform(2, 2, **LINKS, device=Device("NVIDIA H100"))))
    assert "weights-compression exact" in gpus and "gradients-compression" not in gpus and "for GPUs" in gpus


def test_tensors_that_exact_compression_cannot_code_are_not_chosen():
    (fp32,) = lines_of(asked_with(FAST, widths=Widths(4, 4, 4, 2)))
    assert "gradients-compression exact" in fp32 and "weights-compression" not in fp32
    assert codings(asked_with(FAST, widths=Widths(8, 8, 8, 2))) == []


@pytest.mark.parametrize(
    ("setting", "part"), [("weights_compression", "change"), ("gradients_compression", "gradient")]
)
def test_step_time_includes_the_time_of_exact_compression(setting, part):
    seconds, some = list[float](), [replace(CodingTimes(), **{part: (each, each)}) for each in (0.0, 1e-4, 2e-4)]
    for coding in some:
        asked = asked_with(coding)
        seconds.append(predict(asked, step_of(asked, "tawpipe-step", **{setting: "exact"})).step_seconds)
    assert seconds[0] < seconds[1] < seconds[2]
    asked = asked_with(CodingTimes(count=1e-4))
    counted = predict(asked, step_of(asked, "tawpipe-step", **EXACT)).step_seconds
    stripes = sum(home.shard_size for home in step_of(asked, "tawpipe-step").homes)
    assert counted - seconds[0] == pytest.approx(1e-4 * stripes, rel=0.3) or setting != "weights_compression"


def test_lower_learning_rate_predicts_fewer_compressed_bytes():
    chain = lambda: Chain(build_model("tiny", vocab_size=500, max_positions=64).model)  # noqa: E731
    machine = uniform(2, 1, between=LinkModel(2e5), inside=LinkModel(1e8), device=Device())
    requests = [request_of(chain(), machine, Asked(32, 2, learning_rate=rate, timed=False)) for rate in (1e-5, 3e-4)]
    low, high = (predict(asked, step_of(asked, "tawpipe-step", **EXACT)).link_bytes for asked in requests)
    assert low < high
    assert [asked.widths.change for asked in requests] == [change_width(1e-5), change_width(3e-4)]


def test_compression_times_are_measured_and_saved_with_the_plan():
    runs = []
    coding = measured(torch.device("cpu"), lambda run: runs.append(run()) or 0.5)
    each = 0.5 / ELEMENTS
    assert len(runs) == 5 and coding == CodingTimes(each, (each, each), (each, each))
    assert estimated(1e12).change[0] > 0 and estimated(1e12).gradient == (0, 0)
    asked = asked_with(coding, widths=Widths(2, 4, 4, 2, change=0.3))
    again = request_from(json.loads(json.dumps(record_of(asked))), where="here")
    assert (again.profile.coding, again.widths.change) == (coding, 0.3)
