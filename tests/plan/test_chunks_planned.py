"""Rows in chunks, chosen by a plan: where they are, which size, what a saved plan says of them, and who refuses."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from model_requests import request_for
from plan_requests import LAYERS, looking_at, plan_request, profile, step_of
from tawpipe.console import progress_to
from tawpipe.errors import UserError
from tawpipe.model.chain import Chain
from tawpipe.options.names import Change
from tawpipe.plan.answer.longest import NEAR, POSITIONS, PRECISION, _longest_of
from tawpipe.plan.answer.remedy import remedies
from tawpipe.plan.cost import measure as measure_module
from tawpipe.plan.cost import memory
from tawpipe.plan.cost.bench import Bench
from tawpipe.plan.cost.feasible import FILES, fits, lacking, shortage, with_settings
from tawpipe.plan.cost.measure import Asked, machine_of
from tawpipe.plan.cost.predict import memory_quickly, predict
from tawpipe.plan.cost.profile import measure, size_of
from tawpipe.plan.cost.request import CHUNKS, PlanRequest
from tawpipe.plan.machine.machine import Device, Machine, machine_from, spell_machine, uniform
from tawpipe.plan.machine.probe import probe_files
from tawpipe.plan.search.plan import Plan, other_rows
from tawpipe.plan.search.plan_file import planned_settings, replay
from tawpipe.plan.search.refine import ways_of_rows
from tawpipe.plan.search.search import _best, search
from tawpipe.schedule.settings import DEFAULT, ScheduleSettings
from tawpipe.schedule.strategies.table import find
from tawpipe.simulate import LinkModel, Seconds
from tawpipe.topology import Topology
from tawpipe.train.planned import Followed, Planning

ROW = 40_000
GPUS = Machine((2, 2), LinkModel(2e9, 1e-5), LinkModel(1e10), host=LinkModel(1e6), device=Device("GPU"))
CPU = torch.device("cpu")


def asked_of(memory: int = 0, machine: Machine | None = None, **changes: Any) -> PlanRequest:
    """Layers whose working set is 300 bytes for every token of what is computed at one time, and 6 for every token."""
    made = profile()
    lines = dict.fromkeys(("forward full", "backward full"), (0.0, 300.0, 6.0))
    layer = replace(made.blocks[1], forward=Seconds(1e-3, 1e-6), backward=Seconds(3e-3, 3e-6))
    in_chunks = (made.blocks[0], *[layer] * LAYERS, made.blocks[-1])
    made = replace(made, memory=replace(made.memory, in_chunks=lines), in_chunks=in_chunks)
    usual = {"profile": made, "memory": memory, "sequence_length": ROW, "size": size_of([ROW])}
    return plan_request(machine, **usual | changes)


def needed(asked: PlanRequest, size: int, offloaded: int = 0) -> int:
    """Bytes of a device under the leanest settings of ``flat``."""
    lean = {"look_ahead": 1, "gradient_buffers": 1, "sequence_chunk": size, "offloaded_layers": offloaded}
    return memory_quickly(asked, step_of(asked, "flat", **lean)).device


def chosen(asked: PlanRequest) -> ScheduleSettings | None:
    one = _best(asked, find("flat"))
    return one.step.settings if one.fits and one.step else None


def plan_of(asked: PlanRequest) -> Plan:
    return Plan.of(asked, [_best(asked, find("flat"))])


def test_plan_keeps_rows_whole_if_they_fit_else_takes_the_largest_chunk():
    free = asked_of()
    assert chosen(free).sequence_chunk == 0  # type: ignore[union-attr]
    assert needed(free, CHUNKS[0]) < needed(free, CHUNKS[-1]) < needed(free, 0)
    for room, size in ((needed(free, 0), 0), (needed(free, 0) - 1, 16384), (needed(free, 16384) - 1, 8192)):
        settings = chosen(asked_of(room))
        assert settings is not None and settings.sequence_chunk == size
    tight = asked_of(needed(free, CHUNKS[0]) - 1)
    plan = plan_of(tight)
    assert plan.chosen is None and plan.least is not None and plan.least.step is not None
    assert plan.least.step.settings.sequence_chunk == CHUNKS[0], "what needs the least memory is said"


def test_plan_chooses_chunks_and_offloading_together():
    """The link to the host is slow here, so that chunks beat offloading as long as they suffice."""
    free = asked_of(machine=GPUS)
    only_chunks = chosen(asked_of(needed(free, 8192), GPUS))
    assert only_chunks is not None and (only_chunks.sequence_chunk, only_chunks.offloaded_layers) == (8192, 0)
    both = asked_of((needed(free, 2048) + needed(free, 2048, LAYERS)) // 2, GPUS)
    assert not fits(both, memory_quickly(both, step_of(both, "flat", offloaded_layers=LAYERS)))
    settings = chosen(both)
    assert settings is not None and settings.sequence_chunk and settings.offloaded_layers


@pytest.mark.parametrize(("slower", "kept", "in_chunks"), [(1.6, 0, False), (1.0, 1.0, True), (4.0, 1.0, False)])
def test_plan_takes_the_faster_of_whole_rows_and_chunks(slower, kept, in_chunks):
    """Both fit with all layers offloaded. In chunks attention takes ``slower`` as long, and its output may be kept."""
    made = asked_of().profile
    layer = replace(made.blocks[1], forward=Seconds(0, 0, 1e-9), backward=Seconds(0, 0, 3e-9), attention=Seconds())
    cut = replace(layer, attention=Seconds(0, 0, kept * 1e-9)).with_attention(slower)
    memories = replace(made.memory, kept={**made.memory.kept, "attention": kept})
    lines = {**made.memory.in_chunks} | {
        "backward selective": (0.0, 300.0, 6.0),
        "forward selective": (0.0, 300.0, 6.0),
    }
    memories = replace(memories, in_chunks=lines, kept={**memories.kept, "kept": 60})
    blocks, chunks = ((made.blocks[0], *[one] * LAYERS, made.blocks[-1]) for one in (layer, cut))
    made = replace(made, blocks=blocks, in_chunks=chunks, memory=memories)
    machine = replace(GPUS, host=LinkModel(1e12))
    memory = needed(asked_of(machine=machine, profile=made), 0, LAYERS)
    asked = asked_of(memory, machine, profile=made)
    with looking_at("flat"):
        plan = Plan.of(asked, search(asked))
    assert plan.chosen is not None and plan.chosen.step is not None
    settings = plan.chosen.step.settings
    assert bool(settings.sequence_chunk) == in_chunks and settings.offloaded_layers
    ways = list(ways_of_rows(asked, plan.chosen.step))
    assert {(way["sequence_chunk"], way["recompute"]) for way in ways} == {
        (size, recompute) for size in (0, CHUNKS[0], CHUNKS[-1]) for recompute in ("full", "selective")
    }
    said = other_rows(asked, plan.chosen)
    assert said.startswith("rows in chunks take" if in_chunks else "rows whole take"), said
    assert ("rows whole, with all layers" if in_chunks else "rows in chunks, with all layers") in said
    given = asked_of(memory, machine, profile=made, settings=replace(DEFAULT, sequence_chunk=CHUNKS[0]))
    assert not list(ways_of_rows(given, plan.chosen.step)) and not other_rows(given, plan.chosen)
    free = asked_of(profile=replace(made, in_chunks=()))
    assert not list(ways_of_rows(free, plan.chosen.step)), "whole rows fit"


def test_plan_keeps_the_sequence_chunk_of_the_user():
    free = asked_of()
    memory = needed(free, 4096)
    for given, size in ((4096, 4096), (500, 500)):
        settings = chosen(asked_of(memory, settings=replace(DEFAULT, sequence_chunk=given)))
        assert settings is not None and settings.sequence_chunk == size
    assert chosen(asked_of(memory, settings=replace(DEFAULT, sequence_chunk=0))) is None
    assert chosen(asked_of(0, settings=replace(DEFAULT, sequence_chunk=500))).sequence_chunk == 500  # type: ignore[union-attr]


def test_predicted_seconds_grow_with_the_number_of_chunks():
    asked = asked_of()
    seconds = [predict(asked, step_of(asked, "flat", sequence_chunk=size)).step_seconds for size in (2048, 4096, 8192)]
    # 16 micro-batches on 4 devices; 4 ms for every chunk of every layer
    expected = [4 * LAYERS * 4e-3 * ROW / size for size in (2048, 4096, 8192)]
    assert seconds[0] - seconds[1] == pytest.approx(expected[0] - expected[1], rel=0.01)
    assert seconds[1] - seconds[2] == pytest.approx(expected[1] - expected[2], rel=0.01)
    as_long = asked.of(step_of(asked, "flat", sequence_chunk=ROW))
    assert as_long.profile is asked.profile, "a chunk as long as the row is the row"


def test_predicted_chunk_memory_grows_with_rows_per_micro_batch():
    one, two = asked_of(), asked_of(micro_batch=2, size=size_of([ROW] * 2))
    layers = [
        each.of(step_of(each, "flat", sequence_chunk=4096)).profile.memory.working["layer"]["backward full"]
        for each in (one, two)
    ]
    assert [fixed for fixed, _ in layers] == [300 * 4096, 2 * 300 * 4096]


def test_saved_plan_replays_its_sequence_chunk(tmp_path):
    asked = asked_of(needed(asked_of(), 4096), drops=True)
    plan = plan_of(asked)
    assert "chunks of 4,096 tokens" in plan.reason and "another draw of dropout" in plan.reason
    path = tmp_path / "plan.yaml"
    plan.save(path)
    schedule = yaml.safe_load(path.read_text())["schedule"]
    assert planned_settings(schedule, DEFAULT).sequence_chunk == schedule["sequence_chunk"] == 4096
    assert plan.chosen is not None and plan.chosen.prediction is not None
    assert replay(path)[0].step_seconds == pytest.approx(plan.chosen.prediction.step_seconds, rel=0.02)
    del schedule["sequence_chunk"]  # as a plan of before, for which the user's value held
    for size in (7, None):
        assert planned_settings(schedule, replace(DEFAULT, sequence_chunk=size)).sequence_chunk == size


def test_remedies_suggest_sequence_chunks():
    asked = asked_of(needed(asked_of(), 2048), global_batch=4)
    ways = remedies(asked, step_of(asked, "flat", sequence_chunk=0))
    assert any(Change("schedule.sequence_chunk", 2048) in way.changes for way in ways)


# files


def test_plan_offloads_into_files_within_the_disk_space():
    """On processors too, whose memory is the host's; and only for rows in chunks."""
    disk = replace(asked_of().machine, files=LinkModel(1e5, full_duplex=False), files_bytes=10**12)
    files = replace(DEFAULT, offload_dir="/disk")
    whole = chosen(asked_of(0, disk, settings=files))
    assert whole is not None and (whole.sequence_chunk, whole.offload_dir) == (0, "")
    free = asked_of()
    tight = (needed(free, 2048) + needed(asked_of(settings=files), 2048, LAYERS)) // 2
    assert chosen(asked_of(tight)) is None
    asked = asked_of(tight, disk, settings=files)
    settings = chosen(asked)
    assert settings is not None and settings.sequence_chunk and settings.offloaded_layers
    assert settings.offload_dir == "/disk"
    step = step_of(asked, "flat", **{name: getattr(settings, name) for name in ("sequence_chunk", "offloaded_layers")})
    needs = memory_quickly(asked, step)
    assert needs.files == 2 * settings.offloaded_layers * 20 * ROW and needs.host == 0 and "host" not in needs.parts
    in_memory = with_settings(step, offload_dir="")
    slow, quick = (predict(asked, one).step_seconds for one in (step, in_memory))
    each = 4 * 20 * ROW / (1e5 / 2)  # four micro-batches; two devices share the disk
    assert each < slow and quick < slow, "a layer takes as long as its input on its way, if that is longer"
    small = replace(asked, machine=replace(disk, files_bytes=needs.files - 1))
    assert lacking(small, needs) == [FILES] and "disk" in shortage(small, needs)
    row = _longest_of(replace(small, memory_bytes=tight // 2), find("flat"), POSITIONS)
    assert row.binds == FILES and row.as_json()["files_gib"] * 2**30 <= needs.files


def test_disk_is_measured_and_saved_in_the_machine_file(tmp_path):
    link, free = probe_files(str(tmp_path), size=1 << 23)
    assert 0 < link.bytes_per_s < float("inf") and not link.full_duplex and free > 0
    assert not list(tmp_path.iterdir())
    with pytest.raises(UserError, match=r"schedule.offload_dir: got .*missing"):
        probe_files(str(tmp_path / "missing"))
    machine = replace(GPUS, files=LinkModel(3e9, full_duplex=False), files_bytes=5 << 30)
    read = machine_from(spell_machine(machine))
    assert (read.files, read.files_bytes) == (machine.files, machine.files_bytes) and read.disk.bytes_per_s == 1.5e9
    assert machine_from(spell_machine(GPUS)).files_bytes == 0
    with pytest.raises(UserError, match=r"topology: files: free_gib: got -1"):
        machine_from(spell_machine(machine) | {"files": {"free_gib": -1}})


# the longest row


def test_longest_row_uses_the_largest_chunk_of_about_equal_length():
    memory = needed(asked_of(), 4096)
    rows = [
        _longest_of(asked_of(memory, settings=replace(DEFAULT, sequence_chunk=given)), find("flat"), POSITIONS)
        for given in (None, 0, *CHUNKS)
    ]
    free, whole, *cut = (row.tokens for row in rows)
    chunk = rows[0].step.settings.sequence_chunk  # type: ignore[union-attr]
    assert free >= max(whole, *cut) * (1 - NEAR - PRECISION) and cut[0] > 1.9 * whole
    longer = [size for size, tokens in zip(CHUNKS, cut, strict=True) if tokens >= max(cut) * (1 - NEAR)]
    assert chunk is not None and min(longer) <= chunk <= CHUNKS[CHUNKS.index(max(longer)) + (max(longer) < CHUNKS[-1])]
    said = rows[0].as_json()
    assert (said["tokens"], said["sequence_chunk"], said["offloaded_layers"]) == (free, chunk, 0)
    assert f"{chunk:,}" in rows[0].cells() and "whole" in rows[1].cells()


def test_longest_row_that_fits_whole_is_not_cut():
    row = _longest_of(asked_of(needed(asked_of(), 0) + 10_000), find("flat"), POSITIONS)
    assert (row.tokens, row.binds) == (ROW, POSITIONS) and row.step is not None
    assert row.step.settings.sequence_chunk == 0


# runs


class _World(SimpleNamespace):
    nodes, size = Topology.grid(2, 2), 4

    def text_of_rank_0(self, make: Any) -> str:
        return make()


def followed(plan: str, tmp_path: Any, **schedule: Any) -> Followed:
    path = tmp_path / "given.yaml"
    path.write_text(plan)
    world: Any = _World()
    chain: Any = None  # nothing is measured
    return Planning(world, chain, Asked(ROW, 16, settings=replace(DEFAULT, **schedule))).follow(str(path), None)


def test_run_follows_the_chunk_of_a_plan_and_refuses_another(tmp_path):
    asked = asked_of(needed(asked_of(), 4096))
    text = plan_of(asked).text()
    assert followed(text, tmp_path).schedule.sequence_chunk == 4096
    assert followed(text, tmp_path, sequence_chunk=4096).schedule.sequence_chunk == 4096
    with pytest.raises(UserError, match=r"--schedule.sequence-chunk: got 0; 4096, as in the plan; or another"):
        followed(text, tmp_path, sequence_chunk=0)


# what a device holds


def test_long_row_takes_at_most_26_kb_of_gpu_memory_per_token(tmp_path):
    """Of Llama-3.1-8B in bf16, besides homes, buffers and constants of a chunk, with inputs outside of the device: keys
    and values, their gradients in fp32, one row of the gradient, rotary tables.
    """
    shape: dict[str, Any] = {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    }
    LlamaConfig(**shape, num_hidden_layers=4, vocab_size=1000, max_position_embeddings=1 << 24).save_pretrained(
        tmp_path
    )
    machine = machine_of("2x2@10gbit", device=Device("H100"))
    rows = [1 << 18, 1 << 20]
    for folder in ("", "/disk"):
        held = []
        for row in rows:
            settings = replace(DEFAULT, sequence_chunk=4096, offload_dir=folder)
            asked = request_for(str(tmp_path), machine, sequence_length=row, global_batch=4, settings=settings)
            parts = memory_quickly(asked, step_of(asked, "tawpipe-spread", offloaded_layers=4)).parts
            held.append(parts["activations"] + parts["working"])
        per_token = (held[1] - held[0]) / (rows[1] - rows[0])
        assert 4096 + 8192 + 8192 < per_token <= 4096 + 8192 + 8192 + 1024 < 26_000


# measuring

SMALL: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
SMALL |= {"num_key_value_heads": 2, "vocab_size": 100, "max_position_embeddings": 1 << 20}
ALONE = uniform(1, 1, between=LinkModel(1e9), inside=LinkModel(1e9))


def small() -> Chain:
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**SMALL))
    return Chain(model)


