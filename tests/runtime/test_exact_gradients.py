"""Gradients that are coded without loss: every bit comes back, in fewer bytes where sums are of few numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from exact import run_cases
from schedule_numbers import check_numbers
from schedules import llama, make
from tawpipe.errors import UserError
from tawpipe.pipeline.setup import refuse_settings
from tawpipe.runtime.transport.exact_gradients import decode_gradient, encode_gradient
from tawpipe.schedule.proof.verify import ScheduleError, verify
from tawpipe.schedule.settings import ScheduleSettings
from tawpipe.schedule.sizes.footprint import Widths, costs
from tawpipe.schedule.spec import coded_bytes, sum_width
from tawpipe.simulate import CodingTimes, CostModel, LinkModel, play

SLICE = 1 << 12
EXACT: dict[str, Any] = {"strategy": "tawpipe-step", "gradients_compression": "exact"}
BITS = {torch.bfloat16: torch.int16, torch.float32: torch.int32}


@pytest.fixture(autouse=True, scope="module")
def short_slices():
    """Messages of several slices do not take long here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tawpipe.runtime.transport.exact_gradients.SEGMENT", SLICE)
        yield


def there_and_back(values: torch.Tensor) -> int:
    """Bytes of the message, which says every bit."""
    room = torch.full((coded_bytes(values.numel(), values.itemsize),), 0xA5, dtype=torch.uint8)
    used = encode_gradient(values, room)
    assert used <= room.numel()
    room[used:] = 0x5A  # what a shorter message leaves in the room for it
    found = torch.full_like(values, 5.0)
    decode_gradient(room, found)
    assert torch.equal(found.view(BITS[values.dtype]), values.view(BITS[values.dtype]))
    return used


def sums(count: int, numbers: int, seed: int = 0) -> torch.Tensor:
    """Sums of so many bf16 numbers whose sizes are spread as gradients' are."""
    dice = torch.Generator().manual_seed(seed)
    each = torch.randn(count, numbers, generator=dice) * 1e-3 * torch.randn(numbers, generator=dice)
    return each.bfloat16().float().sum(0)


