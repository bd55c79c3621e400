"""Tokens of a row that several ranks compute together: every token has its place, with its rank and in the row."""

from __future__ import annotations

import pytest
import torch

from tawpipe.runtime.compute.cp_groups import CpTokens

LENGTHS = [(16,), (5, 11), (1, 2, 3), (7, 1, 9, 30)]


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_tokens_gathered_by_rank_return_to_row_order(lengths: tuple[int, ...], ranks: int) -> None:
    tokens, row = sum(lengths), torch.arange(sum(lengths) * 3.0).view(1, 1, -1, 3)
    dealt = CpTokens(lengths, ranks, 0)
    gathered = dealt.by_rank(row)
    assert gathered.shape == (ranks, 1, dealt.most, 3)
    assert torch.equal(dealt.in_order(gathered), row)
    for place in range(ranks):
        own = CpTokens(lengths, ranks, place)
        mine = torch.cat([row[0, 0, begin:end] for begin, end in own.own]) if own.own else row[0, 0, :0]
        assert torch.equal(gathered[place, 0, : len(mine)], mine)
        assert not gathered[place, 0, len(mine) :].any()  # no rank's token
    counted = torch.zeros(tokens)
    for own in dealt.ranges:
        for begin, end in own:
            counted[begin:end] += 1
    assert torch.equal(counted, torch.ones(tokens))


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("size", [1, 3, 100])
def test_parts_of_the_tokens_of_a_rank_map_to_their_row_positions(lengths: tuple[int, ...], size: int) -> None:
    for place in range(2):
        dealt = CpTokens(lengths, 2, place)
        own = [token for begin, end in dealt.own for token in range(begin, end)]
        for begin in range(0, len(own), size):
            end = min(begin + size, len(own))
            part = [token for first, last in dealt.part(begin, end) for token in range(first, last)]
            assert part == own[begin:end]
