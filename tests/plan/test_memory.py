"""Memory as it is: measured peaks, what a step holds, what libraries and hosts hold, and ways out."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from model_requests import request_for
from plan_requests import LAYERS, plan_request, search_only, step_of
from tawpipe import CheckSettings, Pipeline, TrainingSettings
from tawpipe.cli import main
from tawpipe.console import progress_to
from tawpipe.errors import UserError
from tawpipe.model.bits.quantized import passing_bytes
from tawpipe.model.chain import Chain
from tawpipe.options.names import Change
from tawpipe.plan.answer import would_fit
from tawpipe.plan.answer.remedy import remedies
from tawpipe.plan.cost import measure as measure_module
from tawpipe.plan.cost import memory as memory_of_blocks
from tawpipe.plan.cost import profile
from tawpipe.plan.cost.bench import Bench
from tawpipe.plan.cost.feasible import fits, shortage, with_settings
from tawpipe.plan.cost.measure import COMMUNICATOR_BYTES, DRIVER_BYTES, system_of
from tawpipe.plan.cost.memory import estimate_memory, measure_memory
from tawpipe.plan.cost.predict import BETWEEN_BLOCKS, Needs, memory_of, memory_quickly, shortened
from tawpipe.plan.cost.request import PlanRequest
from tawpipe.plan.machine.machine import Device, Machine, machine_from, spell_machine, uniform
from tawpipe.plan.search.plan import Plan
from tawpipe.plan.search.plan_file import record_of, request_from
from tawpipe.plan.search.search import search
from tawpipe.prove.models import alone
from tawpipe.runtime import memory as memory_module
from tawpipe.runtime.compute.recompute import kept_per_token
from tawpipe.runtime.homes.optimizer import adamw
from tawpipe.runtime.memory import Taken, give_back
from tawpipe.runtime.peak import Peak, peak_of_step, peaks
from tawpipe.schedule.actions import Op
from tawpipe.schedule.buffers import Kind
from tawpipe.schedule.pipelines.cost_based import CostBasedPipeline
from tawpipe.schedule.settings import ScheduleSettings
from tawpipe.schedule.sizes.activations import activations_held, peak_activations
from tawpipe.schedule.sizes.footprint import BlockMemory, costs
from tawpipe.schedule.strategies.build import build
from tawpipe.schedule.strategies.table import strategies
from tawpipe.simulate import LinkModel
from tawpipe.train.memory import check_left

CPU = torch.device("cpu")
FLOAT = 4
CONFIG = LlamaConfig(
    hidden_size=128,
    intermediate_size=448,
    num_hidden_layers=3,
    num_attention_heads=2,
    num_key_value_heads=2,
    vocab_size=1000,
    max_position_embeddings=8192,
    tie_word_embeddings=False,
)
ALONE = uniform(1, 1, between=LinkModel(1e9), inside=LinkModel(1e9))
GPUS = Machine((2, 2), LinkModel(2e5, 1e-5), LinkModel(1e8), host=LinkModel(2e3), device=Device("GPU"))


def chain() -> Chain:
    with torch.device("meta"):
        model = LlamaForCausalLM(CONFIG)
    return Chain(model)


# measuring


def test_peak_includes_temporary_memory_and_kernel_scratch():
    kept = []

    def leaves() -> None:
        passing = torch.empty(1000)
        kept.append(passing + passing)

    def inside_a_kernel() -> None:
        one = torch.zeros(1, 2, 1024, 64)
        F.scaled_dot_product_attention(one, one, one, is_causal=True)

    first, second, third = peaks([leaves, inside_a_kernel, kept.clear], CPU)
    assert first == Peak(0, 8000, 4000)
    size = 2 * 1024 * 64 * FLOAT
    assert second.before == second.after == 4000
    assert second.most > 4000 + 2 * size + 2 * 1024 * FLOAT, "the kernel's scratch counts as well"
    assert third.after == 0


def test_gpu_peak_is_read_from_the_allocator(monkeypatch):
    """What was there before counts as little as on a CPU: weights, and the input of a layer."""
    state = {"now": 100, "most": 900}
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: state["now"])
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: state["most"])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _: state.update(most=state["now"]))

    def part() -> None:
        state.update(most=700, now=300)

    assert peaks([part, part], torch.device("cuda")) == [Peak(0, 600, 200), Peak(200, 600, 200)]


def test_taken_memory_has_four_counts_of_a_gpu(monkeypatch):
    said = {"allocated_bytes.all.peak": 1, "active_bytes.all.peak": 2, "reserved_bytes.all.peak": 3}
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda _: said)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (6, 10))
    assert Taken.of(torch.device("cuda")) == Taken(allocated=1, active=2, reserved=3, driver=4)


def test_planning_frees_its_memory_even_after_an_error(monkeypatch):
    """Also if it fails; nothing refers to what was measured when the allocator is asked to let go of it."""
    done: list[Any] = []
    monkeypatch.setattr(memory_module, "gc", SimpleNamespace(collect=lambda: done.append("collected")))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: done.append("emptied"))
    give_back(CPU)
    give_back(torch.device("cuda"))
    assert done == ["collected", "collected", "emptied"]
    given: list[torch.device] = []
    monkeypatch.setattr(profile, "give_back", given.append)

    def fail(_: str) -> None:
        raise ZeroDivisionError

    measure = partial(profile.measure, dtype=torch.float32, device=CPU, tokens=64, chunk_tokens=64)
    measure(chain(), timed=False)
    assert given == [CPU]
    with pytest.raises(ZeroDivisionError), progress_to(fail):
        measure(chain())
    assert given == [CPU, CPU]


def test_gpu_timing_warms_up_and_runs_long_enough(monkeypatch):
    """The stand-in runs twice as fast for its first second and a half, and is only asked whether it is done."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    now, runs = [0.0], []

    def run() -> None:
        runs.append(now[0])
        now[0] += 0.01 if now[0] > 1.5 else 0.005

    bench: Any = SimpleNamespace(device=torch.device("cuda"))
    clock = profile.Clock(bench, now=lambda: now[0])
    assert clock._time(run, grad=False) == pytest.approx(0.01)
    counted = round(profile.ENOUGH_S / 0.01)
    assert runs[-counted] >= profile.HEAT_S
    before = len(runs)
    assert clock._time(run, grad=False) == pytest.approx(0.01)
    assert counted <= len(runs) - before <= counted + 3, "it is warm by now"


