"""Indexers of sparse attention (DeepSeek V3.2 and similar models), which choose the keys that a query sees.

The loss gives them no gradient, and weight decay would shrink them, so they are frozen. In a document that is not
longer than the number of keys that an indexer chooses, every token sees all keys before it, whatever the scores are.
Attention is then dense, and the scores of all pairs of tokens are not computed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from tawpipe.model.refuse import unsupported

MOST = "index_topk"
"""Attribute of an indexer with the number of keys that it chooses."""


def freeze_indexers(model: nn.Module) -> int:
    """Freeze the parameters of indexers in place, and return the number of elements that were trainable before."""
    count = 0
    for name, parameter in model.named_parameters():
        if ".indexer." in name and parameter.requires_grad:
            parameter.requires_grad_(False)
            count += parameter.numel()
    return count


def frozen_words(count: int) -> str:
    """Return a sentence about the ``count`` parameters that ``freeze_indexers`` froze, or ``""`` if there are none."""
    why = "the loss gives them no gradient, and weight decay would shrink them"
    return f"{count:,} parameters of indexers of sparse attention: {why}" if count else ""


class Indexer(nn.Module):
    """Mixin class for an indexer that chooses all keys of rows not longer than its limit, without computing scores.

    Hidden states [b, S, ...] in, indices of keys [b, S, keys] out. Longer rows run the indexer's own code.

    Raises:
        UserError: in the first run, the indexer's own code chooses other keys.
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
    """Return a subclass of ``kind`` that chooses all keys of short rows; see ``Indexer``."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        return Indexer.forward(self, *args, **kwargs)

    names = {"__module__": kind.__module__, "__doc__": kind.__doc__, "forward": functools.wraps(kind.forward)(forward)}
    return type(kind.__name__, (Indexer, kind), names)


def spare_indexers(model: nn.Module) -> None:
    """Change the class of the model's indexers in place, so that they compute no scores if all keys are chosen.

    Only indexers that choose single tokens and take an attention mask are changed: the indices of all keys then equal
    their own result, in another order."""
    for name, module in model.named_modules():
        chooses_tokens = hasattr(module, MOST) and "attention_mask" in signature(module.forward).parameters
        if name.endswith(".indexer") and chooses_tokens and not isinstance(module, Indexer):
            module.__class__ = _choosing_all(type(module))
