"""Random numbers of blocks: the same whenever a block computes, and nothing of anybody else's generators."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tawpipe.runtime.compute.randomness import BlockRandomness, OwnGenerator, draws, seed_of

CPU = torch.device("cpu")
DRAWS: list[Callable[[], Tensor]] = [
    lambda: F.dropout(torch.ones(64), 0.5),
    lambda: torch.rand(64),
    lambda: torch.randn(64),
    lambda: torch.randint(0, 1000, (64,)),
    lambda: torch.randperm(64),
    lambda: torch.bernoulli(torch.full((64,), 0.5)),
    lambda: torch.empty(64).uniform_(),
    lambda: torch.multinomial(torch.ones(64), 32),
    lambda: torch.poisson(torch.full((64,), 5.0)),
    lambda: torch.rand_like(torch.ones(64)),
]


def test_seeds_depend_on_every_number_and_their_order() -> None:
    seeds = {seed_of(a, b, c) for a in range(4) for b in range(4) for c in range(4)}
    assert len(seeds) == 64 and all(0 <= seed < 2**64 for seed in seeds)
    assert seed_of(1, 2, 3) == seed_of(1, 2, 3)


@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("compiled", [False, True])
def test_a_block_draws_by_its_seed_and_leaves_the_default_generator(draw: Callable[[], Tensor], compiled: bool) -> None:
    randomness = BlockRandomness(CPU, compiled=compiled)
    torch.manual_seed(1)
    before = torch.default_generator.get_state()
    first, other = randomness.run("block", 7, draw), randomness.run("block", 8, draw)
    torch.manual_seed(2)
    again = randomness.run("block", 7, draw)
    assert torch.equal(first, again) and not torch.equal(first, other)
    with randomness.seeded(7):
        assert torch.equal(draw(), first)
    torch.manual_seed(1)
    assert torch.equal(torch.default_generator.get_state(), before)
    randomness.run("block", 9, draw)
    assert torch.equal(torch.default_generator.get_state(), before)


def test_block_that_starts_to_draw_later_is_seeded() -> None:
    """As a router's noise that only training has: the run without a watch counts for nothing."""
    randomness, noisy = BlockRandomness(CPU), [False]

    def forward() -> Tensor:
        return torch.ones(8) + (torch.rand(8) if noisy[0] else 0)

    torch.manual_seed(3)
    assert torch.equal(randomness.run("router", 5, forward), torch.ones(8))
    noisy[0] = True
    first = randomness.run("router", 5, forward)
    torch.manual_seed(4)
    assert torch.equal(randomness.run("router", 5, forward), first)
    with randomness.seeded(5):
        assert torch.equal(forward(), first)


def test_attention_draws_only_with_dropout_and_given_generators_are_used() -> None:
    attention = torch.ops.aten.scaled_dot_product_attention.default
    qkv = (torch.zeros(1), torch.zeros(1), torch.zeros(1))
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    assert not draws(torch.ops.aten.add.Tensor, qkv[:2], {})
    for one in (attention, flash):
        if torch.Tag.nondeterministic_seeded in one.tags:
            assert not draws(one, qkv, {}) and draws(one, qkv, {"dropout_p": 0.1})
    own = torch.Generator().manual_seed(6)
    expected = torch.rand(4, generator=torch.Generator().manual_seed(6))
    with OwnGenerator(torch.Generator().manual_seed(9)) as mode:
        assert torch.equal(torch.rand(4, generator=own), expected) and not mode.drew
        torch.rand(4)
        assert mode.drew


def test_default_generator_is_restored_after_an_error() -> None:
    for compiled in (False, True):
        randomness = BlockRandomness(CPU, compiled=compiled)
        torch.manual_seed(5)
        before = torch.default_generator.get_state()
        with pytest.raises(ZeroDivisionError), randomness.seeded(1):
            torch.rand(3)
            raise ZeroDivisionError
        assert torch.equal(torch.default_generator.get_state(), before)