@pytest.fixture(scope="module")
def measured_once(tmp_path_factory) -> Callable[[tuple[int, ...]], PlanRequest]:
    """The request for a row of documents of these lengths, whatever is recomputed."""
    folder = tmp_path_factory.mktemp("model")
    CONFIG.save_pretrained(folder)
    settings = ScheduleSettings(micro_batches_per_visit=1, loss_chunk_tokens=256)
    given = {"sequence_length": 512, "global_batch": 1, "dtype": torch.float32, "settings": settings, "timed": False}
    return cache(lambda documents: request_for(str(folder), ALONE, lengths=documents, **given))


USUAL_STEPS = ("full", [512]), ("selective", [128] * 4), ("none", [512])


@pytest.mark.parametrize(
    ("recompute", "documents"),
    [
        pytest.param(recompute, documents, marks=[] if (recompute, documents) in USUAL_STEPS else pytest.mark.slow)
        for recompute in ("full", "selective", "none", "none:1,selective:1,full")
        for documents in ([512], [128] * 4)
    ],
)
def test_step_memory_matches_the_prediction(measured_once, recompute, documents):
    asked = measured_once(tuple(documents))
    settings = replace(asked.settings, recompute=recompute)
    parts = memory_of(asked, build(asked.step(settings))).parts
    with torch.device("meta"):
        model = LlamaForCausalLM(CONFIG)
    pipeline = Pipeline(model, optimizer=adamw(), schedule=settings)
    ids, positions = torch.randint(0, 1000, (1, 512)), torch.cat([torch.arange(n) for n in documents])[None]
    batch = {"input_ids": ids, "labels": ids, "position_ids": positions}
    pipeline.step(batch)  # a block that is new runs twice
    pipeline.drain()
    measured = peak_of_step(pipeline.executor, lambda: pipeline.step(batch))
    said = pipeline.costs(1, 512)
    pipeline.close()
    assert parts["activations"] + parts["working"] == pytest.approx(measured, rel=0.05)
    assert (parts["homes"], parts["buffers"]) == (said.home_bytes, said.buffer_bytes)


