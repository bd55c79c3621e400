"""What layers are called with besides hidden states comes out the same where the embedding's weights are not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from every_family import PACKED, families, micro_batches, random_model
from family_configs import tiny_config
from model_families import Holder, meta_model
from selected import quick_ones
from tawpipe.errors import UserError
from tawpipe.model.attention.attention import PackedMask
from tawpipe.model.batch import MicroBatch
from tawpipe.model.chain import Chain
from tawpipe.model.stubs import LayerCall
from tawpipe.model.tested import TESTED_FAMILIES

SAMPLE = "llama", "gpt2", "opt", "bloom", "gemma3_text", "roberta", "falcon_mamba", "gpt_oss", "biogpt", "deepseek_v3"
"""Plain, learned positions, projections, ALiBi and a norm, two kinds of layers, counted padding, no attention, sinks,
scaled embeddings, latent attention.
"""
NEED_WEIGHTS = "roformer", "zamba", "zamba2"
"""Families whose layers are given embeddings, of positions or of tokens; a chain takes the latter when frozen."""


def with_and_without_weights(holder: Holder, batch: MicroBatch) -> list[tuple[Any, Any]]:
    """Pairs of the leaves of the layers' calls."""
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(0)
        holder.visit(0)
        expected = holder.chain.embed(batch)[1]
        holder.leave(0)
        torch.manual_seed(0)
        return list(zip(leaves(expected), leaves(holder.chain.calls(batch)), strict=True))


def leaves(calls: tuple[LayerCall, ...]) -> list[Any]:
    return [leaf for call in calls for leaf in tree_leaves((call.args, call.kwargs))]


def same(first: Any, second: Any) -> bool:
    if isinstance(first, PackedMask):
        return (first.documents.spans, first.window) == (second.documents.spans, second.window)
    if isinstance(first, Tensor):
        return first.dtype == second.dtype and torch.equal(first, second)
    return type(first) is type(second) and first == second


@pytest.mark.parametrize(
    "family",
    quick_ones([one for one in families() if one in {*TESTED_FAMILIES, *SAMPLE, *NEED_WEIGHTS}], SAMPLE),
)
def test_arguments_of_layers_need_no_embedding_weights(family: str):
    try:
        holder = Holder(random_model(family).requires_grad_(False))
    except (UserError, ImportError, ValueError) as error:  # which families may be refused is another test's
        assert family not in SAMPLE
        pytest.skip(str(error))
    assert bool(holder.chain.why_not_staged) == (family in NEED_WEIGHTS)
    for batch in micro_batches(PACKED):
        pairs = with_and_without_weights(holder, batch)
        assert pairs
        assert all(same(*pair) for pair in pairs) == (family not in NEED_WEIGHTS)


def test_layers_that_read_the_embedding_again_are_found_on_meta():
    model = meta_model(tiny_config("zamba")).requires_grad_(False)
    assert "layer 0 is given a tensor besides the hidden states" in Chain(model).why_not_staged
