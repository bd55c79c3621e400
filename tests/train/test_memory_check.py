"""Memory that will not suffice ends a run before its first step, with a way out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tawpipe.cli import main
from tawpipe.console import Console
from tawpipe.errors import UserError
from tawpipe.model.chain import Chain
from tawpipe.options.names import Change
from tawpipe.pipeline.pipeline import Pipeline
from tawpipe.plan.answer.remedy import WayOut
from tawpipe.plan.answer.would_fit import WouldFit
from tawpipe.plan.cost.measure import Asked, request_of
from tawpipe.plan.machine.machine import Device, Machine
from tawpipe.runtime.transport.transport import needed_groups
from tawpipe.runtime.world import World
from tawpipe.schedule.decode_steps import build_decode_steps
from tawpipe.schedule.placement import Home
from tawpipe.schedule.settings import ScheduleSettings
from tawpipe.serving.generate import Wanted
from tawpipe.serving.passes import Sampling
from tawpipe.serving.placing import build_placing
from tawpipe.simulate import LinkModel
from tawpipe.topology import Topology
from tawpipe.train import memory
from tawpipe.train.planned import Planning
from tawpipe.train.run_model import RunModel
from tawpipe.train.settings.config import TrainConfig
from tawpipe.train.settings.decided import BatchShape

ALONE = World(Topology.grid(1, 1), 0, torch.device("cpu"), None)
FREE = LinkModel(float("inf"))
CONFIG = TrainConfig(
    model="tiny",
    global_batch=4,
    micro_batch=2,
    sequence_length=256,
    dtype="float32",
    schedule=ScheduleSettings(recompute="none", micro_batches_per_visit=2),
)


BATCH = BatchShape.of(CONFIG, "split", 1)


@pytest.fixture(scope="module")
def chain() -> Chain:
    return RunModel(CONFIG).followed(500)[1]


def check(
    monkeypatch,
    chain: Chain,
    *,
    memory_bytes: int,
    schedule: ScheduleSettings = CONFIG.schedule,
    texts: Wanted | None = None,
    dealt: tuple[int, ...] = (),
    soon: Sequence[tuple[int, ...]] = (),
    console: Any = None,
) -> memory.Needs | None:
    machine = Machine((1,), FREE, FREE, device=Device("CPU", memory_bytes))
    monkeypatch.setattr(memory, "machine_unprobed", lambda _: machine)
    asked = Asked(256, 4, 2, dtype=torch.float32, settings=schedule, profile="measure", dealt=dealt)
    planning, console = Planning(ALONE, chain, asked), console or Console(rank=1)
    others = lambda short: WouldFit(short, CONFIG, no_other)  # noqa: E731
    if (measured := memory.measured_for(planning, None, console)) is None:
        return None
    load = memory.MemoryLoad(texts=texts, soon=soon)
    return memory.check_memory(planning, BATCH, measured, load, others, console)[0]


def test_failed_timing_of_suggestions_is_reported(monkeypatch, chain):
    real, lines = Planning.ask, list[str]()
    untimed = lambda *args, timed=True, **rest: (None, "no times") if timed else real(*args, timed=timed, **rest)  # noqa: E731
    monkeypatch.setattr(Planning, "ask", untimed)
    with pytest.raises(UserError, match="memory: got"):
        check(monkeypatch, chain, memory_bytes=2**20, console=SimpleNamespace(notice=lines.append))
    assert [line for line in lines if line] == ["settings that fit are listed without measured times: no times"]


@pytest.mark.slow
def test_memory_check_covers_the_fullest_coming_step(monkeypatch, chain):
    monkeypatch.setattr(memory, "find", lambda _: SimpleNamespace(cuts_documents=True))  # one process is no pipeline
    few, full = (40, 30), (250, 240, 230, 220)
    needs = [check(monkeypatch, chain, memory_bytes=0, dealt=few, soon=soon) for soon in ((), (few,), (full, few))]
    none, same, more = (each.parts["activations"] for each in needs if each is not None)
    assert none == same < more


def no_other(config: TrainConfig) -> Any:
    raise UserError("model", "tiny", "one with weights")


@pytest.mark.slow
def test_run_that_needs_too_much_memory_is_refused_with_what_fits(monkeypatch, chain):
    asked, limit = {}, 0

    def ask(*args: Any, timed: bool = True, **rest: Any) -> Any:
        """Measured once: what the process already holds changes while the tests run."""
        if timed not in asked:
            asked[timed] = real(*args, timed=timed, **rest)[0]
        system = asked[False].system_bytes
        return replace(asked[timed], memory_bytes=limit, system_bytes=system), ""

    real = Planning.ask
    monkeypatch.setattr(Planning, "ask", ask)
    needs = check(monkeypatch, chain, memory_bytes=0)
    assert needs is not None and needs.parts["system"] > needs.parts["working"] > 0
    full = check(monkeypatch, chain, memory_bytes=0, schedule=replace(CONFIG.schedule, recompute="full"))
    assert full is not None and needs.device > full.device
    limit = (needs.device + full.device) // 2
    with pytest.raises(UserError) as refused:
        check(monkeypatch, chain, memory_bytes=limit)
    said = str(refused.value)
    assert said.startswith("memory: got 'a run that needs ") and "working" in said and "on every device" in said
    assert "--schedule.recompute full: " in said and "s per step" in said


def test_weights_and_state_larger_than_all_memory_are_reported_first(monkeypatch, chain):
    parameters = sum(unit.numel for unit in chain.units)
    planning = Planning(ALONE, chain, Asked(256, 4, 2, dtype=torch.bfloat16, settings=CONFIG.schedule))
    for device, host, is_said in ((12, 0, False), (11.9, 0, True), (4, 8, False), (4, 7.9, True), (0, 0, False)):
        there = Device("CPU", int(device * parameters))
        machine = Machine((1,), FREE, FREE, device=there, host_bytes=int(host * parameters))
        monkeypatch.setattr(memory, "machine_unprobed", lambda _, machine=machine: machine)
        assert memory.too_large(planning).startswith("this does not fit: weights and optimizer state of ") == is_said


@pytest.mark.slow
def test_memory_check_counts_sample_texts(monkeypatch, chain):
    real, asked = Planning.ask, []

    def ask(*args: Any, **rest: Any) -> Any:
        """Measured once."""
        asked.append(real(*args, **rest) if not asked else asked[0])
        return asked[-1]

    monkeypatch.setattr(Planning, "ask", ask)
    step = check(monkeypatch, chain, memory_bytes=0)
    assert step is not None and "texts" not in step.parts
    few, many = (Wanted([[1] * 8] * count, 2000, Sampling(), frozenset()) for count in (1, 64))
    short = check(monkeypatch, chain, memory_bytes=0, texts=few)
    assert short is not None and short.parts["texts"] == 0, "less than what a step has given back"
    needs = check(monkeypatch, chain, memory_bytes=0, texts=many)
    assert needs is not None and needs.parts["texts"] > 0
    room, layers, config = many.slot_layout(1), len(chain.blocks) - 2, chain.config
    keys = 2 * config.num_key_value_heads * config.head_dim * 4
    cache = room.groups * room.slots * room.context * keys * layers
    assert cache == 64 * 2008 * keys * layers
    given_back = step.parts["activations"] + step.parts["working"]
    assert cache - given_back < needs.parts["texts"] < 1.5 * cache - given_back, "and a pass"
    assert memory.predicted_bytes(needs, torch.device("cpu")) == needs.device - needs.parts["texts"]

    limit = needs.device - needs.parts["texts"] // 2
    assert check(monkeypatch, chain, memory_bytes=limit, texts=few) is not None
    with pytest.raises(UserError, match="fewer prompts: texts take") as refused:
        check(monkeypatch, chain, memory_bytes=limit, texts=many)
    assert (refused.value.setting, refused.value.value) == ("--sample.tokens", 2000)


def test_sample_texts_on_two_processes_count_one_stage_of_weights(chain):
    machine = Machine((1, 1), FREE, FREE, device=Device("CPU", 0))
    asked = Asked(256, 4, 2, dtype=torch.float32, settings=CONFIG.schedule, profile="measure", timed=False)
    request = request_of(chain, machine, asked, here=torch.device("cpu"))
    texts = Wanted([[1] * 8], 8, Sampling(), frozenset())
    alone, stage = (memory.texts_bytes(chain, texts, request, CONFIG.schedule, ranks) for ranks in (1, 2))
    half = sum(unit.numel for unit in chain.units if {*range(5)}.intersection(unit.blocks))  # keys and values besides
    assert len(chain.blocks) == 10 and 4 * half < stage < 4 * half + alone
    assert memory.texts_bytes(chain, texts, request, CONFIG.schedule, 9) == 0, "more than layers: by evaluation"
    assert memory.texts_bytes(chain, replace(texts, tokens=0), request, CONFIG.schedule, 2) == 0


@pytest.mark.parametrize(("ranks", "groups"), [(1, 0), (2, 2), (3, 3), (4, 2)])
def test_communicators_of_sample_texts_are_those_that_a_generator_makes(chain, ranks, groups):
    request: Any = SimpleNamespace(model=chain.spec, communicator_bytes=1000)
    texts = Wanted([[1] * 8] * 3, 8, Sampling(), frozenset())
    assert memory.texts_groups_bytes(texts, request, ranks) == 1000 * groups
    topology = Topology.grid(ranks, 1)
    steps = build_decode_steps(chain.spec, topology, texts.slot_layout(ranks).groups)
    stages = steps.step.strategy.computes(steps.step)
    wanted = [[unit.index for unit in chain.units if {*stage}.intersection(unit.blocks)] for stage in stages]
    homes = tuple(steps.step.strategy.place(chain.spec, topology))
    placing = build_placing(chain.spec, topology, tuple(Home((0,), home.shard_size) for home in homes), wanted)
    assert len(needed_groups([steps, placing])) == groups


def test_communicators_of_sample_texts_stay_beside_steps(monkeypatch, chain):
    """A step has their memory no more, whatever it gives back for the texts themselves."""
    texts = Wanted([[1] * 8], 8, Sampling(), frozenset())
    monkeypatch.setattr(memory, "texts_groups_bytes", lambda *_: 700)
    needs = check(monkeypatch, chain, memory_bytes=0, texts=texts)
    assert needs is not None and needs.parts["texts"] == 700


def test_memory_check_skips_settings_that_other_checks_refuse(monkeypatch, chain):
    wrong = ScheduleSettings(strategy="tawpipe-spread", homes="0,1")
    assert check(monkeypatch, chain, memory_bytes=1, schedule=wrong) is None


def test_memory_left_by_nccl_groups_is_checked_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Beside what the run was predicted to need; of one process there are no groups."""

    def too_little(world: World, group_bytes: Mapping[Any, int], needs: memory.Needs | None) -> None:
        assert group_bytes == {} and needs is not None and needs.device > 0
        raise UserError("memory", "what NCCL has taken", "less of it")

    monkeypatch.setattr("tawpipe.train.run.check_left", too_little)
    monkeypatch.setattr(Pipeline, "step", None)
    monkeypatch.delenv("RANK", raising=False)
    text = tmp_path / "text.txt"
    text.write_text("A sentence of a small text. " * 80)
    words = ["--data", str(text), "--vocab-size", "300", "--sequence-length", "32", "--global-batch", "4"]
    words += ["--plan", "none", "--nproc", "1", "--device", "cpu", "--evaluation.every", "0"]
    assert main(["train", *words, "--output", str(tmp_path / "run"), "--cache-dir", str(tmp_path / "cache")]) == 2
    assert "memory: got 'what NCCL has taken'" in capsys.readouterr().err


