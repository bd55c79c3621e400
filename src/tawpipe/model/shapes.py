"""Attention and expert sizes from a model's text config, also if a setting is missing or differs between layers."""

from __future__ import annotations

from typing import Any

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Config keys for the number of experts in a layer."""


def share_of_experts(config: Any) -> float:
    """Return the part of a layer's experts that one token is sent to, from 0 to 1; 1 for a model without experts.

    >>> from types import SimpleNamespace
    >>> share_of_experts(SimpleNamespace(num_experts=128, num_experts_per_tok=8))
    0.0625
    """
    experts = next((number for name in EXPERTS if (number := setting_of(config, name))), 1)
    return (setting_of(config, "num_experts_per_tok") or experts) / experts


def num_heads(config: Any) -> int:
    """Return the number of query heads in a model's text config; 0 for a model without attention."""
    return setting_of(config, "num_attention_heads") or 0


def head_size(config: Any) -> int:
    """Return the elements of one query head in a model's text config: ``head_dim``, or hidden size / heads."""
    return setting_of(config, "head_dim") or config.hidden_size // (num_heads(config) or 1)


def setting_of(config: Any, name: str) -> Any:
    """Return the setting ``name`` of ``config``, or None if the config lacks it.

    If the setting differs between layers, the largest value is returned."""
    try:
        return getattr(config, name, None)
    except RuntimeError:  # transformers raises it if the setting differs between layers
        return max(getattr(layer, name, None) or 0 for layer in config.per_layer_config)
