"""Timelines: recorded and predicted steps as bars, traces, pictures and text."""

from __future__ import annotations

import json
from dataclasses import replace
from xml.etree import ElementTree

import pytest
import torch

from schedules import llama, make
from tawpipe.cli import main
from tawpipe.errors import UserError
from tawpipe.report import Bar, draw_timeline, executed_bars, gaps, predicted_bars, summary, write_chrome_trace
from tawpipe.report.bars import label
from tawpipe.runtime.watch.recording import Recording
from tawpipe.schedule.actions import Action, Lane
from tawpipe.simulate import CostModel, LinkModel, play

FORWARD = Action.parse("COMPUTE FORWARD b1 m0 | W0.0 x.0.1 ctx.0 -> x.0.2")
GATHER = Action.parse("GATHER COLLECTIVE all_gather @node u1 | home.w.1 -> W0.0")


@pytest.fixture
def bars() -> list[Bar]:
    """Of a step on two nodes of two, as the clock plays it."""
    schedule = make(llama(3), 2, 2, 8, strategy="tawpipe-spread", micro_batches_per_visit=1)
    costs = CostModel.timed(
        layers=3, forward_s=1.0, backward_s=2.0, between=LinkModel(2000.0), inside=LinkModel(1e6), update_s=1e-4
    )
    return predicted_bars(play(schedule, costs, steps=3))


def recorded(folder, *, rank: int = 0) -> None:
    recording = Recording(torch.device("cpu"), 7)
    for index, action in enumerate((GATHER, FORWARD)):
        recording.around(index, str(action), lambda: None)()
    recording.write(folder, rank=rank, node=rank // 2)


def test_recorded_step_is_read_back_as_bars(tmp_path):
    for rank in range(3):
        recorded(tmp_path / "step", rank=rank)
    found = executed_bars(tmp_path / "step")
    assert [(bar.rank, bar.node) for bar in found] == [(0, 0), (0, 0), (1, 0), (1, 0), (2, 1), (2, 1)]
    assert [bar.action for bar in found[:2]] == [GATHER, FORWARD]
    assert min(bar.begin for bar in found) == 0 and all(bar.start <= bar.begin <= bar.end for bar in found)


def test_predicted_bars_cover_one_step(bars):
    assert {bar.rank for bar in bars} == {0, 1, 2, 3} and {bar.node for bar in bars} == {0, 1}
    assert min(bar.begin for bar in bars) == 0
    computing = sum(bar.end - bar.begin for bar in bars if bar.action.lane is Lane.COMPUTE and bar.rank == 0)
    assert computing == pytest.approx(2 * 3 * (1.0 + 2.0), rel=0.1)


def test_gaps_and_computing_add_up_to_the_step_and_are_summarized(bars):
    mine = [bar for bar in bars if bar.rank == 0]
    begin, end = min(bar.begin for bar in bars), max(bar.end for bar in bars)
    computing = sum(bar.end - bar.begin for bar in mine if bar.action.lane is Lane.COMPUTE)
    assert sum(gap.end - gap.begin for gap in gaps(bars, 0)) == pytest.approx(end - begin - computing)
    said = "\n".join(summary(bars, [0, 2]))
    assert "4 ranks" in said and "rank 2: busy COMPUTE" in said and "at the start" in said and "before " in said


def test_chrome_trace_names_ranks_and_lanes(bars, tmp_path):
    write_chrome_trace([("predicted", bars)], tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {"rank 0 (node 0)", "rank 1 (node 0)", "rank 2 (node 1)", "rank 3 (node 1)"}
    slices = [event for event in events if event["ph"] == "X" and event["name"] != "wait"]
    assert len(slices) == len(bars) and all(event["dur"] >= 0 for event in slices)
    assert Action.parse(slices[0]["args"]["action"]) == bars[0].action


def test_timeline_svg_has_a_bar_for_every_action_of_the_drawn_ranks(bars, tmp_path):
    bars = [replace(bar, start=bar.begin / 2) for bar in bars]
    draw_timeline([("predicted", bars), ("again", bars)], tmp_path / "a.svg", ranks=[1], title="x < y")
    picture = ElementTree.parse(tmp_path / "a.svg").getroot()
    name = "{http://www.w3.org/2000/svg}"
    titles = [title.text for title in picture.iter(f"{name}title")]
    mine = [label(bar) for bar in bars if bar.rank == 1]
    assert sorted(title for title in titles if title in mine) == sorted(2 * mine)
    waits = [bar for bar in bars if bar.rank == 1 and bar.begin > 0]
    assert sum(str(title).startswith("waits for ") for title in titles) == 2 * len(waits) > 0
    words = [text.text for text in picture.iter(f"{name}text")]
    assert {"x < y", "predicted, rank 1 COMPUTE", "again, rank 1 COMPUTE", "waiting"} <= {*words}
    for bar in picture.iter(f"{name}rect"):
        if bar.find(f"{name}title") is not None:
            x, width = float(bar.attrib["x"]), float(bar.attrib["width"])
            assert x >= 0 and width >= 0 and x + width <= 1400


def test_undrawable_timelines_are_refused(bars, tmp_path):
    with pytest.raises(UserError, match=r"ends with \.svg"):
        draw_timeline([("a", bars)], tmp_path / "a.gif")
    with pytest.raises(UserError, match="--ranks: got 9; some of 0, 1, 2, 3"):
        draw_timeline([("a", bars)], tmp_path / "a.svg", ranks=[9])


def test_trace_command_draws_the_last_recorded_step(tmp_path, capsys):
    recorded(tmp_path / "run" / "traces" / "step-00000003")
    recorded(tmp_path / "run" / "traces" / "step-00000012")
    assert main(["trace", str(tmp_path / "run"), "--out", str(tmp_path / "out")]) == 0
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"trace.json", "timeline.svg"}
    said = capsys.readouterr().out
    assert "2 actions" in said and "ui.perfetto.dev" in said


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["nowhere"], "the output folder of a run"),
        (["."], "train with --log.trace-step"),
        (["run", "--ranks", "5"], "--ranks: got '5'; all, or some of 0"),
        (["run", "--ranks", "x"], "--ranks: got 'x'"),
        (["broken"], "a recording of a step"),
    ],
)
def test_wrong_trace_arguments_are_refused(tmp_path, monkeypatch, capsys, words, reason):
    monkeypatch.chdir(tmp_path)
    recorded(tmp_path / "run")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "rank-00000.json").write_text("{")
    assert main(["trace", *words]) == 2
    assert reason in capsys.readouterr().err
