"""The page for users of other trainers: its commands have the settings of the files beside them, and pass a dry run."""

from __future__ import annotations

import re
import runpy
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from pages import commands
from tawpipe.cli import main
from tawpipe.train.settings.config import load_config

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "coming-from.md"
FILES: list[dict[str, Any]] = [
    yaml.safe_load(block) for block in re.findall(r"^```yaml\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
]
COMMANDS = [command.tawpipe or [] for command in commands(PAGE)]
SAME = {
    "model_name_or_path": "model",
    "base_model": "model",
    "max_length": "sequence_length",
    "sequence_len": "sequence_length",
    "cutoff_len": "sequence_length",
    "lora_r": "lora.rank",
    "lora_alpha": "lora.alpha",
    "lora_dropout": "lora.dropout",
    "learning_rate": "learning_rate",
    "lr_scheduler_type": "optimizer.schedule",
    "lr_scheduler": "optimizer.schedule",
    "num_train_epochs": "epochs",
    "num_epochs": "epochs",
    "output_dir": "output",
}
"""Options of other trainers, each with the setting that has its value."""
BATCH = ("per_device_train_batch_size", "micro_batch_size", "gradient_accumulation_steps")
OTHER = {
    *("dtype", "bf16", "stage", "do_train", "deepspeed", "datasets", "dataset", "template", "assistant_only_loss"),
    *("packing", "sample_packing", "neat_packing", "use_peft", "adapter", "finetuning_type", "load_in_4bit"),
    *("lora_target_modules", "lora_target_linear"),
}
"""Options whose values the page explains, or that have no counterpart."""


def _setting(config: object, name: str) -> Any:
    for part in name.split("."):
        config = getattr(config, part)
    return config


@pytest.mark.parametrize(("file", "words"), zip(FILES, COMMANDS, strict=True), ids=["trl", "axolotl", "llama-factory"])
def test_command_has_the_settings_of_the_file_beside_it(file: dict[str, Any], words: list[str]):
    config = load_config(words[1:])
    assert config.dry_run and file.keys() <= SAME.keys() | OTHER | set(BATCH)
    values = {name: _setting(config, SAME[name]) for name in file.keys() & SAME.keys()}
    assert values == {name: file[name] for name in values} and len(values) > 4
    rows = [file[name] for name in BATCH if name in file]
    assert config.global_batch == rows[0] * rows[1] == 16
    assert (config.lora.rank is None) == (file.get("finetuning_type") == "full")
    assert (config.quantize == "nf4") == file.get("load_in_4bit", False)


@pytest.mark.slow
@pytest.mark.parametrize("words", COMMANDS, ids=["trl", "axolotl", "llama-factory"])
def test_command_beside_another_trainers_file_passes_a_dry_run(words: list[str], tmp_path: Path, monkeypatch, capsys):
    pytest.importorskip("peft")
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(ROOT / "examples" / "small_model.py"))["main"]("small-model", steps=1)
    shutil.copy(ROOT / "examples" / "chats.jsonl", ".")
    small = ["small-model" if word == "Qwen/Qwen3-8B" else word for word in words]
    assert "small-model" in small
    assert main([*small, "--nproc", "1", "--cache-dir", "cache"]) == 0, capsys.readouterr().err
    assert "dry run: all checks passed" in capsys.readouterr().out
    assert {path.name for path in tmp_path.iterdir()} == {"small-model", "chats.jsonl"}
