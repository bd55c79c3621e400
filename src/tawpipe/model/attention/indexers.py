"""Indexers of sparse attention (DeepSeek V3.2 and its kin), which choose the keys that a query sees.

The loss gives them no gradient, and weight decay would shrink them: they are frozen. A document that is not longer than
what an indexer chooses sees all keys before it, whatever its scores are: attention is dense there, and no scores of
all pairs of tokens are made.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from tawpipe.model.refuse import unsupported

MOST = "index_topk"
"""The attribute of an indexer that says how many keys it chooses."""


def freeze_indexers(model: nn.Module) -> int:
    """Freeze the parameters of indexers; how many numbers these have that were to be trained."""
    count = 0
    for name, parameter in model.named_parameters():
        if ".indexer." in name and parameter.requires_grad:
            parameter.requires_grad_(False)
            count += parameter.numel()
    return count


def frozen_words(count: int) -> str:
    """What ``freeze_indexers`` did, in a sentence; empty if it was nothing."""
    why = "the loss gives them no gradient, and weight decay would shrink them"
    return f"{count:,} parameters of indexers of sparse attention: {why}" if count else ""


class Indexer(nn.Module):
    """What an indexer becomes an instance of, besides its own class: it chooses all keys where there are no more than
    it may choose. [b, S, ...] in, [b, S, keys] numbers of keys out.

    Raises:
        UserError: when it first runs its own code chooses others.
    """

    _compared = False

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        choose: Callable[..., Tensor] = super().forward  # type: ignore[misc]
        rows, length = hidden_states.shape[:2]
        if length > getattr(self, MOST):
            return choose(hidden_states, *args, **kwargs)
        every = torch.arange(length, dtype=torch.int32, device=hidden_states.device).expand(rows, length, length)
        if not self._compared and not hidden_states.is_meta:
            chosen = choose(hidden_states, *args, **kwargs)
            if chosen.shape != every.shape or not torch.equal(chosen.sort(dim=-1).values, every.to(chosen)):
                raise unsupported(
                    type(self).__name__, f"it leaves out keys of documents that are not longer than its {MOST}"
                )
            self._compared = True
        return every


@functools.cache
def _choosing_all(kind: type[nn.Module]) -> type[nn.Module]:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        return Indexer.forward(self, *args, **kwargs)

    names = {"__module__": kind.__module__, "__doc__": kind.__doc__, "forward": functools.wraps(kind.forward)(forward)}
    return type(kind.__name__, (Indexer, kind), names)


def spare_indexers(model: nn.Module) -> None:
    """Let indexers score nothing where all keys are chosen: those that say how many tokens they choose and look at each
    (by its mask), for which the numbers of all keys are what they would give, in another order.
    """
    for name, module in model.named_modules():
        chooses_tokens = hasattr(module, MOST) and "attention_mask" in signature(module.forward).parameters
        if name.endswith(".indexer") and chooses_tokens and not isinstance(module, Indexer):
            module.__class__ = _choosing_all(type(module))
