"""Which schedule a run follows: that of a file, of the settings, of the checkpoint, or one that is made now."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import yaml

from plan_requests import plan_request
from tawpipe.checkpoint.resume import RunState
from tawpipe.errors import UserError
from tawpipe.plan.plan import Plan
from tawpipe.plan.search import search
from tawpipe.runtime.world import World
from tawpipe.schedule.settings import ScheduleSettings
from tawpipe.topology import Topology
from tawpipe.train import planned
from tawpipe.train.config import TrainConfig
from tawpipe.train.planned import Followed, follow_plan

TWO_BY_TWO = World(Topology.grid(2, 2), 0, torch.device("cpu"), None)
"""Four processes as far as anybody asks."""


@pytest.fixture(scope="module")
def plan() -> str:
    asked = plan_request()
    return Plan.of(asked, search(asked)).text()


CONFIG = TrainConfig(global_batch=16, micro_batch=1, sequence_length=10, dtype="bfloat16")


def follow(config: TrainConfig, earlier: RunState | None = None) -> Followed:
    return follow_plan(config, TWO_BY_TWO, earlier, vocab_size=500, dtype=torch.bfloat16)


@pytest.fixture
def saved(plan, tmp_path) -> str:
    (tmp_path / "plan.yaml").write_text(plan)
    return str(tmp_path / "plan.yaml")


@pytest.fixture
def made(monkeypatch, plan) -> list[str]:
    """How often a plan was made."""
    calls: list[str] = []

    def make(*_: object) -> tuple[str, str, None]:
        calls.append("made")
        return plan, "plan: made now", None

    monkeypatch.setattr(planned, "_make", make)
    return calls


def test_a_plan_for_documents_that_are_dealt_has_no_pipeline(monkeypatch):
    asked = plan_request()
    monkeypatch.setattr("tawpipe.plan.measure.request_of", lambda *_, **__: asked)
    alone = World(Topology.grid(1, 1), 0, torch.device("cpu"), None)
    config = replace(CONFIG, packing="balanced")
    request, _ = planned.ask(config, alone, asked.machine, vocab_size=500, dtype=torch.bfloat16, lengths=[])
    assert request is not None
    with pytest.raises(UserError, match="got '1f1b'; another one: documents are dealt by time"):
        request.step(ScheduleSettings(strategy="1f1b"))
    assert not any(one.fits and one.step.strategy.axis for one in search(request) if one.step is not None)


def test_a_plan_that_takes_a_while_says_what_it_looks_at(monkeypatch):
    asked, said = plan_request(), list[str]()
    monkeypatch.setattr(planned, "ask", lambda *_, **__: (asked, ""))
    monkeypatch.setattr("tawpipe.plan.search.PATIENCE_S", 0.0)
    found = follow_plan(
        *(CONFIG, TWO_BY_TWO, None),
        vocab_size=500,
        dtype=torch.bfloat16,
        tell=said.append,
        measure=lambda _: asked.machine,
    )
    assert found.text and any(line.startswith("planning for 0 s, now tawpipe-") for line in said)


def state(plan: str = "", nodes: Topology | None = None) -> RunState:
    return RunState(step=3, samples=48, seed=0, topology=str(nodes or Topology.grid(2, 2)), plan=plan)


def test_a_file_is_followed(saved, plan):
    found = follow(replace(CONFIG, plan=saved))
    chosen = yaml.safe_load(plan)["schedule"]
    assert found.text == plan and found.line.startswith(f"plan: {saved}: ")
    assert found.config.schedule.micro_batches_per_visit == chosen["micro_batches_per_visit"]
    assert found.config.schedule.loss_chunk_tokens == ScheduleSettings().loss_chunk_tokens


def test_auto_makes_one(made, plan):
    found = follow(CONFIG)
    assert made == ["made"] and found.text == plan and found.line.startswith("plan: made now: ")


def test_settings_beat_auto(made):
    config = replace(CONFIG, schedule=ScheduleSettings(look_ahead=7))
    found = follow(config)
    assert found.config == config and not found.text and not made
    assert "settings under schedule" in found.line


def test_what_a_plan_does_not_decide_does_not_count_as_a_setting(made):
    config = replace(CONFIG, schedule=ScheduleSettings(loss_chunk_tokens=64))
    assert follow(config).text and made == ["made"]


def test_none_is_none(made):
    assert follow(replace(CONFIG, plan="none")) == Followed(replace(CONFIG, plan="none"))
    assert not made


def test_a_resumed_run_does_what_it_did(made, plan):
    assert follow(CONFIG, state(plan)).text == plan
    assert follow(CONFIG, state("")).text == ""
    assert not made
    assert "that of the checkpoint" in follow(CONFIG, state(plan)).line


def test_a_resumed_run_has_the_chunks_that_it_had_unless_the_user_says_others(made, plan):
    chunked = plan.replace("sequence_chunk: 0", "sequence_chunk: 4096")
    assert follow(CONFIG, state(chunked)).config.schedule.sequence_chunk == 4096 and not made
    whole = replace(CONFIG, schedule=replace(CONFIG.schedule, sequence_chunk=0))
    assert follow(whole, state(chunked)).line.startswith("plan: made now")
    assert made == ["made"]


def test_a_resumed_run_on_other_nodes_plans_anew(made, plan):
    assert follow(CONFIG, state(plan, Topology.grid(1, 3))).line.startswith("plan: made now")
    assert made == ["made"]


def test_the_settings_that_a_run_has_saved_are_those_of_its_plan(made, plan):
    first = follow(CONFIG).config
    assert follow(first, state(plan)).text == plan  # resumed with --config config.yaml
    other = replace(first, schedule=replace(first.schedule, look_ahead=9))
    assert follow(other, state(plan)).config == other


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"global_batch": 8}, "--global-batch"),
        ({"micro_batch": 2}, "--micro-batch"),
        ({"sequence_length": 12}, "--sequence-length"),
        ({"schedule": ScheduleSettings(look_ahead=9)}, "--schedule.look-ahead"),
    ],
)
def test_a_plan_for_something_else_is_named(saved, change, named):
    with pytest.raises(UserError, match=named):
        follow(replace(CONFIG, plan=saved, **change))


def test_a_plan_for_other_nodes_or_types_is_named(saved, plan, tmp_path):
    content = yaml.safe_load(plan)
    (tmp_path / "other.yaml").write_text(yaml.safe_dump(content | {"nodes": [8, 8]}))
    with pytest.raises(UserError, match=r"nodes of \[8, 8\]"):
        follow(replace(CONFIG, plan=str(tmp_path / "other.yaml")))
    with pytest.raises(UserError, match="--dtype"):
        follow_plan(replace(CONFIG, plan=saved), TWO_BY_TWO, None, vocab_size=500, dtype=torch.float32)


def test_a_resumed_run_with_another_batch_plans_anew(monkeypatch, plan):
    monkeypatch.setattr(planned, "_make", lambda *_: ("", "plan: none, for a test", None))
    found = follow(replace(CONFIG, global_batch=8), state(plan))
    assert found == Followed(replace(CONFIG, global_batch=8), "", "plan: none, for a test")


def test_without_a_plan_the_settings_hold():
    """A model that is not there is the model's fault, later and by its name."""
    alone = World(Topology.grid(1, 1), 0, torch.device("cpu"), None)
    config = replace(CONFIG, model="no/such/model")
    found = follow_plan(config, alone, None, vocab_size=500, dtype=torch.bfloat16, lengths=lambda: [10])
    assert found.config == config and "the settings under schedule hold" in found.line
