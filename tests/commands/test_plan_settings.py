"""``tawpipe plan`` reads the settings that a run reads, and makes the plan that the run would make."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import LlamaConfig

from forked_commands import run_tawpipe
from runs import TIMEOUT_S, environment
from tawpipe.cli import main
from tawpipe.commands.plan import _vocabulary
from tawpipe.commands.plan_words import PlanWords, parse, plan_parser, schedule_of
from tawpipe.model.chain import Chain
from tawpipe.plan.cost import measure
from tawpipe.plan.cost.profile import Profile, estimate
from tawpipe.plan.machine.machine import Device
from tawpipe.train import planned as planning
from tawpipe.train.saying.words import PARTS, gib
from tawpipe.train.settings.config import load_config

SHAPE: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 2}
RUN: dict[str, Any] = {
    "model": "model",
    "data": ["text.txt"],
    "sequence_length": 64,
    "global_batch": 8,
    "micro_batch": 2,
    "dtype": "float32",
    "device": "cpu",
    "freeze": ["*.layers.0"],
    "steps": 3,
    "optimizer": {"name": "adam"},
    "evaluation": {"every": 0},
    "checkpoint": {"every": 1},
    "schedule": {"sequence_ranks": 1, "reduce_dtype": "same", "loss_chunk_tokens": 32},
}
TOPOLOGY = ["--topology", "1x2", "--device-name", "CPU"]


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A folder with a model, a text that fills every row, and the settings of a run."""
    LlamaConfig(**SHAPE, num_key_value_heads=2, vocab_size=300).save_pretrained(tmp_path / "model")
    (tmp_path / "text.txt").write_text("A sentence of a small text. " * 400)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(RUN))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TAWPIPE_CACHE", str(tmp_path / "cache"))
    for name in ("RANK", "WORLD_SIZE", "TAWPIPE_LOCAL_LAUNCHER"):
        monkeypatch.delenv(name, raising=False)
    yield tmp_path


def read(words: list[str]) -> PlanWords:
    return parse(plan_parser(), words)


def table(text: str) -> list[list[str]]:
    """The rows of the comparison in what was printed."""
    lines = text.splitlines()
    first = next(place for place, line in enumerate(lines) if line.split()[:1] == ["strategy"])
    return [line.split() for line in takewhile(lambda line: line and not line.startswith("plan:"), lines[first:])]


@pytest.mark.usefixtures("few_strategies")
def test_plan_for_a_config_equals_the_plan_of_its_dry_run(monkeypatch, capsys) -> None:
    """With the same links, and times that do not differ from one moment to the next."""

    def measured(chain: Chain, *, dtype: torch.dtype, chunk_tokens: int, optimizer: Any, **_: Any) -> Profile:
        return estimate(chain, dtype=dtype, flops=1e11, chunk_tokens=chunk_tokens, optimizer=optimizer)

    monkeypatch.setattr(measure, "measure", measured)
    monkeypatch.setattr(measure, "resident_memory", lambda: 1 << 28)
    machine = measure.machine_of("1x2", device=Device("CPU", 8 << 30))
    monkeypatch.setattr(planning, "probed", lambda _: machine)
    assert main(["train", "--config", "run.yaml", "--nproc", "2", "--nodes", "1", "--dry-run"]) == 0
    stated = capsys.readouterr().out
    assert main(["plan", "--config", "run.yaml", *TOPOLOGY, "--memory", "6.4", "--save", "plan.yaml"]) == 0
    planned = capsys.readouterr().out
    assert table(planned) == table(stated) and "chosen" in planned
    assert main(["plan", "--config", "run.yaml", *TOPOLOGY, "--memory", "6.4", "--json"]) == 0
    (chosen, *_) = json.loads(capsys.readouterr().out)["candidates"]
    stated_rows = stated.partition("would run:\n")[2].splitlines()
    rows = {name: words.strip() for name, _, words in (line.strip().partition("  ") for line in stated_rows)}
    assert rows["strategy"].startswith(f"{chosen['strategy']}: ")
    assert rows["memory"] == f"{gib(chosen['peak_gib'] * 2**30)} per process at most", "one sum of memory"
    parts = {name: gib(size * 2**30) for name, size in chosen["memory_gib"].items() if size}
    assert len(parts) > 3 and all(f"{size} {PARTS[name]}" in rows["memory, by use"] for name, size in parts.items())
    words = ["train", "--config", "run.yaml", "--nproc", "2", "--nodes", "1", "--dry-run", "--plan", "plan.yaml"]
    assert main(words) == 0, "the run takes the plan for its own"
    assert "assumed" in stated and "assumed" not in capsys.readouterr().out, "of links, for a plan that is made now"


