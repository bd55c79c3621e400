"""Pages, and predicted steps beside executed ones: of a plan, of a run, of a comparison."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from html_pages import check_page_text
from plan_requests import plan_request, search_only, step_of
from schedules import NAMES, llama
from tawpipe.cli import main
from tawpipe.errors import UserError
from tawpipe.plan.answer.page import write_plan_page
from tawpipe.plan.cost.predict import timeline_of
from tawpipe.plan.machine.machine import uniform
from tawpipe.plan.search.plan import Plan
from tawpipe.plan.search.plan_file import load_plan, planned_settings, record_of, replay, request_from, settings_of
from tawpipe.report import Bar, predicted_bars
from tawpipe.report.figures import lines
from tawpipe.report.page import PLOTLY, Section, check_page, page_text, timeline_section, write_text
from tawpipe.report.summary import differences, matched
from tawpipe.schedule.settings import ScheduleSettings
from tawpipe.simulate import LinkModel
from tawpipe.train.page import write_run_page
from tawpipe.train.settings.config import TrainConfig
from tawpipe_lab.page import compare_page

pytest.importorskip("plotly")


@pytest.fixture(scope="module")
def plan() -> Plan:
    asked = plan_request(flops=1e9, peak_flops=1e12)
    return Plan.of(asked, search_only(asked))


@pytest.fixture(scope="module")
def file(plan, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("plan") / "plan.yaml"
    plan.save(path)
    return path


def whole(path: Path) -> str:
    """A page that needs nothing else."""
    text = path.read_text(encoding="utf-8")
    check_page_text(text)
    assert "NaN" not in text.split("<body>")[1].split("<script")[0]
    return text


# a request as data


def test_plan_request_reads_back_equal_from_yaml(plan):
    asked = plan.request
    content = yaml.safe_load(yaml.safe_dump(json.loads(json.dumps(record_of(asked)))))
    again = request_from(content, where="here")
    for name in ("model", "machine", "size", "widths", "global_batch", "settings", "flops", "profile"):
        assert getattr(again, name) == getattr(asked, name), name


def _without_memory(content):
    content["profile"]["memory"]["working"]["layer"] = None


def _size_in_words(content):
    content["units"][0][1][0] = str(content["units"][0][1][0])


@pytest.mark.parametrize("damage", [_without_memory, _size_in_words])
def test_damaged_plan_request_is_refused_by_name(plan, damage):
    content = json.loads(json.dumps(record_of(plan.request)))
    damage(content)
    with pytest.raises(UserError, match="PLAN"):
        request_from(content, where="here")


def test_given_schedule_settings_read_back_from_a_plan_record():
    given = ScheduleSettings(early_updates=True, reuse=False, reduce_dtype="same", loss_chunk_tokens=7)
    assert request_from(record_of(plan_request(settings=given)), where="here").settings == given


def test_tied_model_reads_back_from_a_plan_record():
    asked = plan_request(model=llama(6, tied=True))
    assert request_from(record_of(asked), where="here").model == asked.model


def test_mixture_of_experts_reads_back_from_a_plan_record():
    model = llama(6)
    units = tuple(replace(unit, active=unit.numel // 3) if unit.numel == 333 else unit for unit in model.units)
    asked = plan_request(model=replace(model, units=units))
    assert request_from(record_of(asked), where="here").model == asked.model != model


@pytest.mark.parametrize("strategy", NAMES)
def test_step_settings_read_back_from_yaml(strategy):
    asked = plan_request(uniform(2, 2, between=LinkModel(1e6), inside=LinkModel(1e8)))
    step = step_of(asked, strategy, micro_batches_per_visit=2, look_ahead=3, recompute="none:2,full")
    content = yaml.safe_load(yaml.safe_dump(settings_of(step)))
    assert planned_settings(content, asked.settings) == replace(step.settings, keep_mib=None)  # the run says it


def test_saved_plan_is_simulated_again(plan, file):
    made, left_out = replay(file)
    assert not left_out
    assert plan.chosen.prediction is not None
    assert made.step_seconds == pytest.approx(plan.chosen.prediction.step_seconds, rel=0.02)
    assert made.schedule.topology.world_size == 4


@pytest.mark.parametrize("damage", ["gone", "empty", "machine"])
def test_plan_without_its_clock_record_is_named(file, tmp_path, damage, capsys):
    content = yaml.safe_load(file.read_text())
    if damage == "gone":
        del content["clock"]
    elif damage == "empty":
        content["clock"] = {}
    else:
        content["clock"]["machine"]["nodes"] = [0]
    path = tmp_path / "plan.yaml"
    path.write_text(yaml.safe_dump(content))
    assert main(["trace", str(path)]) == 2
    assert "plan.yaml" in capsys.readouterr().err


# trace


def test_trace_draws_a_plan(file, tmp_path, capsys):
    assert main(["trace", str(file), "--out", str(tmp_path), "--report", str(tmp_path / "page.html")]) == 0
    assert "predicted:" in capsys.readouterr().out
    assert {"trace.json", "timeline.svg", "page.html", PLOTLY} == {path.name for path in tmp_path.iterdir()}
    assert "The step, predicted" in whole(tmp_path / "page.html")


def recorded(folder: Path, bars: list[Bar], slower: float) -> None:
    """Bars as a run writes them, every action ``slower`` times as long."""
    folder.mkdir(parents=True)
    for rank in sorted({bar.rank for bar in bars}):
        mine = [bar for bar in bars if bar.rank == rank]
        spans = [[str(bar.action), bar.begin * slower, bar.end * slower] for bar in mine]
        content = {"format": 1, "rank": rank, "node": mine[0].node, "step": 3, "spans": spans}
        (folder / f"rank-{rank}.json").write_text(json.dumps(content))


@pytest.mark.slow
def test_trace_compares_a_run_with_its_plan(file, tmp_path, capsys):
    run = tmp_path / "run"
    recorded(run / "traces" / "step-00000003", predicted_bars(replay(file)[0]), 1.5)
    (run / "plan.yaml").write_text(file.read_text())
    out = tmp_path / "out"
    assert main(["trace", str(run), "--out", str(out), "--report", str(tmp_path / "page.html")]) == 0
    said = capsys.readouterr().out
    assert "(+50.0%)" in said and "largest differences from the prediction, computing:" in said
    events = json.loads((out / "trace.json").read_text())["traceEvents"]
    names = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert {name.partition(" (")[0] for name in names} >= {"predicted rank 0", "executed rank 3"}
    assert "Predicted and executed" in whole(tmp_path / "page.html")


def test_predicted_and_executed_actions_are_matched(plan):
    bars = predicted_bars(timeline_of(plan.request, plan.chosen.step))
    assert len(matched(bars, bars)) == len(bars)
    assert any("(+0.0%)" in line for line in differences(bars, bars))
    assert list(differences(bars, [])) == ["the plan is for another schedule: none of its actions was recorded"]


# pages


def test_timeline_section_names_the_ranks_that_it_shows(plan, monkeypatch):
    steps = {one.strategy: one.step for one in plan.candidates}
    passing = predicted_bars(timeline_of(plan.request, steps["1f1b"]))  # all ranks, which do not do alike
    assert "The first rank" not in timeline_section("A step", passing).text
    bars = predicted_bars(timeline_of(plan.request, steps["tawpipe-spread"]))
    section = timeline_section("A step", bars, "3 of 9 rounds.")
    assert section.text.startswith("Drag to zoom") and "3 of 9 rounds. The first rank of every node." in section.text
    monkeypatch.setattr("tawpipe.report.page.MOST_BARS", len(bars) // 3)
    section = timeline_section("A step", bars, ranks=[0, 1, 2, 3])
    assert "Only rank 0 of 0, 1, 2, 3: more than" in section.text
    drawn = {name.rpartition(" ")[0] for trace in section.figures[0].data for name in trace.y}
    assert drawn == {"rank 0"}


def test_plan_page_shows_its_sections_and_choice(plan, tmp_path):
    write_plan_page(plan, tmp_path / "page.html")
    text = whole(tmp_path / "page.html")
    for title in ("Time of a step", "Device memory by use", "With other links", "With other sequence lengths"):
        assert title in text
    assert plan.chosen.strategy in text


def test_equally_fast_strategies_follow_the_chosen_one(plan):
    assert plan.chosen is not None and plan.chosen.prediction is not None
    slower = replace(
        plan.chosen.prediction,
        link_bytes=plan.chosen.prediction.link_bytes + 1,
        step_seconds=plan.chosen.seconds * 0.999,
    )
    twin = replace(plan.chosen, strategy="twin", prediction=slower)
    both = Plan.of(plan.request, [twin, *plan.candidates])
    assert [one.strategy for one in both.candidates[:2]] == [plan.chosen.strategy, "twin"]
    assert both.as_fast[:1] == (twin,)
    table = [line.split("\t") for line in both.table(separator="\t")]
    assert (table[1][0], table[1][-1].split(",")[0]) == (plan.chosen.strategy, "chosen")
    assert table[2][-1].split(",")[0] == "equally fast"
    assert both.runner_up is twin


def test_the_chosen_curve_is_on_top():
    figure = lines([1, 2], {"a": [1, 2], "b": [1, 2], "c": [1, 2]}, x_title="x", y_title="y", chosen="b")
    assert figure.data[-1].name == "b"
    assert {trace.opacity for trace in figure.data if trace.name != "b"} == {0.5}
    text = page_text("Plan", "x", [Section("Curves", figures=[figure])])
    assert re.findall(r'aria-pressed="true"[^>]*>(\w)<', text) == ["b", "a", "c"]  # and the first in the legend


def test_comparison_page_shows_all_cells_and_bounds(tmp_path):
    results = sorted((Path(__file__).parents[2] / "benchmarks" / "results").glob("*links*/results.json"))
    content = json.loads(results[-1].read_text())
    write_text(tmp_path / "page.html", compare_page("links", content["environment"], content["rows"]))
    text = whole(tmp_path / "page.html")
    assert "All cells" in text and "physical bound" in text


def test_run_page_shows_loss_plan_and_results(file, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    rows = [
        {"step": i, "loss": 3.0 - i / 10, "seconds": 0.5, "grad_norm": None, "tokens_per_second": 9.0} for i in (1, 2)
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (run / "plan.yaml").write_text(file.read_text())
    (run / "strategies.txt").write_text("flat  1.5  32 % slower")
    write_run_page(tmp_path / "page.html", TrainConfig(output=str(run)), [("model", "tiny")], [("steps", "2 in 1 s")])
    text = whole(tmp_path / "page.html")
    assert "<title>Run: tiny: run</title>" in text and "32 % slower" in text and "def &#x27;" not in text
    assert text.count('<div class="charts">') == 1  # of all curves, side by side where there is room
    facts = text.split('<div class="facts">')[1].split("</div></div>")[0]
    assert all(f">{title}</h2>" in facts for title in ("Result", "Settings", "Plan"))
    assert "Loss" in text and "predicted" in text and "2 in 1 s" in text and "Gradient norm" not in text
    plan = yaml.safe_load(file.read_text())
    strategy = plan["schedule"]["strategy"]
    least = {name: value for name, value in plan.items() if name not in ("strategy", "step_seconds")}  # trained by, too
    (run / "plan.yaml").write_text(yaml.safe_dump(least))
    write_run_page(tmp_path / "page.html", TrainConfig(output=str(run)), [], [])
    assert strategy in whole(tmp_path / "page.html")


def test_report_path_needs_an_existing_folder(tmp_path):
    check_page(None)
    check_page(str(tmp_path / "page.html"))
    for path in (tmp_path, tmp_path / "nowhere" / "page.html"):
        with pytest.raises(UserError, match="--report"):
            check_page(str(path))


def test_user_text_on_a_page_is_escaped(tmp_path):
    rows = [("prompt", "<script>alert(1)</script>")]
    run = tmp_path / "run"
    run.mkdir()
    (run / "metrics.jsonl").write_text("")
    write_run_page(tmp_path / "page.html", TrainConfig(output=str(run)), rows, rows)
    assert "<script>alert" not in (tmp_path / "page.html").read_text()


def test_loaded_plan_contains_its_clock_record(file):
    assert load_plan(file)["clock"]["machine"]["nodes"] == [2, 2]
