"""Lengths that follow from the documents, judged by the tokenizer that counts them and by the runs that have them."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from transformers import LlamaConfig, LlamaForCausalLM

from forked_commands import run_tawpipe
from runs import environment
from tawpipe.cli import main
from tawpipe.data.chats.templates import PLAIN
from tawpipe.data.prepare import prepare_data
from tawpipe.data.prepared import PreparedData
from tawpipe.data.settings import DataSettings
from tawpipe.data.tokenizer import train_tokenizer
from tawpipe.dealing.lengths import LengthLimits
from tawpipe.errors import UserError
from tawpipe.options import Open
from tawpipe.train import lengths
from tawpipe.train.lengths import lengths_before_data, with_length
from tawpipe.train.run_model import RunModel
from tawpipe.train.settings.checks import validate
from tawpipe.train.settings.config import TrainConfig, config_text, load_config

QUICK = (
    *("--device", "cpu", "--log.trackers", "none", "--sample.tokens", "0", "--check", "never", "--plan", "none"),
    *("--evaluation.every", "0", "--export.enabled", "false", "--cache-dir", "cache", "--dtype", "float64"),
)
POSITIONS = 2048
WORDS = [f"word{number}" for number in range(100)]


def words(draw: random.Random, number: int) -> str:
    return " ".join(draw.choice(WORDS) for _ in range(number))


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model that has weights, a chat that is longer than 512 tokens and a text longer than 4096."""
    folder, draw = tmp_path_factory.mktemp("lengths"), random.Random(0)
    tokenizer: Any = train_tokenizer([words(draw, 60) for _ in range(100)], 400)
    tokenizer.chat_template = PLAIN
    torch.manual_seed(0)
    for name, positions in (("model", POSITIONS), ("wide", 8 * POSITIONS)):
        config = LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=positions,
            eos_token_id=tokenizer.eos_token_id,
        )
        LlamaForCausalLM(config).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    chats, texts = [], []
    for row in range(24):
        question = words(draw, {3: 900, 5: 700}.get(row, 20))
        turns = [{"role": "user", "content": question}, {"role": "assistant", "content": words(draw, 12)}]
        chats.append({"messages": turns})
        texts.append({"text": words(draw, 5000 if row == 3 else 40)})
    for name, content in (("chats", chats), ("texts", texts)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in content))
    return folder


