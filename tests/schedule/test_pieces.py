"""Who computes which tokens of a row: every token once, with equal work."""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tawpipe.schedule.pieces import SHORT, Ranges, tokens_of_ranks


def work(own: Ranges, lengths: list[int]) -> int:
    """Pairs of a rank's tokens and those before them in their documents."""
    starts = list(accumulate(lengths, initial=0))
    places = {
        token: token - starts[n] + 1
        for n, length in enumerate(lengths)
        for token in range(starts[n], starts[n] + length)
    }
    return sum(places[token] for begin, end in own for token in range(begin, end))


@given(lengths=st.lists(st.integers(1, 60), min_size=1, max_size=12), ranks=st.integers(1, 8))
def test_every_token_is_dealt_to_one_rank(lengths, ranks):
    dealt = tokens_of_ranks(lengths, ranks)
    assert len(dealt) == ranks
    tokens = [token for own in dealt for begin, end in own for token in range(begin, end)]
    assert sorted(tokens) == list(range(sum(lengths)))
    for own in dealt:
        assert all(begin < end for begin, end in own)
        assert all(before[1] < after[0] for before, after in pairwise(own))
    assert dealt == tokens_of_ranks(lengths, ranks)


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("lengths", [[4001], [1999, 2002], [3000, 40, 40, 40, 881], [50] * 80, [3000, *[7] * 143]])
def test_ranks_get_equal_attention_work(lengths, ranks):
    dealt = tokens_of_ranks(lengths, ranks)
    tokens = [sum(end - begin for begin, end in own) for own in dealt]
    assert max(tokens) - min(tokens) <= max(2 * len(lengths), sum(lengths) / ranks / SHORT)
    if len(lengths) < 6:  # of many short documents attention takes next to nothing
        pairs = [work(own, lengths) for own in dealt]
        assert max(pairs) < 1.02 * sum(pairs) / ranks


def test_short_documents_are_kept_whole():
    lengths = [20] * 400
    for own in tokens_of_ranks(lengths, 4):
        assert all(begin % 20 == end % 20 == 0 for begin, end in own)
