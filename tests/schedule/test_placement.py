"""Homes: stripes hold all of a unit, begin where vector loads want them, and every copy is found by its ranks."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tawpipe.schedule.placement import ALIKE, SHARD_ALIGNMENT, Home, alike_sizes, padded_shard


@given(st.integers(1, 10**12), st.integers(1, 64), st.integers(1, 64))
def test_padded_shards_hold_a_unit_with_minimal_padding(numel: int, parts: int, multiple: int) -> None:
    stripe = padded_shard(numel, parts, multiple)
    assert stripe % multiple == 0 and stripe * parts >= numel
    assert (stripe - multiple) * parts < numel


@given(st.lists(st.integers(1, 10_000), min_size=1, max_size=12))
def test_similar_sizes_are_padded_to_equal_within_one_percent(sizes: list[int]) -> None:
    padded = alike_sizes(sizes)
    assert all(before <= after <= before / (1 - ALIKE) for before, after in zip(sizes, padded, strict=True))
    largest = max(sizes)
    assert all(after == largest for before, after in zip(sizes, padded, strict=True) if before >= 0.99 * largest)
    assert alike_sizes(padded) == padded


def test_every_home_copy_has_its_shards_in_rank_order() -> None:
    home = Home.over((4, 0), 100, multiple=2, replicas=((5, 1), (2, 3)))
    assert home.shard_size == 64 and home.shard_size % (2 * SHARD_ALIGNMENT) == 0 and home.padded == 128
    assert [[home.index(rank) for rank in copy] for copy in home.copies] == [[0, 1]] * 3
    assert home.copies[0] == home.ranks and home.index(6) is None
