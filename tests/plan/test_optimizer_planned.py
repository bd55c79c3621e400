"""Plans for optimizers that look at whole matrices: their strategies, their memory, the seconds of their updates."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from plan_requests import plan_request, step_of
from tawpipe.errors import UserError
from tawpipe.model.chain import Chain
from tawpipe.model.files.build import build_model
from tawpipe.plan.cost.predict import memory_quickly, predict
from tawpipe.plan.cost.updates import estimated, flops_of, measured, states_of
from tawpipe.plan.search.plan import Plan
from tawpipe.plan.search.plan_file import record_of, request_from
from tawpipe.plan.search.search import search
from tawpipe.runtime.homes.named_optimizers import BY_NAME
from tawpipe.runtime.homes.storage import PlaceOfPiece
from tawpipe.schedule.sizes.footprint import Widths
from tawpipe.schedule.strategies.table import find


def test_plan_keeps_units_whole_for_muon():
    asked = plan_request(needs_whole="Muon", global_batch=4)
    found = search(asked)
    assert Plan.of(asked, found).chosen.strategy == "tawpipe-whole"  # type: ignore[union-attr]
    cut = {one.strategy: one.why_not for one in found if not one.fits and not find(one.strategy).axis}
    assert "flat" in cut and all(
        "for Muon, which looks at whole matrices: tawpipe-whole" in why for why in cut.values()
    )
    with pytest.raises(UserError, match="tawpipe-whole"):
        step_of(asked, "hsdp")


def test_memory_and_seconds_count_optimizer_costs_per_unit():
    alike, units = plan_request(), len(plan_request().model.units)
    step = step_of(alike, "tawpipe-whole")
    same = replace(
        alike, widths=Widths(2, 4, 4, (2.0,) * units), profile=replace(alike.profile, update_of=(1e-9,) * units)
    )
    assert memory_quickly(same, step) == memory_quickly(alike, step)
    assert predict(same, step).step_seconds == predict(alike, step).step_seconds
    ends = replace(alike, widths=Widths(2, 4, 4, (2.0, *(0.0,) * (units - 1))))
    assert memory_quickly(ends, step).device < memory_quickly(alike, step).device
    slow = replace(alike, profile=replace(alike.profile, update_of=(1e-9, 1e-4, *(1e-9,) * (units - 2))))
    assert predict(slow, step).step_seconds > predict(alike, step).step_seconds
    again = request_from(json.loads(json.dumps(record_of(replace(slow, widths=ends.widths)))), where="here")
    assert (again.widths, again.profile.update_of) == (ends.widths, slow.profile.update_of)


def test_update_costs_follow_from_the_optimizer():
    units = Chain(build_model("tiny", vocab_size=500, max_positions=64).model).units
    muon, adafactor, adamw = (BY_NAME[name](1e-3) for name in ("muon", "adafactor", "adamw"))
    assert states_of(adamw, units) == 2
    ends, layers = states_of(muon, units)[0], states_of(muon, units)[1]  # type: ignore[index]
    assert ends == 2 and 1 <= layers < 1.1
    assert max(states_of(adafactor, units)[:-1]) < 0.1  # type: ignore[index]  # the last has vectors alone
    place = lambda *shape, in_layer=True, role="": PlaceOfPiece("", shape, 0, in_layer, role)  # noqa: E731
    assert flops_of(muon, place(8, 4)) == flops_of(muon, place(4, 8)) == 5 * (4 * 16 * 8 + 2 * 64)
    assert not flops_of(muon, place(8, 4, in_layer=False)) and not flops_of(adamw, place(8, 4))
    assert not flops_of(muon, place(8, 4, role="vector")) and not flops_of(muon, place(8, 4, role="table"))

    mean, each = estimated(muon, units, rate=1e9, bytes_per_s=1e12)
    assert each[0] < mean < each[1] and estimated(adamw, units, 1e9, 1e12) == (28e-12, ())

    def seconds(run) -> float:
        run()
        return 1.0

    mean, each = measured(muon, units, torch.device("cpu"), seconds)
    assert len(each) == len(units) and min(each) > 0
    assert measured(adamw, units, torch.device("cpu"), seconds) == (1 / 4_000_000, ())
