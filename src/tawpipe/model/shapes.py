"""Sizes of attention that a model's text config says, also where it has none or layers differ."""

from __future__ import annotations

from typing import Any

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Names in configs of the number of a layer's experts."""


def share_of_experts(config: Any) -> float:
    """Of a layer's experts, those that a token is sent to, of a model's text config; 1 where there are none.

    >>> from types import SimpleNamespace
    >>> share_of_experts(SimpleNamespace(num_experts=128, num_experts_per_tok=8))
    0.0625
    """
    experts = next((number for name in EXPERTS if (number := setting_of(config, name))), 1)
    return (setting_of(config, "num_experts_per_tok") or experts) / experts


def num_heads(config: Any) -> int:
    """Query heads of a model's text config; 0 for a model without attention."""
    return setting_of(config, "num_attention_heads") or 0


def head_size(config: Any) -> int:
    """Elements of a query head, of a model's text config."""
    return setting_of(config, "head_dim") or config.hidden_size // (num_heads(config) or 1)


def setting_of(config: Any, name: str) -> Any:
    """A setting of a config, None if it has none; where it differs from layer to layer, the largest."""
    try:
        return getattr(config, name, None)
    except RuntimeError:  # transformers' answer where layers differ
        return max(getattr(layer, name, None) or 0 for layer in config.per_layer_config)
