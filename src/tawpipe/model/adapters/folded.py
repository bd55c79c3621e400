"""LoRA adapters on linear layers, added to the output of the layer in one product.

``peft`` computes ``result + B(A(dropout(x))) * scaling``, which reads or writes the output six times. Here the product
with ``B`` adds its scaled result to the output in place, which reads and writes the output once. In 16 bits the sum is
rounded once, not three times."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn


@cache
def _folded_class() -> type:
    """Return the subclass of peft's ``Linear`` that adds its adapters in place."""
    from peft.tuners.lora.layer import Linear

    class FoldedLinear(Linear):
        """Linear layer that adds plain adapters to its output in place, and leaves all others to ``peft``."""

        def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            """Return the output [..., out] of inputs [..., in] with all active adapters added."""
            left = args or kwargs or self.merged_adapters or self.disable_adapters
            adapters = [] if left else self._plain_adapters(x)
            if not adapters:
                return super().forward(x, *args, **kwargs)
            # Rows [n, in] give an output that is no view: an addition to a view would copy its gradient.
            rows = x.reshape(-1, x.shape[-1])
            base: Any = self.base_layer
            output = base(rows)
            for scaling, dropout, first, second in adapters:
                dropped = dropout(x)  # of ``x``, so that it draws the numbers that peft draws
                low = first(rows if dropped is x else dropped.reshape(rows.shape))
                output = output.addmm_(low, second.t(), alpha=scaling)
            return output.view(*x.shape[:-1], output.shape[-1])

        def _plain_adapters(self, x: Tensor) -> list[tuple[float, Any, Any, Tensor]]:
            """Return scaling, dropout, ``lora_A`` and the weight of ``lora_B`` for each active adapter of this layer.

            The list is empty if there are none, or one is not plain. Plain are adapters without a bias and without a
            variant such as DoRA, on an ``nn.Linear`` without hooks, if all tensors have one dtype."""
            base: Any = self.base_layer
            if type(base) is not nn.Linear or base._forward_hooks or base._forward_pre_hooks:
                return []
            kind = x.device.type
            autocasts = kind != "meta" and torch.is_autocast_enabled(kind)  # torch refuses to answer for meta
            if autocasts or x.dtype != base.weight.dtype:
                return []
            # The dictionaries inside the modules: each look-up through a module is a call of Python.
            firsts: Any = self.lora_A._modules
            seconds: Any = self.lora_B._modules
            dropouts, adapters = self.lora_dropout._modules, []
            for name in self.active_adapters:
                if name in firsts:
                    first, second = firsts[name], seconds[name]
                    weight = second.weight
                    one_dtype = first.weight.dtype == weight.dtype == x.dtype
                    if name in self.lora_variant or second.bias is not None or not one_dtype:
                        return []
                    adapters.append((self.scaling[name], dropouts[name], first, weight))
            return adapters

    return FoldedLinear


def fold_adapters(model: nn.Module) -> None:
    """Make the linear layers with LoRA adapters in ``model`` add them to their output in place.

    Only the class of each layer changes: names, parameters and saved adapters stay as ``peft`` makes them. Subclasses
    of peft's ``Linear`` are left as they are."""
    for module in model.modules():
        kind = type(module)
        if f"{kind.__module__}.{kind.__qualname__}" == "peft.tuners.lora.layer.Linear":
            module.__class__ = _folded_class()
