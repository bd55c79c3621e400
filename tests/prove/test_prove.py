"""Checks on the user's devices: what they find is written, what fails says so, what cannot be told stays unproven."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import states
from fake_cuda import DEVICE, fake_cuda
from pool import forking
from tawpipe.cli import main
from tawpipe.model import flash
from tawpipe.plan.cost.predict import Needs
from tawpipe.prove import checks, documents, endings, exactness, memory, reserved, run, speed, waits
from tawpipe.prove.checks import Check
from tawpipe.prove.freed import Freed
from tawpipe.prove.models import alone, llama
from tawpipe.prove.outcome import FAILS, HINT, HOLDS, UNPROVEN, Outcome
from tawpipe.prove.run import prove
from tawpipe.prove.stand_in import LaneStream, LooksLikeCuda, read_as_a_gpu_does
from tawpipe.runtime.compute.compute import Compute
from tawpipe.runtime.compute.rows import Places, Staging
from tawpipe.runtime.memory import Taken
from tawpipe.runtime.world import World
from tawpipe.schedule.settings import ScheduleSettings

CPU = torch.device("cpu")


def numbers(world: World, *, out: str, only: list[str]) -> dict[str, Any]:
    return vars(prove(world, Path(out), only=only))


def numbers_of_a_pipeline(world: World, **given: Any) -> dict[str, Any]:
    """Memory of rows in chunks is measured in tests/plan/test_memory.py."""
    with pytest.MonkeyPatch.context() as patch:
        every = reserved.ways
        patch.setattr(reserved, "ways", lambda *sizes, **more: {"a pipeline": every(*sizes, **more)["a pipeline"]})
        patch.setitem(speed.TOKENS, "cpu", 256)
        return numbers(world, **given)


def numbers_of(world: World, *, names: list[str], out: str, only: list[str]) -> dict[str, Any]:
    """Of some strategies."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exactness, "_names", lambda: names)
        patch.setattr(exactness, "STEPS", 2)
        return numbers(world, out=out, only=only)


@pytest.mark.slow
def test_prove_checks_of_exactness_chunks_and_order_hold_on_two_processes(pool, tmp_path):
    numbers, few = ["exact", "chunks"], ["tawpipe-spread", "hsdp", "1f1b"]
    found = pool.run(f"{__name__}:numbers", 2, 1, out=str(tmp_path / "found.json"), only=numbers)[0]
    assert json.loads((tmp_path / "found.json").read_text()) == found
    assert {name: row["status"] for name, row in found["checks"].items()} == dict.fromkeys(numbers, HOLDS)
    order = pool.run(f"{__name__}:numbers_of", 2, 1, names=few, out=str(tmp_path / "order.json"), only=["order"])[0]
    row = order["checks"]["order"]
    assert row["status"] == HOLDS and row["numbers"]["strategies"] == few, row["note"]
    differences = found["checks"]["exact"]["numbers"]["differences"]
    assert {"tawpipe-spread", "tawpipe-whole", "hsdp", "flat", "weipipe"} <= differences.keys()
    assert max(differences.values()) < exactness.LIMIT
    names = "aten::_scaled_dot_product_flash_attention_for_cpu"
    assert names in found["checks"]["exact"]["numbers"]["attention"]
    assert "ChunkAttention" in found["checks"]["chunks"]["numbers"]["attention"]["float64"]["cut"]
    assert any("NCCL" in claim for claim in found["unproven"])


@pytest.mark.slow
def test_prove_check_of_bits_holds_under_late_lanes(pool, tmp_path):
    names = ["tawpipe-spread", "zero-bubble", "weipipe"]
    found = pool.run(f"{__name__}:numbers_of", 2, 1, names=names, out=str(tmp_path / "found.json"), only=["bits"])[0]
    row = found["checks"]["bits"]
    assert row["status"] == HOLDS, row["note"]
    assert row["numbers"]["strategies"] == names


@pytest.mark.slow
def test_prove_check_of_context_parallel_rows_holds(pool, tmp_path):
    found = pool.run(f"{__name__}:numbers", 1, 2, out=str(tmp_path / "found.json"), only=["sets"])[0]
    assert found["checks"]["sets"]["status"] == HOLDS