UNEQUAL: dict[str, Any] = {
    "format": 1,
    "nodes": [2],
    "inside": {"gbyte_per_s": 2},
    "devices": {
        "new": {"name": "CPU", "memory_gib": 6},
        "old": {"name": "CPU", "memory_gib": 6, "speed": 0.5},
    },
    "device_of": ["new", "old"],
}
"""Two processes of one machine; the second takes twice as long."""


@pytest.mark.usefixtures("few_strategies")
def test_run_accepts_a_plan_for_devices_of_two_speeds(capsys) -> None:
    Path("two.yaml").write_text(yaml.safe_dump(UNEQUAL))
    assert main(["plan", "--config", "run.yaml", "--topology", "two.yaml", "--save", "plan.yaml"]) == 0
    capsys.readouterr()
    assert yaml.safe_load(Path("plan.yaml").read_text())["schedule"]["device_speeds"] == "1,0.5"
    words = ["train", "--config", "run.yaml", "--nproc", "2", "--nodes", "1", "--dry-run", "--plan", "plan.yaml"]
    assert main(words) == 0
    assert "would run:" in capsys.readouterr().out
    assert main([*words, "--schedule.device-speeds", "1,1"]) == 2
    assert "--schedule.device-speeds: got '1,1'; 1,0.5, as in the plan" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.usefixtures("few_strategies")
def test_run_with_a_plan_for_two_speeds_learns_as_one_process() -> None:
    """And goes on by the plan of its checkpoint."""
    Path("two.yaml").write_text(yaml.safe_dump(UNEQUAL))
    more = {"dtype": "float64", "micro_batch": 1, "global_batch": 12, "evaluation": {"every": 0}}
    more |= {"sample": {"tokens": 0}, "export": {"enabled": False}, "log": {"trackers": ["none"], "every": 1}}
    Path("run.yaml").write_text(yaml.safe_dump(RUN | more))
    assert main(["plan", "--config", "run.yaml", "--topology", "two.yaml", "--save", "plan.yaml"]) == 0
    losses = {}
    for name, words in (
        ("alone", ["--nproc", "1", "--plan", "none"]),
        ("two", ["--nproc", "2", "--nodes", "1", "--plan", "plan.yaml"]),
        ("again", ["--nproc", "2", "--nodes", "1", "--plan", "auto", "--resume", "two/checkpoints/step-00000002"]),
    ):
        done = run_tawpipe(["train", "--config", "run.yaml", "--output", name, *words], environment(), TIMEOUT_S)
        assert done.returncode == 0, done.stderr
        losses[name] = [json.loads(line)["loss"] for line in Path(name, "metrics.jsonl").read_text().splitlines()]
    assert losses["two"] == pytest.approx(losses["alone"], rel=1e-6)
    assert losses["again"] == pytest.approx(losses["alone"][2:], rel=1e-6)
    assert "plan: from the checkpoint; " in done.stdout
    assert "device_speeds: 1,0.5" in Path("two", "plan.yaml").read_text()


def test_plan_options_override_the_file_and_mean_what_they_mean_to_a_run() -> None:
    words = ["--config", "run.yaml", "--global-batch", "16", "--optimizer", "muon", "--sequence-chunk", "16"]
    ours = read([*words, *TOPOLOGY]).config
    theirs = load_config([
        *("--config", "run.yaml", "--global-batch", "16", "--optimizer.name", "muon"),
        *("--schedule.sequence-chunk", "16"),
    ])  # fmt: skip
    assert ours.schedule == theirs.schedule and ours.optimizer == theirs.optimizer
    assert (ours.global_batch, ours.micro_batch, ours.freeze) == (16, 2, ["*.layers.0"])


def test_plan_reads_the_printed_config_of_a_run(capsys) -> None:
    """All of them stand in that file, most as usual."""
    with pytest.raises(SystemExit):
        load_config(["--config", "run.yaml", "--print-config"])
    Path("config.yaml").write_text(capsys.readouterr().out)
    ours, theirs = (read(["--config", name, *TOPOLOGY]) for name in ("config.yaml", "run.yaml"))
    ours.check()
    assert ours.config == theirs.config and len(ours.user_values) > len(theirs.user_values)


def test_longest_ignores_row_and_batch_of_the_file_unless_given_as_options() -> None:
    assert read(["--config", "run.yaml", "--longest", *TOPOLOGY]).row is None
    assert read(["--config", "run.yaml", "--longest", "--sequence-length", "96", *TOPOLOGY]).row == 96
    assert read(["--config", "run.yaml", "--longest", *TOPOLOGY]).batch is None, "but one row for every device"
    assert read(["--config", "run.yaml", "--longest", "--global-batch", "6", *TOPOLOGY]).batch == 6
    assert read(["--config", "run.yaml", *TOPOLOGY]).batch == RUN["global_batch"]


