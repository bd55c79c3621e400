"""A run of commit 952d39e4 is read: its checkpoint, its settings and its plan, whose keys are names of fields."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from states import ALONE
from tawpipe import Pipeline, adamw
from tawpipe.checkpoint.format import read_manifest
from tawpipe.checkpoint.resume import RunState
from tawpipe.cli import main
from tawpipe.plan.search.plan_file import SavedPlan
from tawpipe.train.settings.config import load_config

RUN = Path(__file__).parent / "run_of_952d39e4" / "run"
STATE = RUN / "checkpoints" / "step-00000004"


def test_the_checkpoint_of_an_older_run_is_loaded() -> None:
    model = AutoModelForCausalLM.from_pretrained(RUN / "model")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    pipeline = Pipeline(model, optimizer=adamw(1e-3), world=ALONE)
    pipeline.load(STATE)
    exported = load_file(RUN / "model" / "model.safetensors")
    assert pipeline.step_number == 4
    for name, value in exported.items():
        assert (loaded := pipeline.parameter(name)) is not None and torch.equal(loaded, value)
    pipeline.close()
    state = RunState.of(read_manifest(STATE), str(STATE))
    assert (state.step, state.samples, state.topology) == (4, 16, "2 processes = 2 nodes x 1")


def test_the_settings_and_the_plan_of_an_older_run_are_read() -> None:
    config = load_config(["--config", str(RUN / "config.yaml")])
    plan = SavedPlan.of((RUN / "plan.yaml").read_text())
    assert plan is not None and (config.steps, config.nproc, config.schedule.strategy) == (4, 2, "tawpipe-spread")
    assert plan.settings(config.schedule).look_ahead == 2 and plan.step_s > 0


@pytest.mark.slow
def test_an_older_run_is_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(RUN.parent, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    assert (
        main(["train", "--config", "run/config.yaml", "--resume", "auto", "--steps", "6", "--export.enabled", "false"])
        == 0
    )
    printed = capfd.readouterr().out
    assert "plan: from the checkpoint" in printed and "resumed from run/checkpoints/step-00000004" in printed
    assert "step 6/6" in printed
