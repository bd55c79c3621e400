"""Which schedule a run follows: that of a file, of the settings, of the checkpoint, or one that is made now."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import yaml

from model_requests import request_for
from plan_requests import plan_request, search_only
from tawpipe.checkpoint.resume import RunState
from tawpipe.console import progress_to
from tawpipe.errors import UserError
from tawpipe.plan.cost.measure import Asked, machine_of
from tawpipe.plan.cost.predict import memory_quickly, predict
from tawpipe.plan.machine.machine import Device
from tawpipe.plan.search import plan_file
from tawpipe.plan.search.plan import Plan
from tawpipe.plan.search.plan_file import SavedPlan
from tawpipe.runtime.dtype import DTYPES
from tawpipe.runtime.world import World
from tawpipe.schedule.settings import ScheduleSettings
from tawpipe.simulate import size_of
from tawpipe.topology import Topology
from tawpipe.train import planned
from tawpipe.train.planned import Followed, Planning
from tawpipe.train.settings.config import TrainConfig

TWO_BY_TWO = World(Topology.grid(2, 2), 0, torch.device("cpu"), None)
"""Four processes as far as anybody asks."""


@pytest.fixture(scope="module")
def plan() -> str:
    asked = plan_request()
    return Plan.of(asked, search_only(asked)).text()


CONFIG = TrainConfig(global_batch=16, micro_batch=1, sequence_length=10, dtype="bfloat16")


def planning(config: TrainConfig, world: World = TWO_BY_TWO, **rest: Any) -> Planning:
    asked = Asked(
        config.sequence_length,
        config.global_batch,
        config.micro_batch,
        dtype=DTYPES[config.dtype],
        settings=config.schedule,
        profile="measure",
    )
    chain: Any = None  # nothing is measured here
    return Planning(world, chain, asked, **rest)


def follow(config: TrainConfig, earlier: RunState | None = None) -> Followed:
    return planning(config).follow(config.plan, earlier)


@pytest.fixture
def saved(plan, tmp_path) -> str:
    (tmp_path / "plan.yaml").write_text(plan)
    return str(tmp_path / "plan.yaml")


@pytest.fixture
def made(monkeypatch, plan) -> list[str]:
    """How often a plan was made."""
    calls: list[str] = []

    def make(self: Planning) -> Followed:
        calls.append("made")
        return Followed(self.asked.settings, SavedPlan.of(plan), "plan: made now")

    monkeypatch.setattr(Planning, "make", make)
    return calls


def test_plan_for_dealt_documents_tries_pipelines_of_packs():
    """They have several bins for every stage, which are less full than those of weights that travel."""
    machine = machine_of("2x2@10gbit", device=Device("H100"))
    given = {"vocab_size": 500, "sequence_length": 64, "global_batch": 8, "dealt": [16] * 32}
    request = request_for("tiny", machine, **given)
    step = request.step(ScheduleSettings(strategy="1f1b"))
    assert len(step.micro_batches[0]) == 16 and request.of(step).costs.size == size_of([16] * 2)
    assert request.of(step).activation_bytes == request.activation_bytes
    spread = request.step(ScheduleSettings(strategy="tawpipe-spread"))
    assert len(spread.micro_batches[0]) == 3, "two rounds of full bins would leave no choice"
    assert request.of(spread).costs.size.tokens == pytest.approx(512 / 12)
    with pytest.raises(UserError, match="got 'solved'; generated where documents are dealt by time"):
        request.step(ScheduleSettings(strategy="solved"))
    found = {one.strategy: one for one in search_only(request, "tawpipe-spread", "1f1b", "solved")}
    best = found["1f1b"]
    assert best.fits and best.step is not None and not found["solved"].fits
    assert best.seconds == pytest.approx(predict(request, best.step).step_seconds)


def test_planned_memory_holds_all_slices_of_the_longest_document():
    machine = machine_of("2x2@10gbit", device=Device("H100"))
    asked: dict[str, Any] = {"vocab_size": 500, "sequence_length": 4096, "global_batch": 8}
    settings, parts = ScheduleSettings(strategy="1f1b"), []
    for longest, least, most in ((4096, 2, 8), (40960, 10, 40)):
        request = request_for("tiny", machine, dealt=[longest, *[512] * 48], **asked)
        step = request.step(settings)
        (document,) = step.slices
        assert document == tuple(range(len(document))) and least <= len(document) <= most
        parts.append(memory_quickly(request, step).parts["activations"])
    assert parts[1] > 1.5 * parts[0]
    request = replace(request, dealt=(512,) * 48)
    assert (
        not request.step(settings).slices
        and memory_quickly(request, request.step(settings)).parts["activations"] < parts[0]
    )


@pytest.mark.usefixtures("few_strategies")
def test_long_planning_of_a_run_reports_the_current_strategy(monkeypatch):
    asked, said = plan_request(), list[str]()
    monkeypatch.setattr(Planning, "ask", lambda *_, **__: (asked, ""))
    monkeypatch.setattr("tawpipe.plan.search.search.PATIENCE_S", 0.0)
    monkeypatch.setattr(planned, "probed", lambda _: asked.machine)
    with progress_to(said.append):
        found = planning(CONFIG).follow("auto", None)
    assert found.plan is not None and any(line.startswith("planning: tawpipe-") for line in said)


def text(found: Followed) -> str:
    return found.plan.text if found.plan else ""


def state(plan: str = "", nodes: Topology | None = None) -> RunState:
    return RunState(step=3, samples=48, seed=0, topology=str(nodes or Topology.grid(2, 2)), plan=plan)


def test_plan_file_is_followed(saved, plan):
    found = follow(replace(CONFIG, plan=saved))
    chosen = yaml.safe_load(plan)["schedule"]
    assert text(found) == plan and found.line.startswith(f"plan: {saved}; ")
    assert found.schedule.micro_batches_per_visit == chosen["micro_batches_per_visit"]
    assert found.schedule.loss_chunk_tokens == ScheduleSettings().loss_chunk_tokens


def test_plan_auto_makes_a_plan(made, plan):
    found = follow(CONFIG)
    assert made == ["made"] and text(found) == plan and found.line.startswith("plan: made now; ")


def test_schedule_settings_override_plan_auto(made):
    config = replace(CONFIG, schedule=ScheduleSettings(look_ahead=7))
    found = follow(config)
    assert found.schedule == config.schedule and found.plan is None and not made
    assert "settings under schedule" in found.line


def test_setting_that_no_plan_decides_does_not_prevent_a_plan(made):
    config = replace(CONFIG, schedule=ScheduleSettings(loss_chunk_tokens=64))
    assert follow(config).plan and made == ["made"]


def test_plan_none_uses_the_settings(made):
    followed = follow(replace(CONFIG, plan="none"))
    assert (followed.schedule, followed.plan) == (CONFIG.schedule, None)
    assert followed.line == "plan: none (--plan none); strategy tawpipe-spread, assuming equal devices and links"
    assert not made


def test_resumed_run_keeps_its_plan(made, plan):
    assert text(follow(CONFIG, state(plan))) == plan
    assert follow(CONFIG, state("")).plan is None
    assert not made
    assert "plan: from the checkpoint; " in follow(CONFIG, state(plan)).line


def test_resumed_run_keeps_its_sequence_chunk_unless_set(made, plan):
    chunked = plan.replace("sequence_chunk: 0", "sequence_chunk: 4096")
    assert follow(CONFIG, state(chunked)).schedule.sequence_chunk == 4096 and not made
    whole = replace(CONFIG, schedule=replace(CONFIG.schedule, sequence_chunk=0))
    assert follow(whole, state(chunked)).line.startswith("plan: made now")
    assert made == ["made"]


def test_resumed_run_on_other_nodes_plans_again(made, plan):
    assert follow(CONFIG, state(plan, Topology.grid(1, 3))).line.startswith("plan: made now")
    assert made == ["made"]


def test_saved_schedule_settings_are_recognized_as_those_of_the_plan(made, plan):
    first = replace(CONFIG, schedule=follow(CONFIG).schedule)
    assert text(follow(first, state(plan))) == plan  # resumed with --config config.yaml
    other = replace(first, schedule=replace(first.schedule, look_ahead=9))
    assert follow(other, state(plan)).schedule == other.schedule


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"global_batch": 8}, "--global-batch"),
        ({"micro_batch": 2}, "--micro-batch"),
        ({"sequence_length": 12}, "--sequence-length"),
        ({"schedule": ScheduleSettings(look_ahead=9)}, "--schedule.look-ahead"),
    ],
)
def test_plan_for_another_batch_or_model_is_named(saved, change, named):
    with pytest.raises(UserError, match=named):
        follow(replace(CONFIG, plan=saved, **change))


def test_plan_for_other_nodes_or_dtype_is_named(saved, plan, tmp_path):
    content = yaml.safe_load(plan)
    (tmp_path / "other.yaml").write_text(yaml.safe_dump(content | {"nodes": [8, 8]}))
    with pytest.raises(UserError, match=r"nodes of \[8, 8\]"):
        follow(replace(CONFIG, plan=str(tmp_path / "other.yaml")))
    with pytest.raises(UserError, match="--dtype"):
        follow(replace(CONFIG, plan=saved, dtype="float32"))


def test_resumed_run_with_another_batch_plans_again(monkeypatch, plan):
    none = Followed(CONFIG.schedule, None, "plan: none, for a test")
    monkeypatch.setattr(Planning, "make", lambda _: none)
    assert follow(replace(CONFIG, global_batch=8), state(plan)) == none


def test_older_plan_is_kept_if_settings_spell_the_old_default(plan):
    spelt = replace(CONFIG, schedule=replace(CONFIG.schedule, recompute="full"))
    assert text(follow(spelt, state(plan))) == plan
    settled = replace(state(plan), settled={"recompute": "full"})
    assert follow(spelt, settled).plan is None  # its user has said so


@pytest.mark.parametrize(
    ("error", "fault"),
    [
        (RuntimeError("no kernel for this device"), True),
        (ZeroDivisionError("division by zero"), True),
        (UserError("schedule.sequence_chunk", 8, "0"), False),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"), False),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), False),
    ],
)
def test_failed_planning_falls_back_to_the_settings(monkeypatch, error: Exception, fault: bool):
    def fails(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(planned, "request_of", fails)
    alone = World(Topology.grid(1, 1), 0, torch.device("cpu"), None)
    found = planning(CONFIG, alone).follow("auto", None)
    assert found.schedule == CONFIG.schedule and found.plan is None
    assert f"continues with the settings under schedule (tawpipe-spread): {type(error).__name__}: {error}" in found.line
    assert fault == ("please report" in found.line) == ("request_of(" in found.line)


def test_saved_plan_is_parsed_once(saved, monkeypatch):
    """Its clock, too, whoever asks: for the machine, for the time of documents, for the time of a step."""
    read = list[str]()
    real = plan_file.request_from

    def counted(content: Any, *, where: str) -> Any:
        read.append(where)
        return real(content, where=where)

    monkeypatch.setattr(plan_file, "request_from", counted)
    found = follow(replace(CONFIG, plan=saved))
    assert found.plan is not None and found.machine is not None and found.plan.step_s > 0
    assert found.plan.work is None, "no pair of tokens took time in this plan"
    assert found.plan.request is found.plan.request and len(read) == 1
