"""Comparisons: the smoke suite end to end where root and tc are there, suites and tables everywhere."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace

import pytest
import yaml

from tawpipe.cli import main
from tawpipe.errors import UserError
from tawpipe.schedule.actions import Lane, Op
from tawpipe.schedule.pipelines.layout import Layout
from tawpipe.schedule.pipelines.memory import peak
from tawpipe.schedule.pipelines.strategy import ActivationPipeline
from tawpipe.schedule.pipelines.times import parse_times
from tawpipe.schedule.pipelines.work import Order
from tawpipe.schedule.proof.verify import verify
from tawpipe.schedule.sizes.traffic import link_elements
from tawpipe.schedule.step import Schedule
from tawpipe.schedule.strategies.table import find, strategies
from tawpipe.simulate import LinkModel
from tawpipe.topology import Topology
from tawpipe_lab import ours
from tawpipe_lab.bounds import PIPELINES
from tawpipe_lab.compare import bounds_of, compare, link_of
from tawpipe_lab.rivals.stages import stages_of
from tawpipe_lab.rivals.traffic import stages_per_rank
from tawpipe_lab.suite import Entry, load_suite, read_suite, shipped_suites
from tawpipe_lab.worker import make
from tawpipe_lab.workload import TimedWorkload

WORKLOAD = {
    "layers": 8,
    "layer_bytes": 40000,
    "forward_s": 0.001,
    "backward_input_s": 0.002,
    "backward_weight_s": 0.001,
    "micro_batches": 8,
    "activation_bytes": 4000,
}

TIMED = TimedWorkload(**WORKLOAD)
LARGE = (
    *("paper-24", "lengths", "mixed-layers", "memory-limited", "base-6-48", "lora", "sequence", "link-bound"),
    *("base-6", "jitter", "latency", "memory", "links", "optpipe"),
)
"""Suites whose bounds take long to find."""
REFUSED = ("layers", "layers of the model", "micro-batches", "room")
"""Of a cell, what some pipelines cannot use."""


@pytest.fixture(autouse=True)
def _little_time_for_the_solver(monkeypatch):
    monkeypatch.setattr(ours, "SOLVER_S", 0.5)


needs_tc = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("tc") is None, reason="needs root and tc (iproute2) to build a cluster"
)


@pytest.mark.slow
@needs_tc
def test_smoke_suite_measures_times_within_bounds_and_predicted_bytes(tmp_path, capsys):
    assert main(["lab", "compare", "--suite", "smoke", "--samples", "2", "--out", str(tmp_path)]) == 0
    content = json.loads((tmp_path / "results.json").read_text())
    assert {"versions", "machine", "command", "date"} <= content["environment"].keys()
    rows = {row["strategy"]: row for row in content["rows"]}
    assert set(rows) == {"fsdp2", "tawpipe-spread"}
    for row in rows.values():
        assert row["status"] in ("ok", "void"), row["reason"]
        assert len(row["seconds_per_step"]["samples"]) == 2
        assert row["physical_bound_s"] <= row["seconds_per_step"]["median"]
        assert row["physical_bound_s"] <= row["dependency_bound_s"] * 1.0001
    mine = rows["tawpipe-spread"]
    for sent, predicted in zip(mine["link_bytes_sent"], mine["link_bytes_predicted"], strict=True):
        assert sent == pytest.approx(predicted, rel=0.03)
    assert "tawpipe-spread" in (tmp_path / "table.md").read_text()


@needs_tc
@pytest.mark.slow
def test_suite_with_alone_runs_every_strategy_separately_with_its_traces(tmp_path):
    """Every strategy in a launch of its own; one that does not run is given no timeline of another."""
    cell = {"name": "c", "nodes": 1, "local": 1, "rate": "none", "workload": WORKLOAD}
    broken = {"strategy": "weipipe", "knobs": {"no_such_knob": 1}}
    suite = {"name": "alone", "samples": 1, "memory": True, "alone": True, "cells": [cell]}
    suite["strategies"] = [{"strategy": "tawpipe-spread"}, broken, {"strategy": "flat"}]
    (tmp_path / "suite.yaml").write_text(yaml.safe_dump(suite))
    words = ["lab", "compare", "--suite", str(tmp_path / "suite.yaml"), "--traces", "--out", str(tmp_path / "out")]
    assert main(words) == 0
    rows = {row["strategy"]: row for row in json.loads((tmp_path / "out" / "results.json").read_text())["rows"]}
    assert rows["weipipe"]["status"] == "failed"
    for name in ("tawpipe-spread", "flat"):
        assert rows[name]["status"] in ("ok", "void")
        assert rows[name]["peak_gib"] > 0 and rows[name]["peak_gib_predicted"] > 0
        assert rows[name]["idle_start_s"] >= 0 and rows[name]["idle_end_s"] >= 0
    recorded = {path.parent.name for path in (tmp_path / "out" / "traces").glob("*/rank-*.json")}
    assert recorded == {"c-tawpipe-spread", "c-flat"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in LARGE)) for name in shipped_suites()]
)
def test_every_suite_is_read_and_has_ordered_bounds(name):
    suite = load_suite(name)
    least = min(suite.cells, key=lambda cell: cell.nodes * cell.local)
    cells = (least,) if name in LARGE else (suite.cells[0], suite.cells[-1])
    for cell in {cell.name: cell for cell in cells}.values():
        every = cell.strategies or suite.strategies
        for entry in every[::3] if name in LARGE else every:
            try:
                bounds = bounds_of(cell, entry, link_of(cell))
            except UserError as error:  # a row of the table says so
                pipeline = entry.strategy in PIPELINES or find(ours.rows()[entry.strategy]).axis
                assert error.setting in REFUSED and pipeline, entry
                continue
            assert bounds.physical_s > 0, entry
            assert bounds.dependency_s is None or bounds.physical_s <= bounds.dependency_s * 1.0001, entry


@pytest.mark.parametrize("strategy", [row for row in ours.rows() if row not in ours.BALANCED])
def test_every_strategy_of_ours_makes_a_verified_schedule(strategy):
    verify(ours.schedule_of(strategy, TIMED, Topology.grid(2, 2), {}))


def test_mistakes_in_suites_are_named(tmp_path):
    with pytest.raises(UserError, match="smoke"):
        load_suite("nowhere")
    with pytest.raises(UserError, match="cell"):
        read_suite({"name": "x", "cells": [{"name": "a", "nods": 2}], "strategies": []})
    good = {"name": "c", "nodes": 1, "local": 1, "rate": "none", "workload": WORKLOAD}
    with pytest.raises(UserError, match="strategies"):
        read_suite({"name": "x", "cells": [good], "strategies": []})
    with pytest.raises(UserError, match="forward_s"):
        read_suite({"name": "x", "cells": [{**good, "workload": {"layers": 2}}], "strategies": [{"strategy": "flat"}]})
    for name in ("nodes", "local", "steps_in_a_row"):
        for number in (0, 10**9):
            with pytest.raises(UserError, match=f"{name}: got {number}; 1 to 1,024 in cell c"):
                read_suite({"name": "x", "cells": [{**good, name: number}], "strategies": [{"strategy": "flat"}]})
    file = tmp_path / "bad.yaml"
    file.write_text("a: [")
    with pytest.raises(UserError, match="YAML"):
        load_suite(str(file))
    with pytest.raises(UserError, match="--only"):
        load_suite("smoke").only(["nobody"])


def test_cell_may_have_its_own_strategies():
    good = {"name": "c", "nodes": 1, "local": 1, "rate": "none", "workload": WORKLOAD}
    found = {"strategy": "solved", "knobs": {"recompute": "none"}, "searched": {"order": "x"}}
    cells = [{**good, "strategies": [found]}, {**good, "name": "d"}]
    suite = read_suite({"name": "x", "cells": cells, "strategies": [{"strategy": "flat"}]})
    assert [cell.strategies for cell in suite.cells] == [(Entry("solved", {"recompute": "none"}, {"order": "x"}),), ()]
    assert "strategies" not in suite.cells[0].spelled_out() and suite.cells[0].strategies[0].label.endswith("none)")
    with pytest.raises(UserError, match="a suite with cells and strategies"):
        read_suite({"name": "x", "cells": cells, "strategies": []})


def test_an_unknown_strategy_or_knob_is_named():
    with pytest.raises(UserError, match=r"knob of flat: got 'no_such_knob'; one of .*step_cache"):
        ours.settings_of("flat", {"no_such_knob": 1})
    for knob in ("strategy", "early_updates"):  # the row's name and clip_norm say these
        with pytest.raises(UserError, match=f"knob of flat: got '{knob}'"):
            ours.settings_of("flat", {knob: "hsdp"})
    for refuse in (lambda: ours.settings_of("nobody", {}), lambda: make("nobody", TIMED, Topology.grid(1, 1), 0)):
        with pytest.raises(UserError, match=r"strategy: got 'nobody'; one of .*tawpipe-spread"):
            refuse()


def test_found_pipeline_order_fits_the_memory_capacity():
    """What fits into the room keeps no more, and what does not is refused by name."""
    limited, topology = replace(TIMED, layers=4, room=2.5, host_s=0.001), Topology.grid(2, 2)
    for row in ("1f1b-fitted", "solved"):
        knobs = ours.search_knobs(row, limited, topology, {})
        schedule = ours.schedule_of(row, limited, topology, knobs)
        verify(schedule)
        layout, order = Layout.even(6, 4), Order.parse(knobs["order"])
        assert max(peak(layout, order, ours.pipeline_costs(limited))) <= 2.5
        computed = [a for a in schedule.programs[0] if a.op in (Op.FORWARD, Op.BACKWARD_INPUT, Op.BACKWARD) and a.block]
        assert [a.micro_batch for a in computed] == [work.micro_batch for work in order.compute[0] if work.kind != "W"]
        assert Entry(row, {}, knobs).label == row
    with pytest.raises(UserError, match="room"):
        ours.search_knobs("zero-bubble-fitted", replace(limited, room=2.0, linear_bytes=40_000), topology, {})
    assert ours.search_knobs("1f1b-ours", limited, topology, {}) == {}


def test_pipeline_orders_are_made_for_the_links_of_a_cell():
    slow = LinkModel(TIMED.activation_bytes / 0.5)
    found = parse_times(ours.search_knobs("zero-bubble", TIMED, Topology.grid(2, 2), {}, slow)["block_times"])
    assert found.hop == 500_000 and found.near_hop < 1000 and found.nodes == (0, 0, 1, 1)
    over_nodes = ours.search_knobs("zero-bubble", TIMED, Topology.grid(2, 2), {"stages": "nodes"}, slow)["block_times"]
    assert parse_times(over_nodes).hop == 1_000_000  # two pipelines share the link
    inside = ours.search_knobs("zero-bubble", TIMED, Topology.grid(2, 2), {"stages": "locals"}, slow)["block_times"]
    assert parse_times(inside).hop < 1000


@pytest.mark.parametrize("row", [row for row, strategy in ours.rows().items() if strategy in ours.RIVAL_OF])
def test_our_pipeline_stages_are_balanced_as_a_rival_balances(row):
    cell = load_suite("mixed-layers").cells[0]
    work, topology, rival = cell.workload, Topology.grid(cell.nodes, cell.local), ours.RIVAL_OF[ours.rows()[row]]
    assert isinstance(work, TimedWorkload)
    for balance in ("layers", "cost"):
        schedule = ours.schedule_of(row, work, topology, {"balance": balance} if balance == "cost" else {})
        strategy = schedule.step.strategy
        assert isinstance(strategy, ActivationPipeline)
        each = stages_per_rank(rival)
        stages = strategy.layout_of(schedule.model, strategy.positions(topology))
        assert stages == stages_of(rival, work, 4, each, balance)
        verify(schedule)
    settings = ours.settings_of(row, {"balance": "cost"})
    assert ours.settings_of(row, settings.spelled_out()) == settings
    assert "balance" not in ours.settings_of(row, {}).spelled_out()


def test_impossible_balance_is_refused():
    for row, knobs in (
        ("1f1b-ours", {"balance": "no"}),
        ("generated", {"balance": "cost"}),
        ("flat", {"balance": "cost"}),
    ):
        with pytest.raises(UserError, match="balance"):
            ours.schedule_of(row, TIMED, Topology.grid(2, 2), knobs)
    with pytest.raises(UserError, match="where no stages are given"):
        ours.schedule_of("1f1b-ours", TIMED, Topology.grid(1, 2), {"stages": "world:0,4@0,1", "balance": "cost"})


def test_every_strategy_has_a_lab_row_with_its_settings():
    """A rival's row keeps the strategy's name where both have it."""
    assert set(ours.rows().values()) == set(strategies())
    for name, row in ours.OWN_NAMES.items():
        assert ours.rows()[row] == name and name not in ours.rows() and ours.named(row) == name
    for name in ("tawpipe-whole", "no-grouping", "no-overlap"):
        for knobs, reuse in (({}, False), ({"reuse": True}, True)):
            assert ours.settings_of(name, knobs).spelled_out()["reuse"] is reuse
            assert ours.schedule_of(name, TIMED, Topology.grid(2, 2), knobs).step.settings.reuse is reuse
    assert ours.settings_of("no-overlap", {}).spelled_out()["look_ahead"] == 0
    assert ours.settings_of("flat", {"clip_norm": None}).schedule.early_updates
    row = ours.settings_of("tawpipe-spread", {"parts_per_layer": 2, "step_cache": 3}).spelled_out()
    assert (row["parts_per_layer"], row["step_cache"], row["clip_norm"], row["look_ahead"]) == (2, 3, 1.0, 3)


@pytest.mark.parametrize("row", ours.rows())
def test_settings_of_a_row_read_back_equal(row):
    settings = ours.settings_of(row, {"parts_per_layer": 2, "clip_norm": None, "recompute": "none"})
    assert ours.settings_of(row, settings.spelled_out()) == settings


@pytest.mark.parametrize("row", ["no-grouping", "no-overlap"])
def test_ablation_rows_leave_out_grouping_or_overlap(row):
    """As many nodes as processes; or nothing beside computing. Both bring every visit anew."""
    grouped = ours.schedule_of("tawpipe-spread", TIMED, Topology.grid(2, 2), {"reuse": False})
    without = ours.schedule_of(row, TIMED, Topology.grid(2, 2), {})
    assert without.topology == Topology.grid(*((4, 1) if row == "no-grouping" else (2, 2)))
    lanes = {action.lane for program in without.programs for action in program}
    assert (lanes == {Lane.COMPUTE}) == (row == "no-overlap")

    def far(schedule: Schedule) -> int:
        traffic = link_elements(schedule, physical=Topology.grid(2, 2))
        return sum(link.weights_sent + link.gradients_sent for link in traffic)

    assert far(without) > far(grouped) if row == "no-grouping" else far(without) == far(grouped)


def test_resumed_comparison_measures_only_missing_cells(tmp_path, monkeypatch):
    suite = load_suite("smoke")
    first = suite.cells[0]
    suite = replace(suite, cells=(first, replace(first, name="second")))
    labels = [entry.label for entry in suite.strategies]
    measured: list[str] = []

    def measure(_, cell, *__):
        measured.append(cell.name)
        return [{"suite": suite.name, "cell": cell.spelled_out(), "label": label} for label in labels]

    monkeypatch.setattr("tawpipe_lab.compare._measure_cell", measure)
    monkeypatch.setattr("tawpipe_lab.compare._line", lambda row: "")
    monkeypatch.setattr("tawpipe_lab.compare.disturbance", lambda row, rows: {})
    monkeypatch.setattr(
        "tawpipe_lab.compare.write_results",
        lambda suite, rows, out: (out / "results.json").write_text(json.dumps({"rows": rows})),
    )
    compare(replace(suite, cells=(first,)), tmp_path, tell=lambda _: None)
    assert len(compare(suite, tmp_path, resume=True, tell=lambda _: None)) == 2 * len(labels)
    assert measured == [first.name, "second"]  # the first was not measured again
    slower = replace(first, rate="123mbit")
    compare(replace(suite, cells=(slower,)), tmp_path, resume=True, tell=lambda _: None)
    assert measured[2:] == [first.name]  # another setting under the same name is another cell
    with pytest.raises(UserError, match="results of the suite"):
        compare(replace(suite, name="other"), tmp_path, resume=True, tell=lambda _: None)
