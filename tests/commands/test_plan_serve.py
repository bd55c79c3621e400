"""``tawpipe plan --serve``: what it says, what it measures here, and which words go together."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import GPT2Config

from tawpipe.cli import main
from tawpipe.commands.plan_serve import request_for
from tawpipe.commands.plan_words import parse, plan_parser
from tawpipe.model.bits.lowbit import FewBitsLinear
from tawpipe.plan.machine.machine import Device, uniform
from tawpipe.serving.planner import ServePlan, ServeRequest
from tawpipe.simulate import LinkModel

WORDS = ["plan", "--serve", "--model", "llama-8b", "--device-name", "H100", "--users", "64", "--context", "4096"]


def test_plan_serve_prints_the_chosen_placement(capsys):
    assert main([*WORDS, "--topology", "2x1@25gbit", "--memory", "75"]) == 0
    _, hop, *_, verdict = capsys.readouterr().out.splitlines()
    assert verdict.startswith("replicas: one copy on each of 2 devices") and hop.endswith("as on CPUs")
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
        (["--weights", "w4", "--sequence-length", "64", "--global-batch", "4"], "--weights"),
        (["--serve", "--users", "4", "--context", "64", "--weights", "w5"], "--weights"),
    ],
)
def test_conflicting_plan_serve_options_are_refused(words, setting, capsys):
    assert main(["plan", "--model", "llama-8b", "--topology", "2x1@10gbit", "--device-name", "H100", *words]) == 2
    assert setting in capsys.readouterr().err


def test_quantized_weights_need_fewer_machines(capsys):
    told = {}
    for weights in ("auto", "none", "w4", "int8"):
        words = [*WORDS, "--topology", "2x1@25gbit", "--memory", "12", "--users", "1", "--json", "--weights", weights]
        assert main(words) == 0
        told[weights] = json.loads(capsys.readouterr().out)
    assert told["auto"] == told["none"] and told["w4"]["costs"].endswith("weights in w4")
    assert told["none"]["verdict"] == "pipeline"
    assert told["w4"]["verdict"] == told["int8"]["verdict"] == "one machine"
    alone = {weights: plan["ways"][0] for weights, plan in told.items()}
    assert alone["w4"]["memory_bytes"] < 0.7 * alone["none"]["memory_bytes"]
    assert alone["w4"]["token_s"] < 0.5 * alone["none"]["token_s"] < 0.5 * alone["int8"]["token_s"], "no kernel there"


def measured(*more: str, dtype: torch.dtype = torch.float32) -> ServeRequest:
    words = ["--serve", "--model", "tiny", "--vocab-size", "500", "--users", "3", "--context", "64"]
    words += ["--topology", "2x1@1gbit", *more]
    machine = uniform(2, 1, between=LinkModel(1e8), inside=LinkModel(1e9), device=Device("CPU"))
    return request_for(parse(plan_parser(), words), machine, here=torch.device("cpu"), dtype=dtype)


@pytest.mark.parametrize("form", ["w4", "int8"])
def test_quantized_blocks_are_measured_in_their_form(form, monkeypatch):
    rows, real = set[int](), FewBitsLinear.forward

    def forward(self: FewBitsLinear, given: torch.Tensor) -> torch.Tensor:
        assert self.form == form
        rows.add(given.numel() // self.in_features)
        return real(self, given)

    monkeypatch.setattr(FewBitsLinear, "forward", forward)
    asked = measured("--weights", form, dtype=torch.bfloat16)
    assert asked.source == f"measured on CPU; weights in {form}" and rows == {1, 4, 16, 64, 256}
    layer = asked.model.blocks[1].units[0]
    assert asked.weight_bytes[layer] < 1.5 and asked.weight_bytes[0] == 2


def test_blocks_are_measured_on_this_machine():
    asked = measured()
    assert asked.source == "measured on CPU"
    assert len(asked.costs) == len(asked.model.blocks)
    for cost in asked.costs:
        assert all(seconds > 0 for _, seconds in cost.points)
    assert asked.costs[1].key_s > 0
    assert (asked.boundary_bytes, asked.key_bytes, *set(asked.weight_bytes)) == (4 * 256, 4 * 2 * 4 * 32, 4)
    assert ServePlan(asked).chosen is not None


def test_context_longer_than_model_positions_is_refused(tmp_path, capsys):
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
