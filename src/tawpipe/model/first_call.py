"""The first call of a layer, watched for what the layer changes in place.

A layer is called more than once for each micro-batch, with hidden states that were kept and with weights that came for
this visit. What it changes in place in one call is what the next call would find. So the first call of every layer gets
hidden states that nobody else holds, and everything else that it could change is compared afterwards.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from tawpipe.errors import UserError
from tawpipe.model.refuse import SETTING
from tawpipe.model.stubs import LayerCall


def first_call(layer: nn.Module, call: LayerCall, hidden: Tensor, name: str) -> tuple[Tensor, bool]:
    """The layer's output [b, S, H], and whether it changes the hidden states that it is given in place.

    Args:
        name: the layer in words, for messages.

    Raises:
        UserError: it changes something else: its parameters, its buffers, or a tensor that other layers are given too.
    """
    given = hidden.clone()
    version = given._version
    shared = [leaf for leaf in tree_leaves((call.args, call.kwargs)) if isinstance(leaf, Tensor)]
    parameters, buffers = dict(layer.named_parameters()), dict(layer.named_buffers())
    attributes = _attributes(layer)
    before = {id(tensor): tensor._version for tensor in (*shared, *parameters.values(), *buffers.values())}
    saved = layer.state_dict(keep_vars=True).keys()

    output = call(layer, given)

    if any(before[id(tensor)] != tensor._version for tensor in shared):
        raise UserError(
            SETTING, name, "it changes a tensor in place that other layers are given too; make it copy first"
        )
    if changed := [key for key, value in parameters.items() if before[id(value)] != value._version]:
        raise UserError(
            SETTING,
            name,
            f"its forward pass changes the parameter {changed[0]} in place; only the optimizer may change weights",
        )
    now = dict(layer.named_buffers())
    for key, value in buffers.items():
        replaced = key in saved and now.get(key) is not value
        if replaced or before[id(value)] != value._version:
            raise UserError(
                SETTING,
                name,
                f"its forward pass changes the buffer {key}, such as statistics of batches; every process would have "
                "its own, and a recomputation would count twice. Freeze it, for example by eval() of that module",
            )
    now = _attributes(layer)
    for key in attributes.keys() | now.keys():
        if key not in now or key not in attributes or not _same(attributes[key], now[key]):
            raise UserError(
                SETTING,
                name,
                f"its forward pass changes its attribute {key}: what one call leaves for the next would be that of "
                "another micro-batch, or of a recomputation",
            )
    return output, given._version != version


def _attributes(layer: nn.Module) -> dict[str, Any]:
    """What the modules of a layer hold besides parameters, buffers, modules and what torch keeps for itself."""
    return {
        f"{name}.{key}".lstrip("."): (len(value), value) if isinstance(value, (list, dict, set)) else value
        for name, module in layer.named_modules()
        for key, value in vars(module).items()
        if not key.startswith("_")
    }


def _same(first: Any, second: Any) -> bool:
    if isinstance(first, tuple) and isinstance(second, tuple):
        return len(first) == len(second) and all(map(_same, first, second))
    return first is second or (isinstance(first, (int, float, str)) and first == second)