def test_failing_and_broken_checks_are_reported_and_others_continue(tmp_path, monkeypatch, capsys):
    def broken(world: World) -> Outcome:
        raise RuntimeError("no kernel image")

    listed = (
        Check("wrong", "two and two are five", lambda world: Outcome(False, "four", {"sum": 4})),
        Check("broken", "it runs", broken, alone=True),
        Check("far", "it is quick", broken, needs=("cuda", "several")),
        Check("right", "it is right", lambda world: Outcome(True, "yes")),
    )
    monkeypatch.setattr(run, "CHECKS", listed)
    found = prove(alone(torch.device("cpu")), tmp_path / "found.json")
    statuses = {name: row["status"] for name, row in found.checks.items()}
    assert statuses == {"wrong": FAILS, "broken": FAILS, "far": UNPROVEN, "right": HOLDS}
    assert found.failed == ["wrong", "broken"]
    said = capsys.readouterr().out
    assert "two and two are five: four" in said and "no kernel image" in said and "needs a GPU and several" in said


def test_slower_attention_kernel_is_a_hint_not_a_failure(tmp_path, monkeypatch, capsys):
    slower = "flash attention 2 (varlen); flash attention 3 would be faster but is not installed or activated"
    monkeypatch.setattr(speed, "kernel_of_model", lambda *_: slower)
    found = prove(alone(CPU), tmp_path / "found.json", only=["kernel"])
    assert found.checks["kernel"]["status"] == HINT and not found.failed
    assert slower in capsys.readouterr().out


def test_prove_activates_flash_attention_before_its_checks(tmp_path, monkeypatch):
    asked: list[torch.device] = []
    monkeypatch.setattr(
        "tawpipe.model.attention.attention_kernel.activate_flash", lambda device, *_: asked.append(device)
    )
    for listed in (run, checks):
        monkeypatch.setattr(listed, "CHECKS", (Check("first", "it is", lambda _: Outcome(asked == [CPU], "")),))
    assert main(["prove", "--out", str(tmp_path / "found.json"), "--device", "cpu"]) == 0


FEW = documents.Sizes((1, 7, 40), 24, 30, (16,), 32)


@pytest.fixture
def one_model(monkeypatch):
    """Documents of one model, whose heads share keys."""
    config = next(iter(documents.models(FEW).values()))
    monkeypatch.setattr(documents, "models", lambda _: {"one": config})
    monkeypatch.setitem(documents.SIZES, "cpu", FEW)


def test_prove_check_of_packed_documents_covers_every_kernel_path(one_model):
    found = documents.documents(alone(CPU))
    assert found.holds, found.note
    names = len(("output", "input")) + 9  # parameters of a layer of a Llama
    assert found.numbers["count"] == len(documents.ways(1)) * (len(FEW.lengths) + 1) * names
    ran = found.numbers["attention"]["the CPU's, one"]
    assert ran.keys() == documents.ways(1).keys()
    assert "aten::_scaled_dot_product_flash_attention_for_cpu" in ran["whole"]
    assert "ChunkAttention" not in ran["whole"] and "ChunkAttention" in ran["sets"]


@pytest.mark.parametrize(
    "name", ["sinks, a window", *(pytest.param(name, marks=pytest.mark.slow) for name in ("sinks", "soft caps"))]
)
def test_prove_check_of_documents_covers_sinks_windows_and_soft_caps(name):
    config = documents.models(FEW)[name]
    errors, ran = documents.of_model(config, FEW, CPU, torch.bfloat16)
    assert max(errors.values()) < documents.LIMIT
    assert any(one.endswith("self_attn.sinks") for one in errors) == name.startswith("sinks")
    assert "TiledScores" in ran["whole"]


def test_wrong_gradients_of_sinks_are_detected(monkeypatch):
    """As if the log-sum-exp that the backward pass is given were that of the keys alone."""
    attention = flash.attention

    def careless(query: Any, keys: Any, values: Any, parts: Any, scale: float, sinks: Any = None) -> Any:
        given = query, keys, values, parts, scale
        return attention(*given, sinks)[0], attention(*given)[1]

    monkeypatch.setattr(flash, "attention", careless)
    errors, _ = documents.of_model(documents.models(FEW)["sinks"], FEW, CPU, torch.bfloat16)
    wrong = {name for name, error in errors.items() if error > documents.LIMIT}
    assert any("chunks" in one for one in wrong) and not any(one.startswith("whole") for one in wrong)


