"""``tawpipe plan --serve``: what it says, what it measures here, and which words go together."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import GPT2Config

from tawpipe.cli import main
from tawpipe.commands.plan_serve import request_for
from tawpipe.commands.plan_words import parse, plan_parser
from tawpipe.plan.machine import Device, uniform
from tawpipe.plan.serving import ServePlan
from tawpipe.simulate import LinkModel

WORDS = ["plan", "--serve", "--model", "llama-8b", "--device-name", "H100", "--users", "64", "--context", "4096"]


def test_the_command_says_which_way(capsys):
    assert main([*WORDS, "--topology", "2x1@25gbit", "--memory", "75"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("replicas: 2 devices")
    assert main([*WORDS, "--topology", "2x1@25gbit", "--memory", "75", "--users", "1"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("one machine")
    assert main([*WORDS, "--topology", "4x1@10gbit", "--memory", "16", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    (chosen,) = [way for way in told["ways"] if way["chosen"]]
    assert told["verdict"] == chosen["kind"] == "pipeline"
    assert chosen["stages"] == 4
    assert chosen["memory_bytes"] < 16 * 2**30
    assert main([*WORDS, "--topology", "2x1@10gbit", "--memory", "4"]) == 1


@pytest.mark.parametrize(
    ("words", "setting"),
    [
        (["--serve", "--users", "4"], "--context"),
        (["--serve", "--users", "4", "--context", "64", "--global-batch", "4"], "--global-batch"),
        (["--users", "4", "--sequence-length", "64", "--global-batch", "4"], "--users"),
        (["--serve", "--users", "4", "--context", "64", "--longest"], "--longest"),
    ],
)
def test_words_that_do_not_go_together_are_refused(words, setting, capsys):
    assert main(["plan", "--model", "llama-8b", "--topology", "2x1@10gbit", "--device-name", "H100", *words]) == 2
    assert setting in capsys.readouterr().err


def test_blocks_are_measured_on_this_machine():
    words = [
        "--serve",
        "--model",
        "tiny",
        "--vocab-size",
        "500",
        "--users",
        "3",
        "--context",
        "64",
        "--topology",
        "2x1@1gbit",
    ]
    machine = uniform(2, 1, between=LinkModel(1e8), inside=LinkModel(1e9), device=Device("CPU"))
    asked = request_for(
        parse(plan_parser(), words), machine, here=torch.device("cpu"), dtype=torch.float32, tell=lambda _: None
    )
    assert asked.source == "measured on CPU"
    assert len(asked.costs) == len(asked.model.blocks)
    for cost in asked.costs:
        assert all(seconds > 0 for _, seconds in cost.points)
    assert asked.costs[1].key_s > 0
    assert (asked.boundary_bytes, asked.key_bytes, asked.weight_bytes) == (4 * 256, 4 * 2 * 4 * 32, 4)
    assert ServePlan.of(asked).chosen is not None


def test_a_context_that_a_model_has_no_positions_for_is_refused(tmp_path, capsys):
    GPT2Config(n_layer=2, n_embd=32, n_head=2, n_positions=64, vocab_size=50).save_pretrained(tmp_path)
    words = [
        "plan",
        "--serve",
        "--model",
        str(tmp_path),
        "--topology",
        "2x1@1gbit",
        "--device-name",
        "H100",
        "--users",
        "3",
    ]
    assert main([*words, "--context", "64"]) == 0
    assert main([*words, "--context", "65"]) == 2
    assert "at most 64" in capsys.readouterr().err
