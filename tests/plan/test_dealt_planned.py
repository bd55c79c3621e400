"""Foresight of documents of uneven lengths: where lengths come from, how they are dealt, what the clock says of it."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from plan_requests import LAYERS, plan_request, profile
from tawpipe.cli import main
from tawpipe.dealing.balance import LayerKind, LayerTime
from tawpipe.dealing.unbalanced import in_rows, in_turn
from tawpipe.errors import UserError
from tawpipe.plan.answer.dealt import BALANCED, IN_TURN, ROWS, DealReport
from tawpipe.plan.answer.dealt_words import as_json, lines, write_dealt_page
from tawpipe.plan.answer.lengths import Lengths, lengths_of
from tawpipe.plan.cost.predict import predict
from tawpipe.plan.cost.request import PlanRequest
from tawpipe.plan.cost.typical import typical_documents
from tawpipe.plan.machine.machine import Device, uniform
from tawpipe.plan.search.candidate import Candidate
from tawpipe.plan.search.plan import Plan
from tawpipe.plan.search.plan_file import SavedPlan, record_of, request_from
from tawpipe.schedule.strategies.table import strategies
from tawpipe.simulate import BlockCost, LinkModel, Seconds, size_of

FREE = LinkModel(1e12, shared=False)


def request(cap: int, *, local: int = 2, per_pair: float = 1e-5) -> PlanRequest:
    """Layers whose attention takes as long as the rest at 100 tokens, on links that cost nothing."""
    layer = BlockCost(Seconds(0, 1e-3, per_pair), Seconds(0, 3e-3, 3 * per_pair))
    own = replace(profile(), blocks=(BlockCost(), *[layer] * LAYERS, BlockCost()), update_s=0.0)
    machine = uniform(2, local, between=FREE, inside=FREE, device=Device())
    return plan_request(machine, profile=own, sequence_length=cap, size=size_of([cap]), global_batch=4 * local)


def corpus() -> Lengths:
    return Lengths.of([5] * 60 + [20] * 30 + [100] * 6 + [300] * 2, "made up")


@pytest.fixture(scope="module")
def dealt() -> DealReport:
    return DealReport.of(request(450), corpus(), tokens=4000, max_document=300)


def test_lengths_file_holds_lengths_with_optional_counts(tmp_path: Path) -> None:
    path = tmp_path / "lengths"
    path.write_text("7\n3 2\n\n7, 4\n9 0\n")
    found = lengths_of(str(path))
    assert (found.values.tolist(), found.counts.tolist()) == ([3, 7], [2, 5])
    assert found.cut(5).counts.tolist() == [5, 2, 5] and found.cut(5).values.tolist() == [2, 3, 5]
    steps = [found.step(50, number) for number in range(5)]
    assert steps == [found.step(50, number) for number in range(5)] and len({tuple(one) for one in steps}) > 1
    assert all(43 < sum(one) <= 50 and set(one) <= {3, 7} for one in steps)
    assert [(up_to, round(documents, 3), round(tokens, 3)) for up_to, documents, tokens in found.histogram.rows] == [
        (4, 0.286, 0.146),
        (8, 0.714, 0.854),
    ]


@pytest.mark.parametrize(
    ("text", "named"),
    [("3\n-4\n", "line 2"), ("3\n1 2 3\n", "line 2"), ("x\n", "line 1"), ("\n", "at least one length")],
)
def test_wrong_line_of_a_lengths_file_is_named(tmp_path: Path, text: str, named: str) -> None:
    path = tmp_path / "lengths"
    path.write_text(text)
    with pytest.raises(UserError, match=named):
        lengths_of(str(path))


@pytest.mark.parametrize("words", ["lognormal:6", "lognormal:a,b", "lognormal:6,-1", "lognormal:nan,1", "no/such/file"])
def test_unreadable_lengths_option_is_refused(words: str) -> None:
    with pytest.raises(UserError, match="--lengths"):
        lengths_of(words)


def test_drawn_lengths_have_the_requested_lognormal_median() -> None:
    drawn = lengths_of("lognormal:6.35,2.33")
    order = [length for length, count in zip(drawn.values, drawn.counts, strict=True) for _ in range(count)]
    assert order[len(order) // 2] == pytest.approx(math.exp(6.35), rel=0.03) and order[0] == 32


def test_row_packings_hold_every_token_in_full_rows() -> None:
    work, lengths = request(450).profile.work, corpus().step(3000, 1)
    cut, packed = in_rows(lengths, 4, 300, work), in_turn(lengths, 4, 300, work)
    assert sum(cut.lengths) == sum(packed.lengths) == sum(lengths) and packed.lengths == tuple(lengths)
    for one in (cut, packed):
        numbers = [number for row in one.single for bin in row for number in bin.documents]
        assert sorted(numbers) == list(range(len(one.lengths)))
        assert all(one.tokens(bin) <= 300 for row in one.single for bin in row)
    assert [cut.tokens(bin) for row in cut.single for bin in row][: sum(lengths) // 300] == [300] * (
        sum(lengths) // 300
    )


def test_dealing_by_time_beats_other_packings_in_a_plan(dealt: DealReport) -> None:
    best, turn, rows = dealt.best, dealt.deal_of(IN_TURN), dealt.deal_of(ROWS)
    assert best is not None and turn is not None and rows is not None and best.name == BALANCED
    assert best.seconds < min(turn.seconds, rows.seconds)
    assert sum(rows.packs.lengths) == sum(best.packs.lengths)
    for one in dealt.deals:
        # Links cost nothing here. Ranks may be ahead of each other by a visit, of several rounds perhaps.
        busiest = max(map(sum, zip(*one.packs.times, strict=True)))
        assert busiest * 0.7 < one.seconds < sum(map(max, one.packs.times)) * 1.1
        assert one.over_mean >= 1 and one.timeline is not None
    assert {one.packs.ranks for one in dealt.deals} == {1, 2}


@pytest.mark.slow
def test_slow_links_choose_a_pipeline_of_packs_and_slices() -> None:
    asked = request(450)
    units = tuple(replace(unit, numel=10_000 * unit.numel) for unit in asked.model.units)
    slow = uniform(2, 2, between=LinkModel(1e6), inside=FREE, device=Device())
    asked = replace(
        asked, model=replace(asked.model, units=units), machine=slow, dealt=tuple(corpus().step(4000, 0)), cuts=True
    )
    found = DealReport.of(asked, corpus(), tokens=4000, max_document=300)
    best = found.best
    assert best is not None and best.timeline is not None and strategies()[found.chosen or ""].axis
    assert best.packs.positions > 1 and best.seconds < 0.7 * found.strategies["tawpipe-spread"].seconds
    assert any(deal.packs.slices for deal in found.strategies.values())
    assert best.seconds >= best.packs.mean_seconds * 3 / 4  # if layers compute nothing again
    assert str(found.chosen) in "\n".join(lines(found)) and as_json(found)["lengths"]["chosen"] == found.chosen


def test_extrapolated_step_of_many_rounds_matches_the_whole_simulation(monkeypatch: pytest.MonkeyPatch) -> None:
    from tawpipe.plan.answer import dealt as module

    asked, bins = request(450), in_turn(corpus().step(20_000, 2), 4, 450, request(450).profile.work)
    step = asked.step(replace(asked.settings, strategy="tawpipe-spread", micro_batches_per_visit=1))
    whole = module.played(asked, step, BALANCED, bins)
    monkeypatch.setattr(module, "MOST_PLAYED", 4 * 4 * (LAYERS + 2))
    part = module.played(asked, step, BALANCED, bins)
    assert whole and part and sum(bins.shape) > 8 and part.timeline is None
    assert part.seconds == pytest.approx(whole.seconds, rel=0.05)
    monkeypatch.setattr(module, "LARGEST_WORK", 1)
    for_all = module.played(asked, step, BALANCED, bins)
    assert for_all and whole.seconds * 0.99 < for_all.seconds < whole.seconds * 1.1


@pytest.mark.parametrize(("strategy", "count"), [("1f1b", 1), ("1f1b", 7), ("tawpipe-spread", 2)])
def test_extrapolated_step_of_few_documents_matches_the_whole_simulation(
    monkeypatch, strategy: str, count: int
) -> None:
    """Most bins of its pipeline are empty, and rounds of empty ones alone say nothing about the others."""
    from tawpipe.plan.answer import dealt as module

    asked = request(450)
    step = asked.step(replace(asked.settings, strategy=strategy, micro_batches_per_visit=1))
    bins = step.strategy.dealing(step, cap=450, work=asked.profile.work, cuts=None)([60] * count)
    whole = module.played(asked, step, BALANCED, bins)
    monkeypatch.setattr(module, "MOST_PLAYED", 1)
    part = module.played(asked, step, BALANCED, bins)
    assert whole and part and part.seconds == pytest.approx(whole.seconds, rel=0.2)


def test_document_longer_than_any_pack_is_refused_by_the_plan() -> None:
    with pytest.raises(UserError, match=r"300 tokens.*at most 200"):
        DealReport.of(request(100), Lengths.of([300], "made up"), tokens=600, max_document=300)


def test_dealt_plan_is_shown_as_text_json_and_page(dealt: DealReport, tmp_path: Path) -> None:
    text, said = "\n".join(lines(dealt)), json.loads(json.dumps(as_json(dealt)))["lengths"]
    assert said["chosen"] in text and f"{said['imbalance']:.3f} of the mean" in text
    assert said["tokens"] == sum(said_tokens for said_tokens in dealt.median.lengths)
    assert {one["packing"] for one in said["deals"]} == {ROWS, IN_TURN, BALANCED}
    assert said["imbalance_over_floor"] >= 1 and sum(one["tokens"] for one in said["histogram"]) == pytest.approx(1)
    pytest.importorskip("plotly")
    write_dealt_page(dealt, tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "share of documents" in page and "Time per rank" in page


def test_layer_windows_are_saved_with_the_plan() -> None:
    asked = request(450)
    windowed = replace(asked.profile.blocks[1], window=64)
    blocks = (asked.profile.blocks[0], windowed, *asked.profile.blocks[2:])
    asked = replace(asked, profile=replace(asked.profile, blocks=blocks), size=size_of([450], [64]))
    again = request_from(json.loads(json.dumps(record_of(asked))), where="here")
    assert again.profile.blocks == blocks and again.size == asked.size
    longer = asked.with_length(900)
    assert longer.size == size_of([900], [64]) and asked.with_micro_batch(2).size.within == ((64, 2 * (64 * 836)),)
    assert {(kind.layers, kind.window) for kind in asked.profile.work.kinds} == {(1, 64), (LAYERS - 1, None)}


def test_run_deals_documents_by_the_seconds_of_its_plan() -> None:
    asked = request(450)
    step = asked.step(replace(asked.settings, strategy="tawpipe-spread", micro_batches_per_visit=1))
    found = [Candidate("tawpipe-spread", step, predict(asked, step), True)]
    plan = SavedPlan.of(Plan.of(asked, found).text())
    assert plan is not None and (work := plan.work) is not None
    for length in (1, 50, 1000):
        assert work.of(length) == pytest.approx(LAYERS * 4 * (1e-3 * length + 1e-5 * length**2))
    short = replace(asked, profile=request(450, per_pair=0.0).profile)
    plan = SavedPlan.of(Plan.of(short, found).text())
    assert plan is not None and plan.work is None and SavedPlan.of("") is None


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--lengths", "no/such/file", "--tokens-per-step", "9"], "no/such/file"),
        (["--lengths", "lognormal:6.35,2.33", "--tokens-per-step", "1000"], "--max-document"),
        (["--lengths", "lognormal:6.35,2.33", "--max-document", "1000", "--tokens-per-step", "999"], "at least 1000"),
        (["--lengths", "lognormal:6.35,2.33", "--max-document", "1000"], "--tokens-per-step"),
        (["--sequence-length", "9", "--global-batch", "9", "--bin-tokens", "9"], "--bin-tokens"),
        (["--lengths", "lognormal:6.35,2.33", "--max-document", "1000", "--save", "x"], "--save"),
    ],
)
def test_wrong_lengths_options_are_refused_by_name(
    words: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--model", "tiny", "--topology", "2x2@1gbit", "--device-name", "H100", *words]) == 2
    assert named in capsys.readouterr().err


def test_lengths_corpus_counts_the_tokens_of_the_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [json.dumps({"text": "x y " * (1 + number % 40)}) for number in range(80)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    words = ["plan", "--model", "tiny", "--vocab-size", "300", "--topology", "1x1", "--device-name", "H100", "--json"]
    words += ["--lengths", "corpus", "--data", str(tmp_path / "rows.jsonl"), "--cache-dir", str(tmp_path / "cache")]
    assert main([*words, "--tokens-per-step", "500"]) == 0
    said = json.loads(capsys.readouterr().out)["lengths"]
    assert "80 documents" in said["source"] and 300 < said["tokens"] <= 500 and said["chosen"]
    assert said["max_document"] <= 500 and said["bin_tokens"] >= said["max_document"]


def test_typical_step_has_mean_work_and_the_longest_document() -> None:
    steps = [[100, 100], [900, 900], [400, 200], [50]]
    assert typical_documents(steps, 700, LayerTime((LayerKind(1, 1.0, 0.0),))) == (700,)
    assert typical_documents(steps, 100, LayerTime((LayerKind(1, 1.0, 0.0),))) == (400, 200)
