"""Tokens drawn from logits: who is in, with which chance, and from which random numbers."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch

from tawpipe.serving.drawing import draw, uniform
from tawpipe.serving.passes import Sampling

CHANCES = torch.tensor([0.1, 0.4, 0.2, 0.05, 0.25])
LOGITS = CHANCES.double().log()


def drawn(sampling: Sampling, count: int = 2000) -> Counter[int]:
    rows = [(0, position, sampling) for position in range(count)]
    return Counter(token.token for token in draw(LOGITS.expand(count, -1), rows))


def test_temperature_0_draws_the_most_likely_token_with_its_logprob() -> None:
    (token,) = draw(LOGITS[None], [(7, 3, Sampling(temperature=0.0, logprobs=2))])
    assert (token.slot, token.position, token.token) == (7, 3, 1)
    assert token.logprob == pytest.approx(math.log(0.4))
    assert [number for number, _ in token.top] == [1, 4]
    assert [logprob for _, logprob in token.top] == pytest.approx([math.log(0.4), math.log(0.25)])


def test_logprobs_ignore_temperature_and_top_k() -> None:
    (token,) = draw(LOGITS[None], [(0, 3, Sampling(temperature=3.0, top_k=2, seed=5))])
    assert token.logprob == pytest.approx(float(LOGITS[token.token]))


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (Sampling(), [0.1, 0.4, 0.2, 0.05, 0.25]),
        (Sampling(temperature=0.5), [0.01, 0.16, 0.04, 0.0025, 0.0625]),
        (Sampling(top_k=2), [0, 0.4, 0, 0, 0.25]),
        (Sampling(top_k=9), [0.1, 0.4, 0.2, 0.05, 0.25]),
        (Sampling(top_p=0.6), [0, 0.4, 0, 0, 0.25]),
        (Sampling(top_p=0.0001), [0, 1, 0, 0, 0]),
        (Sampling(top_k=3, top_p=0.7), [0, 0.4, 0, 0, 0.25]),
    ],
)
def test_drawn_frequencies_match_the_sampling_settings(sampling: Sampling, expected: list[float]) -> None:
    counts, total = drawn(sampling), sum(expected)
    for token, chance in enumerate(expected):
        assert counts[token] / 2000 == pytest.approx(chance / total, abs=0.04)
        assert chance or not counts[token]


def test_top_p_over_many_tokens_is_right_without_sorting_all() -> None:
    logits = torch.zeros(1, 5000, dtype=torch.float64)
    logits[0, 4321] = 30.0
    assert draw(logits, [(0, 0, Sampling(top_p=0.9))])[0].token == 4321
    logits[0, 4321] = 0.0
    tokens = [draw(logits, [(0, at, Sampling(top_p=0.9))])[0].token for at in range(50)]
    assert len(set(tokens)) > 40


def test_random_draw_depends_only_on_seed_and_position() -> None:
    sampling = Sampling(seed=3)
    torch.manual_seed(0)
    before = torch.get_rng_state()
    (alone,) = draw(LOGITS[None], [(0, 11, sampling)])
    others = [(1, 11, Sampling(seed=4)), (0, 11, sampling), (2, 12, sampling)]
    assert draw(LOGITS.expand(3, -1), others)[1] == alone
    assert torch.equal(torch.get_rng_state(), before)
    assert len({uniform(seed, position) for seed in range(9) for position in range(9)}) == 81


def test_nan_logits_still_draw_a_valid_token() -> None:
    (token,) = draw(torch.full((1, 5), float("nan")), [(0, 0, Sampling())])
    assert math.isnan(token.logprob) and 0 <= token.token < 5
    (token,) = draw(torch.tensor([[0.0, float("-inf")]]), [(0, 0, Sampling(top_p=0.5))])
    assert token.token == 0