@pytest.mark.parametrize("form", ["nf4", "int8"])
def test_dequantization_memory_matches_the_prediction(tmp_path, form):
    """On a row so short that nothing takes more."""
    CONFIG.save_pretrained(tmp_path)
    frozen = ["model.embed_tokens", "model.layers", "lm_head"]
    settings = ScheduleSettings(micro_batches_per_visit=1)
    given = {"sequence_length": 8, "global_batch": 1, "dtype": torch.float32, "settings": settings, "timed": False}
    asked = request_for(str(tmp_path), ALONE, frozen=frozen, quantize=form, **given)
    parts = memory_of(asked, build(asked.step(settings))).parts
    with torch.device("meta"):
        model = LlamaForCausalLM(CONFIG)
    model.requires_grad_(False).model.norm.requires_grad_()
    pipeline = Pipeline(model, optimizer=adamw(), schedule=settings, training=TrainingSettings(quantize=form))
    ids = torch.randint(0, 1000, (1, 8))
    pipeline.step({"input_ids": ids, "labels": ids})
    pipeline.drain()
    measured = peak_of_step(pipeline.executor, lambda: pipeline.step({"input_ids": ids, "labels": ids}))
    of_mlp = passing_bytes(form, 128 * 448)
    packing = pipeline.chain.units[1].packing
    assert packing is not None and packing.passing_bytes == of_mlp
    pipeline.close()
    assert parts["working"] == asked.profile.memory.unpacking == pytest.approx(of_mlp, rel=0.01)
    assert parts["activations"] + parts["working"] == pytest.approx(measured, rel=0.05)
    estimated = estimate_memory(pipeline.chain, dtype=torch.float32, chunk_tokens=8)
    assert estimated.unpacking == of_mlp


def test_nf4_base_memory_and_seconds_match_the_prediction(tmp_path):
    """Homes, buffers with the room to dequantise in, working memory; and seconds for every visit."""
    CONFIG.save_pretrained(tmp_path)
    settings, patterns = ScheduleSettings(micro_batches_per_visit=1, loss_chunk_tokens=256), ["model.layers.[01]"]
    given = {
        "sequence_length": 512,
        "global_batch": 1,
        "dtype": torch.float32,
        "settings": settings,
        "frozen": patterns,
        "quantize": "nf4",
    }
    asked = request_for(str(tmp_path), ALONE, timed=False, **given)
    parts = memory_of(asked, build(asked.step(settings))).parts
    with torch.device("meta"):
        model = LlamaForCausalLM(CONFIG)
    for layer in model.model.layers[:2]:
        layer.requires_grad_(False)
    pipeline = Pipeline(model, optimizer=adamw(), schedule=settings, training=TrainingSettings(quantize="nf4"))
    ids = torch.randint(0, 1000, (1, 512))
    batch = {"input_ids": ids, "labels": ids}
    pipeline.step(batch)
    pipeline.drain()
    measured = peak_of_step(pipeline.executor, lambda: pipeline.step(batch))
    said, identity = pipeline.costs(1, 512), pipeline.spec.identity
    pipeline.close()
    assert parts["activations"] + parts["working"] == pytest.approx(measured, rel=0.05)
    assert (parts["homes"], parts["buffers"]) == (said.home_bytes, said.buffer_bytes)
    assert asked.model.identity == identity and identity["travels"] < identity["parameters"]
    device = replace(ALONE, device=Device("GPU", flops=1e12))
    timed = request_for(str(tmp_path), device, profile="estimate", **given)
    again = request_from(record_of(timed), where="a test")
    assert again.model == timed.model and again.profile.blocks == timed.profile.blocks
    assert [block.unpack_s > 0 for block in timed.profile.blocks] == [False, True, True, False, False]