def test_smaller_batch_suggestions_use_bin_token_settings() -> None:
    """A request's rows are bins: of all processes that compute one, and as many as a step has."""
    given = {"global_batch": 64, "sequence_length": 256, "schedule": ScheduleSettings(sequence_ranks=2)}
    batch = BatchShape.of(replace(CONFIG, **given, micro_batch=1, bin_tokens=512), "balanced", 4)
    assert (batch.rows, batch.row_tokens, batch.step_tokens) == (16, 1024, 16384)
    smaller = ("sequence_length", 512), ("sequence_length", 128), ("global_batch", 8)
    ways = [WayOut((Change("micro_batch", 1), Change(*change)), 1.0) for change in smaller]
    assert [str(memory._for_packs(way, batch)) for way in ways] == [
        "--micro-batch 1 --bin-tokens 256: 1.000 s per step of as many rows",
        "--micro-batch 1 --bin-tokens 64 --max-document 128: 1.000 s per step of as many rows",
        "--micro-batch 1 --tokens-per-step 8192: 1.000 s per step of fewer tokens",
    ]
    rows = replace(batch, packing="split")
    assert [memory._for_packs(way, rows) for way in ways] == ways


@pytest.mark.parametrize(
    ("fits", "others", "earlier", "chosen"),
    [
        (True, 1.0, "", "none"),
        (True, 0.0, "", "full"),  # another rank has less memory
        (False, 1.0, "", "full"),
        (True, 1.0, "full", "full"),  # as in the run that is resumed
        (True, 1.0, "none", "none"),
        (False, 1.0, "none", "full"),  # which does not fit any more
    ],
)
def test_recompute_choice_is_equal_on_all_ranks(monkeypatch, fits, others, earlier, chosen):
    limits = []
    monkeypatch.setattr(memory, "machine_unprobed", lambda _: None)
    monkeypatch.setattr(memory, "_all_of", lambda _, request: request)
    monkeypatch.setattr(memory, "fits_to_keep", lambda request, schedule, share: limits.append(share) or fits)
    world: Any = SimpleNamespace(gather_numbers=lambda mine: [mine, others])
    request: Any = object()
    assert memory.settled_recompute(world, ScheduleSettings(), request, earlier) == chosen
    assert limits == ([] if earlier == "full" else [1.0 if earlier else memory.KEEPS])
    assert memory.settled_recompute(world, ScheduleSettings(recompute="selective"), request, earlier) == "selective"
