"""Coding without loss in a plan: it is charged with its time, and proposed where a step is faster with it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from plan_requests import plan_request, profile, search_only, step_of
from tawpipe.model.build import build_model
from tawpipe.model.chain import Chain
from tawpipe.plan.coding import ELEMENTS, estimated, measured
from tawpipe.plan.machine import Device, uniform
from tawpipe.plan.measure import Asked, request_of
from tawpipe.plan.plan import Plan
from tawpipe.plan.plan_file import record_of, request_from
from tawpipe.plan.predict import predict
from tawpipe.plan.request import PlanRequest
from tawpipe.plan.without_loss import without_loss
from tawpipe.schedule.footprint import Widths
from tawpipe.schedule.spec import change_width
from tawpipe.simulate import CodingTimes, LinkModel

SLOW = CodingTimes(1e-2, (1e-2, 1e-2), (1e-2, 1e-2))
EXACT = {"weights_compression": "exact"}


def asked_with(coding: CodingTimes, **changes) -> PlanRequest:
    return plan_request(profile=replace(profile(), coding=coding), **changes)


def lines_of(asked: PlanRequest) -> list[str]:
    return list(without_loss(Plan.of(asked, search_only(asked, "tawpipe-step"))))


def test_it_is_proposed_where_a_step_is_faster_and_left_off_where_it_is_not():
    (gains,) = lines_of(asked_with(CodingTimes()))
    assert gains.startswith("no number changes with --schedule.strategy tawpipe-step ") and "taken for 5 bits" in gains
    assert "--schedule.weights-compression exact" in gains and "--schedule.gradients-compression exact" in gains
    (loses,) = lines_of(asked_with(SLOW))
    assert "are left off" in loses
    alone = uniform(1, 4, between=LinkModel(2e5), inside=LinkModel(1e8), device=Device())
    assert not lines_of(asked_with(CodingTimes(), machine=alone))


def test_what_cannot_be_coded_is_not_proposed():
    links = {"between": LinkModel(2e5, 1e-5), "inside": LinkModel(1e8)}
    (gpus,) = lines_of(asked_with(CodingTimes(), machine=uniform(2, 2, **links, device=Device("NVIDIA H100"))))
    assert "weights-compression exact" in gpus and "gradients-compression" not in gpus
    (fp32,) = lines_of(asked_with(CodingTimes(), widths=Widths(4, 4, 4, 2)))
    assert "gradients-compression exact" in fp32 and "weights-compression" not in fp32


@pytest.mark.parametrize(
    ("setting", "part"), [("weights_compression", "change"), ("gradients_compression", "gradient")]
)
def test_a_step_takes_as_long_as_its_coding(setting, part):
    seconds, some = list[float](), [replace(CodingTimes(), **{part: (each, each)}) for each in (0.0, 1e-4, 2e-4)]
    for coding in some:
        asked = asked_with(coding)
        seconds.append(predict(asked, step_of(asked, "tawpipe-step", **{setting: "exact"})).step_seconds)
    assert seconds[0] < seconds[1] < seconds[2]
    asked = asked_with(CodingTimes(count=1e-4))
    counted = predict(asked, step_of(asked, "tawpipe-step", **EXACT)).step_seconds
    stripes = sum(home.stripe for home in step_of(asked, "tawpipe-step").homes)
    assert counted - seconds[0] == pytest.approx(1e-4 * stripes, rel=0.3) or setting != "weights_compression"


def test_fewer_bits_are_taken_for_a_lower_rate():
    chain = lambda: Chain(build_model("tiny", vocab_size=500, max_positions=64).model)  # noqa: E731
    machine = uniform(2, 1, between=LinkModel(2e5), inside=LinkModel(1e8), device=Device())
    requests = [request_of(chain(), machine, Asked(32, 2, learning_rate=rate, timed=False)) for rate in (1e-5, 3e-4)]
    low, high = (predict(asked, step_of(asked, "tawpipe-step", **EXACT)).link_bytes for asked in requests)
    assert low < high
    assert [asked.widths.change for asked in requests] == [change_width(1e-5), change_width(3e-4)]


def test_it_is_measured_and_a_saved_plan_knows_it():
    runs = []
    coding = measured(torch.device("cpu"), lambda run: runs.append(run()) or 0.5)
    each = 0.5 / ELEMENTS
    assert len(runs) == 5 and coding == CodingTimes(each, (each, each), (each, each))
    assert estimated(1e12).change[0] > 0 and estimated(1e12).gradient == (0, 0)
    asked = asked_with(coding, widths=Widths(2, 4, 4, 2, change=0.3))
    again = request_from(json.loads(json.dumps(record_of(asked))), where="here")
    assert (again.profile.coding, again.widths.change) == (coding, 0.3)