@settings(max_examples=60, deadline=None)
@given(
    length=st.one_of(st.integers(1, 70), st.integers(1, 10_000), st.sampled_from((SLICE, SLICE + 1, 2 * SLICE))),
    dtype=st.sampled_from((torch.bfloat16, torch.float32)),
    kind=st.sampled_from(("any bits", "sums", "zeros", "few sizes", "rows of zeros")),
    seed=st.integers(0, 2**31),
)
def test_exact_gradient_compression_restores_every_bit(length, dtype, kind, seed):
    dice = torch.Generator().manual_seed(seed)
    if kind == "any bits":
        values = torch.randint(-(2**31), 2**31, (length,), generator=dice).to(torch.int32).view(torch.float32)
        if dtype == torch.bfloat16:
            values = values.view(torch.bfloat16)[:length].clone()
    elif kind == "few sizes":  # numbers that are none, the largest, the smallest, zeros of both signs
        some = torch.tensor([0.0, -0.0, float("nan"), float("inf"), -float("inf"), 1e-45, 3e38, 1e-38, 1.0])
        values = some[torch.randint(0, len(some), (length,), generator=dice)].to(dtype)
    else:
        values = sums(1 + seed % 9, length, seed).to(dtype)
        values *= kind != "zeros"
        if kind == "rows of zeros":
            values[: length // 2] = 0
    assert there_and_back(values) <= coded_bytes(length, values.itemsize)


@pytest.mark.parametrize("distance", [0, 1, 13, 14, 15, 200])
def test_exact_gradient_compression_restores_extreme_exponents(distance):
    """Around zero, around the largest, and where the lowest is next to what is below it."""
    exponents = torch.arange(256).repeat(64)
    few = torch.cat([exponents, torch.full((1 << 14,), distance), torch.full((1 << 14,), max(0, distance - 1))])
    there_and_back((few << 7).to(torch.int16).view(torch.bfloat16))
    there_and_back((few << 23).to(torch.int32).view(torch.float32))


def test_exact_gradient_compression_reaches_its_predicted_width():
    for summands in (1, 2, 4, 8):
        values = sums(summands, 1 << 18)
        bits = 8 * there_and_back(values) / values.numel()
        assert bits <= 1.06 * 8 * sum_width(4, summands), summands
    assert 8 * there_and_back(sums(1, 1 << 18).bfloat16()) / (1 << 18) <= 1.06 * 8 * sum_width(2, 1)
    assert there_and_back(torch.randn(1000) * 10.0 ** torch.randint(-30, 30, (1000,))) == coded_bytes(1000, 4)


# schedules


@pytest.mark.parametrize("given", [EXACT, {**EXACT, "strategy": "tawpipe-spread"}, {**EXACT, "early_updates": True}])
@pytest.mark.parametrize(("nodes", "local"), [(2, 1), (3, 2)])
def test_exact_gradient_schedules_verify_and_bytes_equal_the_simulation(nodes, local, given):
    usual: dict[str, Any] = {name: value for name, value in given.items() if name != "gradients_compression"}
    plain, schedule = (make(llama(4), nodes, local, 4 * nodes * local, **how) for how in (usual, given))
    verify(schedule, one_thread=True)
    check_numbers(schedule, seed=3)
    clock = CostModel.timed(layers=4, forward_s=0.1, backward_s=0.3, between=LinkModel(1e5), inside=LinkModel(1e6))
    clock = replace(clock, weight_bytes=2, gradient_bytes=4, reduce_scatter="ring")
    widths = Widths(2, 4, 4, 2)
    before, said = (costs(one, widths, activation_bytes={}) for one in (plain, schedule))
    moved = play(schedule, clock, steps=2)
    for link, node in zip(said.link_sent_bytes, moved.node_bytes[moved.steady_step], strict=True):
        assert node.sent == pytest.approx(link, rel=0.01)
    assert max(said.link_sent_bytes) < max(before.link_sent_bytes)
    more = said.buffer_bytes - before.buffer_bytes  # one message that leaves and one that arrives
    assert more == 2 * coded_bytes(max(home.shard_size for home in schedule.homes), 4)


def test_exact_gradient_compression_takes_simulated_time():
    usual: dict[str, Any] = {"strategy": "tawpipe-step"}
    plain, coded = (make(llama(4), 2, 1, 4, **how) for how in (usual, EXACT))
    fast = CostModel.timed(layers=4, forward_s=1e-3, backward_s=3e-3, between=LinkModel(1e4), inside=LinkModel(1e9))
    fast = replace(fast, weight_bytes=2, gradient_bytes=4, reduce_scatter="ring")
    elements = sum(home.shard_size for home in coded.homes)
    for each, faster in ((0.0, True), (1e-3, False)):
        clock = replace(fast, coding=CodingTimes(gradient=(each, each)))
        took = [play(schedule, clock).step_seconds for schedule in (plain, coded)]
        assert (took[1] < took[0]) == faster
        assert took[1] >= 2 * each * elements


def recoded(action: Any, compression: str) -> Any:
    return replace(action, compression=compression) if action.collective == "reduce_scatter" else action


@pytest.mark.parametrize("compression", ["", "int8"])
def test_gradients_sent_in_an_undeclared_form_are_refused(compression):
    schedule = make(llama(3), 2, 1, 4, **EXACT)
    programs = tuple(tuple(recoded(action, compression) for action in program) for program in schedule.programs)
    with pytest.raises(ScheduleError, match="travels as"):
        verify(replace(schedule, programs=programs))


# refusals


@pytest.mark.parametrize(
    "strategy", ["tawpipe-striped", "tawpipe-whole", "flat", "hsdp", "tawpipe-groups", "weipipe", "1f1b"]
)
def test_gradients_compression_exact_is_refused_by_unsupported_strategies(strategy):
    with pytest.raises(UserError, match="round one ring") as refused:
        make(llama(6), 2, 2, 4, strategy=strategy, gradients_compression="exact")
    assert refused.value.setting == "schedule.gradients_compression" and "none under" in str(refused.value)
    alone = make(llama(6), 1, 2, 4, strategy=strategy, gradients_compression="exact")  # where it does nothing
    assert alone.programs == make(llama(6), 1, 2, 4, strategy=strategy).programs


@pytest.mark.parametrize(
    ("where", "reason"), [({"on_gpus": True}, "on GPUs"), ({"dtype": torch.float64}, "none with float64")]
)
def test_gradients_compression_exact_is_refused_on_gpus_and_for_fp64(where, reason):
    usual: dict[str, Any] = {"clip_norm": 1.0, "compile_layers": False, "quantize": "none"}
    chosen = ScheduleSettings(**EXACT)
    refuse_settings(chosen, **usual, dtype=torch.float32)
    with pytest.raises(UserError, match=reason) as refused:
        refuse_settings(chosen, **usual, **where)
    assert refused.value.setting == "schedule.gradients_compression"


# training

CODED = {"gradients_compression": "exact"}
CASES = {"a ring of three": {"topology": (3, 1), "delays": 1}}
MORE = {
    "spread": {"topology": (2, 2), "strategy": "tawpipe-spread", "delays": 2},
    "bf16": {"topology": (2, 1), "reduce_dtype": "same"},
    "early": {"topology": (2, 1), "frozen": True, "early_updates": True, "clip_norm": None},
    "adapters": {"topology": (2, 2), "lora": True},
    "tied, with exact weights": {"topology": (2, 2), "tied": True, "weights_compression": "exact"},
    "homes in the host's memory": {"topology": (2, 2), "host_homes": "state"},
}


def test_gradients_compression_exact_changes_no_bit(pool, tmp_path):
    run_cases(pool, CASES, str(tmp_path), coded=CODED)


@pytest.mark.slow
def test_gradients_compression_exact_changes_no_bit_in_more_cases(pool, tmp_path):
    run_cases(pool, MORE, str(tmp_path), coded=CODED)


def test_sent_bytes_of_exact_gradients_match_the_prediction(pool):
    for sent, said, _, _, gradients in pool.run("exact:moved", 2, 1, coded=CODED, lr=3e-4):
        assert sent == pytest.approx(said, rel=0.03) and gradients < 0.8