@pytest.mark.slow
@pytest.mark.usefixtures("short_past")
def test_chunked_row_memory_matches_the_prediction(tmp_path):
    """More tokens than it is measured with: of a chunk fixed, of keys and values for every token."""
    CONFIG.save_pretrained(tmp_path)
    files = {"offloaded_layers": 3, "offload_dir": str(tmp_path)}
    settings = ScheduleSettings(micro_batches_per_visit=1, loss_chunk_tokens=256, sequence_chunk=512, **files)
    given = {"sequence_length": 2048, "global_batch": 1, "dtype": torch.float32, "settings": settings, "timed": False}
    asked = request_for(str(tmp_path), ALONE, **given)
    needs = memory_of(asked, build(asked.step(settings)))
    parts = needs.parts
    with torch.device("meta"):
        model = LlamaForCausalLM(CONFIG)
    pipeline = Pipeline(model, optimizer=adamw(), schedule=settings, checks=CheckSettings(check="never"))
    ids = torch.randint(0, 1000, (1, 2048))
    pipeline.step({"input_ids": ids[:, :1024], "labels": ids[:, :1024]})
    pipeline.drain()
    measured = peak_of_step(pipeline.executor, lambda: pipeline.step({"input_ids": ids, "labels": ids}))
    compute: Any = pipeline.executor.compute
    assert compute.places.file_bytes == needs.files
    pipeline.close()
    assert parts["activations"] + parts["working"] == pytest.approx(measured, rel=0.05)


def test_layer_output_shared_as_next_input_counts_once():
    model = chain()
    model.prepare(CPU, torch.float32)
    found = kept_per_token(model)
    measured = measure_memory(Bench(chain(), CPU, torch.float32, 256), tokens=512).kept
    assert found["graph"] == pytest.approx(measured["graph"], rel=0.02)
    assert found["kept"] == pytest.approx(measured["kept"], rel=0.02)
    assert found["kept"] == 2 * 128 * FLOAT + 2 * FLOAT, "its input, attention's output, and a number for every head"


def test_rows_of_twice_the_layer_width_are_long_enough_to_measure_memory(monkeypatch):
    """In shorter ones the gradient of a matrix hides what is computed for all tokens."""
    needed = {}
    for most in (CONFIG.hidden_size // 2, 2 * CONFIG.hidden_size, 8 * CONFIG.hidden_size):
        monkeypatch.setattr(memory_of_blocks, "MOST_TOKENS", most)
        line = measure_memory(Bench(chain(), CPU, torch.float32, 256), tokens=100_000).working["layer"]["backward full"]
        needed[most] = line[0] + line[1] * 100_000
    too_short, enough, long = needed.values()
    assert enough == pytest.approx(long, rel=0.01) and too_short < 0.9 * long


@pytest.mark.parametrize(
    ("width", "free_gib", "tokens", "most"),
    [(4096, 70, 32_768, 8192), (4096, 70, 33_000, 8191), (5000, 70, 4096, 10_240), (8192, 8, 4096, 4096)],
)
def test_gpu_measures_memory_in_rows_as_long_as_free_memory_allows(monkeypatch, caplog, width, free_gib, tokens, most):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free_gib << 30, 80 << 30))
    bench: Any = SimpleNamespace(device=torch.device("cuda"), boundary=2 * width, chain=SimpleNamespace(width=width))
    assert memory_of_blocks._longest(bench, tokens) == most and not caplog.text
    bench.device = CPU
    assert memory_of_blocks._longest(bench, tokens) in (2047, 2048)
    assert "with rows of 2048 tokens, not" in caplog.text


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_estimated_memory_is_close_to_measured_memory(dtype):
    measured = measure_memory(Bench(chain(), CPU, dtype, 256), tokens=512)
    estimated = estimate_memory(chain(), dtype=dtype, chunk_tokens=256)
    tokens = 100_000
    for kind, name in (("layer", "backward full"), ("head", "backward full")):
        one, other = (memory.working[kind][name] for memory in (estimated, measured))
        assert one[0] + one[1] * tokens == pytest.approx(other[0] + other[1] * tokens, rel=0.3)
    assert estimated.kept["graph"] == pytest.approx(measured.kept["graph"], rel=0.2)
    assert estimated.kept["ctx"] == pytest.approx(measured.kept["ctx"], rel=0.2)


