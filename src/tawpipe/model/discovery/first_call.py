"""The first call of a layer, watched for what the layer changes in place.

A layer is called more than once for each micro-batch, with hidden states that were kept and with weights that came for
this visit. What it changes in place in one call is what the next call would find. So the first call of every layer gets
hidden states that nobody else holds, and everything else that it could change is compared afterwards.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from tawpipe.model.buffers import persistent_buffers
from tawpipe.model.refuse import unsupported
from tawpipe.model.stubs import LayerCall


class ValuesBefore:
    """The parameters and persistent buffers of a module, as they are before its forward pass.

    Other buffers are left alone: rotary frequencies may be computed anew for longer rows.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module, self._persistent = module, persistent_buffers(module)
        self._parameters = {name: (tensor, tensor._version) for name, tensor in module.named_parameters()}
        self._buffers = {name: (tensor, tensor._version) for name, tensor in self._now().items()}

    def _now(self) -> dict[str, Tensor]:
        return {name: tensor for name, tensor in self._module.named_buffers() if name in self._persistent}

    def check(self, name: str) -> None:
        """Raise UserError if one of them has been changed or replaced.

        Args:
            name: the module in words.
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
    """The layer's output [b, S, H]; True beside it if it changes the hidden states that it is given in place.

    Args:
        name: the layer in words, for messages.

    Raises:
        UserError: it changes something else: its parameters, its buffers, or a tensor that other layers are given too;
            or it keeps a tensor for its next call.
    """
    given = hidden.clone()
    version = given._version
    shared = [(leaf, leaf._version) for leaf in tree_leaves((call.args, call.kwargs)) if isinstance(leaf, Tensor)]
    held, before = ValuesBefore(layer), plain_tensors(layer)

    output = call(layer, given)

    if any(tensor._version != earlier for tensor, earlier in shared):
        raise unsupported(name, "it changes a tensor in place that other layers are given too; make it copy first")
    held.check(name)
    if kept := sorted(plain_tensors(layer).keys() - before.keys()):
        raise unsupported(
            name,
            f"its forward pass leaves a tensor in its attribute {kept[0]}: the next call would find what belongs to "
            "another micro-batch, or to a recomputation",
        )
    # Kernels of a model's own may write without a version, which the next call would not see.
    return output, given._version != version or not _alike(given, hidden)


def _alike(first: Tensor, second: Tensor) -> bool:
    if first.is_meta or torch.equal(first, second):
        return True
    return torch.equal(first.nan_to_num(), second.nan_to_num())


def plain_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Tensors that are plain attributes of a module and of the modules in it, by their path."""
    return {
        f"{name}.{key}".lstrip("."): value
        for name, part in module.named_modules()
        for key, value in vars(part).items()
        if isinstance(value, Tensor)
    }
