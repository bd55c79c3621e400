"""Lengths of documents: the histogram adds up, and packing by tokens loses to dealing by time as it should."""

from __future__ import annotations

import random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tawpipe.dealing.balance import LayerKind, LayerTime, deal
from tawpipe.dealing.unbalanced import in_turn
from tawpipe.report.lengths import Histogram

WORK = LayerTime((LayerKind(layers=4, per_token=1000.0, per_pair=1.0),))


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=50))
def test_a_histogram_counts_every_document_and_token_once(lengths):
    found = Histogram.of(np.array(lengths))
    for at, edge in enumerate(found.edges):
        inside = [length for length in lengths if edge // 2 < length <= edge]
        assert abs(found.documents[at] * len(lengths) - len(inside)) < 1e-6
        assert abs(found.tokens[at] * sum(lengths) - sum(inside)) < 1e-6 * sum(lengths)
    assert len(found.lines()) == len(found.edges)


@given(st.lists(st.integers(1, 100), min_size=1, max_size=60), st.integers(1, 5))
def test_in_turn_packs_every_document_once_within_the_row_length(lengths, world_size):
    rows = in_turn(lengths, world_size, 100, WORK)
    held = [number for one in rows.single for row in one for number in row.documents]
    assert sorted(held) == list(range(len(lengths)))
    assert all(rows.tokens(row) <= 100 for one in rows.single for row in one)
    assert all(len(one) == world_size for one in rows.single)
    assert rows.seconds >= rows.mean_seconds * (1 - 1e-9)


def test_dealing_by_time_beats_packing_by_tokens_for_uneven_documents():
    draw = random.Random(0)
    lengths = [min(4096, max(8, int(draw.lognormvariate(4.5, 2.0)))) for _ in range(400)]
    before = in_turn(lengths, 4, 4096, WORK)
    after = deal(lengths, world_size=4, cap=6144, work=WORK)
    assert before.mean_seconds == after.mean_seconds
    assert after.seconds < 0.9 * before.seconds