def test_logits_memory_of_a_long_row_is_that_of_one_chunk():
    schedule = build(step_of(plan_request(), "flat"))
    head = next(one for one in schedule.programs[0] if one.op is Op.BACKWARD and one.block == LAYERS + 1)
    short, long = (measure_memory(Bench(chain(), CPU, torch.float32, 512), tokens=n) for n in (256, 2048))
    tokens = 100_000
    assert short.working_of(schedule, head, tokens) == pytest.approx(long.working_of(schedule, head, tokens), rel=0.2)
    assert short.working_of(schedule, head, 256) < short.working_of(schedule, head, 512)


# adding up


def test_activation_and_working_bytes_are_of_one_moment():
    asked = plan_request()
    step = step_of(asked, "flat", recompute="none")
    schedule, sizes = build(step), asked.activation_bytes
    huge = 10**9
    at_the_start = costs(schedule, asked.widths, activation_bytes=sizes, working=lambda one: huge * (one.block == 0))
    least = min(held for action, held in activations_held(schedule, 0, sizes) if action.block == 0)
    assert at_the_start.working_bytes == huge
    assert least <= at_the_start.activation_bytes < peak_activations(schedule, 0, sizes)


def test_pinned_memory_is_rounded_up_to_powers_of_two():
    memory = BlockMemory(48, {})
    assert memory.activations(100)[Kind.OFFLOADED] == 4800
    assert memory.activations(100, pinned=True)[Kind.OFFLOADED] == 8192
    assert memory.activations(100, pinned=True)[Kind.INPUT] == 4800


def test_node_memory_counts_offloads_of_all_its_devices():
    asked = plan_request(GPUS)
    step = step_of(asked, "flat", offloaded_layers=LAYERS)
    needs = memory_of(asked, build(step))
    each = asked.activation_bytes[Kind.OFFLOADED]
    assert each == 256 and needs.host == 2 * LAYERS * each, "10 tokens of 20 bytes, rounded up; two devices a node"
    on_cpus = memory_of(plan_request(), build(step_of(plan_request(), "flat", offloaded_layers=LAYERS)))
    assert on_cpus.host == 0 and on_cpus.parts["host"] == LAYERS * 200, "where devices compute in the host's memory"


def test_exact_frozen_weights_are_counted_on_the_host():
    asked = plan_request(GPUS)
    units = tuple(replace(unit, trainable=False) if i == 1 else unit for i, unit in enumerate(asked.model.units))
    frozen = replace(asked, model=replace(asked.model, units=units), widths=replace(asked.widths, exact=4))
    schedule = build(step_of(frozen, "flat"))
    assert memory_of(frozen, schedule).host == 2 * 4 * schedule.home_elements(0, trainable=False) > 0


