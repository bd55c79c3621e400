"""One preparation: what a run and a dry run decide before anything large is there, and what it is made from."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from tawpipe.cli import main
from tawpipe.console import Console
from tawpipe.errors import REPORT
from tawpipe.model.chain import Chain
from tawpipe.plan.cost.measure import Asked, request_of
from tawpipe.plan.cost.predict import memory_quickly
from tawpipe.plan.machine.probe import machine_unprobed
from tawpipe.runtime.world import World
from tawpipe.topology import Topology
from tawpipe.train import run_model
from tawpipe.train.dry_run import _checkpoint
from tawpipe.train.planned import MEMORY, Planning
from tawpipe.train.prepare import build, check, follow_plan, settle_data
from tawpipe.train.settings.config import load_config
from tawpipe.train.start import documents_of

SHAPE = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
SIZES = ["--vocab-size", "300", "--sequence-length", "32", "--global-batch", "4", "--device", "cpu"]
SMALL = ["--data", "text.txt", *SIZES, "--evaluation.every", "0"]


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder with a small text and a small model without weights."""
    (tmp_path / "text.txt").write_text("A sentence of a small text. " * 80)
    LlamaConfig(**SHAPE, num_key_value_heads=2, vocab_size=300).save_pretrained(tmp_path / "model")  # type: ignore[arg-type]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TAWPIPE_CACHE", str(tmp_path / "cache"))
    for name in ("RANK", "WORLD_SIZE", "TAWPIPE_LOCAL_LAUNCHER"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.mark.parametrize(
    ("model", "plan", "dry"),
    [
        ("tiny", "auto", False),
        *(pytest.param(*one, marks=pytest.mark.slow) for one in (("model", "none", False), ("model", "auto", True))),
    ],
)
def test_model_is_built_and_discovered_once(model: str, plan: str, dry: bool, monkeypatch) -> None:
    """By the plan, the memory check, the documents and the pipeline together."""
    calls: list[str] = []
    real_build, real_follow = run_model.build_model, Chain._discover

    def build(*words: Any, **rest: Any) -> Any:
        calls.append("built")
        return real_build(*words, **rest)

    def follow(chain: Chain) -> Any:
        calls.append("followed")
        return real_follow(chain)

    monkeypatch.setattr("tawpipe.model.files.build.build_model", build)
    monkeypatch.setattr(run_model, "build_model", build)
    monkeypatch.setattr(Chain, "_discover", follow)
    words = ["train", *SMALL, "--model", model, "--plan", plan, "--nproc", "1", "--steps", "1", "--sample.tokens", "0"]
    words += ["--export.enabled", "false", "--checkpoint.every", "0", "--output", "run"]
    assert main([*words, *["--dry-run"] * dry]) == 0
    assert sorted(calls) == ["built", "followed"]


def test_internal_planning_error_is_shown_as_a_warning_with_report_request(monkeypatch, capsys) -> None:
    """The run goes on without a plan, and its user learns what to send to whom; standard error names no failure."""

    def search(*_: object, **__: object) -> None:
        print(1 / len(""))

    monkeypatch.setattr("tawpipe.plan.search.search.search", search)
    words = ["train", *SMALL, "--model", "model", "--nproc", "2", "--dry-run"]  # one process has nothing to search
    assert main(words) == 0
    said, error = capsys.readouterr()
    assert "\n\nwarning: plan: none; training continues with the settings under schedule (tawpipe-spread): " in said
    warning = said.partition("warning: ")[2].partition("\n\n")[0]
    assert "ZeroDivisionError: division by zero" in warning.splitlines()[0] and "please report it" in warning
    assert "in search" in warning and "1 / len" in warning and "would run:" in said
    assert "Traceback" not in error


@pytest.mark.parametrize(("problem", "sign"), [(f"division by zero; {REPORT}", "\n\nwarning: "), ("none here", "\n")])
def test_internal_memory_check_error_is_shown_as_a_warning(problem: str, sign: str, monkeypatch, capsys) -> None:
    monkeypatch.setattr(Planning, "ask", lambda *_, **__: (None, problem))
    assert main(["train", *SMALL, "--model", "model", "--nproc", "1", "--plan", "none", "--dry-run"]) == 0
    assert f"{sign}memory is not checked before the first step: {problem}" in capsys.readouterr().out


@pytest.mark.slow
def test_request_of_leaves_the_given_chain_unchanged() -> None:
    config = load_config([*SMALL, "--freeze", "*.layers.0"])
    _, chain = run_model.RunModel(config).followed(300)
    names = [name for name, _ in chain.model.named_parameters()]
    before = [*chain.model.parameters(), *chain.model.buffers()]
    state, units = dict(vars(chain)), chain.units
    world = World(Topology.grid(1, 1), 0, torch.device("cpu"), None)
    asked = Asked(32, 4, dtype=torch.float32, timed=False, profile="measure", quantize="int8")
    first = request_of(chain, machine_unprobed(world), asked)
    after = [*chain.model.parameters(), *chain.model.buffers()]
    assert [name for name, _ in chain.model.named_parameters()] == names
    assert all(one is other and one.is_meta for one, other in zip(before, after, strict=True))
    assert vars(chain) == state and chain.units is units and not any(unit.packing for unit in units)
    again = request_of(chain, machine_unprobed(world), replace(asked, quantize="none"))
    assert first.model != again.model == chain.spec


@pytest.mark.parametrize("packing", [pytest.param("split", marks=pytest.mark.slow), "balanced"])
def test_prepared_run_holds_its_decisions_and_the_stated_memory(packing: str) -> None:
    """And the memory that is stated is the plan's own sum."""
    words = [*SMALL, "--packing", packing, "--schedule.look-ahead", "3", "--learning-rate", "0.001", "--steps", "3"]
    words += ["--schedule.recompute", "full"]  # or nothing would be computed again, and there is nothing to keep
    config = load_config(
        [*words, "--optimizer.warmup-steps", "1", "--optimizer.weight-decay", "0.1", "--quantize", "none"]
    )
    world = World(Topology.grid(1, 1), 0, torch.device("cpu"), None)
    console, model, start = Console(0), run_model.RunModel(config), _checkpoint(config)
    documents = documents_of(config, model, world, console)
    run = build(settle_data(documents, model, start, world, console), world, console)
    prepared = check(run, *follow_plan(run, world, console), console)
    assert prepared.config == config, "nothing was open"
    assert prepared.batch.packing == packing and prepared.dtype == torch.float32
    assert (prepared.batch.bin_tokens > 0) == prepared.batch.dealt == (packing == "balanced")
    assert prepared.request is not None and prepared.needs is not None
    needs = memory_quickly(prepared.request, prepared.request.step(prepared.schedule))
    kept = {"kept": prepared.schedule.keep_mib * 2**20} if prepared.schedule.keep_mib else {}
    # The last copy takes the place of what computing gave back: no step follows it here.
    said, copied = dict(prepared.needs.parts), needs.parts["saving"]
    assert said.pop("texts") > 0, "that the run samples"
    assert said.pop("saving") == max(0, copied - needs.parts["activations"] - needs.parts["working"])
    assert said == {name: size for name, size in needs.parts.items() if name != "saving"} | kept
    assert bool(kept) == prepared.batch.dealt
    if kept:
        there = machine_unprobed(world).device.memory_bytes
        assert needs.device + kept["kept"] <= there and kept["kept"] < MEMORY["cpu"] * there
