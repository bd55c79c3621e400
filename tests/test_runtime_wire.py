"""Messages in 8 bits: how far off they are, what they do with bad numbers, and training with them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tawpipe.runtime.wire import Scratch, decode, encode
from tawpipe.schedule.spec import WIRE_BLOCK, wire_bytes, wire_width

ROUNDING = {"int8": 1 / 254, "fp8": 1 / 16}
"""Largest error: of int8 half a step of a block's largest number; of e4m3 half a step of 3 bits after the point, of
each number, as long as it is not far below the largest.
"""


def there_and_back(values: torch.Tensor, wire: str, into: torch.Tensor | None = None) -> torch.Tensor:
    message = torch.full((wire_bytes(values.numel(), wire),), 7, dtype=torch.uint8)
    encode(values, wire, message)
    found = torch.full_like(values, 5.0) if into is None else into
    decode(message, wire, found, add=into is not None)
    return found


@pytest.mark.parametrize("wire", ["int8", "fp8"])
@given(count=st.integers(1, 3 * WIRE_BLOCK), exponent=st.integers(-30, 30), seed=st.integers(0, 9))
def test_numbers_come_back_within_a_step(wire, count, exponent, seed):
    values = torch.randn(count, generator=torch.Generator().manual_seed(seed)) * 2.0**exponent
    found = there_and_back(values, wire)
    for block, same in zip(values.split(WIRE_BLOCK), found.split(WIRE_BLOCK), strict=True):
        largest = block.abs().max()
        off = (block - same).abs() / (largest if wire == "int8" else torch.maximum(block.abs(), largest / 2**8))
        assert off.max() <= ROUNDING[wire] * 1.001


@pytest.mark.parametrize("wire", ["int8", "fp8"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_what_was_rounded_is_not_rounded_again(wire, dtype):
    once = there_and_back(torch.randn(1000, generator=torch.Generator().manual_seed(1)).to(dtype), wire)
    assert once.dtype == dtype
    assert torch.allclose(there_and_back(once, wire), once, rtol=1e-2 if dtype == torch.bfloat16 else 1e-6)


@pytest.mark.parametrize("wire", ["int8", "fp8"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_number_that_is_not_finite_stays_so(wire, bad):
    values = torch.zeros(2 * WIRE_BLOCK + 3)
    values[WIRE_BLOCK + 1] = bad
    found = there_and_back(values, wire)
    assert not found[WIRE_BLOCK + 1].isfinite()
    assert found[:WIRE_BLOCK].eq(0).all() and found[2 * WIRE_BLOCK :].eq(0).all()


@pytest.mark.parametrize("wire", ["int8", "fp8"])
def test_messages_can_be_added_up(wire):
    values = torch.linspace(-3, 3, 700)
    assert torch.equal(there_and_back(values, wire, torch.ones(700)), there_and_back(values, wire) + 1)


def test_bytes_and_room():
    assert wire_bytes(WIRE_BLOCK, "int8") == WIRE_BLOCK * wire_width("int8", 4) == WIRE_BLOCK + 4
    assert wire_width("dtype", 2) == 2
    scratch = Scratch(torch.device("cpu"))
    first = scratch.take("all", 3, 100, "fp8")
    assert first.shape == (3, wire_bytes(100, "fp8"))
    assert (
        scratch.take("all", 2, 100, "fp8").data_ptr() == first.data_ptr() != scratch.take("own", 1, 9, "fp8").data_ptr()
    )


@pytest.mark.parametrize(
    "knobs",
    [
        {"placement": "spread", "weights_wire": "int8", "gradients_wire": "int8"},
        {"placement": "spread", "weights_wire": "fp8", "gradients_wire": "fp8", "gradients_scope": "step"},
        {"placement": "striped", "weights_wire": "int8", "gradients_wire": "fp8"},
        {"placement": "whole", "gradients_wire": "int8"},
        {"placement": "flat", "weights_wire": "fp8"},
    ],
    ids=lambda knobs: " ".join(map(str, knobs.values())),
)
def test_training_in_8_bits_is_close_and_repeats_itself(pool, knobs):
    """Losses close to those of full messages, but not the same; the same bits again whatever the timing."""
    plain = pool.run("cases:weights_after", 2, 2, rows=7, placement=knobs["placement"])[0]
    losses, weights = pool.run("cases:weights_after", 2, 2, rows=7, **knobs)[0]
    again = pool.run("cases:weights_after", 2, 2, rows=7, delays=0.003, **knobs)[0]
    assert losses == pytest.approx(plain[0], rel=5e-3)
    assert losses != plain[0]
    assert losses == again[0] and all(torch.equal(weights[name], again[1][name]) for name in weights)


def test_room_for_messages_is_as_said(pool):
    """What the transport holds is what the costs count."""
    for held, said in pool.run("cases:scratch", 2, 2):
        assert 0 < held <= said
