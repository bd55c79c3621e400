"""Small copies of a model on the CPU, so that a model of any size can be compared with its own forward pass.

A copy has the model's first layers and a part of its vocabulary. Its values are the model's values plus a small random
disturbance. Without it, zeros (in an adapter) and ones (in a norm) would hide errors that the comparison is for."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tawpipe.model.buffers import materialize_buffers
from tawpipe.model.chain import Chain, inner_model
from tawpipe.model.discovery.discovery import kind_of
from tawpipe.model.fused.places import plain_again
from tawpipe.model.weights import WeightSource

MOST_LAYERS = 8
SMALL_VOCABULARY = 1024
LARGE_TABLE = 20_000_000
"""Elements of an embedding above which the vocabulary is cut."""
DISTURBANCE = 0.02


@dataclass(frozen=True)
class Cut:
    """Size of a small copy.

    Args:
        layers: number of layers in the copy: the first ones of the model.
        vocabulary: tokens in the model's vocabulary.
        tokens: tokens in the copy's vocabulary.
        parameters: elements of all parameters of the copy.
    """

    layers: int
    vocabulary: int
    tokens: int
    parameters: int


def plan_cut(chain: Chain) -> Cut:
    """Return the size of the smallest copy that has a layer of every kind, between 2 and ``MOST_LAYERS`` layers.

    A model with fewer layers keeps all of them. The vocabulary is cut to ``SMALL_VOCABULARY`` tokens if the embedding
    has more than ``LARGE_TABLE`` elements."""
    text = chain.config.get_text_config()
    types = getattr(text, "layer_types", None) or []
    seen, wanted = set(), 0
    for index, layer in enumerate(chain.layers):
        kind = kind_of(layer, index), types[index] if index < len(types) else None
        if kind not in seen:
            seen.add(kind)
            wanted = index + 1
    layers = min(max(wanted, 2), MOST_LAYERS, len(chain.layers))
    vocabulary = text.vocab_size
    tokens = min(vocabulary, SMALL_VOCABULARY) if vocabulary * text.hidden_size > LARGE_TABLE else vocabulary
    cut = Cut(layers, vocabulary, tokens, 0)
    shapes = [
        _shape(slot.shape, cut) for unit in chain.units if _is_kept(unit.blocks, chain, cut) for slot in unit.slots
    ]
    return Cut(layers, vocabulary, tokens, sum(torch.Size(shape).numel() for shape in shapes))


def _is_kept(blocks: tuple[int, ...], chain: Chain, cut: Cut) -> bool:
    """Return True if the copy has a unit used by these ``blocks``: the embedding, kept layers or the head."""
    return any(block <= cut.layers or block > len(chain.layers) for block in blocks)


def _shape(shape: tuple[int, ...], cut: Cut) -> tuple[int, ...]:
    """Return the shape of a parameter in the copy: a first dimension of vocabulary size becomes ``cut.tokens``."""
    return (cut.tokens, *shape[1:]) if shape and shape[0] == cut.vocabulary else shape


def small_copy(chain: Chain, source: WeightSource, cut: Cut, dtype: torch.dtype) -> nn.Module:
    """Return a copy of the chain's model with the first layers only, on the CPU, without dropout and noise.

    A ``peft`` wrapper is copied as well, fused kernels are not. Every value is disturbed by noise with a fixed seed.

    Args:
        chain: the model.
        source: gives the values, one unit at a time.
        cut: size of the copy, from ``plan_cut``.
        dtype: dtype of the copy's parameters.
    """
    originals = dict(chain.model.named_parameters())
    memo: dict[int, Any] = {
        id(p): nn.Parameter(torch.empty(0, device="meta", dtype=dtype), p.requires_grad) for p in originals.values()
    }
    generator = torch.Generator().manual_seed(0)
    for unit in chain.units:
        if not _is_kept(unit.blocks, chain, cut):
            continue
        flat = source.unit(unit, dtype=dtype)
        for slot in unit.slots:
            value = slot.view(flat)
            if _shape(slot.shape, cut) != slot.shape:
                value = value[: cut.tokens]
            value = value + DISTURBANCE * torch.randn(value.shape, generator=generator, dtype=dtype)
            memo[id(originals[slot.name])] = nn.Parameter(value, originals[slot.name].requires_grad)
    copy = deepcopy(chain.outer_model, memo)
    plain_again(copy)

    model = inner_model(copy)
    *above, name = chain.path.split(".")
    holder = model.get_submodule(".".join(above))
    holder._modules[name] = nn.ModuleList(list(getattr(holder, name))[: cut.layers])
    text = model.config.get_text_config()
    text.num_hidden_layers = cut.layers
    if cut.tokens < cut.vocabulary:
        _cut_vocabulary(model, text, cut)
    materialize_buffers(model, torch.device("cpu"))
    _silence(copy)
    return copy


def _cut_vocabulary(model: nn.Module, text: Any, cut: Cut) -> None:
    """Set the vocabulary size in the config, and in the attributes of the embeddings and the head, to ``cut.tokens``.

    Their weights must have this size already. A padding token beyond it is removed.

    Args:
        model: the copy, changed in place.
        text: its text config, changed in place.
        cut: sizes of the copy.
    """
    text.vocab_size = cut.tokens
    if (text.pad_token_id or 0) >= cut.tokens:
        text.pad_token_id = None
    for module in model.modules():
        if isinstance(module, nn.Embedding) and module.num_embeddings == cut.vocabulary:
            module.num_embeddings = cut.tokens
            if module.padding_idx is not None and module.padding_idx >= cut.tokens:
                module.padding_idx = None
        elif isinstance(module, nn.Linear) and module.out_features == cut.vocabulary:
            module.out_features = cut.tokens


def _silence(copy: nn.Module) -> None:
    """Set every dropout, jitter and noise setting of the model to 0, in place.

    Two runs of different shapes cannot draw the same random numbers."""
    model = inner_model(copy)
    for owner in (*copy.modules(), model.config, model.config.get_text_config()):
        for key, value in list(vars(owner).items()):
            if isinstance(value, float) and any(word in key for word in ("drop", "jitter", "noise")):
                setattr(owner, key, 0.0)
        if isinstance(owner, nn.modules.dropout._DropoutNd):
            owner.p = 0.0