@pytest.mark.slow
def test_chunks_are_measured_only_if_requested(monkeypatch):
    for module in ("plan.cost.memory", "model.attention.chunked"):
        monkeypatch.setattr(f"tawpipe.{module}.PAST_KEYS", 256)
    whole = measure(small(), dtype=torch.float32, device=CPU, tokens=256, row=1024)
    assert not whole.in_chunks and not whole.memory.in_chunks
    found = measure(small(), dtype=torch.float32, device=CPU, tokens=256, row=512, chunks=lambda _: (128, 256, 512))
    cut = found.cut(128)
    long = size_of([1 << 16])
    assert len(cut.blocks) == 4 and cut.blocks[0] == found.blocks[0] and cut.blocks[-1] == found.blocks[-1]
    assert min(cut.blocks[1].forward.of(long), cut.blocks[1].backward.of(long)) > 0
    fixed, own, token = found.memory.in_chunks["backward full"]
    assert own > 10 * 64 * 4 and 2 * 64 * 4 <= token <= 6 * 64 * 4, "keys and values, and their gradients"
    assert cut.memory.working["layer"]["backward full"] == (fixed + own * 128, token)


@pytest.mark.slow
def test_measured_chunk_memory_is_linear_in_row_length(monkeypatch):
    """The gradients that a kernel gives of one part of the past are gone before it looks at the next one."""
    for module in ("plan.cost.memory", "model.attention.chunked"):
        monkeypatch.setattr(f"tawpipe.{module}.PAST_KEYS", 256)
    bench = Bench(small(), CPU, torch.float32, 256)
    lines = memory.measure_chunks(bench, 64)
    keys_and_their_gradients = 2 * (2 * 64 * 4)
    assert lines["backward full"][2] == keys_and_their_gradients - 64 * 4
    weighed = memory._weigh_chunks(bench, 2, 1536, 64)
    for name, (fixed, own, token) in lines.items():
        assert fixed + own * 64 + token * 1536 == pytest.approx(weighed[name], rel=0.02), name


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_why_whole_names_the_reason_against_cutting_rows(device, monkeypatch):
    assert Bench(small(), torch.device(device), torch.bfloat16, 256).why_whole() == ""
    monkeypatch.setattr(LlamaDecoderLayer, "forward", lambda layer, hidden, **call: hidden + layer.mlp(hidden))
    assert "calls no attention" in Bench(small(), torch.device(device), torch.bfloat16, 256).why_whole()


