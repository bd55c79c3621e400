"""Plans of ``solved``: what every layer keeps, its stages and its order, chosen together and followed by a run."""

from __future__ import annotations

from dataclasses import replace

import pytest
import yaml

from tawpipe.plan.cost.predict import memory_quickly, predict
from tawpipe.plan.cost.profile import Profile, size_of
from tawpipe.plan.cost.request import PlanRequest
from tawpipe.plan.machine.machine import Device, Machine
from tawpipe.plan.search.pipelines import planner_of
from tawpipe.plan.search.plan import Plan
from tawpipe.plan.search.plan_file import planned_settings
from tawpipe.plan.search.search import Candidate, with_settings
from tawpipe.schedule.actions import Op
from tawpipe.schedule.pipelines import cost_based
from tawpipe.schedule.pipelines.limits import BUDGET
from tawpipe.schedule.proof.verify import verify
from tawpipe.schedule.settings import DEFAULT, ScheduleSettings
from tawpipe.schedule.sizes.footprint import BlockMemory, Widths
from tawpipe.schedule.spec import BlockSpec, ModelSpec, UnitSpec
from tawpipe.schedule.strategies.build import build
from tawpipe.schedule.transform import for_one_thread
from tawpipe.simulate import BlockCost, LinkModel, Seconds

LAYERS, NODES, ROWS, LENGTH, HIDDEN = 8, 2, 8, 1000, 100


def asked_of(memory: int) -> PlanRequest:
    """A model whose kept graphs are the most of its memory: ten times its boundaries."""
    numel = 10_000
    ends = BlockSpec((), "embedding", False, False), BlockSpec((), "head")
    layers = (BlockSpec((i,), "layer") for i in range(LAYERS))
    model = ModelSpec((ends[0], *layers, ends[1]), tuple(UnitSpec(numel, True, (i + 1,)) for i in range(LAYERS)))
    forward = Seconds(0.0, 1e-5)
    layer = BlockCost(forward, Seconds(0.0, 3e-5), Seconds(0.0, 1e-6), backward_weight=forward)
    memory_of = BlockMemory(2 * HIDDEN, {"graph": 20 * HIDDEN, "kept": 4 * HIDDEN, "lin": 10 * HIDDEN})
    profile = Profile((BlockCost(), *[layer] * LAYERS, BlockCost()), 1e-12, memory_of, "formula")
    fast = LinkModel(1e12)
    machine = Machine((1,) * NODES, fast, fast, host=LinkModel(2e9), device=Device("H100"), host_bytes=1 << 40)
    size = size_of([LENGTH])
    return PlanRequest(model, profile, machine, ROWS, 1, LENGTH, size, Widths(2, 4, 4, 2), memory_bytes=memory)


@pytest.fixture(scope="module")
def chosen() -> tuple[PlanRequest, list[dict[str, str]]]:
    request = asked_of(14_000_000)
    step = request.step(ScheduleSettings(strategy="solved"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cost_based, "KEEP_TRIES", 500)
        patch.setattr(cost_based, "SOLVE_S", 0.1)
        return request, [*step.strategy.changes(planner_of(request), step, lambda _: True, budget=BUDGET)]


def test_solved_plan_with_mixed_layers_fits_and_is_shortest(chosen):
    request, options = chosen
    *alike, mixed = options
    assert len(set(mixed["recompute"].replace(":", ",").split(",")) & {"none", "selective", "full"}) > 1
    step = request.step(replace(DEFAULT, strategy="solved", **mixed))
    assert memory_quickly(request, step).device <= request.memory_bytes
    seconds = predict(request, step).step_seconds
    for how in ("full", *(one["recompute"] for one in alike)):
        other = next((one for one in alike if one["recompute"] == how), {"recompute": how})
        uniform = request.step(replace(DEFAULT, strategy="solved", **other))
        if memory_quickly(request, uniform).device <= request.memory_bytes:
            assert seconds < predict(request, uniform).step_seconds
    schedule = build(step)
    verify(for_one_thread(schedule), steps=1, one_thread=True)
    assert sum(action.op is Op.FORWARD for program in schedule.programs for action in program) == ROWS * (LAYERS + 1)
    moved = [action.op for program in schedule.programs for action in program if action.op in (Op.OFFLOAD, Op.RELOAD)]
    assert moved and moved.count(Op.OFFLOAD) == moved.count(Op.RELOAD)  # some of it waits in the host's memory


def test_plan_records_its_pipeline_order_and_a_missing_solver(chosen, monkeypatch):
    request, options = chosen
    step = request.step(replace(DEFAULT, strategy="solved", **options[-1]))
    plain = with_settings(request.step(ScheduleSettings(strategy="solved")))
    for one, solver, note in ((step, True, False), (step, False, True), (plain, True, True)):
        monkeypatch.setattr(cost_based, "has_solver", lambda solver=solver: solver)
        plan = Plan.of(request, [Candidate("solved", one, predict(request, one), True)])
        assert ("heuristic order" in "\n".join(plan.table())) is note
        lines = [line for line in plan.left_out() if "OR-tools is not installed (pip install" in line]
        assert len(lines) == (not solver)
        saved = planned_settings(yaml.safe_load(plan.text())["schedule"], DEFAULT)
        assert saved.pipeline_order == one.settings.pipeline_order
        assert request.step(saved) == one


@pytest.mark.slow
def test_solved_plan_without_a_solver_has_a_heuristic_order(monkeypatch):
    monkeypatch.setattr(cost_based, "has_solver", lambda: False)
    request = asked_of(14_000_000)
    step = request.step(ScheduleSettings(strategy="solved"))
    *_, mixed = step.strategy.changes(planner_of(request), step, lambda _: True, budget=BUDGET)
    assert mixed["pipeline_order"]
