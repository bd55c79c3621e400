"""The first call of a layer, watched for what the layer changes in place.

A layer is called more than once for each micro-batch, with hidden states that were kept and with weights that came for
this visit. What it changes in place in one call is what the next call would find. So the first call of every layer gets
hidden states that nobody else holds, and everything else that it could change is compared afterwards.
"""

from __future__ import annotations

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
    return output, given._version != version
