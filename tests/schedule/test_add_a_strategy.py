"""A strategy that no file of the package knows is run, proved, timed, drawn, planned and measured like the others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plan_requests import looking_at
from schedule_numbers import check_numbers
from schedules import llama, make
from tawpipe.cli import main
from tawpipe.errors import UserError
from tawpipe.report import draw_timeline, predicted_bars
from tawpipe.runtime.world import World
from tawpipe.schedule.proof.verify import verify
from tawpipe.schedule.strategies.table import STRATEGIES, import_strategies
from tawpipe.simulate import CostModel, LinkModel, play

EXAMPLE = Path(__file__).parents[2] / "examples" / "add_a_strategy.py"


@pytest.fixture(autouse=True)
def brought(nothing_brought: None) -> None:
    """The example's strategy in the table, for a test, also where its module was imported before."""
    import_strategies([str(EXAMPLE)])
    strategy = __import__("add_a_strategy").Broadcast()
    STRATEGIES[strategy.name] = strategy


def exact(world: World, *, settings: list[dict[str, Any]]) -> list[float]:
    """``cases:exact``, in a process that is told of the strategy."""
    import cases

    import_strategies([str(EXAMPLE)])
    return cases.exact(world, settings=settings)


def test_example_strategy_has_fewer_than_100_lines():
    assert len(EXAMPLE.read_text().splitlines()) < 100


@settings(max_examples=30, deadline=None)
@given(
    nodes=st.integers(1, 3),
    local=st.integers(1, 3),
    layers=st.integers(1, 6),
    count=st.integers(1, 9),
    tied=st.booleans(),
    cached=st.sampled_from((0, 2, "all")),
    training=st.booleans(),
    seed=st.integers(0, 99),
)
def test_example_strategy_verifies_and_computes_right_sums(nodes, local, layers, count, tied, cached, training, seed):
    model = llama(layers, tied=tied)
    schedule = make(model, nodes, local, count, training=training, strategy="broadcast", step_cache=cached)
    verify(schedule)
    check_numbers(schedule, seed=seed)


def test_example_strategy_trains_as_one_process(pool):
    usual = {"dtype": "float64", "tied": True, "strategy": "broadcast", "rows": 7}
    settings = [usual, usual | {"recompute": "none:1,full", "step_cache": "all", "micro_batches_per_visit": 2}]
    for differences in pool.run("test_add_a_strategy:exact", 2, 2, settings=settings):
        assert max(differences) < 1e-10


def test_example_strategy_refuses_unsupported_settings():
    with pytest.raises(UserError, match="visit under broadcast: a unit goes to all processes in one hop"):
        make(llama(3), 2, 2, 4, strategy="broadcast", gradients_scope="step")


def test_example_strategy_is_simulated_and_drawn(tmp_path):
    link = LinkModel(1e6)
    costs = CostModel.timed(layers=4, forward_s=0.1, backward_s=0.3, between=link, inside=LinkModel(1e8))
    timeline = play(make(llama(4), 2, 2, 4, strategy="broadcast"), costs)
    assert timeline.step_seconds > 4 * 0.4
    draw_timeline([("predicted", predicted_bars(timeline))], tmp_path / "step.svg")
    assert (tmp_path / "step.svg").stat().st_size > 1000


@pytest.mark.slow
def test_example_strategy_is_a_row_of_a_plan(capsys):
    words = "--model tiny --vocab-size 300 --topology 2x2@1gbit --device-name A100 --sequence-length 64 --json"
    with looking_at("broadcast", "tawpipe-spread"):
        assert main(["plan", "--import", str(EXAMPLE), *words.split(), "--global-batch", "4"]) == 0
    rows = {row["strategy"]: row for row in json.loads(capsys.readouterr().out)["candidates"]}
    assert rows["broadcast"]["runnable"] and rows["broadcast"]["step_seconds"] > 0


@pytest.mark.slow
def test_plan_chooses_the_example_strategy_if_nothing_is_faster(capsys):
    """On one node, for an optimizer of whole matrices: its bytes are those of ``tawpipe-whole``, and so its step."""
    words = "--model tiny --vocab-size 500 --topology 1x4 --device-name A100 --optimizer muon --global-batch 4 --json"
    assert main(["plan", "--import", str(EXAMPLE), *words.split(), "--sequence-length", "8192", "--all"]) == 0
    plan = json.loads(capsys.readouterr().out)
    rows = {row["strategy"]: row for row in plan["candidates"]}
    assert plan["chosen"] == "broadcast"
    assert rows["broadcast"]["step_seconds"] == rows["tawpipe-whole"]["step_seconds"]


def test_example_strategy_can_be_chosen_for_a_run(capsys):
    assert main(["train", "--import", str(EXAMPLE), "--schedule.strategy", "broadcast", "--print-config"]) == 0
    assert "strategy: broadcast" in capsys.readouterr().out


def test_missing_import_module_is_named(capsys):
    assert main(["plan", "--import", "nowhere.to.be.found", "--help"]) == 2
    assert "--import: got 'nowhere.to.be.found'" in capsys.readouterr().err
