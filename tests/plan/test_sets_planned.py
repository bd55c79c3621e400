"""Rows over several devices of a node, chosen by a plan: where they are, how many, what is said, and who refuses."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from transformers import LlamaConfig

from model_requests import request_for
from plan_requests import LAYERS, plan_request, profile, step_of
from tawpipe.console import progress_to
from tawpipe.errors import UserError
from tawpipe.options.names import Change
from tawpipe.plan.answer.longest import Longest, limit_of
from tawpipe.plan.answer.remedy import remedies
from tawpipe.plan.cost.bench import Bench
from tawpipe.plan.cost.measure import Asked, machine_of
from tawpipe.plan.cost.predict import memory_quickly
from tawpipe.plan.cost.profile import FLASH_FACTOR, size_of
from tawpipe.plan.cost.request import PlanRequest
from tawpipe.plan.machine.machine import Device, Machine, uniform
from tawpipe.plan.search import search as search_module
from tawpipe.plan.search.candidate import Outlook
from tawpipe.plan.search.plan import Plan
from tawpipe.plan.search.plan_file import planned_settings, replay
from tawpipe.plan.search.search import _best, search
from tawpipe.schedule.settings import DEFAULT
from tawpipe.schedule.strategies.table import find
from tawpipe.simulate import LinkModel, Seconds
from tawpipe.train import planned

ROW = 40_000
FOUR = uniform(1, 4, between=LinkModel(1e9), inside=LinkModel(1e10))


def asked_of(rows: int = 16, memory: int = 0, machine: Machine | None = None, **changes: Any) -> PlanRequest:
    """Layers that take 0.16 s a row, with 4 bytes of keys and values for every token, whose rows can be cut."""
    machine = machine or uniform(2, 2, between=LinkModel(1e9), inside=LinkModel(1e9), device=Device())
    made = profile()
    layer = replace(made.blocks[1], forward=Seconds(1e-4, 1e-6), backward=Seconds(3e-4, 3e-6))
    memories = replace(made.memory, keys=4, key_gradients=8)
    made = replace(made, blocks=(made.blocks[0], *[layer] * LAYERS, made.blocks[-1]), memory=memories, cuts=True)
    usual: dict[str, Any] = {"profile": made, "sequence_length": ROW, "size": size_of([ROW])}
    return plan_request(machine, global_batch=rows, memory=memory, **usual | changes)


def given(ranks: int | None) -> dict[str, Any]:
    return {"settings": replace(DEFAULT, sequence_ranks=ranks)}


def needed(asked: PlanRequest, ranks: int) -> int:
    """Bytes of a device under the leanest settings of ``flat``."""
    return memory_quickly(asked, step_of(asked, "flat", look_ahead=1, gradient_buffers=1, sequence_ranks=ranks)).device


def chosen(asked: PlanRequest) -> int | None:
    """Ranks of a row under ``flat``, None where nothing fits."""
    one = _best(asked, find("flat"))
    return one.step.sequence_ranks if one.fits and one.step else None


def test_sequence_ranks_default_to_1_without_a_plan():
    assert DEFAULT.sequence_ranks is None and step_of(asked_of(), "flat").settings.sequence_ranks == 1


@pytest.mark.parametrize("share", [0.2, 0.5, 0.9, 1.0, 1.3])
def test_settings_far_above_the_memory_are_skipped_without_effect(share, monkeypatch):
    asked, tried = asked_of(memory=int(share * needed(asked_of(machine=FOUR), 4)), machine=FOUR), list[int]()
    best_of = search_module._best_of
    monkeypatch.setattr(search_module, "_best_of", lambda *given: tried.append(0) or best_of(*given))
    short, tries = _best(asked, find("flat")), len(tried)
    monkeypatch.setattr(search_module, "FAR_OVER", math.inf)
    whole = _best(asked, find("flat"))
    assert short.fits == whole.fits == (share >= 1)
    assert not short.fits or short.step == whole.step
    assert (tries < len(tried) - tries) == (share < 0.6)


def test_whole_rows_limit_the_search_for_more_sequence_ranks(monkeypatch):
    best_of, tried = search_module._best_of, list[int | None]()
    watch = lambda asked, *rest: tried.append(asked.settings.sequence_ranks) or best_of(asked, *rest)  # noqa: E731
    monkeypatch.setattr(search_module, "_best_of", watch)
    asked = asked_of(rows=1, machine=FOUR)
    assert asked.leaves_idle
    _best(asked, find("flat"))
    free = tried[:]
    _best(asked, find("flat"), outlook=Outlook(most_s=lambda _: 0.0))
    assert free == [None, *asked.cp_group_sizes] and tried[len(free) :] == [None], "the fewest first"


def test_impossible_lean_settings_do_not_exclude_usual_settings(monkeypatch):
    def leanest(*_: object) -> None:
        raise UserError("schedule.look_ahead", 1, "more")

    asked = asked_of(memory=2**40, machine=FOUR)
    usual = _best(asked, find("flat"))
    monkeypatch.setattr(search_module, "leanest", leanest)
    lean = _best(asked, find("flat"))
    assert usual.fits and lean.fits and lean.step == usual.step


@pytest.mark.parametrize("machine", [None, FOUR], ids=["2x2", "1x4"])
def test_idle_devices_share_rows_if_the_plan_gains(machine):
    assert [chosen(asked_of(rows, machine=machine)) for rows in (16, 4)] == [1, 1]
    assert chosen(asked_of(2, machine=machine)) == 2
    assert chosen(asked_of(1, machine=machine)) == (4 if machine else 2)
    slow = replace(asked_of().machine if machine is None else machine, inside=LinkModel(1e5))
    assert chosen(asked_of(2, machine=slow)) == 1, "not where keys and values take longer than what is saved"


def test_rows_that_fit_no_single_device_are_shared():
    free = asked_of(machine=FOUR)
    assert needed(free, 4) < needed(free, 2) < needed(free, 1)
    for ranks in (1, 2, 4):
        assert chosen(asked_of(memory=needed(free, ranks), machine=FOUR)) == ranks
    none = asked_of(memory=needed(free, 4) - 1, machine=FOUR)
    least = Plan.of(none, [_best(none, find("flat"))]).least
    assert chosen(none) is None and least is not None and least.step is not None
    assert least.step.sequence_ranks == 4, "what needs the least memory is said"


def test_sequence_ranks_setting_of_the_user_is_kept():
    assert [chosen(asked_of(2, **given(ranks))) for ranks in (None, 1, 2)] == [2, 1, 2]
    assert chosen(asked_of(**given(2))) == 2
    assert chosen(asked_of(memory=needed(asked_of(), 2), **given(1))) is None


def test_uncuttable_rows_are_planned_whole():
    whole = replace(asked_of().profile, cuts=False)
    assert chosen(asked_of(2, profile=whole)) == 1
    assert chosen(asked_of(memory=needed(asked_of(), 2), profile=whole)) is None


def test_plan_changes_the_dropout_draw_only_if_needed_and_says_so(monkeypatch):
    monkeypatch.setattr(search_module, "strategies", lambda: {"flat": find("flat")})

    def plan(asked: PlanRequest) -> tuple[int, str]:
        made = Plan.of(asked, search(asked))
        assert made.chosen is not None and made.chosen.step is not None
        return made.chosen.step.sequence_ranks, made.reason

    assert plan(asked_of(2, drops=True))[0] == 1
    ranks, reason = plan(asked_of(2))
    assert ranks == 2 and "every row over 2 devices of a node" in reason and "dropout" not in reason
    ranks, reason = plan(asked_of(4, needed(asked_of(4), 2), drops=True))
    assert ranks == 2 and "another draw of dropout" in reason


def test_saved_plan_keeps_its_sequence_ranks(tmp_path):
    asked = asked_of(2)
    plan, path = Plan.of(asked, [_best(asked, find("flat"))]), tmp_path / "plan.yaml"
    plan.save(path)
    schedule = yaml.safe_load(path.read_text())["schedule"]
    assert planned_settings(schedule, DEFAULT).sequence_ranks == schedule["sequence_ranks"] == 2
    assert plan.chosen is not None
    assert replay(path)[0].step_seconds == pytest.approx(plan.chosen.seconds, rel=0.02)
    del schedule["sequence_ranks"]  # as a plan of before, for which the user's value held
    for ranks in (4, None):
        assert planned_settings(schedule, replace(DEFAULT, sequence_ranks=ranks)).sequence_ranks == ranks


def test_remedies_suggest_sequence_ranks():
    asked = asked_of(4, needed(asked_of(), 2))
    assert any(Change("schedule.sequence_ranks", 2) in way.changes for way in remedies(asked, step_of(asked, "flat")))


def test_longest_row_uses_all_devices_of_a_node_if_longer():
    memory = needed(asked_of(machine=FOUR), 1)
    rows = {}
    for ranks in (None, 1, 4):
        asked = asked_of(4, memory, FOUR, sequence_length=1 << 20, size=size_of([1 << 20]), **given(ranks))
        found = Longest.of(asked, ends=limit_of(1 << 20))
        assert found.best is not None
        rows[ranks] = found.best.tokens, found.best.as_json()["sequence_ranks"], found.reason
    assert rows[None][:2] == (rows[4][0], 4) and rows[4][0] > 2 * rows[1][0] and rows[1][1] == 1
    assert "4 devices of a node" in rows[None][2]
    short = Longest.of(asked_of(4, memory, FOUR, sequence_length=99, size=size_of([99])), ends=limit_of(99)).best
    assert short is not None and short.as_json()["sequence_ranks"] == 1, "as long by one device"


def test_longest_rows_fewer_than_devices_are_split():
    """By their number, which ``--global-batch`` says: all of a step are of that length."""
    for rows, ranks in ((1, 4), (2, 2), (4, 1)):
        asked = asked_of(rows, 0, FOUR, sequence_length=ROW, size=size_of([ROW]))
        best = Longest.of(asked, ends=limit_of(ROW)).fastest
        assert best is not None and best.prediction is not None
        said = best.as_json()
        assert (said["tokens"], said["rows"], said["sequence_ranks"]) == (ROW, rows, ranks)
        assert best.tokens_per_second == pytest.approx(ROW * rows / best.prediction.step_seconds / 4)
        assert best.cells()[1:3] == (f"{ROW:,}", str(rows)) and said["mfu"] is None, "operations are not known"


def test_attention_of_split_rows_takes_the_time_of_flash_attention(tmp_path):
    """Whole rows have cuDNN's on Hopper, if they are of one document and a length that recurs."""
    shape: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 100}
    shape |= {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 4096}
    LlamaConfig(**shape).save_pretrained(tmp_path)

    def asked(name: str = "NVIDIA H100 80GB HBM3", tokens: int = 2048, **given: Any) -> PlanRequest:
        machine = machine_of("1x2", device=Device(name, 2**36))
        return request_for(str(tmp_path), machine, sequence_length=tokens, global_batch=1, **given)

    usual = asked()
    others = asked("A100"), asked(tokens=2040), asked(lengths=(1024, 1024))
    assert usual.profile.flash_factor == FLASH_FACTOR > 1.5
    assert [one.profile.flash_factor for one in others] == [1.0] * 3
    assert "flash attention 2" in usual.profile.source and "flash attention 2" not in others[0].profile.source
    whole = usual.of(step_of(usual, "flat", sequence_ranks=1)).profile.blocks[1]
    step = step_of(usual, "flat", sequence_ranks=2)
    split = usual.of(step).of(step).profile.blocks[1]
    assert split.forward == replace(whole.forward, per_pair=FLASH_FACTOR * whole.forward.per_pair)
    assert split.backward.per_pair == FLASH_FACTOR * whole.backward.per_pair and split.attention != whole.attention
    small = asked(memory_bytes=1, tokens=4096)
    assert small.profile.in_chunks[1].forward == split.forward
    ends = replace(whole, forward=Seconds())
    measured = replace(small.profile, in_chunks=(ends, whole.with_attention(3.0)), blocks=(ends, whole))
    assert measured.with_flash(2.0, estimated=False).flash_factor == pytest.approx(3.0)
    assert replace(measured, in_chunks=()).with_flash(2.0, estimated=False).flash_factor == 2.0
    longer = usual.with_length(4096)
    assert longer.flops == pytest.approx(asked(tokens=4096).flops) and longer.flops > 2 * usual.flops


