"""Plans: profiles, predictions, the search, the answer, the command."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Config

from family_configs import tiny_config
from model_requests import request_for
from plan_requests import LAYERS, plan_request, profile, search_only, step_of
from schedules import laid_out, llama, spell_recompute
from tawpipe.cli import main
from tawpipe.commands.plan import run as plan_command
from tawpipe.console import progress_to
from tawpipe.errors import UserError
from tawpipe.model.chain import Chain
from tawpipe.model.files.build import build_model
from tawpipe.model.flops import chain_flops
from tawpipe.model.loss import loss_chunk
from tawpipe.model.settings import LoraSettings
from tawpipe.plan.answer.page import memory_parts
from tawpipe.plan.cost import feasible
from tawpipe.plan.cost import predict as predicting
from tawpipe.plan.cost.bench import Bench
from tawpipe.plan.cost.feasible import with_settings
from tawpipe.plan.cost.measure import machine_of
from tawpipe.plan.cost.predict import _play, bound_of, memory_of, memory_quickly, predict
from tawpipe.plan.cost.profile import estimate, fit, measure, size_of
from tawpipe.plan.cost.request import PlanRequest
from tawpipe.plan.machine.machine import Device, Machine, uniform
from tawpipe.plan.search import pipelines
from tawpipe.plan.search import search as searching
from tawpipe.plan.search.candidate import Candidate
from tawpipe.plan.search.plan import Plan
from tawpipe.plan.search.plan_file import load_plan, planned_settings, record_of, replay, request_from, settings_of
from tawpipe.plan.search.search import search
from tawpipe.schedule.pipelines.cost_based import SEARCH
from tawpipe.schedule.pipelines.layout import Layout
from tawpipe.schedule.pipelines.limits import BUDGET, QUICK, searched
from tawpipe.schedule.refusal import MemoryOfPosition
from tawpipe.schedule.settings import DEFAULT, ScheduleSettings, recompute_of_blocks
from tawpipe.schedule.strategies.build import build
from tawpipe.schedule.strategies.table import strategies
from tawpipe.simulate import LinkModel, Seconds
from tawpipe.train.settings.config import load_config

# profiles


@given(fixed=st.floats(0, 1e-2), token=st.floats(1e-7, 1e-4), pair=st.sampled_from([0.0, 1e-9, 1e-7]))
def test_fit_recovers_the_terms_of_block_seconds(fixed, token, pair):
    sizes = [size_of([n]) for n in (1000, 500, 250)] + [size_of([125] * 8)]
    truth = Seconds(fixed, token, pair)
    found = fit(sizes, [truth.of(size) for size in sizes])
    for size in sizes:
        assert found.of(size) == pytest.approx(truth.of(size), rel=1e-5)
    assert min(found.fixed, found.per_token, found.per_pair) >= 0


def test_fit_has_no_negative_terms():
    sizes = [size_of([n]) for n in (1000, 500, 250)]
    assert min(vars(fit(sizes, [1.0, 0.9, 0.1])).values()) >= 0


def test_fit_of_zero_seconds_is_zero():
    assert fit([size_of([n]) for n in (1000, 500, 250)], [0.0, 0.0, 0.0]) == Seconds()


def tiny(**changes) -> Chain:
    model = build_model("tiny", vocab_size=500, max_positions=256).model
    return Chain(model, **changes)


def test_plan_counts_frozen_parameters():
    """Adapters beside frozen layers, layers frozen among others, and first ones through which no gradient passes."""
    machine = machine_of("1x2", device=Device("H100"))
    asked: dict[str, Any] = {"sequence_length": 64, "global_batch": 4}
    adapter, patterns = LoraSettings(rank=4, dropout=0.1), ["*.embed_tokens", "model.layers.[02]"]
    whole = request_for("tiny", machine, **asked)
    adapted, frozen = (
        request_for("tiny", machine, **asked, lora=adapter),
        request_for("tiny", machine, **asked, frozen=patterns),
    )
    trained = [sum(unit.numel for unit in one.model.units if unit.trainable) for one in (whole, adapted, frozen)]
    assert trained[1] < 0.1 * trained[0] and trained[2] < trained[0]
    assert adapted.drops and not whole.drops
    backward = [one.profile.blocks[3].backward.per_token for one in (whole, adapted, frozen)]
    assert backward[2] == pytest.approx(backward[0] * 2 / 3) and backward[2] < backward[1] < backward[0]
    assert [block.needs_backward for block in frozen.model.blocks[:3]] == [False, False, True]
    assert adapted.flops < 0.75 * whole.flops
    bench = Bench(
        Chain(build_model("tiny", max_positions=64, frozen=["model.layers.2"]).model),
        torch.device("meta"),
        torch.float32,
        8,
    )
    assert [3] in bench.kinds().values()


def test_measured_profile_has_costs_of_every_block():
    found = measure(tiny(), dtype=torch.float32, device=torch.device("cpu"), tokens=256)
    size = size_of([256])
    assert len(found.blocks) == 10
    assert len({id(cost) for cost in found.blocks[1:-1]}) == 1, "equal layers are measured once"
    layer = found.blocks[1]
    assert 0 < layer.forward.of(size) < layer.backward.of(size)
    assert found.blocks[-1].backward.of(size) > 0 and found.update_s > 0
    memory = found.memory
    assert memory.kept["graph"] > memory.kept["kept"] > memory.boundary == 256 * 4


def test_estimated_profile_counts_matrix_operations():
    chain = tiny()
    found = estimate(chain, dtype=torch.bfloat16, flops=1e12)
    layer, numel = found.blocks[1], chain.units[1].numel
    assert layer.forward.per_token == pytest.approx(2 * numel / 0.5e12)
    assert layer.backward.of(size_of([64])) == pytest.approx(3 * layer.forward.of(size_of([64])))
    assert found.blocks[0].forward == Seconds() and "estimated" in found.source


def test_estimated_profile_counts_active_experts():
    config = tiny_config("mixtral")
    config.num_experts_per_tok = 1
    chain = Chain(AutoModelForCausalLM.from_config(config))
    experts = sum(slot.numel for slot in chain.units[1].slots if ".experts." in slot.name)
    met = chain.units[1].numel - experts + experts / config.num_local_experts
    assert 0 < met < chain.units[1].numel
    assert estimate(chain, dtype=torch.bfloat16, flops=1e12).blocks[1].forward.per_token == pytest.approx(
        2 * met / 0.5e12
    )


@pytest.mark.parametrize(
    ("given", "dtype", "device", "chunk"),
    [
        (0, torch.bfloat16, "cuda", 2688),  # 4 GiB of logits
        (0, torch.float64, "cpu", 1024),  # at least
        (300, torch.bfloat16, "cuda", 300),
    ],
)
def test_loss_chunk_follows_from_the_vocabulary_size(given, dtype, device, chunk):
    assert loss_chunk(given, 128256, dtype, device) == chunk
    assert loss_chunk(given, 1000, dtype, device) == (given or 8192)


@pytest.mark.parametrize(
    ("reduce_dtype", "row", "chunk", "most"),
    [("float32", 512, 0, 1024), ("same", 65536, 0, 8192), ("float32", 65536, 100, 100), ("same", 512, 0, 1024)],
)
def test_plan_counts_the_logits_of_one_loss_chunk(reduce_dtype, row, chunk, most):
    """And where gradients travel in bf16, the buffer in which those of the head's chunks are added up."""
    machine = machine_of("2x2@10gbit", device=Device("H100", 2**36))
    chosen = ScheduleSettings(loss_chunk_tokens=chunk, reduce_dtype=reduce_dtype)
    found = request_for("tiny", machine, sequence_length=row, global_batch=8, micro_batch=2, settings=chosen)
    head = 8192 * 256 + 256
    sums = 4 * head if reduce_dtype == "same" and most < 2 * row else 0
    fixed, per_token = found.profile.memory.working["head"]["backward full"]
    assert (fixed, per_token) == (most * 8192 * (12 + 2) + sums, 0), "three numbers in fp32 and one in bf16"