def test_stream_private_gpu_memory_is_counted():
    """Where activations travel; on a CPU it is a share of them, whatever travels."""
    asked = plan_request(GPUS)
    parts = memory_of(asked, build(step_of(asked, "1f1b"))).parts
    assert 0 < parts["apart"] < parts["activations"] + 4 * 2 * 200
    assert "apart" not in memory_of(asked, build(step_of(asked, "tawpipe-spread"))).parts
    parts = memory_of(plan_request(), build(step_of(plan_request(), "flat"))).parts
    assert parts["apart"] == round(parts["activations"] * BETWEEN_BLOCKS)


@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_offload_staging_buffers_are_counted_in_the_working_memory(recompute):
    """The head's peak counts it too, of which no rows wait in the host's memory."""
    asked, how = plan_request(GPUS), {"sequence_chunk": 2, "recompute": recompute}
    memory = replace(asked.profile.memory, working={"head": {"backward full": (10**6, 0)}})
    asked = replace(asked, profile=replace(asked.profile, memory=memory))
    on_device, in_files, in_host = (
        memory_of(asked, build(step_of(asked, "flat", **how, **more))).parts["working"]
        for more in ({}, {"offloaded_layers": LAYERS, "offload_dir": "/tmp"}, {"offloaded_layers": LAYERS})
    )
    assert on_device == in_files == 10**6
    assert in_host == 10**6 + 6 * 2 * 20 + (4 * 2 * 60 if recompute == "selective" else 0)


def test_the_driver_and_every_communicator_are_counted():
    asked = plan_request(GPUS, system_bytes=1000, communicator_bytes=10)
    flat, spread = (memory_quickly(asked, step_of(asked, name)).parts["system"] for name in ("flat", "tawpipe-spread"))
    assert flat > 1000 and spread > flat and flat % 10 == 0, "one hop of collectives needs fewer groups than two"
    one = plan_request(
        uniform(1, 1, between=LinkModel(1.0), inside=LinkModel(1.0)), system_bytes=1000, communicator_bytes=10
    )
    assert memory_quickly(one, step_of(one, "flat")).parts["system"] == 1000


def test_driver_memory_is_measured_on_gpus_and_assumed_elsewhere(monkeypatch):
    gpu = replace(GPUS, device=Device("H100"))
    assert system_of(gpu, CPU) == (DRIVER_BYTES + COMMUNICATOR_BYTES, COMMUNICATOR_BYTES), "that of all processes, too"
    measured = replace(gpu, device=replace(gpu.device, communicator_bytes=1 << 30))
    assert system_of(measured, CPU) == (DRIVER_BYTES + (1 << 30), 1 << 30)
    assert machine_from(spell_machine(measured)).device == measured.device
    monkeypatch.setattr(measure_module, "device_name", lambda _: "H100")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (70 << 30, 80 << 30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 2 << 30)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    assert system_of(gpu, torch.device("cuda")) == (8 << 30, COMMUNICATOR_BYTES)
    process, groups = system_of(ALONE, CPU)
    assert process > 2**26 and groups == 0


def test_run_whose_groups_leave_too_little_memory_is_refused(monkeypatch):
    """The stand-in driver has 80 GiB, of which homes take 10 and step and buffers will take 50."""
    state = {"free": 80 - 12}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (state["free"] << 30, 80 << 30))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 10 << 30)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 11 << 30)
    needs = Needs({"homes": 10 << 30, "buffers": 20 << 30, "activations": 30 << 30, "system": 3 << 30}, 0)
    world = replace(alone(CPU), device=torch.device("cuda"))
    groups = {"GATHER node": 5 << 30, "INTER_W rail": 6 << 30}
    check_left(world, groups, needs)
    state["free"] = 48
    with pytest.raises(
        UserError, match=r"memory: got '?11\.\d* GiB for 2 groups of NCCL.* 50.* left for the step, not 49"
    ):
        check_left(world, groups, needs)
    check_left(alone(CPU), {}, needs)