@pytest.fixture(autouse=True)
def there(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(home)


def longest_chat(home: Path) -> int:
    """Tokens of the longest chat, as the tokenizer of transformers counts them."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(home / "model")
    chats = [json.loads(line)["messages"] for line in (home / "chats.jsonl").read_text().splitlines()]
    texts = [tokenizer.apply_chat_template(chat, tokenize=False) for chat in chats]
    return max(len(tokenizer(text).input_ids) for text in texts)  # with the token that begins a text


def train(output: str, *given: str) -> int:
    return main(["train", "--nproc", "1", "--steps", "2", "--output", output, *QUICK, *given])


def saved(output: str) -> dict[str, Any]:
    return yaml.safe_load(Path(output, "config.yaml").read_text())


def losses(output: str) -> list[float]:
    return [json.loads(line)["loss"] for line in Path(output, "metrics.jsonl").read_text().splitlines()]


def prepared(data: str, limits: LengthLimits | int, **given: Any) -> PreparedData:
    settings = DataSettings(data=[data], cache_dir="cache", **given)
    return prepare_data(settings, sequence_length=limits, seed=0, model="wide")


# settings


def test_sequence_length_auto_reads_back_and_numbers_are_accepted(tmp_path):
    config = load_config([])
    assert isinstance(config.sequence_length, Open) and config.sequence_length == 512 and config.global_batch == 8
    text = config_text(config)
    assert "\nsequence_length: auto\n" in text and "\nglobal_batch: null\n" in text
    (tmp_path / "saved.yaml").write_text(text)
    assert load_config(["--config", str(tmp_path / "saved.yaml")]) == config
    (tmp_path / "set.yaml").write_text("sequence_length: 64\n")
    for given in (["--config", str(tmp_path / "set.yaml")], ["--sequence-length", "64"]):
        assert load_config(given).sequence_length == 64
    assert load_config(["--config", str(tmp_path / "set.yaml"), "--sequence-length", "auto"]) == config
    with pytest.raises(UserError, match="a whole number at least 2 or auto"):
        load_config(["--sequence-length", "long"])


def test_random_weights_and_older_checkpoints_keep_default_row_length():
    config = lengths_before_data(load_config([]), None, pretrained=False)
    assert config == TrainConfig(sequence_length=512, global_batch=8)
    assert with_length(config, 512, "balanced", 64) == config
    assert isinstance(lengths_before_data(load_config([]), None, pretrained=True).sequence_length, Open)
    earlier: Any = SimpleNamespace(settled={})
    assert lengths_before_data(load_config([]), earlier, pretrained=True) == config


@pytest.mark.parametrize(
    ("given", "length", "packing", "processes", "rows", "tokens"),
    [
        ((), 512, "split", 4, 8, None),
        ((), 1000, "split", 1, 5, None),
        ((), 3000, "split", 4, 4, None),
        ((), 3000, "balanced", 1, 2, 4096),
        ((), 3000, "balanced", 4, 4, 12000),
        (("--schedule.sequence-ranks", "2"), 3000, "balanced", 4, 2, 6000),
        (("--global-batch", "3"), 3000, "balanced", 4, 3, None),
        (("--tokens-per-step", "5000"), 3000, "balanced", 1, 2, 5000),
        (("--micro-batch", "4"), 3000, "fit", 1, 4, None),
        (("--sequence-length", "100"), 3000, "split", 1, 8, None),
    ],
)
def test_step_gets_its_tokens_or_a_document_per_process(given, length, packing, processes, rows, tokens):
    config = with_length(load_config(given), length, packing, processes)
    assert (config.global_batch, config.tokens_per_step) == (rows, tokens)


def test_settings_that_depend_on_the_length_are_checked_once_known():
    lengths_of = ("--evaluation.retrieval-lengths", "600", "--evaluation.every", "1")
    validate(load_config(["--output", "x", "--model", "model", *lengths_of]))
    with pytest.raises(UserError, match="got 600; at most --sequence-length, which is 512"):
        validate(load_config(["--output", "x", *lengths_of]))


@pytest.mark.parametrize(
    ("given", "most", "why"),
    [
        ((), POSITIONS, "the model's positions"),
        (("--tokens-per-step", "900"), 900, "the tokens of a step"),
        (("--bin-tokens", "700", "--schedule.sequence-ranks", "2"), 1400, "the size of a packed micro-batch"),
        (("--bin-tokens", "700", "--schedule.strategy", "1f1b"), POSITIONS, "the model's positions"),
        (("--rope.scaling", "linear", "--rope.factor", "2"), 2 * POSITIONS, "the model's positions"),
    ],
)
def test_document_limit_is_the_smallest_of_model_step_and_pack(given, most, why):
    config = load_config(["--model", "model", *given])
    limits = lengths.limits_of(config, RunModel(config))
    assert (limits.most, limits.why) == (most, why)


# data


def test_longest_document_sets_the_row_length_within_the_limits(home):
    limits = LengthLimits(most=4000, why="the model's positions", text=4096)
    longest = longest_chat(home)
    cut = "2 chats were longer than 600 tokens (the model's positions)"
    chats = prepared("chats.jsonl", limits)
    assert chats.report.sequence_length == chats.longest == longest > 512 and chats.report.train.cut == 0
    assert f"sequence length: {longest:,} tokens, the longest document (--sequence-length)" in chats.report.lines()
    fewer = prepared("chats.jsonl", replace(limits, most=600)).report
    assert fewer.sequence_length == 512 and fewer.why_length == f"the minimum; {cut}"
    assert any("exceed 600 tokens (the model's positions)" in line for line in fewer.lines())
    texts = prepared("texts.jsonl", replace(limits, most=9000)).report
    assert texts.sequence_length == 4096 and texts.why_length == "the tokens of a step; 1 document is longer"
    both = DataSettings(data=["chats.jsonl"], validation_data=["texts.jsonl"], cache_dir="cache")
    assert prepare_data(both, sequence_length=limits, seed=0, model="wide").report.sequence_length == 4000


def test_long_text_beside_chats_is_cut_as_a_text(home):
    limits = LengthLimits(most=9000, why="the model's positions", text=4096)
    both = DataSettings(data=["chats.jsonl", "texts.jsonl"], validation_fraction=0.0, cache_dir="cache")
    report = prepare_data(both, sequence_length=limits, seed=0, model="wide").report
    assert report.sequence_length == 4096 and report.train.cut == 1  # the text, and no chat is cut at turns
    assert not report.read.troubles


def test_short_documents_share_rows_of_the_default_length(tmp_path):
    (tmp_path / "short.txt").write_text("word1 word2")
    (tmp_path / "other.txt").write_text("word3 word2")
    limits = LengthLimits(most=4000, why="", text=4096)
    assert prepared(str(tmp_path / "*.txt"), limits).report.sequence_length == 512
    assert prepared(str(tmp_path / "*.txt"), replace(limits, most=300)).report.sequence_length == 300


def test_stream_length_has_a_limit_and_first_documents_set_a_dry_run(home):
    limits = LengthLimits(most=16384, why="the model's positions", text=4096)
    assert prepared("chats.jsonl", limits, streaming=True).report.sequence_length == 8192
    assert prepared("texts.jsonl", limits, streaming=True).report.sequence_length == 4096
    assert prepared("chats.jsonl", replace(limits, most=900), streaming=True).report.sequence_length == 900
    look = prepared("chats.jsonl", replace(limits, looks=True), streaming=True).report
    assert look.sequence_length == longest_chat(home) and look.why_length == "the longest of the first documents"


# runs


@pytest.mark.slow
def test_run_reports_and_saves_its_length_and_a_resumed_run_keeps_it(home, capsys):
    given = ("--model", "wide", "--data", "chats.jsonl")
    longest = longest_chat(home)
    assert train("first", *given) == 0
    assert f"sequence length: {longest:,} tokens, the longest document" in capsys.readouterr().out
    had = {"sequence_length": longest, "global_batch": -(-4096 // longest), "tokens_per_step": 4096}
    assert {name: saved("first")[name] for name in had} == had
    state = next(Path("first", "checkpoints").glob("*/tawpipe.json"))
    assert {name: json.loads(state.read_text())["run"]["settled"][name] for name in had} == had
    Path("first", "config.yaml").unlink()  # a restart has the words of the start and the state alone
    lines = Path("chats.jsonl").read_text()
    try:
        Path("chats.jsonl").write_text(lines + json.dumps({"messages": long_chat()}) + "\n")
        assert train("second", *given, "--resume", str(state.parent), "--steps", "3") == 0
    finally:
        Path("chats.jsonl").write_text(lines)
    assert {name: saved("second")[name] for name in had} == had


def long_chat() -> list[dict[str, str]]:
    return [{"role": "user", "content": "word1 " * 1500}, {"role": "assistant", "content": "word2"}]


@pytest.mark.slow
def test_memory_limits_the_length_and_equal_settings_give_equal_losses(home, capsys, monkeypatch):
    real = lengths.holds
    monkeypatch.setattr(lengths, "holds", lambda request, step: real(request, step) and request.sequence_length < 1200)
    given = ("--model", "wide", "--data", "chats.jsonl", "--long-chats", "anywhere")
    assert train("memory", *given) == 0
    said = capsys.readouterr().out
    length = saved("memory")["sequence_length"]
    assert f"sequence length: {length:,} tokens, the memory; 2 documents are longer" in said
    assert 790 < length <= 800  # bins have 3/2 of it
    by_hand = ("--sequence-length", str(length), "--tokens-per-step", "4096")
    assert train("hand", *given, *by_hand) == 0
    assert losses("memory") == losses("hand")


@pytest.mark.slow
def test_positions_limit_the_length_and_requested_rows_are_kept(home):
    assert train("rows", "--model", "model", "--data", "texts.jsonl", "--global-batch", "2") == 0
    assert saved("rows")["sequence_length"] == POSITIONS and saved("rows")["global_batch"] == 2
    assert saved("rows")["tokens_per_step"] is None
    assert train("pieces", "--model", "model", "--data", "chats.jsonl", "--max-document", "600") == 0
    assert (saved("pieces")["max_document"], saved("pieces")["tokens_per_step"]) == (600, 4096)


@pytest.mark.slow
def test_auto_length_and_losses_are_equal_on_two_processes(home):
    given = ("--model", "model", "--data", "chats.jsonl", "--steps", "2")
    assert train("alone", *given) == 0
    two = run_tawpipe(["train", "--nproc", "2", "--nodes", "1", "--output", "two", *QUICK, *given], environment(), 300)
    assert two.returncode == 0, two.stderr
    assert saved("two")["sequence_length"] == saved("alone")["sequence_length"] > 512
    assert losses("two") == pytest.approx(losses("alone"), rel=1e-6)
