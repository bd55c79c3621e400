"""Documents dealt to ranks: all of them once, within the cap, for equally long."""

from __future__ import annotations

import random

import pytest

from tawpipe.dealing.balance import LayerKind, LayerTime, Packs, deal
from tawpipe.errors import UserError
from tawpipe.schedule.spec import share_packs

WORK = LayerTime((LayerKind(layers=32, per_token=53_248, per_pair=1),))
"""An 8 B model's: attention takes half of the time at 53 k tokens."""


def corpus(tokens: int, longest: int, seed: int, mu: float = 6.35, sigma: float = 2.33) -> list[int]:
    """Lengths of documents as production corpora have them."""
    draw, lengths = random.Random(seed), []
    while sum(lengths) < tokens:
        lengths.append(min(longest, max(32, int(draw.lognormvariate(mu, sigma)))))
    return lengths


def dealt_numbers(bins: Packs) -> list[int]:
    return sorted(n for row in (*bins.shared, *bins.single) for one in row for n in one.documents)


@pytest.mark.parametrize("seed", range(20))
def test_every_document_is_dealt_once_and_no_pack_exceeds_the_cap(seed: int) -> None:
    draw = random.Random(seed)
    ranks = draw.choice([1, 2, 4])
    world = ranks * draw.choice([1, 2, 3])
    cap = draw.choice([64, 1000])
    lengths = [draw.randint(1, draw.choice([5, cap, cap * ranks])) for _ in range(draw.randint(1, 80))]
    bins = deal(lengths, world_size=world, cap=cap, work=WORK, ranks=ranks)
    assert dealt_numbers(bins) == list(range(len(lengths)))
    assert all(any(one.documents for one in row) for row in (*bins.shared, *bins.single))
    for row, size, places in [
        *((row, ranks, world // ranks) for row in bins.shared),
        *((r, 1, world) for r in bins.single),
    ]:
        assert len(row) == places
        assert all(bins.tokens(one) <= cap * size and one.ranks == size for one in row)
    assert bins.seconds >= bins.floor * (1 - 1e-9)
    again = deal(lengths, world_size=world, cap=cap, work=WORK, ranks=ranks)
    assert again == bins


def test_rank_has_shared_packs_first_and_one_pack_of_every_round() -> None:
    lengths = [900, *[10] * 50, 100, 100]
    bins = deal(lengths, world_size=4, cap=500, work=WORK, ranks=2)
    assert bins.shape[0] and 0 in {n for one in bins.shared[0] for n in one.documents}
    for rank in range(4):
        own = bins.of(rank)
        assert len(own) == sum(bins.shape) == len(share_packs(*bins.shape, 4, 2)[rank])
        assert own[: bins.shape[0]] == bins.of(rank ^ 1)[: bins.shape[0]]


@pytest.mark.parametrize("mu", [6.35, 4.46], ids=["production", "code"])
@pytest.mark.parametrize(("world", "ranks"), [(8, 8), (24, 8), (8, 4)])
def test_skewed_corpora_are_balanced_within_six_percent(world: int, ranks: int, mu: float) -> None:
    """Four million tokens a step, documents of up to 128 k."""
    for seed in range(3):
        lengths = corpus(4_000_000, 131_072, seed, mu, 2.3)
        bins = deal(lengths, world_size=world, cap=131_072, work=WORK, ranks=ranks)
        assert bins.imbalance < 1.06


def test_eight_devices_are_balanced_within_five_percent_without_sharing() -> None:
    """Bins have room for half a document more: where the longest document fills one, nothing can stand beside it."""
    steps = (corpus(4_000_000, 131_072, seed) for seed in range(5))
    found = [deal(lengths, world_size=8, cap=196_608, work=WORK).imbalance for lengths in steps]
    assert sorted(found)[2] < 1.05


def test_layers_with_a_window_are_balanced_within_ten_percent() -> None:
    windowed = LayerTime((LayerKind(5, 53_248, 1, 1024), LayerKind(1, 53_248, 1)))
    assert windowed.of(1024) == pytest.approx(6 * (53_248 * 1024 + 1024**2))
    bins = deal(corpus(2_000_000, 65_536, 1), world_size=8, cap=65_536, work=windowed)
    assert bins.imbalance < 1.1


def test_document_that_no_pack_holds_is_refused() -> None:
    with pytest.raises(UserError, match=r"one of 1001 tokens.*at most 1000.*over 2 processes"):
        deal([1001], world_size=4, cap=500, work=WORK, ranks=2)