@pytest.mark.slow
def test_plan_of_an_uncuttable_model_keeps_rows_whole_and_gives_the_reason(tmp_path, monkeypatch):
    LlamaConfig(**SMALL).save_pretrained(tmp_path)
    given: dict[str, Any] = {"sequence_length": 1 << 18, "global_batch": 4, "memory_bytes": 60 << 20}
    monkeypatch.setattr(measure_module, "DRIVER_BYTES", 0)
    monkeypatch.setattr(measure_module, "COMMUNICATOR_BYTES", 0)
    machine = machine_of("2x2@10gbit", device=Device("H100"))
    said: list[str] = []
    with progress_to(said.append):
        good = request_for(str(tmp_path), machine, **given)
    assert good.chunks == CHUNKS and not said
    monkeypatch.setattr(Bench, "why_whole", lambda _: "its layers look back")
    with progress_to(said.append):
        bad = request_for(str(tmp_path), machine, **given)
    assert bad.chunks == () and said == ["rows stay whole: its layers look back"]
    assert "its layers look back" in plan_of(bad).reason
    with pytest.raises(UserError, match=r"schedule.sequence_chunk: got 4096; 0, for whole rows: its"):
        request_for(str(tmp_path), machine, **given, settings=replace(DEFAULT, sequence_chunk=4096))
    with progress_to(said.append):
        compiled = request_for(str(tmp_path), machine, **given, compiled=True)
        request_for(str(tmp_path), machine, **given, compiled=True, timed=False)
    request_for(str(tmp_path), machine, **given, compiled=True)
    assert len(said) == 2, "neither of memory alone nor outside of the context"
    assert compiled.chunks == () and said[-1] == "rows stay whole: --compile compiles layers on whole rows"
