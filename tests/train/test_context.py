"""A run on rows longer than the model was made for: rotary positions from settings, what it finds far back."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from runs import command, rows
from small import make_small
from tawpipe.cli import main
from tawpipe.data.prepare import prepare_data
from tawpipe.errors import UserError
from tawpipe.plan.cost import memory
from tawpipe.schedule.strategies.table import strategies
from tawpipe.train.judging.retrieval import retrieval_check
from tawpipe.train.settings.config import load_config

YARN = ("--rope.scaling", "yarn", "--rope.factor", "2")


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """A small corpus, and a model's config with half as many positions as a row has tokens."""
    folder = tmp_path_factory.mktemp("context")
    make_small(folder, files=60, layers=2, positions=32)
    return folder


def alone(home: Path, output: str, *words: str) -> int:
    """A run of one process, in this one."""
    quiet = ("--nproc", "1", "--device", "cpu", "--log.trackers", "none", "--sample.tokens", "0")
    return main([*command(home, output, *quiet, *words)[2:]])


@pytest.mark.slow
def test_a_context_is_extended_in_phases(home, few_strategies, capsys):
    assert alone(home, "short") == 2
    assert "--rope.scaling" in capsys.readouterr().err
    assert alone(home, "first", *YARN, "--steps", "2", "--plan", "auto") == 0
    said = capsys.readouterr().out
    assert "rotary positions" in said and "rope_type yarn" in said and "up to 64 tokens" in said
    config = json.loads((home / "first" / "model" / "config.json").read_text())
    assert config["rope_parameters"]["factor"] == 2 and config["max_position_embeddings"] == 64

    other = ("--rope.scaling", "linear")
    for words, named in (((*YARN, "--rope.theta", "5e4"), "--rope.theta"), (other, "--rope.scaling")):
        assert alone(home, "first", *words, "--steps", "3", "--resume", "auto") == 2
        said = capsys.readouterr().err
        assert named in said and "as in the checkpoint" in said and "--model" in said
    assert alone(home, "first", *YARN, "--steps", "3", "--resume", "auto") == 0

    trained = ("--model", str(home / "first" / "model"), "--steps", "1", "--sequence-length", "128")
    assert alone(home, "second", *trained, *YARN) == 2
    assert "--rope.factor: got 2.0; at least 4" in capsys.readouterr().err
    assert alone(home, "second", *trained, "--rope.scaling", "yarn", "--rope.factor", "4") == 0
    config = json.loads((home / "second" / "model" / "config.json").read_text())
    assert config["rope_parameters"]["original_max_position_embeddings"] == 32
    assert config["max_position_embeddings"] == 128


@pytest.mark.slow
def test_evaluation_by_position_is_written_and_changes_no_loss(home, capsys):
    words = (*YARN, "--export.enabled", "false", "--checkpoint.every", "0")
    page = home / "curve.html"
    assert alone(home, "plain", *words) == 0
    capsys.readouterr()
    assert alone(home, "curve", *words, "--evaluation.by-position", "3", "--report", str(page)) == 0
    said = capsys.readouterr().out
    assert "validation loss by position" in said and "to 16: " in said and "to 64: " in said
    assert "Validation loss by position" in page.read_text()
    kept = ("step", "loss", "grad_norm", "tokens", "validation_loss")
    plain, curve = ([{name: row.get(name) for name in kept} for row in rows(home, one)] for one in ("plain", "curve"))
    assert plain == curve
    for row in rows(home, "curve"):
        if row.get("validation_loss") is None:
            assert "validation_by_position" not in row
            continue
        losses = row["validation_by_position"]
        assert list(losses) == ["16", "32", "64"]
        assert min(losses.values()) <= row["validation_loss"] <= max(losses.values())
    assert alone(home, "never", *words, "--evaluation.by-position", "3", "--evaluation.every", "0") == 2
    assert "--evaluation.by-position: got 3; 0 while --evaluation.every is 0" in capsys.readouterr().err


LONG = ("--sequence-length", "256", "--rope.scaling", "yarn", "--rope.factor", "8", "--global-batch", "4")
ASKED = ("--evaluation.retrieval-lengths", "256", "224", "--evaluation.retrieval-depths", "3")


