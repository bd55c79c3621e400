"""How many rows a micro-batch has under ``--micro-batch auto``: by tokens, a device's share, memory and predictions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from plan_requests import plan_request
from tawpipe.cli import main
from tawpipe.model.chain import Chain
from tawpipe.plan.cost.filling import FILLS, PER_STAGE, Filling
from tawpipe.plan.cost.measure import filling_of
from tawpipe.plan.cost.predict import memory_quickly
from tawpipe.plan.cost.request import PlanRequest
from tawpipe.plan.search import sizes
from tawpipe.plan.search.sizes import with_best_size
from tawpipe.schedule.settings import ScheduleSettings
from tawpipe.simulate import BlockCost, Seconds
from tawpipe.topology import Topology


@pytest.mark.parametrize(
    ("kind", "rows", "row", "devices", "expected"),
    [
        ("cuda", 64, 512, 1, (1, 2, 4, 8, 16, 32)),  # 32 x 512 tokens fill a GPU
        ("cuda", 12, 512, 1, (1, 2, 3, 4, 6, 12)),  # all micro-batches have equally many rows
        ("cuda", 64, 512, 8, (1, 2, 4, 8)),  # a device has eight rows
        ("cuda", 12, 512, 8, (1,)),  # six devices would have two rows each, and two devices none
        ("cuda", 24, 512, 9, (1,)),  # six micro-batches of four rows would leave three devices idle
        ("cuda", 4, 512, 8, (1,)),
        ("cuda", 8, 10_000, 1, (1,)),
        ("cuda", 8, 32_768, 1, (1,)),
        ("cpu", 8, 512, 1, (1,)),
        ("cpu", 8, 128, 1, (1, 2, 4)),
    ],
)
def test_sizes_fill_a_device_and_leave_none_idle(kind, rows, row, devices, expected):
    assert Filling.of(kind, rows, row, devices).sizes == expected


@pytest.mark.parametrize("positions", [2, 4])
def test_pipelines_keep_enough_micro_batches_for_every_stage(positions):
    filling = Filling.of("cuda", 64, 128, 4, positions=positions)
    most = filling.sizes[-1]
    assert 64 // most / (4 // positions) == PER_STAGE * positions  # of each pipeline
    assert Filling.of("cuda", 8, 128, 4, positions=positions).sizes == (1,)


def test_words_name_the_reason():
    filling = Filling.of("cuda", 64, 512, 1)
    assert filling.words(32) == "auto: 16,384 tokens, where 16,384 fill a device"
    assert filling.words(8) == "auto: 32 do not fit into memory; 4,096 tokens, where 16,384 fill a device"
    few = Filling.of("cuda", 8, 512, 1)
    assert few.words(8) == "auto: a device has 4,096 tokens of a step, fewer than the 16,384 that fill it"
    tried = replace(filling, tried=(16, 32))
    assert tried.words(16).startswith("auto: the fastest of 16, 32 by the plan; 8,192 tokens")
    kept = filling.up_to(8, "as in the resumed run")
    assert kept.sizes == (1, 2, 4, 8) and kept.words(8) == "auto: as in the resumed run"
    assert kept.words(4).startswith("auto: 8 do not fit into memory")


SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}


def llama(**given: Any) -> Chain:
    with torch.device("meta"):
        return Chain(LlamaForCausalLM(LlamaConfig(**SMALL, **given)))


def test_one_row_where_another_number_would_change_results():
    grid, usual = Topology.grid(1, 2), ScheduleSettings()

    def of(chain: Chain, settings: ScheduleSettings = usual) -> Filling:
        return filling_of(chain, grid, "cuda", settings, 16, 32)

    assert of(llama()).sizes == (1, 2, 4, 8)
    assert of(llama(), ScheduleSettings(sequence_ranks=2)).sizes == (1, 2, 4, 8, 16)
    assert of(llama(), ScheduleSettings(strategy="1f1b")).sizes == (1, 2)
    with torch.device("meta"):
        experts = MixtralForCausalLM(MixtralConfig(**SMALL, num_local_experts=2))
    balanced = Chain(experts)
    assert of(balanced).sizes == (1, 2, 4, 8)
    balanced.balance_experts(0.01)
    longrope = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "factor": 4.0}
    scaled = llama(
        max_position_embeddings=64,
        original_max_position_embeddings=16,
        rope_parameters={**longrope, "rope_theta": 1e4, "original_max_position_embeddings": 16},
    )
    given = ScheduleSettings(device_speeds="1x1,1x0.5")
    cases = {"dropout": of(llama(attention_dropout=0.1)), "balanced": of(balanced), "longrope": of(scaled)}
    for reason, filling in (*cases.items(), ("speeds", of(llama(), given))):
        assert filling.sizes == (1,) and reason in filling.words(1), reason


def asked(layer: BlockCost, sizes: tuple[int, ...] = (1, 2, 4)) -> PlanRequest:
    """A request for 16 rows on 2 x 2 devices whose layers take the time of ``layer``."""
    request = plan_request()
    profile = replace(request.profile, blocks=(request.profile.blocks[0], *[layer] * 6, request.profile.blocks[-1]))
    filling = Filling(sizes, 10, 40, FILLS["cuda"])
    return replace(request, profile=profile, filling=filling).with_micro_batch(sizes[-1])


def test_plan_takes_the_largest_size_if_calls_cost_time_and_none_is_slower():
    for layer in (BlockCost(Seconds(0.01), Seconds(0.03)), BlockCost(Seconds(0, 1e-3), Seconds(0, 3e-3))):
        best = with_best_size(asked(layer))
        assert best.micro_batch == 4 and best.size.tokens == 40
        assert best.filling is not None and best.filling.tried == (2, 4)
        assert "a device has 40 tokens of a step" in best.filling.words(4)
    given = plan_request()
    assert with_best_size(given) is given


def test_plan_takes_a_smaller_size_where_pipelines_win(monkeypatch):
    """More micro-batches fill the positions of a pipeline better."""
    monkeypatch.setattr(sizes, "COMPARED", ("1f1b",))
    best = with_best_size(asked(BlockCost(Seconds(0, 1e-3), Seconds(0, 3e-3))))
    assert best.micro_batch == 1 and best.filling is not None and best.filling.tried == (1, 2, 4)


def test_plan_takes_the_largest_size_that_fits(monkeypatch):
    monkeypatch.setattr(sizes, "COMPARED", ("tawpipe-spread",))
    layer = BlockCost(Seconds(0.01), Seconds(0.03))
    free = asked(layer)
    settings = replace(free.settings, strategy="tawpipe-spread", micro_batches_per_visit=1, recompute="full")

    def wanted(size: int) -> int:
        request = free.with_micro_batch(size)
        return memory_quickly(request, request.step(settings)).wanted

    memory = wanted(2)
    assert memory < wanted(4)
    best = with_best_size(replace(free, memory_bytes=memory))
    assert best.micro_batch == 2 and best.filling is not None and 4 not in best.filling.tried
    assert "4 do not fit into memory" in replace(best.filling, tried=(2,)).words(2)
    assert with_best_size(replace(free, memory_bytes=1)).micro_batch == 1


@pytest.mark.slow
def test_command_says_once_that_a_step_has_too_few_tokens(capsys, tmp_path):
    words = "plan --model tiny --topology 1x1 --device-name H100 --sequence-length 512 --global-batch 8"
    assert main([*words.split(), "--report", str(tmp_path / "plan.html")]) == 0
    assert "micro-batches of 8 (auto: the fastest of 4, 8" in (tmp_path / "plan.html").read_text()
    said = capsys.readouterr().out
    assert said.count("fewer than the 16,384 that fill it") == 1
    assert "micro-batches of 8 (auto: the fastest of 4, 8 by the plan; a device has 4,096 tokens of a step" in said
    assert main([*words.split(), "--micro-batch", "2"]) == 0
    assert "micro-batches of" not in capsys.readouterr().out
