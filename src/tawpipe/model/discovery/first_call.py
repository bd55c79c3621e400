"""Checks the first call of a layer for in-place changes.

A layer is called several times for each micro-batch, with stored hidden states and with weights loaded for this visit.
An in-place change in one call would affect the next call. So the first call of every layer receives its own copy of the
hidden states, and everything else that it could change is compared afterwards."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from tawpipe.model.buffers import persistent_buffers
from tawpipe.model.refuse import unsupported
from tawpipe.model.stubs import LayerCall


class ValuesBefore:
    """Snapshot of a module's parameters and persistent buffers before a forward pass, to detect changes.

    Other buffers are not checked: rotary frequencies may be computed again for longer rows."""

    def __init__(self, module: nn.Module) -> None:
        self._module, self._persistent = module, persistent_buffers(module)
        self._parameters = {name: (tensor, tensor._version) for name, tensor in module.named_parameters()}
        self._buffers = {name: (tensor, tensor._version) for name, tensor in self._now().items()}

    def _now(self) -> dict[str, Tensor]:
        """Return the module's present persistent buffers, by name."""
        return {name: tensor for name, tensor in self._module.named_buffers() if name in self._persistent}

    def check(self, name: str) -> None:
        """Raise UserError if a parameter or persistent buffer was changed or replaced since the snapshot.

        Args:
            name: name of the module for the message.
        """
        for key, (tensor, version) in self._parameters.items():
            if tensor._version != version:
                raise unsupported(
                    name,
                    f"its forward pass changes the parameter {key} in place; only the optimizer may change weights",
                )
        now = self._now()
        for key, (tensor, version) in self._buffers.items():
            if now.get(key) is not tensor or tensor._version != version:
                raise unsupported(
                    name,
                    f"its forward pass changes the buffer {key}, such as statistics of batches; every process would "
                    "have its own, and a recomputation would count twice. Freeze it: eval() of that module, while the "
                    "model is in training mode, before the Pipeline is made",
                )


def first_call(layer: nn.Module, call: LayerCall, hidden: Tensor, name: str) -> tuple[Tensor, bool]:
    """Call the layer for the first time, and check what it changes in place.

    Args:
        layer: the layer.
        call: its arguments besides the hidden states.
        hidden: hidden states; the layer gets a copy.
        name: name of the layer for messages.

    Returns:
        The layer's output [b, S, H], and True if the layer changes its hidden states in place.

    Raises:
        UserError: it changes its parameters, its buffers or a tensor that other layers receive too, or it stores a
            tensor for its next call.
    """
    hidden_copy = hidden.clone()
    version = hidden_copy._version
    shared = [(leaf, leaf._version) for leaf in tree_leaves((call.args, call.kwargs)) if isinstance(leaf, Tensor)]
    held, before = ValuesBefore(layer), plain_tensors(layer)

    output = call(layer, hidden_copy)

    if any(tensor._version != earlier for tensor, earlier in shared):
        raise unsupported(name, "it changes a tensor in place that other layers are given too; make it copy first")
    held.check(name)
    if kept := sorted(plain_tensors(layer).keys() - before.keys()):
        raise unsupported(
            name,
            f"its forward pass leaves a tensor in its attribute {kept[0]}: the next call would find what belongs to "
            "another micro-batch, or to a recomputation",
        )
    # A model's own kernels may write without changing the version counter, so the values are compared as well.
    return output, hidden_copy._version != version or not _alike(hidden_copy, hidden)


def _alike(first: Tensor, second: Tensor) -> bool:
    """Return True if two tensors are equal, with NaN equal to NaN.

    On the meta device always return True."""
    if first.is_meta or torch.equal(first, second):
        return True
    return torch.equal(first.nan_to_num(), second.nan_to_num())


def plain_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return the tensors that are plain attributes of ``module`` and its submodules, by path."""
    return {
        f"{name}.{key}".lstrip("."): value
        for name, part in module.named_modules()
        for key, value in vars(part).items()
        if isinstance(value, Tensor)
    }