# predictions


@settings(max_examples=10, deadline=None)
@given(
    strategy=st.sampled_from(["tawpipe-spread", "tawpipe-striped", "flat", "hsdp"]),
    per_visit=st.integers(1, 2),
    per_rank=st.integers(6, 9),
    scope=st.sampled_from(["visit", "step"]),
)
def test_prediction_from_few_rounds_matches_the_whole_simulation(strategy, per_visit, per_rank, scope):
    asked = plan_request(global_batch=4 * per_rank)
    scope = scope if strategy in ("tawpipe-spread", "hsdp") else "visit"
    step = step_of(asked, strategy, micro_batches_per_visit=per_visit, gradients_scope=scope)
    made = predict(asked, step)
    schedule = build(step)
    whole = _play(asked, schedule, step)
    assert made.step_seconds == pytest.approx(whole.step_seconds, rel=0.01)
    assert made.needs == memory_of(asked, schedule)
    assert memory_quickly(asked, step) == made.needs
    assert bound_of(asked, step) <= made.step_seconds * 1.001


def test_pipeline_prediction_grows_linearly_with_micro_batches():
    short, longer = plan_request(global_batch=12), plan_request(global_batch=40)
    for kind in ("1f1b", "zero-bubble"):
        layout = laid_out(kind, stages="nodes")
        made = [predict(asked, asked.step(DEFAULT, layout)).step_seconds for asked in (short, longer)]
        assert 2.0 < made[1] / made[0] < 40 / 12 * 1.02


