"""A run under ``--micro-batch auto``: its losses, its memory, and the number that a resumed run keeps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from runs import command, rows, run_forked
from small import make_small
from tawpipe.checkpoint.resume import RunState, read_run
from tawpipe.cli import main
from tawpipe.options import Open
from tawpipe.plan.cost.filling import Filling
from tawpipe.runtime.world import World
from tawpipe.schedule.settings import ScheduleSettings
from tawpipe.topology import Topology
from tawpipe.train import memory, prepare
from tawpipe.train.settings.config import TrainConfig, config_text, load_config
from tawpipe.train.settings.decided import BatchShape

SHORT = ("--device", "cpu", "--dtype", "float64", "--log.trackers", "none", "--sample.tokens", "0", "--nproc", "1")
ALONE = World(Topology.grid(1, 1), 0, torch.device("cpu"), None)


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("filled")
    make_small(folder, files=20, layers=2, positions=256)
    return folder


def alone(home: Path, output: str, *words: str) -> int:
    return main([*command(home, output, *SHORT, "--export.enabled", "false", *words)[2:]])


def settled(home: Path, output: str, step: int) -> dict[str, Any]:
    return read_run(home / output / "checkpoints" / f"step-{step:08}").settled


def same_losses(ours: list[dict], theirs: list[dict]) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        for name in {"loss", "grad_norm", "validation_loss"} & mine.keys():
            assert mine[name] == pytest.approx(other[name], rel=1e-6)  # the model's norms are in float32


@pytest.mark.slow
def test_run_has_equal_losses_and_keeps_its_number_when_resumed(home, capsys, monkeypatch):
    assert alone(home, "given", "--micro-batch", "1") == 0
    assert "micro-batches of 1\n" in capsys.readouterr().out
    assert alone(home, "auto") == 0
    said = capsys.readouterr().out
    assert "micro-batches of 6 (auto: a device has 384 tokens of a step, fewer than the 512 that fill it)" in said
    same_losses(rows(home, "auto"), rows(home, "given"))
    assert settled(home, "auto", 4)["micro_batch"] == 6 and settled(home, "given", 4)["micro_batch"] == 1
    assert yaml.safe_load((home / "auto" / "config.yaml").read_text())["micro_batch"] == "auto"

    monkeypatch.setitem(prepare.FILLS, "cpu", 128)  # a new run would have two rows
    assert alone(home, "auto", "--resume", "auto", "--steps", "6") == 0
    assert "micro-batches of 6 (auto" in capsys.readouterr().out and settled(home, "auto", 6)["micro_batch"] == 6


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["none", "auto"])
def test_processes_have_the_losses_of_one(home, plan):
    words = (*SHORT[:-1], "2", "--nodes", "1", "--export.enabled", "false", "--plan", plan)
    two = run_forked(home, f"two-{plan}", *words, few_strategies=True)
    assert two.returncode == 0 and "micro-batches of 3 (auto: " in two.stdout, two.stderr
    assert alone(home, f"one-{plan}", "--micro-batch", "1") == 0
    same_losses(rows(home, f"two-{plan}"), rows(home, f"one-{plan}"))


@pytest.mark.slow
def test_unequal_rows_are_padded_little_and_have_equal_losses(home, capsys):
    words = ("--packing", "none", "--sequence-length", "128")
    assert alone(home, "padded", *words) == 0
    assert "micro-batches of 1 (auto: several rows of unequal lengths would be padded)" in capsys.readouterr().out
    assert alone(home, "packs", "--packing", "balanced", "--max-document", "64", "--tokens-per-step", "384") == 0
    assert "packed micro-batches of at most 423 tokens" in capsys.readouterr().out
    assert settled(home, "packs", 4)["bin_tokens"] == 423
    given = ("--packing", "balanced", "--max-document", "64", "--tokens-per-step", "384", "--bin-tokens", "96")
    assert alone(home, "bins", *given) == 0
    same_losses(rows(home, "packs"), rows(home, "bins"))


@pytest.mark.parametrize(
    ("fitting", "recompute", "earlier", "chosen"),
    [
        ({"none": 8, "full": 8}, "auto", "", 8),
        ({"none": 2, "full": 8}, "auto", "", 2),  # recomputing takes longer than small micro-batches do
        ({"none": 0, "full": 4}, "auto", "", 4),
        ({"none": 8, "full": 4}, "auto", "full", 4),
        ({"none": 0, "full": 0}, "auto", "", 1),
        ({"selective": 4}, "selective", "", 4),
    ],
)
def test_memory_limits_the_micro_batch(monkeypatch, fitting, recompute, earlier, chosen):
    limits = set[float]()

    def fits(size: int, schedule: ScheduleSettings, share: float) -> bool:
        limits.add(share)
        return size <= fitting[schedule.recompute]

    monkeypatch.setattr(memory, "machine_unprobed", lambda _: None)
    monkeypatch.setattr(memory, "_all_of", lambda _, request: request)
    monkeypatch.setattr(memory, "fits_to_keep", fits)
    request: Any = SimpleNamespace(with_micro_batch=lambda size: size)
    settings, counts = ScheduleSettings(recompute=recompute), (1, 2, 4, 8)
    assert memory.settled_micro_batch(ALONE, settings, request, counts, earlier) == chosen
    assert limits == {1.0 if earlier else memory.KEEPS}
    less: Any = SimpleNamespace(gather_numbers=lambda _: [1.0, 0.0])  # another rank has less memory
    assert memory.settled_micro_batch(less, settings, request, counts) == 1
    assert memory.settled_micro_batch(ALONE, settings, None, counts) == 1


def test_resumed_run_keeps_its_number_on_the_same_nodes(monkeypatch):
    monkeypatch.setattr(prepare, "filling_of", lambda *_: Filling((1, 2, 4, 8), 64, 512, 512))
    monkeypatch.setattr(prepare, "first_micro_batches", lambda *_: [])
    config = TrainConfig(sequence_length=64)
    batch = BatchShape.of(config, "split", 1)
    assert batch.micro_batch == 1 and isinstance(config.micro_batch, Open)

    def left(state: RunState | None, **changes: Any) -> tuple[int, ...] | None:
        run: Any = SimpleNamespace(config=replace(config, **changes), batch=batch, chain=None, data=None, state=state)
        filling = prepare._filling(run, ALONE)
        return filling and filling.sizes

    before = RunState(step=1, samples=8, seed=0, topology=str(ALONE.nodes), settled={"micro_batch": 4})
    assert left(None) == (1, 2, 4, 8) and left(before) == (1, 2, 4)
    assert left(replace(before, settled={})) == (1,), "a run of an earlier version had one row"
    assert left(replace(before, topology="2 nodes")) == (1, 2, 4, 8)
    assert left(replace(before, settled={"micro_batch": 3})) == (1, 2, 4, 8), "the batch has changed since then"
    assert left(before, micro_batch=2) is None


def test_packs_fill_a_device_in_one_round():
    config = TrainConfig(tokens_per_step=65536, max_document=2048)
    caps = [
        BatchShape.of(config, "balanced", size, fills).bin_tokens for size, fills in ((2, 0), (2, 16384), (8, 16384))
    ]
    assert caps == [3072, 16384, 9012]
    assert BatchShape.of(replace(config, bin_tokens=4000), "balanced", 2, 16384).bin_tokens == 4000


def test_numbers_from_files_are_kept_and_auto_is_written(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("micro_batch: 1\nbin_tokens: null\n")
    config = load_config(["--config", str(file)])
    assert config.micro_batch == 1 and not isinstance(config.micro_batch, Open) and isinstance(config.bin_tokens, Open)
    assert "\nmicro_batch: auto\n" in config_text(load_config([])) and "\nbin_tokens: auto\n" in config_text(config)
