"""``tawpipe train --dry-run`` says what would run, refuses what a run is refused for, and leaves nothing behind."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tawpipe.cli import main
from tawpipe.plan.answer.would_fit import WouldFit
from tawpipe.plan.machine.machine import Machine
from tawpipe.runtime.world import World
from tawpipe.train import dry_run, memory

SIZES = ["--vocab-size", "300", "--sequence-length", "32", "--global-batch", "4"]
SMALL = ["--data", "text.txt", *SIZES, "--device", "cpu", "--evaluation.every", "0"]


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A folder with a small text, in which no process can be started; temporary files go beside it."""
    here, others = tmp_path / "here", tmp_path / "others"
    here.mkdir()
    others.mkdir()
    (here / "text.txt").write_text("A sentence of a small text. " * 80)
    monkeypatch.chdir(here)
    monkeypatch.setattr(tempfile, "tempdir", str(others))
    monkeypatch.setenv("TAWPIPE_CACHE", str(tmp_path / "cache"))
    for name in ("RANK", "WORLD_SIZE", "TAWPIPE_LOCAL_LAUNCHER"):
        monkeypatch.delenv(name, raising=False)

    def start(*words: object, **rest: object) -> None:
        raise AssertionError(f"a process was started: {words}")

    monkeypatch.setattr(subprocess, "Popen", start)
    yield here
    assert not any(others.iterdir()) and not (tmp_path / "cache").exists()


def rows(text: str, title: str) -> dict[str, str]:
    """The rows of a table in what was printed."""
    lines = text.partition(f"{title}:\n")[2].splitlines()
    found = [line for line in lines if line.startswith("  ")]
    return {line[2:].partition("  ")[0]: line[2:].partition("  ")[2].strip() for line in found}


def test_dry_run_deals_packed_micro_batches_and_slices_to_a_pipeline(folder: Path, capsys) -> None:
    """One of them in slices, as no bin holds it."""
    lines = [{"text": "A sentence of a small text. " * times} for times in (30, 1, 1, 2, 1, 3)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, lines)))
    words = ["train", "--dry-run", *SMALL, "--data", "rows.jsonl", "--nproc", "2", "--nodes", "1", "--plan", "none"]
    words += ["--packing", "balanced", "--bin-tokens", "12", "--schedule.strategy", "1f1b"]
    assert main(words) == 0
    said = rows(capsys.readouterr().out, "would run")["batch"]
    assert "packed micro-batches per pipeline (" in said and "slices of long documents" in said and "round" not in said


