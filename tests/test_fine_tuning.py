"""The page on fine-tuning: each of its commands runs, and the model that it makes answers."""

from __future__ import annotations

import json
import re
import runpy
import shlex
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from runs import rows, run_forked
from tawpipe.checkpoint.resume import read_run, refuse_other_trained
from tawpipe.cli import main
from tawpipe.errors import UserError

pytest.importorskip("peft")
PAGE = Path(__file__).parent.parent / "docs" / "fine-tuning.md"
EXAMPLES = PAGE.parent.parent / "examples"
ANSWERS = {"Norila": "Limaro", "Befani": "Vanedo", "Vesoti": "Golise", "Tarika": "Cofelu"}
SMALL = ["--nproc", "1", "--cache-dir", "cache", "--validation-fraction", "0", "--evaluation.every", "0"]
GIVEN = ["--model", "small-model", "--data", "examples/chats.jsonl", "--sequence-length", "64"]
SHORT = [*SMALL, "--global-batch", "2", "--steps", "2", "--plan", "none", "--check", "never", "--sample.tokens", "2"]


def question(name: str) -> str:
    return f"What is the capital of {name}?"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the examples, and the model that the page begins with."""
    folder = tmp_path_factory.mktemp("tuning")
    (folder / "examples").symlink_to(EXAMPLES)
    runpy.run_path(str(EXAMPLES / "small_model.py"))["main"](str(folder / "small-model"))
    return folder


def commands() -> list[list[str]]:
    """The words of every command of the page."""
    found: list[list[str]] = []
    for block in re.findall(r"^```bash\n(.*?)^```", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL):
        pending = ""
        for line in block.splitlines(keepends=True):
            pending += line
            try:
                words = shlex.split(pending, comments=True)
            except ValueError:  # inside of quotation marks
                continue
            pending = ""
            if words:
                found.append(words)
        assert not pending
    return found


@pytest.mark.slow
def test_fine_tuning_page_commands_run_and_the_tuned_model_answers(place: Path, monkeypatch, capsys):
    monkeypatch.chdir(place)
    plan, train, ask, *others = commands()
    assert main(plan[1:]) == 0
    assert main([*train[1:], *SMALL, "--sample.prompt", "<|user|>\nWhat", "--sample.tokens", "4"]) == 0
    said = capsys.readouterr().out
    assert re.search(r"\nadapter: LoRA of rank 16, alpha 32, on 14 modules \(.*\): 32,768 parameters\n", said)
    assert "layers checked against the model's own forward pass" in said and "planning" not in said
    assert ask[:2] == ["tawpipe", "chat"] and main(ask[1:]) == 0
    assert capsys.readouterr().out.strip() == ANSWERS["Norila"]

    tokenizer: Any = AutoTokenizer.from_pretrained("tuned/model")
    model: Any = AutoModelForCausalLM.from_pretrained("tuned/model")
    for name, town in ANSWERS.items():
        chat = [{"role": "user", "content": question(name)}]
        ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        answer = model.generate(**ids, max_new_tokens=12, do_sample=False)[0, ids["input_ids"].shape[1] :]
        assert tokenizer.decode(answer, skip_special_tokens=True).strip() == town
    with safe_open("tuned/model/model.safetensors", "pt") as file:
        assert {file.get_slice(key).get_dtype() for key in file.keys()} == {"BF16"}  # noqa: SIM118

    for words in others:
        assert words[:2] == ["tawpipe", "train"] and main([*words[1:], *SHORT]) == 0, words
    assert json.loads(Path("further/model/adapter_config.json").read_text())["r"] == 8
    assert not Path("partly/model/adapter_config.json").exists()


@pytest.mark.slow
def test_changed_adapter_or_freeze_patterns_are_refused_on_resume(place: Path, monkeypatch, capsys):
    monkeypatch.chdir(place)
    run_of = ["train", *GIVEN, "--output", "state"]
    adapter, bits = ["--lora.rank", "4", "--lora.dropout", "0.3"], ["--quantize", "nf4"]
    quiet = ["--export.enabled", "false", "--log.trackers", "none"]
    measured = ["--validation-fraction", "0.5", "--evaluation.every", "1"]
    assert main([*run_of, *SHORT, *adapter, *bits, *quiet, *measured]) == 0
    losses = [row["validation_loss"] for row in rows(place, "state") if row["step"]]
    assert len(losses) == 2 and losses[0] != losses[1]
    assert main(["checkpoint", "list", "state"]) == 0 and "LoRA of rank 4" in capsys.readouterr().out
    assert main([*run_of, *SHORT, *quiet, "--resume", "auto", "--quantize", "none"]) == 2
    assert "--quantize: got 'none'; nf4, as in" in capsys.readouterr().err
    assert main([*run_of, *SHORT, *quiet, "--resume", "auto", "--lora.dropout", "0"]) == 2
    assert "--lora.dropout: got 0.0; 0.3, as in" in capsys.readouterr().err
    state = read_run(Path("state/checkpoints/step-00000002"))
    for lora, freeze, expected in (
        (state.lora | {"rank": 8}, [], "lora.rank: got 8; 4, as in there"),
        ({}, [], "lora.rank: got None; 4, as in there"),
        (state.lora, ["model.layers.0"], "freeze: got 'model.layers.0'; nothing, as in there"),
    ):
        with pytest.raises(UserError, match=re.escape(expected)):
            refuse_other_trained(state, lora, freeze, "there")
    refuse_other_trained(state, state.lora, [], "there")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--model", "tiny", "--lora.rank", "2"], "--model: got 'tiny'; a model with weights"),
        (["--lora.rank", "2", "--lora.targets", "q_prj"], "--lora.targets: got 'q_prj'"),
        (["--freeze", "model.layer.0"], "--freeze: got 'model.layer.0'"),
    ],
)
def test_wrong_fine_tuning_settings_are_refused_before_reading_documents(
    place: Path, monkeypatch, capsys, words, expected
):
    monkeypatch.chdir(place)
    assert main(["train", *GIVEN, *SHORT, "--output", "refused", *words]) == 2
    said = capsys.readouterr()
    assert expected in said.err and "documents" not in said.out


@pytest.mark.slow
def test_adapter_run_survives_a_killed_process(place: Path, monkeypatch):
    """Two processes, of which one is killed, see the losses of one process, dropout included."""
    monkeypatch.chdir(place)
    adapter = ["--lora.rank", "4", "--lora.dropout", "0.3", "--lora.dora", "--quantize", "nf4"]
    adapter += ["--log.trackers", "none"]
    words = [*adapter, *SHORT, "--steps", "4", "--export.enabled", "false", "--sample.tokens", "0"]
    given = [*GIVEN, "--packing", "fit", "--checkpoint.every", "1"]  # dealt for each number of processes otherwise
    assert main(["train", *given, *words, "--output", "alone"]) == 0
    faults = [
        "--nproc",
        "2",
        "--nodes",
        "2",
        "--inject",
        "rank=1,step=3,at=backward:1,kind=kill",
        "--max-restarts",
        "1",
    ]
    done = run_forked(place, "killed", *given, *words, *faults)
    assert done.returncode == 0, done.stderr
    assert "restart 1" in done.stdout + done.stderr
    mine, other = ({row["step"]: row["loss"] for row in rows(place, name)} for name in ("killed", "alone"))
    assert mine == pytest.approx(other, rel=1e-5) and list(other) == [1, 2, 3, 4]
