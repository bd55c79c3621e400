"""Recipes in examples/ are ways to train that nothing speaks against, shown on small models of their families."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from family_configs import tiny_config
from tawpipe.cli import main
from tawpipe.data.chats.templates import PLAIN
from tawpipe.data.tokenizer import train_tokenizer
from tawpipe.train.settings.config import load_config

RECIPES = Path(__file__).parent.parent / "examples" / "recipes"
CHATS = RECIPES.parent / "chats.jsonl"
MODELS = {"qwen3-8b": "qwen3", "llama3-8b": "llama", "gemma3-4b": "gemma3", "gpt-oss-20b": "gpt_oss"}
MODELS |= {"qwen3-8b-131k": "qwen3"}
WAYS = ("lora", "qlora", "full", "long-context")
MACHINES = ("machines", "two-sparks", "two-boxes")
USUAL = [("qwen3-8b", "lora")]
SELDOM = [("gemma3-4b", "full"), ("llama3-8b", "qlora"), ("gpt-oss-20b", "qlora"), ("qwen3-8b-131k", "long-context")]
OTHERS = [("llama3-8b", "full"), ("gemma3-4b", "long-context"), ("gpt-oss-20b", "lora")]
OTHERS += [("qwen3-8b", "two-sparks"), ("llama3-8b", "two-boxes")]


@pytest.fixture(scope="module")
def small_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small model of every family, and a tokenizer beside it."""
    folder = tmp_path_factory.mktemp("models")
    tokenizer: Any = train_tokenizer([CHATS.read_text()], 300)
    tokenizer.chat_template = PLAIN
    for family in set(MODELS.values()):
        config = tiny_config(family)
        text = config.get_text_config()
        text.vocab_size, text.max_position_embeddings = len(tokenizer), 256
        AutoModelForCausalLM.from_config(config).save_pretrained(folder / family)
        tokenizer.save_pretrained(folder / family)
    return folder


def config_words(*names: str) -> list[str]:
    return [word for name in names for word in ("--config", str(RECIPES / f"{name}.yaml"))]


def dry_run(small_models: Path, model: str, *others: str) -> int:
    here = ["--model", str(small_models / MODELS[model]), "--data", str(CHATS), "--device", "cpu", "--plan", "none"]
    here += ["--output", str(small_models / "run"), "--validation-data", str(CHATS), "--nproc", "4", "--nodes", "2"]
    short = ["--sequence-length", "512", "--schedule.sequence-chunk", "128"]  # chunks as they are, but small ones
    here += short if "long-context" in others else []
    return main(["train", *config_words(model, *others), *here, "--dry-run"])


@pytest.mark.usefixtures("short_past")
@pytest.mark.parametrize(("model", "way"), [*USUAL, *(pytest.param(*pair, marks=pytest.mark.slow) for pair in SELDOM)])
def test_every_recipe_passes_a_dry_run(
    small_models: Path, model: str, way: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert dry_run(small_models, model, way, "machines") == 0, capsys.readouterr().err
    assert "all checks passed" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.usefixtures("short_past")
@pytest.mark.parametrize(("model", "way"), OTHERS)
def test_recipes_work_with_other_models(small_models: Path, model: str, way: str) -> None:
    assert dry_run(small_models, model, way) == 0


def test_every_recipe_file_is_tested_and_names_a_model_or_a_way() -> None:
    assert {path.stem for path in RECIPES.glob("*.yaml")} == {*MODELS, *WAYS, *MACHINES}
    for model in MODELS:
        assert "/" in load_config(config_words(model)).model
    assert load_config(config_words("qwen3-8b-131k", "long-context")).rope.factor == 4