@pytest.mark.slow
def test_log_sum_exp_with_gpu_incompatible_strides_is_detected(one_model, monkeypatch):
    class Strided(read_as_a_gpu_does):
        """Hands it over as part of a longer one."""

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if "flash_attention_for_cpu_backward" in func._schema.name and args[5].is_contiguous():
                longer = args[5].new_zeros(*args[5].shape[:-1], args[5].shape[-1] + 3)
                part = longer[..., : args[5].shape[-1]].copy_(args[5])
                args = (*args[:5], part, *args[6:])
            return super().__torch_dispatch__(func, types, args, kwargs)

    monkeypatch.setattr(documents, "read_as_a_gpu_does", Strided)
    found = documents.documents(alone(CPU))
    assert not found.holds and ("chunks" in found.note or "sets" in found.note)
    assert max(found.numbers["worst"].values()) > 1


def numbers_with_an_early_free(world: World, *, out: str, only: list[str]) -> dict[str, Any]:
    """As if what is received were not recorded on the stream that computes."""
    travel = Compute.travel

    def careless(self: Compute, *given: Any) -> None:
        self.stream = LaneStream("nobody's")  # type: ignore[attr-defined]
        travel(self, *given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Compute, "travel", careless)
        return numbers_of(world, names=["flat", "1f1b"], out=out, only=only)


def test_fake_tensors_are_not_counted_as_live_bytes() -> None:
    before = memory.live_bytes(CPU)
    with FakeTensorMode():
        held = torch.empty(1 << 20)
    assert held.device.type == "cpu" and memory.live_bytes(CPU) < before + (1 << 20)


def test_single_process_frees_no_memory_on_another_lane() -> None:
    pipeline = states.make()
    freed = Freed(pipeline)
    with freed.watching():
        pipeline.step(states.BATCHES[0])
        pipeline.drain()
    pipeline.close()
    assert freed._origins and freed.faults == []


@pytest.mark.slow
def test_memory_freed_too_early_on_another_lane_is_detected(pool, tmp_path, monkeypatch):
    found = pool.run(f"{__name__}:numbers_with_an_early_free", 2, 1, out=str(tmp_path / "found.json"), only=["bits"])[0]
    row = found["checks"]["bits"]
    assert row["status"] == FAILS and not row["numbers"]["differ"]
    assert row["numbers"]["freed"].keys() == {"1f1b"}
    assert "allocated on INTER_W, is dropped by COMPUTE" in row["note"]


def test_streams_of_offloaded_rows_are_independent_of_the_layer_count(monkeypatch):
    assert reserved.streams_of_rows(CPU, 8) == reserved.streams_of_rows(CPU, 2) > 0
    place = Places._place

    def apart(self: Places, *given: Any) -> Any:
        self._staging = Staging(self._device)
        return place(self, *given)

    monkeypatch.setattr(Places, "_place", apart)
    assert reserved.streams_of_rows(CPU, 8) > reserved.streams_of_rows(CPU, 2), "each copied on streams of its own"


def test_memory_above_the_prediction_is_named_by_every_count():
    needs = Needs({"homes": 4 << 30, "working": 1 << 30, "system": 1 << 30}, 0)
    fits = Taken(5 << 30, 5 << 30, 5 << 30, 6 << 30)
    assert reserved.too_much(needs, 5 << 30, fits) == []
    for name in ("active", "reserved", "driver"):
        more = Taken(**{**vars(fits), name: 8 << 30})
        (said,) = reserved.too_much(needs, 5 << 30, more)
        assert said == f"8.00 GiB {name}, {6 if name == 'driver' else 5}.00 predicted"
    assert reserved.too_much(needs, 8 << 30, None) == ["8.00 GiB allocated, 5.00 predicted"]
    apart = Needs({**needs.parts, "apart": 3 << 30}, 0)
    assert reserved.too_much(apart, 5 << 30, Taken(5 << 30, 8 << 30, 8 << 30, 9 << 30)) == []
    assert reserved.too_much(apart, 8 << 30, None) == ["8.00 GiB allocated, 5.00 predicted"]


