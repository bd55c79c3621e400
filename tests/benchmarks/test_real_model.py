"""A real model trains as in a plain loop, and other programs open its exports; skipped where they are not there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import real_model
import real_things
from real_model import TOLERANCE, Bench
from real_sides import largest_difference, losses, open_folder, plain, token_logs

CACHED = [real_things.HOME / name for name in ("smollm2/config.json", "llamafactory-0.9.5/data")]


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    if missing := [str(path) for path in CACHED if not path.exists()]:
        command = "python benchmarks/real_model.py --only training"
        pytest.skip(f"{missing[0]} is not there: {command} fetches it")
    pytest.importorskip("peft")
    for variable in ("RANK", "WORLD_SIZE", "TAWPIPE_LOCAL_LAUNCHER"):
        monkeypatch.delenv(variable, raising=False)


@pytest.mark.slow
def test_adapter_of_a_real_model_trains_and_merges_as_with_peft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(real_model, "BATCH", 1)
    monkeypatch.setattr(real_model, "ANSWER", 0)
    bench = Bench(tmp_path, steps=2)
    file = bench.plan_of(bench.data, 2, tmp_path / "plain-lora", lora=True, rate=real_model.RATES["lora"], warmup=3)
    plain(file)
    run = bench.trained("lora", "lora", 2, "--export.merge", "--check", "never", "--checkpoint.every", "0")
    assert largest_difference(losses(run), json.loads((tmp_path / "plain-lora" / "losses.json").read_text())) < 1e-5
    folders = (run / "model", tmp_path / "plain-lora" / "model")
    merged, adapter = (token_logs(open_folder(folder), bench.chats[:1]) for folder in folders)
    assert largest_difference(merged, adapter) < TOLERANCE


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("real-model")


@pytest.mark.slow
@pytest.mark.parametrize("part", [part for part in real_model.PARTS if part != "cost"])
def test_exports_of_a_real_model_agree_with_other_programs(part: str, folder: Path) -> None:
    rows = list(real_model.readings(part, Bench(folder, steps=2)))
    failed = [real_model.line(row) for row in rows if row.outcome == "failed"]
    assert not failed, "\n".join(failed)
    for row in rows:
        if row.outcome == "skipped":
            pytest.skip(row.note)
