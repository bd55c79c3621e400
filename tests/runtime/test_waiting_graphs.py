"""What a layer keeps, in the host's memory and back: the same bits, no memory of the device meanwhile, no weights."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.multiprocessing.reductions import StorageWeakRef

from tawpipe.runtime.compute.activations import Activations, LayerGraph
from tawpipe.runtime.compute.attention_results import AttentionResults
from tawpipe.runtime.compute.moves import copy
from tawpipe.runtime.compute.recompute import Saved, keep_graph
from tawpipe.schedule.actions import Action, Lane, Op
from tawpipe.schedule.buffers import AWAY, Buffer, Kind

HEADS, WIDTH = 2, 16


def layer(hidden: Tensor, flat: Tensor) -> Tensor:
    """Attention and an MLP with dropout: views of one product, a saved output, a saved mask, a saved view of input."""
    fused, out, up = (one.view(WIDTH, -1) for one in flat.split([3 * WIDTH * WIDTH, WIDTH * WIDTH, WIDTH * WIDTH]))
    query, key, value = (
        one.unflatten(-1, (HEADS, -1)).transpose(1, 2) for one in (hidden.tanh() @ fused).chunk(3, dim=-1)
    )
    attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    hidden = hidden + attended.transpose(1, 2).flatten(-2) @ out
    return hidden + F.dropout(hidden @ up, 0.2) * hidden[..., :1].sigmoid()


def graph(kind: Kind) -> tuple[LayerGraph, Tensor, dict[int, Tensor]]:
    torch.manual_seed(5)
    bound = {0: torch.randn(5 * WIDTH * WIDTH)}
    flat, saved = bound[0].detach().requires_grad_(), Saved()
    leaf = torch.randn(2, 7, WIDTH).requires_grad_()
    run = lambda given: layer(given, flat)  # noqa: E731
    if kind is Kind.GRAPH:
        output = keep_graph(run, leaf, [0], bound, saved)
        return LayerGraph(leaf, get_gradient_edge(output), None, saved), flat, bound
    results = AttentionResults(catches=True)
    torch.manual_seed(6)
    results.keep(lambda: run(leaf))
    return LayerGraph(leaf, results, None, results.tensors), flat, bound


def gradients(kept: LayerGraph, flat: Tensor) -> list[Tensor]:
    edge = kept.graph
    if isinstance(edge, AttentionResults):
        torch.manual_seed(6)
        edge = get_gradient_edge(edge.reuse(lambda: layer(kept.leaf, flat)))
    kept.forget()
    torch.autograd.backward(edge, torch.linspace(-1, 1, 2 * 7 * WIDTH).view(2, 7, WIDTH))
    assert kept.leaf.grad is not None and flat.grad is not None
    return [kept.leaf.grad, flat.grad]


@pytest.mark.parametrize("kind", [Kind.GRAPH, Kind.ATTENTION])
def test_offloaded_graph_is_restored_bit_by_bit_and_frees_device_memory(kind):
    expected = gradients(*graph(kind)[:2])
    kept, flat, bound = graph(kind)
    here, away = Buffer(kind, (0, 1)), Buffer(AWAY[kind], (0, 1))
    held = Activations()
    held.kept[here] = kept
    blocks: Any = SimpleNamespace(
        held=held, growing_buffers={}, chain=SimpleNamespace(device=torch.device("cpu")), stream=None
    )
    storages = [StorageWeakRef(one.untyped_storage()) for one in (kept.leaf, *kept.saved)]
    assert all(one.untyped_storage().data_ptr() != bound[0].untyped_storage().data_ptr() for one in kept.saved)
    assert len({one.cdata for one in storages}) >= (4 if kind is Kind.GRAPH else 2)

    copy(blocks, Action(Op.OFFLOAD, Lane.HOST, (here,), (away,), (here,), block=1, micro_batch=0), to_host=True)
    gc.collect()
    assert all(one.expired() for one in storages)  # no memory of the device is held by anybody
    assert list(held.kept) == [away]
    flat.data.mul_(1)  # weights are where they were, and the graph reads them there
    copy(blocks, Action(Op.RELOAD, Lane.HOST, (away,), (here,), (away,), block=1, micro_batch=0), to_host=False)
    assert list(held.kept) == [here]
    back: Any = held.kept[here]
    for mine, theirs in zip(gradients(back, flat), expected, strict=True):
        assert torch.equal(mine, theirs)

    # The place is used again, and grows.
    kept, flat, _ = graph(kind)
    held.kept[here] = kept
    copy(blocks, Action(Op.OFFLOAD, Lane.HOST, (here,), (away,), (here,), block=1, micro_batch=0), to_host=True)
    waiting: Any = held.kept[away]
    waiting.memory.zero_()
    copy(blocks, Action(Op.RELOAD, Lane.HOST, (away,), (here,), (away,), block=1, micro_batch=0), to_host=False)
    back = held.kept[here]
    assert not torch.equal(gradients(back, flat)[1], expected[1])  # it is read from there