def test_unpinned_copies_to_a_device_are_detected(monkeypatch):
    pinned = torch.ones(3)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda self: self.data_ptr() == pinned.data_ptr())
    with waits.unpinned_copies() as found:
        pinned.to(LooksLikeCuda("cpu"), non_blocking=True)
        torch.ones(2, 3).to(torch.float64)
        assert not found
        torch.ones(2, 3).to(LooksLikeCuda("cpu"), non_blocking=True)
    assert found == ["(2, 3) of float32 from memory that is not pinned"]


@pytest.mark.slow
def test_layer_is_timed_beside_transfers_and_memory_is_compared(pool, tmp_path):
    given = {"out": str(tmp_path / "found.json"), "only": ["beside", "reserved"]}
    found = pool.run(f"{__name__}:numbers_of_a_pipeline", 1, 2, **given)[0]
    beside, ways = found["checks"]["beside"], found["checks"]["reserved"]
    assert beside["status"] == UNPROVEN, "processes share processors"
    assert beside["numbers"]["seconds"].keys() == {"alone", "beside a receive", "beside gathers"}
    assert ways["status"] == UNPROVEN, ways["note"]
    assert ways["numbers"]["ways"].keys() == {"a pipeline"}
    for row in ways["numbers"]["ways"].values():
        predicted = sum(size for name, size in row["predicted"].items() if name not in memory.BESIDES)
        assert 0.8 * predicted < row["allocated_bytes"] <= (1 + memory.LIMIT) * predicted, "of the fullest stage"


@pytest.mark.slow
@pytest.mark.usefixtures("short_past")
def test_all_remaining_prove_checks_pass_on_a_cpu(tmp_path, monkeypatch):
    """Documents of a kind of attention that tests above leave out; memory under one setting, as the longest row is
    under the usual one, on short rows in processes that are forked.
    """
    every = documents.models
    monkeypatch.setattr(documents, "models", lambda sizes: dict([*every(sizes).items()][2:3]))
    monkeypatch.setattr(memory, "RECOMPUTE", memory.RECOMPUTE[-1:])
    monkeypatch.setattr(exactness, "STEPS", 2)
    monkeypatch.setitem(memory.MEMORY_BYTES, "cpu", 2**27)
    monkeypatch.setitem(speed.TOKENS, "cpu", 256)
    monkeypatch.setattr(memory, "get_context", lambda _: forking())
    out = tmp_path / "found.json"
    others = {"exact", "chunks", "bits", "reserved"}  # which tests above have, with several processes
    names = [check.name for check in checks.CHECKS if check.name not in others]
    assert main(["prove", "--device", "cpu", "--out", str(out), "--only", *names]) == 0
    found = json.loads(out.read_text())["checks"]
    assert [*found] == names
    needs_more = {"sets", "order", "beside", "waits", "offload"}
    assert {name for name, row in found.items() if row["note"].startswith("needs")} == needs_more


def test_prove_command_refuses_wrong_options_and_reports_failures(tmp_path, monkeypatch, capsys):
    def sums(world: World) -> Outcome:
        return Outcome(world.size == 2, "four")

    out = str(tmp_path / "found.json")
    assert main(["prove", "--only", "speeed", "--out", out, "--device", "cpu"]) == 2
    assert "--only" in capsys.readouterr().err
    assert main(["prove", "--out", str(tmp_path / "missing" / "found.json")]) == 2
    assert main(["prove", "--nproc", "0"]) == 2
    for listed in (run, checks):
        monkeypatch.setattr(listed, "CHECKS", (Check("sums", "there are two", sums),))
    assert main(["prove", "--out", out, "--device", "cpu"]) == 1
    assert json.loads(Path(out).read_text())["checks"]["sums"]["status"] == FAILS


