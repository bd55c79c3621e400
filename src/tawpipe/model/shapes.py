"""Sizes of attention that a model's text config says, also where it has none or layers differ."""

from __future__ import annotations

from typing import Any


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
