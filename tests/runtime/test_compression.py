"""Messages in 8 bits: how far off they are, what they do with bad numbers, and training with them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tawpipe.runtime.transport.compression import Scratch, decode, encode
from tawpipe.schedule.spec import COMPRESSION_BLOCK, compressed_bytes, compressed_width

ROUNDING = {"int8": 1 / 254, "fp8": 1 / 16}
"""Largest error: of int8 half a step of a block's largest number; of e4m3 half a step of 3 bits after the point, of
each number, as long as it is not far below the largest.
"""


def there_and_back(values: torch.Tensor, compression: str, into: torch.Tensor | None = None) -> torch.Tensor:
    message = torch.full((compressed_bytes(values.numel()),), 7, dtype=torch.uint8)
    encode(values, compression, message)
    found = torch.full_like(values, 5.0) if into is None else into
    decode(message, compression, found, add=into is not None)
    return found


@pytest.mark.parametrize("compression", ["int8", "fp8"])
@given(count=st.integers(1, 3 * COMPRESSION_BLOCK), exponent=st.integers(-140, 30), seed=st.integers(0, 9))
def test_compressed_values_return_within_the_rounding_limit(compression, count, exponent, seed):
    values = torch.randn(count, generator=torch.Generator().manual_seed(seed)) * 2.0**exponent
    found = there_and_back(values, compression)
    for block, same in zip(values.split(COMPRESSION_BLOCK), found.split(COMPRESSION_BLOCK), strict=True):
        largest = block.abs().max()
        assert same.isfinite().all()
        if largest < 2.0**-110:
            continue  # the scale is no longer exact
        off = (block - same).abs() / (largest if compression == "int8" else torch.maximum(block.abs(), largest / 2**8))
        assert off.max() <= ROUNDING[compression] * 1.001


@pytest.mark.parametrize("compression", ["int8", "fp8"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_compressing_twice_equals_compressing_once(compression, dtype):
    once = there_and_back(torch.randn(1000, generator=torch.Generator().manual_seed(1)).to(dtype), compression)
    assert once.dtype == dtype
    assert torch.allclose(there_and_back(once, compression), once, rtol=1e-2 if dtype == torch.bfloat16 else 1e-6)


@pytest.mark.parametrize("compression", ["int8", "fp8"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_nonfinite_values_survive_compression_in_place(compression, bad):
    values = torch.zeros(2 * COMPRESSION_BLOCK + 3)
    values[COMPRESSION_BLOCK + 1] = bad
    found = there_and_back(values, compression)
    assert not found[COMPRESSION_BLOCK + 1].isfinite()
    assert found[:COMPRESSION_BLOCK].eq(0).all() and found[2 * COMPRESSION_BLOCK :].eq(0).all()


@pytest.mark.parametrize("compression", ["int8", "fp8"])
def test_compressed_messages_are_accumulated(compression):
    values = torch.linspace(-3, 3, 700)
    assert torch.equal(there_and_back(values, compression, torch.ones(700)), there_and_back(values, compression) + 1)


def test_long_messages_are_compressed_in_slices(monkeypatch):
    values = torch.randn(5 * COMPRESSION_BLOCK + 7)
    whole = there_and_back(values, "int8")
    monkeypatch.setattr("tawpipe.runtime.transport.compression.SEGMENT", 2 * COMPRESSION_BLOCK)
    assert torch.equal(there_and_back(values, "int8"), whole)


def test_compressed_bytes_and_scratch_sizes_are_consistent():
    assert (
        compressed_bytes(COMPRESSION_BLOCK)
        == COMPRESSION_BLOCK * compressed_width("int8", 4, 0)
        == COMPRESSION_BLOCK + 4
    )
    assert compressed_width("none", 2, 0) == 2
    scratch = Scratch(torch.device("cpu"))
    first, second = scratch.take([100, 600], "fp8")
    assert (first.numel(), second.numel()) == (compressed_bytes(100), compressed_bytes(600))
    assert second.data_ptr() == first.data_ptr() + first.numel() and scratch.nbytes == first.numel() + second.numel()
    assert scratch.take([5], "fp8")[0].data_ptr() == first.data_ptr()


@pytest.mark.parametrize(
    "knobs",
    [
        pytest.param(
            {
                "strategy": "tawpipe-spread",
                "weights_compression": "fp8",
                "gradients_compression": "fp8",
                "gradients_scope": "step",
            },
            marks=pytest.mark.slow,
        ),
        {"strategy": "tawpipe-striped", "weights_compression": "int8", "gradients_compression": "fp8"},
        pytest.param({"strategy": "tawpipe-whole", "gradients_compression": "int8"}, marks=pytest.mark.slow),
    ],
    ids=lambda knobs: " ".join(map(str, knobs.values())),
)
def test_compressed_training_is_close_and_bitwise_repeatable(pool, knobs):
    """The first step's gradients are those of full messages but for the rounding, which Adam's steps would hide; the
    same bits again whatever the timing.
    """
    limit = 0.06 if "fp8" in knobs.values() else 0.02
    if "weights_compression" in knobs:  # attention's gradients are small differences of what rounded weights give
        limit = 0.15
    for norm, differences in pool.run("cases:rounded", 2, 2, knobs=knobs):
        assert norm == pytest.approx(1.0, abs=limit / 2) and norm != 1.0
        middle = sorted(differences)[len(differences) // 2 :]
        assert max(middle[:1], default=0.0) < limit
        assert max(middle, default=0.0) < 0.3  # vectors share blocks with matrices whose gradients are larger
    losses, weights = pool.run("cases:weights_after", 2, 2, rows=7, **knobs)[0]
    again = pool.run("cases:weights_after", 2, 2, rows=7, delays=0.003, **knobs)[0]
    assert losses == again[0] and all(torch.equal(weights[name], again[1][name]) for name in weights)


def test_compression_scratch_is_within_the_predicted_bytes(pool):
    """What the transport holds is what the costs count."""
    for held, said in pool.run("cases:scratch", 2, 2):
        assert 0 < held <= said
