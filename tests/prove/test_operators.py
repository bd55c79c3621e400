"""The operators of attention that ran are named."""

from __future__ import annotations

import torch

from tawpipe.prove.operators import attention_seen


def test_attention_seen_names_only_attention_operators():
    query = torch.randn(1, 2, 8, 4)
    with attention_seen() as seen:
        torch.nn.functional.scaled_dot_product_attention(query, query, query, is_causal=True)
        torch.ones(3).sum()
    assert seen and all("attention" in one for one in seen)
    with attention_seen() as seen:
        torch.ones(3).sum()
    assert not seen


def test_attention_seen_watches_the_given_thread():
    ran = []
    with attention_seen(lambda run: ran.append(run())) as seen:
        pass
    assert len(ran) == 2 and not seen