@pytest.mark.usefixtures("few_strategies")
@pytest.mark.slow
def test_dry_run_on_several_nodes_reports_the_run_and_writes_nothing(folder: Path, capsys) -> None:
    threads = torch.get_num_threads()
    assert main(["train", "--dry-run", *SMALL, "--nodes", "2", "--nproc", "4"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("4 processes = 2 nodes x 2 on CPU")
    assert "chosen" in said and "plan: chosen" in said and "links: 2 GB/s assumed" in said
    found = rows(said, "would run")
    assert {"model", "weights", "batch", "strategy", "memory", "available memory"} <= found.keys()
    assert "the run uses" in found["available memory"] and "sent" in found["network"]
    assert [path.name for path in folder.iterdir()] == ["text.txt"] and torch.get_num_threads() == threads


def test_dry_run_and_run_report_equal_settings_and_memory(
    capsys, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    words = ["train", *SMALL, "--nproc", "1", "--plan", "none", "--steps", "1", "--sample.tokens", "0"]
    words += ["--checkpoint.every", "1", "--export.enabled", "false"]
    monkeypatch.setattr("tawpipe.train.run.brief", lambda rows, _: rows)  # the console of a run leaves some out
    assert main([*words, "--dry-run"]) == 0
    would = rows(capsys.readouterr().out, "would run")
    assert main([*words, "--output", str(tmp_path / "run"), f"--cache-dir={tmp_path / 'of-the-run'}"]) == 0
    does = rows(capsys.readouterr().out, "plan")
    assert does["model"] == f"{would['model']}, weights: {would['weights']}"
    for name in ("batch", "attention", "strategy"):
        assert would[name] == does[name]
    before_system = lambda row: row.partition(" while")[0]  # noqa: E731
    assert before_system(would["memory, by use"]) == before_system(does["memory, by use"]) != ""

    before = sorted(tmp_path.rglob("run/**/*"))
    words += ["--output", str(tmp_path / "run"), "--resume", "auto", "--steps", "2", "--dry-run"]
    assert main(words) == 0
    assert rows(capsys.readouterr().out, "would run")["weights"].endswith("step-00000001, step 1")
    assert main([*words, "--seed", "1"]) == 2
    assert "--seed: got 1" in capsys.readouterr().err and sorted(tmp_path.rglob("run/**/*")) == before


def test_dry_run_reads_only_the_first_of_many_documents(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    documents = [json.dumps({"text": f"document {n} " * 20}) for n in range(40)]
    Path("many.jsonl").write_text("\n".join(documents))
    monkeypatch.setattr(dry_run, "FEW_BYTES", 0)
    monkeypatch.setattr(dry_run, "FIRST_DOCUMENTS", 10)
    words = ["train", "--dry-run", *SMALL, "--data", "many.jsonl", "--nproc", "2", "--plan", "none", "--epochs", "3"]
    assert main([*words, "--output", "new/run"]) == 0
    assert not Path("new").exists()
    said = capsys.readouterr().out
    assert "only the first 10 documents are read here" in said
    assert "steps: counted when all documents are read (3 epochs)" in said


def test_dry_run_refuses_missing_data(capsys) -> None:
    assert main(["train", "--dry-run", *SMALL, "--data", "missing.txt"]) == 2
    assert "--data" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "t5"}, "decoder-only"),
        ({"model_type": "no-such"}, "config.json"),
    ],
)
def test_dry_run_refuses_an_untrainable_model_before_reading_data(config, words, capsys, monkeypatch) -> None:
    Path("model").mkdir()
    Path("model/config.json").write_text(json.dumps(config))
    monkeypatch.setattr(dry_run, "documents_of", lambda *_: pytest.fail("data was read"))
    assert main(["train", "--dry-run", *SMALL, "--model", "model"]) == 2
    assert "--model" in (said := capsys.readouterr().err) and words in said


def test_dry_run_refuses_a_model_too_large_for_memory(capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    real = memory.machine_unprobed

    def small(world: World) -> Machine:
        machine = real(world)
        return replace(machine, device=replace(machine.device, memory_bytes=1 << 20))

    monkeypatch.setattr(memory, "machine_unprobed", small)
    monkeypatch.setattr(memory, "remedies", lambda *_: [])  # they are of the run's own test, and take long
    monkeypatch.setattr(WouldFit, "ways", lambda _: iter(()))
    assert main(["train", "--dry-run", *SMALL, "--nproc", "4", "--plan", "none"]) == 2
    assert "memory: got 'a run that needs" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "setting"),
    [
        (["--schedule.strategy", "no-such"], "--schedule.strategy"),
        (["--nproc", "4", "--nodes", "3"], "--nodes"),
        (["--output", "text.txt/run"], "--output"),
        (["--output", "old"], "--output"),
        (["--plan", "none", "--nproc", "1", "--schedule.sequence-ranks", "3"], "sequence_ranks"),
        (["--plan", "none", "--nproc", "1", "--inject", "rank=9,step=1,at=forward:0,kind=kill"], "--inject"),
        (["--plan", "none", "--nproc", "1", "--compile", "--schedule.sequence-chunk", "16"], "compile_layers"),
    ],
)
def test_dry_run_refuses_settings_that_the_run_refuses(words: list[str], setting: str, capsys) -> None:
    Path("old").mkdir()
    Path("old/metrics.jsonl").touch()
    assert main(["train", "--dry-run", *SMALL, *words]) == 2
    assert setting in capsys.readouterr().err
