"""Rows that several ranks compute together: the numbers of one process, for every family, evaluations included."""

from __future__ import annotations

import pytest

from borders import llama, piped
from positions import by_position
from states import ALONE
from tawpipe.errors import UserError

LIMIT = 1e-10
ROWS = ((5, 9, 3), (17,), (1, 2, 14), (3,))
"""Documents in rows, whose tokens no number of pieces divides; a rank may have none of a row."""


@pytest.mark.parametrize(
    ("nodes", "local", "ranks"),
    [
        pytest.param(1, 2, 2, marks=pytest.mark.slow),
        (2, 2, 2),
        pytest.param(1, 4, 4, marks=pytest.mark.slow),
    ],
)
def test_context_parallel_groups_match_one_process(pool, nodes, local, ranks):
    """In chunks and not, with sets that have fewer micro-batches than others, clipped, for several steps of AdamW."""
    fixed = {"dtype": "float64", "sequence_ranks": ranks}
    settings = [
        {"strategy": "tawpipe-spread", "rows": 5, "micro_batches_per_visit": 2, "tied": True},
        {"strategy": "tawpipe-whole", "rows": 3, "tied": False, "sequence_chunk": 3, "recompute": "selective"},
        {"strategy": "hsdp", "rows": 7, "micro_batches_per_visit": 3, "tied": True, "micro_batch": 2},
        {"strategy": "flat", "rows": 2, "tied": False, "sequence_chunk": 7, "offloaded_layers": 3},
    ]
    some = {(1, 2): slice(0, 2), (2, 2): slice(2, 4)}.get((nodes, local), slice(ranks // 4, ranks // 4 + 1))
    for results in pool.run("cases:exact", nodes, local, settings=[fixed | one for one in settings[some]]):
        assert max(results) < LIMIT, results


@pytest.mark.parametrize(
    ("local", "chunk", "tied"),
    [
        pytest.param(2, 0, True, marks=pytest.mark.slow),
        pytest.param(2, 3, False, marks=pytest.mark.slow),
        pytest.param(4, 0, False, marks=pytest.mark.slow),
    ],
)
def test_context_parallel_groups_match_the_plain_model_for_every_attention(pool, local, chunk, tied):
    """Windows, soft caps, sinks, biases, experts, latent attention, one product for queries, keys and values; rows of
    which a rank has no token.
    """
    names = ["gemma3", "gpt_oss"] if chunk else ["gemma3", "deepseek_v3"]
    names += ["gpt_oss", "gemma2", "qwen3_moe", "gpt2"] if local == 2 and not chunk else []
    knobs = {"sequence_ranks": local, "sequence_chunk": chunk, "strategy": "tawpipe-spread"}
    differences = pool.run("cases:families", 1, local, names=names, tied=tied, rows=ROWS, **knobs)[0]
    for family, difference in differences.items():
        # transformers computes a router's softmax in fp32, also in an fp64 model.
        assert difference < (1e-6 if family in ("qwen3_moe", "gpt_oss", "deepseek_v3") else LIMIT), differences


def test_parts_of_shared_rows_computed_piece_by_piece_match_one_process(pool):
    """Without chunks as a setting: a rank's part of a row is longer than what a layer computes at one time."""
    setting = {"strategy": "tawpipe-spread", "rows": 2, "tied": True, "sequence_ranks": 2, "dtype": "float64"}
    assert max(pool.run("shared_rows:exact_in_parts", 1, 2, at_once=3, **setting)) < LIMIT


@pytest.mark.parametrize(
    "settings",
    [
        {},
        pytest.param({"sequence_chunk": 128}, marks=pytest.mark.slow),
        pytest.param({"sequence_chunk": 128, "recompute": "selective"}, marks=pytest.mark.slow),
    ],
)
def test_memory_of_shared_rows_matches_the_count(pool, settings):
    """A layer computes a quarter of a rank's tokens at one time: half as much memory as with all of them."""
    for counted, measured in pool.run("shared_rows:memory", 1, 2, tokens=1024, at_once=128, **settings):
        assert counted == pytest.approx(measured, rel=0.05)
        assert measured < 6_000_000, "10,100,000 if all tokens are computed at one time"


def test_rank_without_a_token_of_a_row_takes_part(pool):
    knobs = {"sequence_ranks": 2, "sequence_chunk": 3, "recompute": "selective"}
    differences = pool.run("cases:families", 1, 2, names=["gemma3"], tied=True, rows=((1,), (3,)), **knobs)[0]
    assert differences["gemma3"] < LIMIT


def test_context_parallel_dropout_gradients_match_the_loss_slope(pool):
    """In attention, behind it and before the first layer: the gradient is the slope of the loss."""
    drops = {"attn_pdrop": 0.2, "resid_pdrop": 0.3, "embd_pdrop": 0.1}
    assert max(pool.run("borders:slope_over_ranks", 1, 2, family="gpt2", drops=drops, sequence_ranks=2)) < 1e-6


@pytest.mark.slow
def test_evaluation_by_position_is_equal_over_context_parallel_ranks(pool):
    alone = by_position(ALONE, chunk=6, micro_batch=1)
    results = pool.run("positions:by_position", 1, 2, chunk=6, micro_batch=1, sequence_ranks=2)
    (curve, said, _), (_, usual, _) = results[0]
    assert said == usual == [(pytest.approx(loss, rel=1e-6), tokens) for loss, tokens in alone[0][1]]
    assert curve == pytest.approx(alone[0][0], rel=1e-6)  # norms in other processes are in fp32


def test_evaluation_answers_are_equal_over_context_parallel_ranks(pool):
    """Of rows whose tokens several ranks look at; rows of one micro-batch would be told apart no more."""
    (alone, *_), *_ = pool.run("positions:answers", 1, 1, loss_chunk_tokens=6)
    (together, *_), *_ = pool.run("positions:answers", 1, 2, loss_chunk_tokens=6, sequence_ranks=2)
    assert [(one.right, one.tokens) for one in together] == [(one.right, one.tokens) for one in alone]
    assert [one.loss for one in together] == pytest.approx([one.loss for one in alone], rel=1e-6)
    with pytest.raises(AssertionError, match="answers are told apart by row"):
        pool.run("positions:answers", 1, 2, micro_batch=2, sequence_ranks=2)


def test_context_parallel_size_above_the_node_is_refused():
    with pytest.raises(UserError, match=r"sequence_ranks.*2; 1: .* every node has one"):
        piped(llama(), sequence_ranks=2)