@pytest.mark.slow
def test_retrieval_is_evaluated_at_every_length_and_depth(home, monkeypatch, capsys):
    """The plain model that the run exports says the same on the same rows."""
    monkeypatch.setattr(memory, "PAST_KEYS", 256)  # what chunks need is measured on rows that are no longer than these
    words = (*LONG, *ASKED, "--evaluation.retrieval-samples", "2", "--checkpoint.every", "0", "--dtype", "float64")
    words = (*words, "--schedule.sequence-chunk", "100", "--export.dtype", "float64")
    page = home / "facts.html"
    assert alone(home, "facts", *words, "--report", str(page)) == 0
    said = capsys.readouterr().out
    assert re.search(r"retrieval +0 of 12 facts found; first miss at 224 tokens, depth 0\n", said)
    drawn = page.read_text()
    assert "Hidden facts" in drawn and '"type":"heatmap"' in drawn and drawn.count("0 of 2") == 12  # and in words
    measured = [row for row in rows(home, "facts") if "retrieval_found" in row]
    assert [row["step"] for row in measured] == [2, 4]
    config = load_config(command(home, "facts", *words)[3:])
    data = prepare_data(config, sequence_length=256, seed=config.seed, model=config.model)
    model = AutoModelForCausalLM.from_pretrained(home / "facts" / "model", dtype=torch.float64)
    check = retrieval_check(config, data, model.config)
    assert check is not None and list(check.lengths) == [224, 256]
    for length in check.lengths:
        for place, depth in enumerate(("0", "0.5", "1")):
            total, tokens = 0.0, 0
            for number in (2 * place, 2 * place + 1):
                row = check.needles.row(length, 0, number)
                with torch.no_grad():
                    logits = model(row.input_ids, use_cache=False).logits
                total += float(torch.nn.functional.cross_entropy(logits[0], row.labels[0], reduction="sum"))
                tokens += row.tokens
            assert measured[-1]["retrieval_loss"][f"{length}/{depth}"] == pytest.approx(total / tokens, rel=1e-6)
            assert measured[-1]["retrieval_found"][f"{length}/{depth}"] == 0

    tiny = [*LONG, "--validation-fraction", "0", *ASKED[:2], "256"]  # of the training text, then
    data = prepare_data(load_config(command(home, "x", *tiny)[3:]), sequence_length=256, seed=0, model=None)
    with pytest.raises(UserError, match=r"--evaluation.retrieval-lengths: got 256; at most 128 for .*model"):
        retrieval_check(config, data, LlamaConfig(max_position_embeddings=128))


@pytest.mark.slow
def test_learned_fact_is_found_by_the_retrieval_evaluation(home, tmp_path, capsys):
    words = (
        *LONG,
        *ASKED,
        "--evaluation.retrieval-samples",
        "1",
        "--checkpoint.every",
        "0",
        "--export.enabled",
        "false",
    )
    config = load_config(command(home, "knows", *words)[3:])
    data = prepare_data(config, sequence_length=256, seed=config.seed, model=config.model)
    check = retrieval_check(config, data, LlamaConfig())
    assert check is not None
    said = data.tokenizer.decode(check.needles.row(224, 0, 0).input_ids[0].tolist())
    for number in range(20):
        (tmp_path / f"{number}.txt").write_text(
            f"{re.findall('The access code.*[.]', str(said))[0]}\n" * (4 + number % 3)
        )
    words = (
        *words,
        "--data",
        str(tmp_path / "*.txt"),
        "--steps",
        "20",
        "--learning-rate",
        "2e-2",
        "--micro-batch",
        "4",
    )
    assert alone(home, "knows", *words, "--evaluation.every", "100") == 0
    assert re.search(r"retrieval +6 of 6 facts found\n", capsys.readouterr().out)
    assert set(rows(home, "knows")[-1]["retrieval_found"].values()) == {1.0}


@pytest.mark.slow
def test_run_of_zero_steps_evaluates_as_the_training_run_did(home, few_strategies, capsys):
    """It says what the run that trained the model said at its end."""
    words = ("--evaluation.by-position", "3", *ASKED, "--plan", "auto", "--packing", "split")
    assert alone(home, "taught", *LONG, *words, "--dtype", "float64", "--export.dtype", "float64") == 0
    page, model = home / "looked.html", str(home / "taught" / "model")
    words = (*words, "--model", model, "--steps", "0", "--sequence-length", "256", "--global-batch", "4")
    assert alone(home, "looked", *words, "--dtype", "float64", "--report", str(page)) == 0
    assert "Hidden facts" in page.read_text() and not (home / "looked" / "model").exists()
    (row,) = rows(home, "looked")
    trained = rows(home, "taught")[-1]
    assert row["step"] == 0 and row["loss"] is None
    for name in ("validation_by_position", "retrieval_found", "retrieval_loss"):
        assert row[name] == pytest.approx(trained[name], rel=1e-12)
    assert row["validation_loss"] == pytest.approx(trained["validation_loss"], rel=1e-12)
    capsys.readouterr()
    assert alone(home, "nothing", *words, "--evaluation.retrieval-lengths", "--validation-fraction", "0") == 2
    assert "--steps: got 0; at least 1: without validation data" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "refusal"),
    [
        (ASKED[:2], "got 256; at most --sequence-length, which is 64"),
        ((*LONG, *ASKED, "--evaluation.every", "0"), "got [256, 224]; none while --evaluation.every is 0"),
        ((*LONG, *ASKED[:1], "128", "40"), "got 40; at least "),
        ((*LONG, *ASKED[:1], "many"), "got ['many']; a list of whole numbers"),
    ],
)
def test_impossible_retrieval_lengths_are_refused(home, capsys, words, refusal):
    assert alone(home, "refused", *words) == 2
    assert f"--evaluation.retrieval-lengths: {refusal}" in capsys.readouterr().err


def test_plan_accepts_rope_settings_for_a_longer_context(home, capsys):
    words = ["plan", "--model", str(home / "model"), "--topology", "2x2@1gbit", "--device-name", "CPU", "--json"]
    words += ["--sequence-length", "64", "--global-batch", "4", "--dtype", "float32"]
    assert main(words) == 2
    assert "--sequence-length: got 64; at most 32" in capsys.readouterr().err
    assert main([*words, "--rope.scaling", "yarn", "--rope.factor", "0.5"]) == 2
    assert "--rope.factor: got 0.5; a number at least 1" in capsys.readouterr().err
    assert main([*words, *YARN]) == 0
    assert json.loads(capsys.readouterr().out)["chosen"] in strategies()