def test_script_that_crashes_or_hangs_at_its_end_fails_the_check(monkeypatch):
    given: list[dict[str, Any]] = []
    ends: list[Any] = [
        subprocess.CompletedProcess([], 0, "1.0", "a warning"),
        subprocess.CompletedProcess([], -6, "", "first\nterminate called"),
        subprocess.TimeoutExpired("python", 120),
    ]

    def ended(words: list[str], **how: Any) -> Any:
        given.append(how)
        end = ends[len(given) - 1]
        if isinstance(end, BaseException):
            raise end
        return end

    monkeypatch.setattr(subprocess, "run", ended)
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("TAWPIPE_LOCAL_LAUNCHER", "1")
    monkeypatch.setenv("KEPT", "1")
    found = [endings.without_close(alone(torch.device("cpu"))) for _ in ends]
    assert [one.holds for one in found] == [True, False, False]
    assert found[1].numbers == {"error": "terminate called"} and "not ended after" in found[2].note
    for how in given:  # it is a process of its own, of no launcher's
        assert "RANK" not in how["env"] and "TAWPIPE_LOCAL_LAUNCHER" not in how["env"] and how["env"]["KEPT"] == "1"


def test_offload_check_fails_if_losses_differ(monkeypatch):
    here = alone(torch.device("cpu"))
    settings: list[int] = []

    def steps(world: World, config: Any, dtype: Any, given: Any, tokens: int) -> Any:
        settings.append(given.offloaded_layers)
        loss = losses[len(settings) - 1]
        return [speed.TimedStep(seconds, 0.0, 0.0, loss) for seconds in (1.0 + len(settings) % 2, 2.0, 3.0)], []

    monkeypatch.setattr(speed, "_steps", steps)
    losses = [1.0, 1.0, 1.0, 1.5]
    equal, other = speed.offload(here), speed.offload(here)
    assert equal.holds and not other.holds and settings[0] == 0 < settings[1] and "differ" in other.note
    assert equal.numbers["seconds"] == [2.0, 2.0]


def test_timed_steps_have_issuing_and_computing_seconds():
    config = llama(hidden=16, layers=2, heads=2, vocabulary=50)
    steps, clocks = speed._steps(alone(CPU), config, torch.float32, ScheduleSettings(), 32)
    assert len(steps) == speed.STEPS - 2 and clocks == [0, 0], "a CPU says no clock"
    for one in steps:
        assert 0 < one.issuing_s <= one.seconds and 0 < one.computing_s <= one.seconds


@pytest.mark.parametrize(("seconds", "holds"), [(1.1, True), (1.3, False), (0.7, False)])
def test_step_time_far_from_the_prediction_fails_the_gpu_check(seconds, holds, monkeypatch):
    monkeypatch.setattr(speed, "probe", lambda world: SimpleNamespace(machine=None))
    monkeypatch.setattr(speed, "request_of", lambda *_, **__: SimpleNamespace(step=lambda settings: None))
    monkeypatch.setattr(speed, "predict", lambda *_: SimpleNamespace(step_seconds=1.0))
    monkeypatch.setattr(speed, "_steps", lambda *_: ([speed.TimedStep(seconds, 0.5, 0.1, 2.0)] * 3, [1980, 1750]))
    monkeypatch.setattr(speed, "dtype_here", lambda world: torch.bfloat16)
    with fake_cuda():
        found = speed.step(alone(DEVICE))
    assert found.holds == holds
    assert found.numbers["waiting_seconds"] == seconds - 0.5 and "0.500 s of it computing" in found.note


@pytest.mark.parametrize(("beside", "holds"), [(1.1, True), (1.2, False)])
def test_layer_slowed_by_transfers_fails_the_gpu_check(beside, holds, monkeypatch):
    """The times are given; before the first of them the device computes until it is warm."""
    hot = list[str]()
    timed = {"_timed": 1.0, "_beside_a_receive": 1.0, "_beside_gathers": beside}
    for name, value in timed.items():
        monkeypatch.setattr(waits, name, lambda *_, value=value, name=name: hot.append(name) or value)
    monkeypatch.setattr(waits, "warm_up", lambda *_: hot.append("warm"))
    monkeypatch.setattr(waits, "make_group", lambda *_, **__: None)
    monkeypatch.setattr(waits, "sized", lambda _: llama(hidden=16, layers=2, heads=2, vocabulary=50))
    monkeypatch.setattr(waits, "dtype_here", lambda world: torch.float32)
    monkeypatch.setitem(waits.TOKENS, "cuda", 8)
    with fake_cuda():
        found = waits.beside(alone(DEVICE))
    assert found.holds == holds and hot == ["warm", *timed]
    assert f"device: {{beside: {beside}}}" in found.note
