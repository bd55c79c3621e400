"""Where nothing fits a plan says what would: single changes of the run, planned anew, then more machines."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import tawpipe
from plan_requests import plan_request, profile
from schedules import llama
from tawpipe.cli import main
from tawpipe.console import span
from tawpipe.errors import UserError
from tawpipe.model.settings import LoraSettings
from tawpipe.plan.answer import would_fit
from tawpipe.plan.answer.remedy import WayOut
from tawpipe.plan.answer.would_fit import WouldFit
from tawpipe.plan.cost.feasible import some_fit
from tawpipe.plan.cost.profile import size_of
from tawpipe.plan.cost.request import PlanRequest
from tawpipe.plan.search.plan import Plan
from tawpipe.plan.search.refused import in_plain_words
from tawpipe.plan.search.search import TOO_LONG, search
from tawpipe.schedule.refusal import LeastLayers, MemoryOfPosition, MicroBatchCount
from tawpipe.schedule.sizes.footprint import Widths
from tawpipe.schedule.strategies.table import strategies
from tawpipe.train.settings.config import TrainConfig

LAYERS = 2


def small(**changes: Any) -> PlanRequest:
    """Of a model and a batch that are planned in a moment."""
    return plan_request(model=llama(LAYERS), profile=profile(LAYERS), global_batch=4, **changes)


def least(request: PlanRequest) -> int:
    return min(one.prediction.peak_bytes for one in search(request) if one.prediction is not None)


@cache
def nothing() -> PlanRequest:
    """Of which nothing fits."""
    return small(memory=least(small()) * 2 // 3)


NAMED = re.compile(r"(.+): ([\d.]+ (?:ms|s|h)) per step \(([\w-]+), [\d.]+ GiB\)(?: of (?:as many|fewer) rows)?")


def ask(config: TrainConfig) -> PlanRequest:
    """An adapter takes half of what a model at home does, low bits a quarter; with memory that nobody has."""
    if config.schedule.sequence_chunk:
        raise UserError("schedule.sequence_chunk", 2048, "0, for whole rows")
    share = 4 if config.quantize == "nf4" else 2
    return replace(
        nothing(), widths=Widths(2 // min(2, share), 4 // share, 4 // share, 1), memory_bytes=1, machine=None
    )


def said_of(request: PlanRequest, config: TrainConfig | None = None) -> list[tuple[str, str, str]]:
    lines = list(map(str, WouldFit(request, config or TrainConfig(), ask).ways()))
    named = [NAMED.fullmatch(line) for line in lines]
    assert all(named), lines
    return [(one[1], one[2], one[3]) for one in named if one]


@pytest.mark.usefixtures("few_strategies")
def test_single_changes_that_fit_are_listed_before_more_machines():
    assert Plan.of(nothing(), search(nothing())).chosen is None
    said = said_of(nothing())
    assert [words for words, _, _ in said[:2]] == ["--lora.rank 16", "--lora.rank 16 --quantize nf4"] and len(said) == 3
    request = replace(ask(TrainConfig()), machine=nothing().machine, memory_bytes=nothing().memory_bytes)
    chosen = Plan.of(request, search(request)).chosen
    assert chosen is not None and (said[0][1], said[0][2]) == (span(chosen.seconds), chosen.strategy)
    machines = re.fullmatch(r"(\d+) machines of 2 devices each", said[2][0])
    assert machines
    for nodes, good in ((int(machines[1]), True), (int(machines[1]) - 1, False)):
        assert (
            some_fit(replace(nothing(), machine=replace(nothing().machine, nodes=(2,) * nodes)), lambda: False) == good
        )


@pytest.mark.usefixtures("few_strategies")
def test_settings_of_the_user_are_not_suggested_again(monkeypatch):
    monkeypatch.setattr(would_fit, "MOST_NODES", 1)
    adapter = replace(TrainConfig(), lora=LoraSettings(rank=8))
    assert [words for words, _, _ in said_of(nothing(), adapter)][:1] == ["--quantize nf4"]
    whole = replace(adapter, quantize="nf4", schedule=replace(adapter.schedule, sequence_chunk=0))
    assert not any("chunk" in words for words, _, _ in said_of(nothing(), whole))  # it cannot run so


@pytest.mark.usefixtures("few_strategies")
def test_smaller_rows_are_suggested_if_nothing_else_fits(monkeypatch):
    monkeypatch.setattr(would_fit, "MOST_NODES", 1)
    long = small(sequence_length=1024, size=size_of([1024]))
    none = replace(TrainConfig(), lora=LoraSettings(rank=8), quantize="nf4")
    said = said_of(replace(long, memory_bytes=least(long) * 3 // 4), none)
    assert "--sequence-length 512" in [words for words, _, _ in said], said


@pytest.mark.usefixtures("few_strategies")
def test_smaller_batch_is_suggested_with_a_smaller_micro_batch(monkeypatch):
    monkeypatch.setattr(would_fit, "MOST_NODES", 1)
    monkeypatch.setattr(would_fit, "some_fit", lambda request, over: request.global_batch <= 2)
    monkeypatch.setattr(WouldFit, "_planned", lambda self, request, changes: [WayOut(changes, 1.0)])
    lines = list(map(str, WouldFit(replace(nothing(), micro_batch=4), TrainConfig(), ask).ways()))
    assert "--micro-batch 2 --global-batch 2: 1.000 s per step of fewer rows" in lines


WORDS = ["plan", "--model", "tiny", "--vocab-size", "500", "--sequence-length", "64", "--global-batch", "8"]


@pytest.mark.slow
def test_reasons_against_strategies_are_short_and_all_lists_every_row(capsys):
    words = [*WORDS, "--topology", "4x2@1gbit", "--device-name", "H100"]
    assert main(words) == 0
    short = capsys.readouterr()
    assert "layers are needed" in short.out and "got" not in short.out + short.err
    assert sum("layers are needed" in line for line in short.out.splitlines()) <= 2
    assert "with --all: tawpipe-striped, tawpipe-whole" in short.out
    assert not any(line.startswith(("tawpipe-spread", "flat")) for line in short.err.splitlines()), "one table"
    assert main([*words, "--all"]) == 0
    whole = capsys.readouterr().out
    assert "with --all" not in whole and "\ntawpipe-striped" in whole and "\ntawpipe-striped" not in short.out


def test_search_at_its_time_limit_still_names_a_fitting_strategy():
    found = search(plan_request(), most_s=lambda _: 0.0)
    fitting = [one for one in found if one.fits]
    assert len(fitting) == 1 and fitting[0].step is not None
    assert [one.why_not for one in found[1:]] == [TOO_LONG] * (len(found) - 1)
    assert len(found) == sum(one.candidate for one in strategies().values())


def test_reasons_name_machine_limits_instead_of_unset_settings():
    no_room = in_plain_words(UserError("memory of a position", "0", "more", need=MemoryOfPosition()))
    assert no_room == "no micro-batch fits into a device beside weights, gradients and optimizer state"
    odd = in_plain_words(UserError("micro-batches", 5, "even groups", need=MicroBatchCount(4, 6)))
    assert odd == "4 or 6 micro-batches are needed, not 5"


def test_plan_and_run_code_parse_no_error_messages():
    """Refusals and ways out are data: their text may say anything. What users write may be matched."""
    for need in (LeastLayers(8), MemoryOfPosition(2**30), MicroBatchCount(4, 6), "it cannot be"):
        errors = (UserError("schedule.sequence_ranks", 5, text, need=need) for text in ("at least 3: y; z", ""))
        assert len({in_plain_words(error) for error in errors}) == 1, need
    root = Path(tawpipe.__file__).parent
    matching = {
        str(path.relative_to(root))
        for room in ("plan", "train", "schedule/pipelines", "orders")
        for path in (root / room).rglob("*.py")
        if "\nimport re\n" in path.read_text(encoding="utf-8")
    }
    assert matching == {"plan/cost/measure.py", "train/settings/optimizers.py"}, "a topology; names of parameters"
