"""The longest rows: that they are, what ends them, what is offloaded for them, the command and its page."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import GPT2Config, LlamaConfig, Qwen3_5TextConfig

from model_requests import request_for
from plan_requests import LAYERS, plan_request, step_of
from tawpipe.cli import main
from tawpipe.plan.answer.longest import NEAR, POSITIONS, SHORTEST, Longest, LongestRow, _longest_of, limit_of
from tawpipe.plan.cost.feasible import DEVICE, HOST, LEAN, fits, lacking
from tawpipe.plan.cost.measure import machine_of
from tawpipe.plan.cost.predict import memory_quickly
from tawpipe.plan.cost.profile import size_of
from tawpipe.plan.cost.request import MOST_TOKENS, PlanRequest
from tawpipe.plan.machine.machine import Device, Machine, uniform
from tawpipe.schedule.settings import DEFAULT
from tawpipe.schedule.strategies.table import find, strategies
from tawpipe.simulate import LinkModel

MOST = 1 << 20
GPUS = Machine((2, 2), LinkModel(2e5, 1e-5), LinkModel(1e8), host=LinkModel(2e3), device=Device("GPU"))


def candidates() -> list[str]:
    """Strategies whose rows are looked at; other tests may have brought some."""
    return [name for name, one in strategies().items() if one.candidate and not one.axis]


def asked_of(machine: Machine | None = None, *, memory: int, most: int = MOST) -> PlanRequest:
    return plan_request(machine, global_batch=4, memory=memory, sequence_length=most, size=size_of([most]))


def longest(machine: Machine | None = None, *, memory: int, most: int = MOST) -> dict[str, LongestRow]:
    return {one.strategy: one for one in Longest.of(asked_of(machine, memory=memory, most=most)).rows}


def offloaded(row: LongestRow) -> int:
    assert row.step is not None
    return row.step.settings.offloaded_layers


def lacks(row: LongestRow, tokens: int) -> list[list[str]]:
    """Which memory rows of another length lack, for every number of offloaded layers."""
    assert row.request is not None
    asked = row.request.with_length(tokens)
    numbers = [0] if "offloaded_layers" in find(row.strategy).refusals else range(LAYERS + 1)
    steps = [step_of(asked, row.strategy, **LEAN, offloaded_layers=n) for n in numbers]
    return [lacking(asked, memory_quickly(asked, step)) for step in steps]


# the answer


@pytest.mark.parametrize(
    ("machine", "memory"),
    [(None, 3_000_000), (GPUS, 3_000_000), (replace(GPUS, host_bytes=100_000), 500_000), (None, 100_000)],
)
def test_longest_row_fits_and_one_percent_more_does_not(machine, memory):
    rows = longest(machine, memory=memory)
    assert set(rows) == set(candidates())
    for row in rows.values():
        assert row.request is not None and row.prediction is not None and row.step is not None
        assert fits(row.request, row.prediction.needs)
        assert row.request.sequence_length == row.tokens and row.request.size == size_of([row.tokens])
        assert all(lacks(row, int(row.tokens * 1.01) + 1)), row.strategy
        assert row.step.settings.recompute == "full" and row.step.settings.micro_batches_per_visit == 1
    tokens = [one.tokens for one in Longest.of(asked_of(machine, memory=memory)).rows]
    assert tokens == sorted(tokens, reverse=True)


@pytest.mark.slow
@settings(max_examples=2, deadline=None)
@given(memory=st.integers(20_000, 5_000_000), more=st.integers(0, 500_000), host=st.integers(1, 500_000))
def test_more_memory_never_shortens_the_longest_row(memory, more, host):
    few = longest(replace(GPUS, host_bytes=host), memory=memory)
    on_devices = longest(replace(GPUS, host_bytes=host), memory=memory + more)
    on_hosts = longest(replace(GPUS, host_bytes=host + more), memory=memory)
    for name, row in few.items():
        assert row.tokens <= min(on_devices[name].tokens, on_hosts[name].tokens), name


@pytest.mark.slow
def test_offloading_lengthens_rows_only_with_host_memory():
    memory = 500_000
    processors, none = longest(memory=memory), longest(replace(GPUS, host_bytes=1), memory=memory)
    some, any_ = longest(replace(GPUS, host_bytes=200_000), memory=memory), longest(GPUS, memory=memory)
    for name in candidates():
        used = [offloaded(rows[name]) for rows in (processors, none, some, any_)]
        tokens = [rows[name].tokens for rows in (none, some, any_)]
        if name == "weipipe":
            assert used == [0] * 4 and tokens[0] == tokens[2]
            continue
        assert used[:2] == [0, 0] and 0 < used[2] < used[3]
        assert tokens[0] < tokens[1] < tokens[2]
        over = lacks(some[name], some[name].tokens)
        assert [DEVICE in one for one in over] == [n < used[2] for n in range(LAYERS + 1)], "no more than needed"


def test_limit_of_the_longest_row_is_named():
    memory = 500_000
    assert {row.binds for row in longest(memory=memory).values()} == {DEVICE}
    assert {row.binds for row in longest(GPUS, memory=memory).values()} == {DEVICE}
    on_hosts = longest(replace(GPUS, host_bytes=50_000), memory=memory)
    assert {name for name, row in on_hosts.items() if row.binds == HOST} == set(candidates()) - {"weipipe"}
    assert {(row.binds, row.tokens) for row in longest(memory=memory, most=64).values()} == {(POSITIONS, 64)}
    free = Longest.of(asked_of(memory=0), ends=limit_of(MOST))
    assert {(row.binds, row.tokens) for row in free.rows} == {("a limit of 1,048,576 tokens", MOST)}
    assert "--memory" in free.reason


def test_buffers_shrink_only_if_the_row_needs_their_memory():
    names = ("look_ahead", "gradient_buffers")
    for memory, expected in ((10**9, DEFAULT), (500_000, replace(DEFAULT, **LEAN))):
        for row in longest(memory=memory, most=MOST if memory < 10**9 else 64).values():
            assert row.step is not None
            assert [getattr(row.step.settings, name) for name in names] == [getattr(expected, name) for name in names]


def test_missing_memory_is_named_if_no_row_fits():
    found = Longest.of(asked_of(memory=1000))
    assert found.best is None and found.fastest is None and found.memory == ""
    assert {row.tokens for row in found.rows} == {0} and {row.binds for row in found.rows} == {DEVICE}
    assert all(row.why_not.startswith(f"{SHORTEST} tokens need") and "homes" in row.why_not for row in found.rows)
    assert "no strategy" in found.reason and all(row["step_seconds"] is None for row in found_json(found))


def found_json(found: Longest) -> list[dict]:
    return json.loads(found.json_text())["longest"]


def test_fastest_strategy_is_chosen_among_the_longest_rows():
    found = Longest.of(asked_of(memory=500_000))
    best, fastest = found.best, found.fastest
    assert best is not None and fastest is not None and found.rows[0] is best
    assert fastest.tokens >= best.tokens * (1 - NEAR)
    near = [row for row in found.rows if row.tokens >= best.tokens * (1 - NEAR)]
    assert fastest.tokens_per_second == max(row.tokens_per_second for row in near)
    assert best.strategy in found.reason and fastest.strategy in found.reason and f"{best.tokens:,}" in found.reason


def test_strategies_that_coincide_on_one_node_are_listed_once():
    rows = longest(uniform(1, 4, between=LinkModel(1e9), inside=LinkModel(1e8)), memory=500_000)
    assert rows["tawpipe-step"].tokens == 0 and "the same as" in rows["tawpipe-step"].why_not
    assert rows["flat"].tokens


# models


LLAMA_8B: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}


def saved(folder: Path, **changes: Any) -> str:
    """A Llama as a folder, of 8 B parameters unless ``changes`` say otherwise."""
    LlamaConfig(**{**LLAMA_8B, **changes}).save_pretrained(folder)
    return str(folder)


@pytest.mark.slow
def test_longest_row_of_an_8b_model_on_24_devices_offloads_layers(tmp_path):
    machine = machine_of("3x8@10gbit", device=Device("H100"))
    model = saved(tmp_path, max_position_embeddings=MOST_TOKENS)
    asked = request_for(model, machine, sequence_length=None, global_batch=24, memory_bytes=75 << 30)
    rows = {name: _longest_of(asked, find(name), POSITIONS) for name in ("tawpipe-spread", "weipipe")}
    assert {row.binds for row in rows.values()} == {DEVICE}
    assert all(row.tokens > 32768 for row in rows.values())
    long = rows["tawpipe-spread"]
    assert long.step is not None and long.prediction is not None
    assert offloaded(long) > 16 and offloaded(rows["weipipe"]) == 0 and long.tokens > 2 * rows["weipipe"].tokens
    assert long.prediction.step_seconds > sum(asked.with_length(long.tokens).block_seconds(long.step))
    some = replace(asked, machine=replace(asked.machine, host_bytes=1 << 38))
    assert _longest_of(some, find("flat"), POSITIONS).binds == HOST


def test_longest_row_ends_at_the_model_positions(tmp_path):
    machine = machine_of("3x8@10gbit", device=Device("H100"))
    asked = request_for(saved(tmp_path, num_hidden_layers=2, max_position_embeddings=4096), machine,
                       sequence_length=None, global_batch=24, memory_bytes=75 << 30)  # fmt: skip
    for name in ("tawpipe-spread", "hsdp"):
        row = _longest_of(asked, find(name), POSITIONS)
        assert (row.tokens, row.binds) == (4096, POSITIONS)
    assert "at least " in _longest_of(asked, find("weipipe"), POSITIONS).why_not


def test_longest_row_of_a_9b_hybrid_on_one_device_uses_host_homes(tmp_path):
    config = Qwen3_5TextConfig(
        hidden_size=4096,
        num_hidden_layers=32,
        num_attention_heads=16,
        intermediate_size=12288,
        linear_num_value_heads=32,
        vocab_size=248320,
        max_position_embeddings=MOST_TOKENS,
    )
    config.save_pretrained(tmp_path)
    machine = machine_of("1x1", device=Device("H100"))
    asked = request_for(str(tmp_path), machine, sequence_length=None, global_batch=1, memory_bytes=80 << 30)
    assert not asked.profile.why_whole and 8e9 < asked.model.identity["parameters"] < 10e9
    row = _longest_of(asked, find("tawpipe-spread"), POSITIONS)
    assert row.tokens > 100_000 and row.binds == DEVICE and "host_homes state" in row.cells()[-1]
    assert row.step is not None and row.step.settings.sequence_chunk and row.request is not None
    assert row.request.settings.host_homes == "state"
    assert not _longest_of(asked.with_homes("none"), find("tawpipe-spread"), POSITIONS).tokens


# the command

WORDS = ["plan", "--longest", "--model", "tiny", "--vocab-size", "500", "--topology", "2x2@1gbit"]
WORDS += ["--dtype", "float32", "--device", "cpu", "--device-name", "cpu"]
SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
SMALL |= {"num_key_value_heads": 4, "vocab_size": 500, "max_position_embeddings": MOST_TOKENS}


@pytest.mark.slow
@pytest.mark.usefixtures("few_strategies", "short_past")
def test_longest_command_prints_table_json_and_page(tmp_path, capsys):
    pytest.importorskip("plotly")
    page = tmp_path / "page.html"
    words = [*WORDS, "--model", saved(tmp_path, **SMALL)]
    assert main([*words, "--memory", "4", "--report", str(page)]) == 0
    said, progress = capsys.readouterr()
    assert all(
        words in said for words in ("longest row", "limited by", DEVICE, "has the longest row", "device memory in GiB")
    )
    assert "tawpipe-spread: " in progress and DEVICE in progress
    text = page.read_text(encoding="utf-8")
    assert all(
        title in text
        for title in ("Seconds per step by row length", "Memory of a device by row length", "where a row ends")
    )
    assert main([*words, "--sequence-length", "4096", "--global-batch", "8", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["longest"]
    assert {row["strategy"] for row in rows} == set(candidates())
    for row in rows:
        assert (row["sequence_length"], row["binds"]) == (4096, "a limit of 4,096 tokens")
        assert row["step_seconds"] > 0 and row["knobs"]["recompute"] == "full"
        assert row["tokens_per_second_per_device"] == pytest.approx(4096 * 8 / row["step_seconds"] / 4)
        assert row["rows"] == 8 and row["mfu"] is None, "the peak of a CPU is not known"
        assert row["peak_gib"] == pytest.approx(sum(row["memory_gib"].values()))
    assert main([*words, "--sequence-length", "64", "--memory", "0.001"]) == 1


def test_position_table_limits_the_longest_row(tmp_path, capsys):
    GPT2Config(vocab_size=500, n_embd=32, n_layer=4, n_head=2, n_positions=40).save_pretrained(tmp_path)
    words = [*WORDS, "--model", str(tmp_path)]
    assert main([*words, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["longest"]
    assert {(row["sequence_length"], row["binds"]) for row in rows} == {(40, POSITIONS)}
    assert main([*words, "--sequence-length", "64"]) == 2
    assert "--sequence-length: got 64; at most 40" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--save", "plan.yaml"], "--save: got 'plan.yaml'; unset with --longest"),
        (["--lengths", "3,4"], "--lengths: got '3,4'; unset with --longest"),
        (["--explain", "flat"], "--explain: got 'flat'; unset with --longest"),
        (["--micro-batch", "2"], "--micro-batch: got 2; 1 with --longest"),
        (["--sequence-length", "1"], "--sequence-length: got 1"),
        (["--global-batch", "0"], "--global-batch: got 0"),
        (["--report", "nowhere/page.html"], "--report"),
    ],
)
def test_options_incompatible_with_longest_are_refused(words, reason, capsys):
    assert main([*WORDS, *words]) == 2
    assert reason in capsys.readouterr().err


def test_plan_without_a_sequence_length_names_required_options(capsys):
    assert main(["plan", "--model", "tiny", "--topology", "1x1"]) == 2
    assert "required: --sequence-length, --global-batch" in capsys.readouterr().err
