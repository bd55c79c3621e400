"""What a run exports: the stops and the template that were trained with, tried before the first step."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedTokenizerFast,
)

from tawpipe.checkpoint.names import complete_states
from tawpipe.checkpoint.resume import read_run
from tawpipe.cli import main
from tawpipe.errors import RunError

SHAPE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 300,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": 256,
}
TURNS = "{% for m in messages %}{{ '<|ask|>' + m.content + '<|turn_end|>' }}{% endfor %}"
WORDS = (
    *("--plan", "none", "--nproc", "1", "--device", "cpu", "--sequence-length", "64", "--global-batch", "4"),
    *("--evaluation.every", "0", "--checkpoint.every", "0", "--sample.tokens", "0", "--validation-fraction", "0"),
    *("--optimizer.warmup-steps", "0", "--steps", "1", "--check", "never"),
)
CHATS = [{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ok"}]}] * 8
STOPS = {"eos_token_id": [256, 299], "temperature": 0.6, "do_sample": False, "top_p": 0.95}
"""A generation config that transformers' own check would not write."""


def tokenizer(*special: str) -> PreTrainedTokenizerFast:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(letters)}, merges=[]))
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    given = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|end|>")
    given.add_tokens([*special], special_tokens=True)
    return given


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A folder with weights and a tokenizer without a chat template; its config names transformers 4's class."""
    LlamaForCausalLM(LlamaConfig(**SHAPE)).save_pretrained(tmp_path / "base")
    tokenizer("<|turn_end|>", "<|ask|>", "<|im_start|>", "<|im_end|>").save_pretrained(tmp_path / "base")
    path = tmp_path / "base" / "tokenizer_config.json"
    settings = json.loads(path.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast", "a_key": "of others"}
    path.write_text(json.dumps(settings))
    return tmp_path / "base"


def trained(base: Path, *words: str, rows: list[dict[str, Any]] = CHATS) -> tuple[int, Path]:
    """A run in this process: the exit code and its output folder."""
    home = base.parent
    (home / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = ("--model", str(base), "--data", str(home / "rows.jsonl"), "--output", str(home / "out"), *WORDS, *words)
    return main(["train", *given, "--cache-dir", str(home / "cache")]), home / "out"


def stops(folder: Path) -> Any:
    return json.loads((folder / "generation_config.json").read_text())["eos_token_id"]


@pytest.mark.parametrize("template", [TURNS, None])
@pytest.mark.slow
def test_token_that_ends_learned_turns_is_exported_as_a_stop(base: Path, template: str | None, capsys) -> None:
    ends = tokenizer("<|turn_end|>", "<|ask|>", "<|im_start|>", "<|im_end|>").convert_tokens_to_ids(
        "<|turn_end|>" if template else "<|im_end|>"
    )
    (base / "generation_config.json").write_text(json.dumps(STOPS))
    if template:
        (base / "chat_template.jinja").write_text(template)
    code, out = trained(base, "--checkpoint.every", "1")
    assert code == 0 and "export" in (said := capsys.readouterr().out) and "checked" in said
    assert stops(out / "model") == [256, 299, ends]
    content = json.loads((out / "model" / "generation_config.json").read_text())
    assert {key: content[key] for key in STOPS if key != "eos_token_id"} == {
        key: value for key, value in STOPS.items() if key != "eos_token_id"
    }
    opened = AutoTokenizer.from_pretrained(out / "model")
    assert ("<|turn_end|>" if template else "<|im_start|>") in opened.chat_template
    assert main(["export", str(out), "--output", str(base.parent / "again")]) == 0
    assert "export: checked" in capsys.readouterr().out
    assert stops(base.parent / "again") == [256, 299, ends]  # without its data


def test_existing_stop_token_is_not_added_twice(base: Path) -> None:
    (base / "generation_config.json").write_text(json.dumps({"eos_token_id": 256}))
    _, out = trained(base, rows=[{"text": f"A short text, number {number}."} for number in range(8)])
    assert stops(out / "model") == 256


def test_tokenizer_files_are_copied_and_only_the_template_changes(base: Path) -> None:
    (base / "chat_template.jinja").write_text(TURNS)
    (base.parent / "mine.jinja").write_text(TURNS + "{{ '' }}")
    code, out = trained(base, "--chat-template", str(base.parent / "mine.jinja"))
    assert code == 0
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (out / "model" / name).read_bytes() == (base / name).read_bytes(), name
    assert (out / "model" / "chat_template.jinja").read_text() == TURNS + "{{ '' }}"


def test_another_tokenizer_replaces_all_tokenizer_files_of_the_base(base: Path) -> None:
    tokenizer("<|other|>").save_pretrained(base.parent / "other")
    (base / "merges.txt").write_text("")
    code, out = trained(base, "--tokenizer", str(base.parent / "other"), rows=[{"text": "some words"}] * 8)
    assert code == 0 and not (out / "model" / "merges.txt").exists()
    assert "<|other|>" in AutoTokenizer.from_pretrained(out / "model").get_vocab()


def test_unsavable_tokenizer_ends_the_run_before_its_first_step(base: Path, monkeypatch, capsys) -> None:
    def fails(*_: object) -> None:
        raise NotImplementedError("not saved")

    monkeypatch.setattr("tawpipe.model.files.carried.tokenizers_agree", lambda *_: False)  # or its files are carried
    monkeypatch.setattr(PreTrainedTokenizerFast, "save_pretrained", fails)
    code, out = trained(base)
    said = capsys.readouterr()
    assert code == 2 and "not saved" in said.err and "step 1/1" not in said.out
    assert not (out / "model").exists()


def test_an_unreadable_generation_config_is_named_before_the_first_step(base: Path, capsys) -> None:
    (base / "generation_config.json").write_text("{")
    code, _ = trained(base)
    assert code == 2 and "generation_config.json cannot be read" in capsys.readouterr().err


@pytest.mark.parametrize("checkpoint", ["1", "0"])
def test_failed_export_names_the_export_command(base: Path, checkpoint: str, monkeypatch, capsys) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tawpipe.model.files.export.replace_folder", full)
    code, out = trained(base, "--checkpoint.every", checkpoint)
    said = capsys.readouterr().err
    assert code == 1 and "No space left" in said and f"stay in {out / 'model.incomplete'}" in said
    assert load_file(out / "model.incomplete" / "model.safetensors")
    assert (f"`tawpipe export {out}`" in said) == (checkpoint == "1")


def test_wrong_exported_folder_is_named_and_kept(base: Path, monkeypatch, capsys) -> None:
    real = save_file

    def spoils(tensors: dict[str, Any], path: Path, **more: Any) -> None:
        tensors = {name: value.half() if "norm" in name else value for name, value in tensors.items()}
        real({name: value for name, value in tensors.items() if "layers.1.mlp.up" not in name}, path, **more)

    monkeypatch.setattr("safetensors.torch.save_file", spoils)
    code, out = trained(base)
    said = capsys.readouterr().err
    assert code == 1 and "differs from the model of this run" in said
    assert "layers.1.mlp.up_proj.weight is missing" in said and "norm.weight is (torch.float16" in said
    assert (out / "model" / "model.safetensors").is_file()


def test_dry_run_finds_differing_tied_tensors(base: Path, capsys) -> None:
    tensors = load_file(base / "model.safetensors")
    config = json.loads((base / "config.json").read_text()) | {"tie_word_embeddings": True}
    (base / "config.json").write_text(json.dumps(config))
    assert not tensors["lm_head.weight"].equal(tensors["model.embed_tokens.weight"])
    code, _ = trained(base, "--dry-run")
    assert code == 2 and "tie_word_embeddings: false" in capsys.readouterr().err


@pytest.mark.slow
def test_recompute_setting_is_chosen_by_memory_and_kept_in_checkpoints(base: Path, monkeypatch, capsys) -> None:
    steps = ("--checkpoint.every", "1", "--checkpoint.keep", "0")
    _, out = trained(base, *steps)
    assert read_run(complete_states(out / "checkpoints")[-1]).settled["recompute"] == "none"
    monkeypatch.setattr("tawpipe.train.memory.KEEPS", 1e-9)  # there would be no room
    code, _ = trained(base, *steps, "--steps", "2", "--resume", "auto")
    assert code == 0 and read_run(complete_states(out / "checkpoints")[-1]).settled["recompute"] == "none"
    _ = trained(base, *steps, "--output", str(base.parent / "other"))
    assert read_run(complete_states(base.parent / "other" / "checkpoints")[-1]).settled["recompute"] == "full"


def test_pretrained_model_is_trained_by_one_process_by_default(base: Path, capsys) -> None:
    (base.parent / "rows.jsonl").write_text(json.dumps({"text": "some words of a text"}) + "\n")
    words = ["train", "--model", str(base), "--data", str(base.parent / "rows.jsonl"), "--device", "cpu", "--dry-run"]
    words += ["--sequence-length", "64", "--validation-fraction", "0", "--output", str(base.parent / "out")]
    assert main(words) == 0
    said = capsys.readouterr().out
    assert said.startswith("1 process = 1 node x 1") and "measuring" not in said and "planning" not in said
    assert "recompute" in said and "--timeouts" not in said


def test_out_of_memory_error_suggests_recompute(base: Path, monkeypatch) -> None:
    from tawpipe.schedule.settings import ScheduleSettings
    from tawpipe.train.memory import naming_recompute

    for recompute, notes in (("none", 1), ("full", 0)):
        with pytest.raises(MemoryError) as failed, naming_recompute(ScheduleSettings(recompute=recompute)):
            raise MemoryError
        assert len(getattr(failed.value, "__notes__", ())) == notes
    with pytest.raises(RunError) as other, naming_recompute(ScheduleSettings(recompute="none")):
        raise RunError("something else")
    assert not hasattr(other.value, "__notes__")


def test_default_sample_prompt_is_the_start_of_a_held_out_document(base: Path, capsys) -> None:
    rows = [{"text": f"Number {number} of some texts that are long enough to be cut."} for number in range(40)]
    code, out = trained(base, "--sample.tokens", "2", "--validation-fraction", "0.2", rows=rows)
    prompt = json.loads((out / "samples.jsonl").read_text().splitlines()[0])["prompt"]
    assert code == 0 and prompt.startswith("Number ") and any(row["text"].startswith(prompt) for row in rows)


@pytest.mark.slow
def test_run_shows_the_balance_and_its_export_keeps_the_config(tmp_path: Path, capsys: Any) -> None:
    shape = SHAPE | {"num_local_experts": 4, "num_key_value_heads": 2, "pad_token_id": None}
    config = MixtralConfig(**shape, router_aux_loss_coef=0.02, output_router_logits=True)
    MixtralForCausalLM(config).save_pretrained(tmp_path / "base")
    tokenizer().save_pretrained(tmp_path / "base")
    before = json.loads((tmp_path / "base" / "config.json").read_text())
    assert before["output_router_logits"]
    for words, shown in (((), True), (("--experts.balance", "none"), False)):
        code, out = trained(tmp_path / "base", *words, rows=[{"text": "A short text."}] * 8)
        assert code == 0
        assert ("coefficient 0.02 (output_router_logits is true" in capsys.readouterr().out) == shown
        (row,) = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
        assert ("balance_loss" in row and "busiest_expert" in row) == shown
        assert not shown or (1 <= row["busiest_expert"] <= 2 and 2 <= row["balance_loss"] < 4)
        after = json.loads((out / "model" / "config.json").read_text())
        assert {key: after.get(key) for key in before} == before
        shutil.rmtree(out)
    assert trained(tmp_path / "base", "--experts.balance", "some")[0] == 2
    assert "none, auto or a number" in capsys.readouterr().err