def test_plan_keeps_whole_rows_if_retrieval_lengths_are_evaluated() -> None:
    """As the run does; a plan that divides rows would be refused by it."""
    free = {**RUN, "schedule": {}}
    for lengths, ranks in (([], None), ([32], 1)):
        Path("run.yaml").write_text(yaml.safe_dump(free | {"evaluation": {"retrieval_lengths": lengths}}))
        assert schedule_of(read(["--config", "run.yaml", *TOPOLOGY]).config).sequence_ranks == ranks


def test_preset_takes_the_vocabulary_size_of_the_config() -> None:
    """Its own where no run is meant."""
    Path("run.yaml").write_text(yaml.safe_dump({**RUN, "model": "tiny", "freeze": []}))
    assert _vocabulary(read(["--config", "run.yaml", *TOPOLOGY])) == load_config(["--config", "run.yaml"]).vocab_size
    alone = ["--model", "tiny", "--sequence-length", "64", "--global-batch", "8", *TOPOLOGY]
    assert _vocabulary(read(alone)) is None and _vocabulary(read([*alone, "--vocab-size", "500"])) == 500


def test_plan_measures_links_before_a_process_takes_a_device(monkeypatch) -> None:
    """On rank 0 and on the others, which then end: a context that is there too early takes memory, and NCCL's settings
    come too late.
    """
    monkeypatch.setattr("tawpipe.runtime.world.pick_device", lambda *_: pytest.fail("too early"))
    monkeypatch.setattr("tawpipe.plan.machine.doctor.probe_machine", lambda _: None)
    assert main(["plan", "--config", "run.yaml", "--topology", "probe"]) == 0


@pytest.mark.parametrize(
    ("changes", "words", "reason"),
    [
        ({}, ["--config", "missing.yaml"], "missing.yaml"),
        ({"sequence_lenght": 5}, [], "--config run.yaml, line 1: got 'sequence_lenght'; no such key; did you mean"),
        ({"global_batch": "many"}, [], "--global-batch in run.yaml"),
        ({"global_batch": 0}, [], "--global-batch in run.yaml, line"),
        ({"micro_batch": 9}, [], "--micro-batch in run.yaml, line"),
        ({"schedule": {"early_updates": True}}, [], "early_updates"),
        ({"schedule": {"strategy": "flat"}}, [], "--schedule.strategy in run.yaml, line"),
        ({"schedule": {"look_ahead": 3}}, [], "unset: the plan chooses it"),
        ({"packing": "balanced"}, [], "--packing in run.yaml, line"),
        ({"max_document": 64}, [], "--max-document in run.yaml, line"),
        ({"quantize": "nf4", "freeze": []}, [], "--quantize in run.yaml, line"),
        ({"model": "no/such/place/model"}, [], "--model"),
        ({}, ["--steps", "5"], "--steps"),
        ({}, ["--sequence-chunk", "many"], "--schedule.sequence-chunk: got 'many'"),
    ],
)
def test_settings_that_a_plan_cannot_use_are_refused(changes, words, reason, capsys, monkeypatch) -> None:
    monkeypatch.setattr(measure, "request_of", lambda *_, **__: pytest.fail("went on"))
    Path("run.yaml").write_text(
        yaml.safe_dump(changes | {k: v for k, v in RUN.items() if k not in changes}, sort_keys=False)
    )
    assert main(["plan", "--config", "run.yaml", *TOPOLOGY, *words]) == 2
    assert reason in (said := capsys.readouterr().err), said


@pytest.mark.parametrize(
    ("error", "reports"), [(OverflowError("infinity"), True), (KeyError("x"), True), (OSError("no such file"), False)]
)
def test_internal_error_is_reported_as_a_fault_of_tawpipe_but_not_oserror(
    error: Exception, reports: bool, capsys, monkeypatch
) -> None:
    def fails(_: PlanWords) -> int:
        raise error

    monkeypatch.setattr("tawpipe.commands.plan._run", fails)
    assert main(["plan", "--config", "run.yaml", *TOPOLOGY]) == 1
    said = capsys.readouterr().err
    assert "Traceback" in said and type(error).__name__ in said
    assert ("this is a fault of tawpipe" in said.splitlines()[-1]) == reports


def test_wrong_plan_settings_are_refused_before_torch_is_imported(folder: Path) -> None:
    import subprocess
    import sys

    program = (
        "import sys, tawpipe.cli\n"
        f"code = tawpipe.cli.main(['plan', '--config', 'run.yaml', *{TOPOLOGY!r}, '--schedule.sequence-chunk', '-1'])\n"
        "import json; print(json.dumps([code, 'torch' in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=folder)
    assert json.loads(done.stdout.splitlines()[-1]) == [2, False], done.stderr


def test_plan_refuses_sequence_length_auto(capsys) -> None:
    assert main(["plan", "--model", "tiny", *TOPOLOGY, "--sequence-length", "auto", "--global-batch", "4"]) == 2
    assert "--sequence-length: got 'auto'; a number: a plan reads no documents" in " ".join(
        capsys.readouterr().err.split()
    )
