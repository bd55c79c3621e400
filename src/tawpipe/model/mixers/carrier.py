"""Replacement for a mixer's cache, which passes states on while a row is computed chunk by chunk."""

from __future__ import annotations

from inspect import signature

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tawpipe.model.attention.chunked import State

CACHES = "cache", "cache_params", "past_key_values", "past_key_value"
"""Names of the forward argument that is a cache in transformers."""


def cache_argument(module: nn.Module) -> str | None:
    """Return the name of the module's forward argument that is a cache, or None if it has none."""
    return next((name for name in signature(module.forward).parameters if name in CACHES), None)


class LayerStates:
    """States of a carrier in the form of transformers before 5.21, where mixers read them as attributes of a layer."""

    record_past = True

    def __init__(self, before: State) -> None:
        self.conv_states = {place: state for (kind, place), state in before.items() if kind == "conv"}
        self.recurrent_states = {place: state for (kind, place), state in before.items() if kind == "recurrent"}

    def __getitem__(self, layer_idx: int) -> LayerStates:
        return self


class Carrier:
    """Replacement for a mixer's cache: provides the states before some tokens and records the states behind them.

    States keep their autograd graph in both directions.

    Args:
        before: states before the tokens; empty at the beginning of a document.
    """

    def __init__(self, before: State | None = None) -> None:
        self.before: State = before or {}
        self.after: State = {}

    @property
    def layers(self) -> LayerStates:
        return LayerStates(self.before)

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.before.get(("conv", state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.before.get(("recurrent", state_idx))

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, *, conv_kernel_size: int
    ) -> Tensor:
        """Record the last inputs of a convolution, and return its inputs with earlier ones in front.

        Args:
            conv_states: inputs [b, C, S].
            conv_kernel_size: size of the convolution; ``conv_kernel_size - 1`` inputs are recorded.
        """
        before = self.get_conv_state(layer_idx, state_idx)
        whole = conv_states if before is None else torch.cat([before.to(conv_states.dtype), conv_states], dim=-1)
        seen = conv_kernel_size - 1
        self.after["conv", state_idx] = F.pad(whole, (max(0, seen - whole.shape[-1]), 0))[..., -seen:].clone()
        return whole

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **_: object
    ) -> Tensor:
        """Record a recurrent state in fp32 or wider, and return it unchanged."""
        wide = torch.promote_types(recurrent_states.dtype, torch.float32)
        self.after["recurrent", state_idx] = recurrent_states.to(wide)
        return recurrent_states

    def is_recording_past(self, layer_idx: int) -> bool:
        """Return True, which keeps mixers from their code for decoding one token."""
        return True

    def has_previous_state(self, *_: object) -> bool:
        """Return True if states were passed in."""
        return bool(self.before)