def test_row_cutting_is_checked_only_if_a_plan_may_cut_rows(tmp_path, monkeypatch):
    shape: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    shape["num_attention_heads"] = 2
    LlamaConfig(**shape, num_key_value_heads=2, vocab_size=100).save_pretrained(tmp_path)
    machine, said = machine_of("2x4@10gbit", device=Device("H100", 2**36)), []

    def asked(rows: int, **settings: Any) -> PlanRequest:
        made = replace(DEFAULT, **settings)
        with progress_to(said.append):
            return request_for(str(tmp_path), machine, sequence_length=512, global_batch=rows, settings=made)

    assert asked(8).cp_group_sizes == () and asked(2, sequence_ranks=1).cp_group_sizes == ()
    assert asked(2).cp_group_sizes == (2, 4) and not said
    monkeypatch.setattr(Bench, "why_whole", lambda _: "its layers look back")
    assert asked(8).cp_group_sizes == () and not said
    assert asked(2).cp_group_sizes == () and said == ["rows stay whole: its layers look back"]
    with pytest.raises(UserError, match=r"schedule.sequence_ranks: got 2; 1, for whole rows: its layers look back"):
        asked(2, sequence_ranks=2)
    with pytest.raises(UserError, match=r"schedule.sequence_ranks: got 3; 1, 2 or 4"):
        asked(2, sequence_ranks=3)


@pytest.mark.parametrize(("by_one", "given", "expected"), [(False, None, None), (True, None, 1), (True, 2, 2)])
def test_run_that_needs_whole_rows_plans_with_one_sequence_rank(by_one, given, expected, monkeypatch):
    asked = []
    monkeypatch.setattr(planned, "request_of", lambda _, __, one, **___: asked.append(one.settings))
    world: Any = SimpleNamespace(barrier=lambda: None, device=torch.device("cpu"), gather_texts=lambda text: [text])
    chain: Any = None
    batch = Asked(64, 8, 2, settings=replace(DEFAULT, sequence_ranks=given))
    planning = planned.Planning(world, chain, batch, by_one=by_one)
    planning.ask(replace(FOUR, device=Device(memory_bytes=1)))
    assert [one.sequence_ranks for one in asked] == [expected]