def test_host_memory_is_saved_in_the_machine_file():
    machine = replace(GPUS, host_bytes=3 << 30)
    assert machine_from(spell_machine(machine)).host_bytes == 3 << 30
    assert machine_from(spell_machine(GPUS)).host_bytes == 0
    content = spell_machine(machine)
    content["host"]["memory_gib"] = -1
    with pytest.raises(UserError, match="topology: host: memory_gib: got -1"):
        machine_from(content)


# fitting


def test_layers_are_offloaded_only_if_the_host_holds_them():
    lean = {"look_ahead": 1, "gradient_buffers": 1, "step_cache": 0}
    free = plan_request(GPUS)
    needs = {
        n: memory_quickly(free, step_of(free, "flat", **lean | {"step_cache": None}, offloaded_layers=n))
        for n in (0, LAYERS)
    }
    limit = needs[0].device - 1
    for host, good in ((0, True), (needs[LAYERS].host, True), (256, False)):
        asked = plan_request(replace(GPUS, host_bytes=host), memory=limit)
        (found,) = search_only(asked, "flat")
        assert found.fits == good, host
        assert found.prediction is not None and fits(asked, found.prediction.needs) == good


def test_remedies_fit_and_give_their_step_seconds():
    asked = plan_request(micro_batch=1)
    step = step_of(asked, "tawpipe-spread", recompute="none", micro_batches_per_visit=4)
    full = memory_quickly(asked, with_settings(step, recompute="full")).device
    tight = replace(asked, memory_bytes=full)
    needs = memory_quickly(tight, step)
    assert "on every device" in shortage(tight, needs) and "homes" in shortage(tight, needs)
    found = (str(way) for way in remedies(tight, step) if way.changes == (Change("schedule.recompute", "full"),))
    assert next(found).endswith("s per step")


@pytest.mark.slow
@pytest.mark.usefixtures("few_strategies")
def test_plan_suggests_a_change_if_nothing_fits(capsys, monkeypatch):
    monkeypatch.setattr(measure_module, "resident_memory", lambda: 0)  # it differs from one moment to the next
    monkeypatch.setattr(would_fit, "CHANGES", ())
    monkeypatch.setattr(would_fit, "MOST_NODES", 1)
    words = ["plan", "--model", "tiny", "--vocab-size", "500", "--sequence-length", "512", "--global-batch", "8"]
    words += ["--topology", "1x2", "--dtype", "float32", "--device", "cpu", "--device-name", "CPU"]
    words += ["--sequence-ranks", "1"]
    measured = request_for(
        "tiny", uniform(1, 2, between=LinkModel(1e9), inside=LinkModel(1e9)), sequence_length=512, global_batch=8,
        dtype=torch.float32, vocab_size=500, timed=False, settings=ScheduleSettings(sequence_ranks=1),
    )  # fmt: skip
    least = Plan.of(measured, search(replace(measured, memory_bytes=1))).least
    assert least is not None and least.prediction is not None
    limit = (least.prediction.peak_bytes - least.prediction.memory["working"] // 4) / 2**30
    assert main([*words, "--memory", f"{limit:.5f}"]) == 1
    assert "would fit: --sequence-length 256" in capsys.readouterr().out


@pytest.mark.parametrize(("nodes", "rows"), [((1, 1, 1), 2), ((2, 2), 8)])
def test_memory_quickly_equals_the_full_count_for_every_strategy(nodes: tuple[int, ...], rows: int):
    """One stands for all that do alike, and holds as much as the fullest of them built one by one."""
    link = LinkModel(2e5, 1e-5)
    machine = Machine(nodes, link, link, {0: replace(link, bytes_per_s=5e4)}, device=Device("H100"))
    asked = plan_request(machine, global_batch=rows, memory=10**7)
    for name in (name for name, strategy in strategies().items() if not isinstance(strategy, CostBasedPipeline)):
        with suppress(UserError):
            step = step_of(asked, name)
            short, _, _ = shortened(asked, step, step.strategy.rounds_held)
            assert memory_quickly(asked, step) == memory_of(asked, build(short)), name