# the search


@pytest.fixture(scope="module")
def found() -> list[Candidate]:
    """What a search finds for the plain request."""
    return search(plan_request())


def test_search_tries_every_strategy_and_sorts_by_seconds(found):
    asked = plan_request()
    known = strategies()
    assert {one.strategy for one in found} == {name for name in known if known[name].candidate}
    played = [one for one in found if one.prediction is not None]
    assert [one.seconds for one in played] == sorted(one.seconds for one in played)
    plan = Plan.of(asked, found)
    assert plan.chosen is not None
    best = min(one.seconds for one in played)
    assert plan.chosen.seconds == best
    assert plan.chosen.strategy in plan.reason


def test_search_excludes_strategies_above_the_memory_limit(found):
    free = Plan.of(plan_request(), found)
    assert free.chosen is not None and free.chosen.prediction is not None
    least = min(one.prediction.peak_bytes for one in free.candidates if one.prediction is not None)
    tight = plan_request(memory=free.chosen.prediction.peak_bytes - 1)
    plan = Plan.of(tight, search_only(tight))
    assert plan.chosen is not None and plan.chosen.prediction is not None
    assert plan.chosen.prediction.peak_bytes < free.chosen.prediction.peak_bytes
    nothing = plan_request(memory=least // 4)
    plan = Plan.of(nothing, search_only(nothing))
    assert plan.chosen is None and "nothing fits" in plan.reason and "GiB" in plan.reason
    with pytest.raises(UserError, match="nothing fits"):
        plan.text()


def test_strategies_that_do_not_fit_are_simulated_once_and_only_if_quick(monkeypatch):
    tight, played = plan_request(memory=1, global_batch=17), list[str]()
    real = searching.predict
    monkeypatch.setattr(
        searching, "predict", lambda asked, step: played.append(step.strategy.name) or real(asked, step)
    )
    weights = ("tawpipe-spread", "flat", "tawpipe-whole", "weipipe")
    quick = search_only(tight, *weights)
    assert sorted(played) == sorted(weights), "once each, however many places its homes may have"
    monkeypatch.setattr(searching, "QUICK_PLAYED", 0)
    long = search_only(tight, *weights)
    assert len(played) == len(weights)
    sizes = [{one.strategy: one.prediction and one.prediction.peak_bytes for one in found} for found in (quick, long)]
    assert sizes[0] == sizes[1], "of all ranks"
    row = Plan.of(tight, long).row(long[0])
    assert row["step_seconds"] is row["idle_s"] is None and row["peak_gib"] > 0 and not row["fits"]


@pytest.mark.parametrize("rows", [16, 17])
def test_partial_memory_count_never_exceeds_the_full_count(rows):
    asked = plan_request(global_batch=rows)
    for name in ("tawpipe-spread", "flat", "hsdp", "tawpipe-striped", "tawpipe-whole", "weipipe", "1f1b"):
        step = step_of(asked, name)
        some, every = (memory_quickly(asked, step, part=part).wanted for part in (True, False))
        assert 0 < some <= every
        for memory in (some - 1, every - 1, every):
            assert feasible.holds(replace(asked, memory_bytes=memory), step) == (memory >= every)


def test_search_offloads_as_few_layers_as_the_memory_needs():
    machine = Machine((2, 2), LinkModel(2e5, 1e-5), LinkModel(1e8), host=LinkModel(2e3), device=Device("GPU"))
    (free,) = search_only(plan_request(machine), "tawpipe-spread")
    assert free.step is not None and free.step.settings.offloaded_layers == 0
    lean = {"micro_batches_per_visit": 1, "look_ahead": 1, "gradient_buffers": 1, "step_cache": 0, "recompute": "full"}
    steps = {layers: with_settings(free.step, **lean, offloaded_layers=layers) for layers in (0, LAYERS // 2, LAYERS)}
    sizes = {layers: memory_quickly(plan_request(machine), step).device for layers, step in steps.items()}
    assert sizes[LAYERS] < sizes[LAYERS // 2] < sizes[0]
    used = []
    for memory in (sizes[0] - 1, sizes[LAYERS // 2] - 1, sizes[LAYERS]):
        (found,) = search_only(plan_request(machine, memory=memory), "tawpipe-spread")
        assert found.fits and found.step is not None and found.step.settings.offloaded_layers > 0
        used.append(found.step.settings.offloaded_layers)
    assert used == sorted(used) and used[0] == LAYERS // 2


def test_pipelines_are_excluded_if_the_model_or_compiled_layers_forbid():
    asked = plan_request(why_not_staged="its layers are given what is computed from the embedding")
    with pytest.raises(UserError, match="given what is computed from the embedding"):
        step_of(asked, "1f1b")
    compiled = plan_request(compiled=True)
    assert step_of(compiled, "1f1b").strategy.axis
    with pytest.raises(UserError, match="compiled layers cannot be taken apart"):
        step_of(compiled, "generated", stages="world:0,3,5,6@0,1,2,3")


def search_with(monkeypatch, generate) -> None:
    """Let plans look for stages with another function."""
    monkeypatch.setattr(SEARCH, "_registered", replace(SEARCH(), generate=generate))


@pytest.mark.parametrize(("hopeless", "budgets"), [(0.5, {0}), (100, {QUICK, BUDGET})])
def test_stages_are_searched_only_if_a_pipeline_may_win(hopeless, budgets, monkeypatch):
    used, generate = set(), SEARCH().generate
    search_with(monkeypatch, lambda *a, budget: used.add(budget) or generate(*a, budget=budget))
    monkeypatch.setattr("tawpipe.plan.search.search.HOPELESS", hopeless)
    found = {one.strategy: one for one in search_only(plan_request(), "tawpipe-spread", "1f1b", "generated")}
    assert used == budgets and found["generated"].step is not None


def test_pipeline_is_planned_if_nothing_else_fits():
    """They compute whole rows, of which one way to lay them out may fit and another may not."""
    model, one = llama(8), profile(8)
    wide = tuple(replace(unit, numel=10**7) if 0 < unit.blocks[0] < 9 else unit for unit in model.units)
    lines = dict.fromkeys(("forward full", "backward full"), (0.0, 300.0, 6.0))
    made = replace(one, memory=replace(one.memory, in_chunks=lines), in_chunks=one.blocks)
    gpus = Machine((2, 2), LinkModel(2e9, 1e-5), LinkModel(1e10), host=LinkModel(1e6), device=Device("GPU"))
    asked = replace(plan_request(gpus, model=replace(model, units=wide), profile=made), sequence_length=4096)
    asked = replace(asked, size=size_of([4096]))
    assert asked.chunks
    memory = memory_quickly(asked, step_of(asked, "1f1b", stages="world")).device
    names = ("tawpipe-spread", "flat", "1f1b", "interleaved-1f1b")
    plan = Plan.of(asked, search_only(tight := replace(asked, memory_bytes=memory), *names))
    assert plan.chosen is not None and plan.chosen.step is not None and plan.chosen.step.strategy.axis
    assert not any(one.fits for one in plan.candidates if one.step and not one.step.strategy.axis)
    nothing = Plan.of(tight, search_only(replace(asked, memory_bytes=memory // 3), *names))
    assert nothing.chosen is None and nothing.least is not None


@pytest.mark.slow
@pytest.mark.usefixtures("quickly_generated")
def test_mixture_of_experts_that_only_pipelines_can_hold_is_planned(tmp_path):
    """Layers of Qwen3-30B-A3B on two nodes of four devices with 76 GiB: what others gather of a layer is too much."""
    sizes = {"num_hidden_layers": 48, "hidden_size": 2048, "num_experts": 128, "moe_intermediate_size": 768}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 128256}
    AutoConfig.for_model("qwen3_moe", **sizes, **heads, tie_word_embeddings=False).save_pretrained(tmp_path)
    machine = machine_of("2x4@10gbit", device=Device("H100"))
    asked = request_for(str(tmp_path), machine, sequence_length=8192, global_batch=8, memory_bytes=76 << 30)
    plan = Plan.of(asked, search_only(asked, "tawpipe-spread", "flat", "1f1b", "interleaved-1f1b", "generated"))
    assert plan.chosen is not None and plan.chosen.step is not None and plan.chosen.step.strategy.axis
    assert memory_quickly(asked, plan.chosen.step).device <= 76 << 30
    refused = {one.strategy: one.why_not for one in plan.candidates if one.why_not}
    assert not any("position" in why or "block_times" in why for why in refused.values())
    # Weights of every position are in the search for stages: ends take more memory than time.
    by_name = {candidate.strategy: candidate for candidate in plan.candidates}
    assert by_name["generated"].fits
    assert all(by_name["generated"].seconds <= by_name[fixed].seconds for fixed in ("1f1b", "interleaved-1f1b"))


@pytest.mark.parametrize("shorter", [True, False])
def test_stages_are_also_searched_with_less_memory_and_the_best_are_kept(shorter, monkeypatch):
    asked, given = plan_request(global_batch=8, memory=1 << 30), list[float]()

    def generate(costs, positions, micro_batches, *, budget=0, **more):
        """Good stages for one search alone: the third, with less memory; or the second, thorough one with all of it."""
        given.append(costs.memory)
        good = len(given) == (3 if shorter else 2)
        layout = Layout.parse("0,2,4,5@0,1,2,3" if good else "0,5,6,7@0,1,2,3", len(costs.blocks))
        assert len(given) == 1 or budget > QUICK
        return layout

    search_with(monkeypatch, generate)
    strategy = pipelines.fit_to(asked, strategies()["generated"])
    step = asked.step(replace(asked.settings, strategy="generated"), strategy)
    worth = lambda recompute: recompute == "full"  # noqa: E731
    changes = strategy.changes(pipelines.planner_of(asked), step, worth, budget=BUDGET)
    steps = [with_settings(step, **change) for change in changes]
    assert len(given) == 3 and given[0] == given[1] > given[2] > 0
    seconds = [predict(asked, one).step_seconds for one in (step, *steps)]
    assert min(seconds) == seconds[2 if shorter else 1] < min(seconds[:2] if shorter else seconds[::2])


@pytest.mark.parametrize("fits", [True, False])
def test_stages_of_published_orders_are_used_if_the_search_is_worse(fits, monkeypatch):
    """By the plan's clock, which knows more than the search; or where nothing fits that the search has found."""
    asked = plan_request(global_batch=8, memory=1 << 30)

    def worse(costs, positions, micro_batches, **more):
        if not fits:
            raise UserError("memory of a position", 1, "more", need=MemoryOfPosition())
        return Layout(len(costs.blocks), (0, *range(2, positions + 1)), tuple(range(positions)))

    names = ("1f1b", "interleaved-1f1b", "generated")
    good = {one.strategy: one for one in search_only(asked, "tawpipe-spread", *names)}
    search_with(monkeypatch, worse)
    found = {one.strategy: one for one in search_only(asked, "tawpipe-spread", *names)}
    fixed = min(found[name].seconds for name in names[:2])
    assert found["generated"].fits and good["generated"].seconds <= found["generated"].seconds <= 1.01 * fixed


@pytest.mark.slow
@pytest.mark.usefixtures("quickly_generated")
@pytest.mark.parametrize("rows", [100_001])
def test_plan_simulates_no_more_micro_batches_for_more_rows(rows, monkeypatch):
    """Neither where pipelines are long, nor where some devices have a row more than others."""
    most, play = [0], predicting.play

    def watched(schedule, *args, **kwargs):
        most.append(max(len(own) for own in schedule.step.micro_batches))
        return play(schedule, *args, **kwargs)

    monkeypatch.setattr(predicting, "play", watched)
    monkeypatch.setattr(predicting, "MOST_UNEVEN", 1000)
    found = search(plan_request(global_batch=rows))
    assert all(one.prediction is not None for one in found if not one.why_not) and any(one.fits for one in found)
    assert max(most) <= 2 * searched(4) + 1


def test_layouts_that_do_not_fit_are_simulated_once_per_strategy(monkeypatch):
    """Sets of several sizes and layouts need memory only to be compared."""
    played_steps, predict = list[str](), searching.predict

    def watched(request, step):
        played_steps.append(step.strategy.name)
        return predict(request, step)

    monkeypatch.setattr(searching, "predict", watched)
    cut = replace(profile(8), in_chunks=profile(8).blocks, cuts=True)
    asked = replace(plan_request(global_batch=8, model=llama(8), profile=cut), memory_bytes=1)
    candidates = search(asked)
    assert asked.cp_group_sizes and not any(candidate.fits for candidate in candidates)
    assert len(played_steps) == len(set(played_steps)) == sum(one.prediction is not None for one in candidates)
    assert all(one.prediction.timeline is not None for one in candidates if one.prediction is not None)


@pytest.mark.usefixtures("few_strategies")
def test_long_planning_reports_the_current_strategy(monkeypatch, capsys):
    monkeypatch.setattr(searching, "PATIENCE_S", 0.0)
    words = "--model tiny --vocab-size 500 --topology 1x2 --device-name H100 --sequence-length 64 --global-batch 4"
    assert plan_command(words.split()) == 0
    said, progress = capsys.readouterr()
    assert "  planning: tawpipe-spread (0 s so far)\n" in progress and "so far" not in said


def test_hopeless_or_too_costly_pipeline_orders_are_not_made(monkeypatch):
    """Those that are made for costs: others need no search. Balanced stages may be far better than even ones."""
    asked = plan_request(global_batch=8)
    monkeypatch.setattr("tawpipe.plan.search.candidate.QUICK_EFFORT", 1)
    monkeypatch.setattr(searching, "HOPELESS", 0.0)
    names = ("tawpipe-spread", "1f1b", "zero-bubble", "generated", "solved")
    hopeless = {one.strategy: one for one in search_only(asked, *names)}
    monkeypatch.setattr(searching, "HOPELESS", 100.0)
    monkeypatch.setattr(searching, "MOST_EFFORT", 1)
    long = {one.strategy: one for one in search_only(asked, *names)}
    assert hopeless["1f1b"].prediction is not None and long["1f1b"].prediction is not None
    for name in ("zero-bubble", "solved"):
        assert hopeless[name].why_not.startswith("not evaluated: others take")
    assert hopeless["generated"].prediction is not None
    for name in ("zero-bubble", "generated", "solved"):
        assert long[name].why_not.startswith(
            "not evaluated: finding orders for this number of micro-batches and devices takes"
        )


def test_slow_links_choose_a_strategy_that_sends_fewer_bytes():
    slow, fast = (plan_request(uniform(2, 2, between=LinkModel(rate), inside=LinkModel(1e8))) for rate in (3e3, 1e8))
    chosen = [Plan.of(asked, search_only(asked)).chosen for asked in (slow, fast)]
    assert chosen[0] is not None and chosen[1] is not None
    assert chosen[0].prediction is not None and chosen[1].prediction is not None
    assert chosen[0].prediction.link_bytes < chosen[1].prediction.link_bytes
    assert "busy" in Plan.of(slow, [chosen[0]]).reason


def test_plans_exist_for_one_node_and_for_one_device():
    for nodes, local in ((1, 1), (1, 4)):
        asked = plan_request(uniform(nodes, local, between=LinkModel(1e9), inside=LinkModel(1e8)))
        plan = Plan.of(asked, search(asked))
        assert plan.chosen is not None
        assert plan.as_json()["candidates"][0]["link_bytes"] == 0


def test_plans_exist_for_uneven_nodes():
    machine = Machine((4, 2), LinkModel(2e5), LinkModel(1e8))
    found = search_only(plan_request(machine), "tawpipe-striped", "tawpipe-whole", "1f1b")
    assert Plan.of(plan_request(machine), found).chosen is not None


# the answer


def test_plan_json_has_its_documented_keys(found):
    asked = plan_request(flops=1e9, peak_flops=1e12)
    content = json.loads(json.dumps(Plan.of(asked, found).as_json(), allow_nan=False))
    assert content.keys() == {"candidates", "chosen", "reason", "runner_up", "micro_batch"}
    keys = {"strategy", "knobs", "runnable", "step_seconds", "tokens_per_second_per_device", "mfu"}
    keys |= {"exposed_communication_s", "idle_s", "link_bytes", "peak_gib", "fits"}
    for row in content["candidates"]:
        assert keys <= row.keys()
    first = content["candidates"][0]
    assert first["tokens_per_second_per_device"] == pytest.approx(16 * 10 / first["step_seconds"] / 4)
    assert 0 < first["mfu"] < 1


def test_saved_plan_loads_as_settings(found, tmp_path):
    plan = Plan.of(plan_request(), found)
    plan.save(tmp_path / "plan.yaml")
    saved = load_plan(tmp_path / "plan.yaml")
    assert plan.chosen is not None and plan.chosen.step is not None
    assert saved["strategy"] == plan.chosen.strategy and saved["nodes"] == [2, 2]
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump({"schedule": saved["schedule"]}))
    assert load_config(["--config", str(config)]).schedule == replace(plan.chosen.step.settings, keep_mib=None)


@pytest.mark.parametrize("setting", ["full", "none", "none:2,selective:1,full", "selective:3,full"])
def test_recompute_setting_reads_back_from_its_spelling(setting):
    model = llama(4)
    of_blocks = recompute_of_blocks(setting, model)
    assert recompute_of_blocks(spell_recompute(of_blocks[1:-1]), model) == of_blocks


@pytest.mark.parametrize("block_units", [[[0], [1], []], [[0], [1], [2], [9]]])
def test_plan_with_inconsistent_blocks_and_units_is_refused(block_units):
    content = record_of(plan_request(model=llama(1), profile=profile(1)))
    assert len(content["block_units"]) == 3
    with pytest.raises(UserError, match="a plan that `tawpipe plan --save` or a run wrote"):
        request_from({**content, "block_units": block_units}, where="here")


def test_unknown_or_mistyped_plan_settings_are_refused():
    with pytest.raises(UserError, match="PLAN: schedule: got 'wings'"):
        planned_settings({"strategy": "flat", "wings": 2}, DEFAULT)
    with pytest.raises(UserError, match="PLAN: schedule: homes: got None; a text"):
        planned_settings({"strategy": "flat", "homes": None}, DEFAULT)
    with pytest.raises(UserError, match="PLAN: schedule: look_ahead: got True; a whole number"):
        planned_settings({"strategy": "flat", "look_ahead": True}, DEFAULT)


@pytest.mark.usefixtures("few_strategies")
@pytest.mark.parametrize(
    ("device", "dtype"), [pytest.param("cpu", "float32", marks=pytest.mark.slow), ("H100", "bfloat16")]
)
def test_plan_uses_the_dtype_that_the_run_will_choose(device, dtype, tmp_path, capsys):
    words = [word for word in WORDS if word not in ("--dtype", "float32")]
    assert main([*words, "--device-name", device, "--save", str(tmp_path / "plan.yaml")]) == 0
    assert f"; {dtype} (auto: " in capsys.readouterr().out
    assert load_plan(tmp_path / "plan.yaml")["weight_bytes"] == getattr(torch, dtype).itemsize


@pytest.mark.parametrize("content", ["", "a: [", "format: 7", "- 1"])
def test_broken_plan_file_is_named(tmp_path, content):
    (tmp_path / "plan.yaml").write_text(content)
    with pytest.raises(UserError, match="PLAN: got"):
        replay(tmp_path / "plan.yaml")
    with pytest.raises(UserError, match="--plan: got"):
        load_plan(tmp_path / "plan.yaml", setting="--plan")


# the command

WORDS = ["plan", "--model", "tiny", "--vocab-size", "500", "--sequence-length", "64", "--global-batch", "8"]
WORDS += ["--topology", "2x2@1gbit", "--dtype", "float32", "--device", "cpu", "--device-name", "cpu"]


@pytest.mark.usefixtures("few_strategies")
def test_plan_command_explains_and_saves_its_choice(tmp_path, capsys):
    assert main([*WORDS, "--save", str(tmp_path / "plan.yaml"), "--explain", "tawpipe-spread"]) == 0
    said, progress = capsys.readouterr()
    assert "chosen" in said and "tawpipe-spread:" in said and "homes:" in said and "--plan" in said
    assert "measuring 3 kinds of blocks on this CPU, 64 tokens" in progress
    assert "float32 (as --dtype says)" in said
    assert load_plan(tmp_path / "plan.yaml")["global_batch"] == 8


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--topology", "nowhere.yaml"], "--topology"),
        (["--topology", "2x2"], "3x8@10gbit"),
        (["--sequence-length", "1"], "--sequence-length"),
        (["--global-batch", "0"], "--global-batch"),
        (["--micro-batch", "9"], "--micro-batch"),
        (["--lengths", "3,4"], "--lengths: got '3,4'"),
        (["--lengths", "0,64"], "--lengths: got '0,64'; documents of at least one token"),
        (["--save", "nowhere/plan.yaml"], "--save: got 'nowhere/plan.yaml'; a file in a folder that exists"),
        (["--lengths", "a"], "--lengths"),
        (["--profile", "guess"], "--profile"),
        (["--device-name", "Abacus", "--profile", "estimate"], "a device whose peak is known"),
        (["--explain", "magic"], "--explain"),
        (["--memory", "0"], "--memory: got 0.0; more than 0"),
        (["--vocab-size", "0"], "--vocab-size"),
        (["--lengths", "70,-6"], "--lengths"),
        (["--topology", "2x2@1.2.3gbit"], "--topology"),
        (["--model", "nothing"], "--model"),
    ],
)
def test_wrong_plan_options_are_refused_by_name(words, reason, capsys):
    assert main([*WORDS, *words]) == 2
    assert reason in capsys.readouterr().err


@pytest.mark.parametrize("profile", ["auto", "estimate", "measure"])
@pytest.mark.parametrize("file", ["", "device: {memory_gib: 80}"])
def test_unnamed_device_is_requested_before_the_model_is_built(tmp_path, monkeypatch, capsys, file, profile):
    """A large model is not measured on the processors of a machine that only plans."""
    monkeypatch.setattr("tawpipe.model.files.build.build_model", lambda *_, **__: pytest.fail("went on"))
    (tmp_path / "two.yaml").write_text(f"format: 1\nnodes: [1, 1]\nbetween: {{gbit_per_s: 1}}\n{file}\n")
    topology = str(tmp_path / "two.yaml") if file else "3x8@10gbit"
    words = ["plan", "--model", "llama-8b", "--topology", topology, "--sequence-length", "64", "--global-batch", "8"]
    assert main([*words, "--device", "cpu", "--profile", profile]) == 2
    said = capsys.readouterr().err
    assert said.startswith("tawpipe: error: --device-name: got 'nothing'") and "H100, " in said and "CPU" in said


def test_estimate_for_an_unknown_device_names_the_device(capsys):
    assert main([*WORDS, "--profile", "estimate"]) == 2
    assert "--device-name: got 'CPU'; a device whose peak is known: GB200" in capsys.readouterr().err


def test_long_measurement_reports_its_current_block(monkeypatch):
    monkeypatch.setattr("tawpipe.plan.cost.profile.QUIET_S", 0.0)
    said: list[str] = []
    with progress_to(said.append):
        measure(tiny(), dtype=torch.float32, device=torch.device("cpu"), tokens=16)
    for words in (
        "block 0 (embedding), 16 tokens",
        "block 1 (layer), 16 tokens",
        "(head)",
        "the optimizer, run 4 of 4",
    ):
        assert any(words in line for line in said), words


@pytest.mark.usefixtures("few_strategies")
def test_rows_beyond_model_positions_are_planned_with_document_lengths(tmp_path, capsys):
    GPT2Config(vocab_size=500, n_embd=32, n_layer=2, n_head=2, n_positions=40).save_pretrained(tmp_path)
    words = [*WORDS, "--model", str(tmp_path)]
    assert main([*words, "--lengths", "30,34"]) == 0
    assert main(words) == 2
    assert "--sequence-length: got 64; at most 40" in capsys.readouterr().err


@pytest.mark.usefixtures("few_strategies")
def test_plan_that_fits_nothing_exits_with_1(capsys, monkeypatch):
    monkeypatch.setattr("tawpipe.plan.answer.would_fit.SECONDS", 0.0)
    monkeypatch.setattr("tawpipe.plan.answer.would_fit.MOST_NODES", 1)
    assert main([*WORDS, "--memory", "0.001"]) == 1
    assert "nothing fits" in capsys.readouterr().out


# plans that are run


@pytest.mark.slow
def test_plans_train_to_equal_losses_and_a_repeated_plan_to_equal_bits(pool, found):
    """The same model and data by five plans: one result within rounding; and one plan twice: the same bits."""
    names = ("tawpipe-spread", "tawpipe-step", "tawpipe-whole", "flat", "hsdp")
    chosen = [one for one in found if one.strategy in names]
    assert len(chosen) == 5
    results = []
    for one in (*chosen, chosen[0]):
        assert one.step is not None
        results.append(pool.run("cases:weights_after", 2, 2, rows=8, **settings_of(one.step))[0])
    losses, weights = results[0]
    for other_losses, other in results[1:]:
        assert other_losses == pytest.approx(losses, rel=1e-10)
        assert all(torch.allclose(value, weights[name], rtol=1e-8, atol=1e-10) for name, value in other.items())
    assert results[-1][0] == losses and all(torch.equal(value, weights[name]) for name, value in results[-1][1].items())


def test_flops_of_unknown_expert_models_are_none():
    chain = tiny()
    assert chain_flops(chain, [64])
    chain.config.num_experts = 8
    assert chain_flops(chain, [64]) is None


def test_plan_pages_show_memory_parts_of_every_strategy():
    one, other = (SimpleNamespace(memory=parts) for parts in ({"homes": 2**30}, {"homes": 2**31, "apart": 2**29}))
    assert memory_parts([one, other]) == {"homes": [1, 2], "apart": [0, 0.5]}  # type: ignore[list-item]


def test_slowdown_beside_transfers_lengthens_the_predicted_step():
    """Where it was measured, and where there are transfers."""
    quick = LinkModel(1e12)
    for ranks, factor in ((2, 1.25), (1, 1.0)):
        machine = uniform(1, ranks, between=quick, inside=quick)
        slower = replace(machine, device=replace(machine.device, beside=1.25))
        alone, beside = (
            predict(one, step_of(one, "flat")).step_seconds for one in (plan_request(machine), plan_request(slower))
        )
        assert beside == pytest.approx(factor * alone, rel=1e-3)


def test_strategies_that_coincide_on_one_node_are_planned_once(monkeypatch):
    """By what ranks do; on two nodes, or where the earlier one is in no plan, nothing is left out."""
    near = uniform(1, 4, between=LinkModel(1e9), inside=LinkModel(1e8), device=Device())
    table = strategies()

    def same(asked: PlanRequest) -> dict[str, str]:
        kept = {name: feasible._same_here(strategy, asked) for name, strategy in table.items()}
        return {name: why for name, why in kept.items() if why}

    found = same(plan_request(near))
    names = ("tawpipe-step", "tawpipe-striped", "hsdp")
    assert found == dict.fromkeys(names, "the same as tawpipe-spread on one node") and same(plan_request()) == {}
    monkeypatch.setattr(type(table["tawpipe-spread"]), "candidate", False)
    monkeypatch.setattr(type(table["tawpipe-step"]), "candidate", True)
    assert "tawpipe-step" not in same(plan_request(near))


@pytest.mark.parametrize("look_ahead", [2, 3])
def test_predicted_step_is_never_below_its_bound(look_ahead: int):
    """Of a few rounds, weights that come before the step are so large a part that one round more adds too little."""
    machine = uniform(2, 1, between=LinkModel(1e5, 1e-5), inside=LinkModel(1e8), device=Device("H100"))
    asked = plan_request(machine, global_batch=40)
    step = step_of(asked, "weipipe", look_ahead=look_ahead)
    found, whole = predict(asked, step), predict(asked, step, rounds=40)
    assert found.bound_s <= found.step_seconds * (1 + 1e-6)
    assert found.step_seconds == pytest.approx(whole.step_seconds, rel=0.1)
