"""Values for buffers that a model on the meta device lacks, such as rotary frequencies."""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tawpipe.model.refuse import unsupported

_STRICT = "_keep_in_fp32_modules_strict"


def owners(model: nn.Module) -> dict[str, Any]:
    """Return module name -> the nearest transformers model at or above it, whose ``_init_weights`` initialises it."""
    from transformers import PreTrainedModel

    in_charge: dict[str, Any] = {}
    for name, module in model.named_modules():
        above = in_charge[name.rpartition(".")[0]] if name else model
        in_charge[name] = module if isinstance(module, PreTrainedModel) else above
    return in_charge


def persistent_buffers(model: nn.Module) -> set[str]:
    """Return the names of the buffers that are saved with a model's weights."""
    return {
        f"{path}.{name}".lstrip(".")
        for path, module in model.named_modules()
        for name in module._buffers.keys() - module._non_persistent_buffers_set
    }


def wide_parameters(model: nn.Module) -> list[str]:
    """Return the names of parameters that the model's class wants in fp32 (``_keep_in_fp32_modules_strict``)."""
    wanted = "|".join(rf"(^|\.){re.escape(name)}($|\.)" for name in getattr(model, _STRICT, None) or ())
    names = [name for name, _ in model.named_parameters()]
    return [name for name in names if wanted and re.search(wanted, name.replace(".base_layer.", "."))]


def wide_words(names: Sequence[str], dtype: torch.dtype) -> str:
    """Return a line about parameters that are kept in 32 bits but compute in ``dtype``, or ``""`` if there are none."""
    if not names or dtype.itemsize >= 4:
        return ""
    few = ", ".join(sorted({re.sub(r"\.\d+\.", ".*.", name) for name in names})[:3])
    kept = "32 bits in the optimizer, in checkpoints and in the exported model"
    return f"{len(names)} parameters have {kept}; they compute in {str(dtype).removeprefix('torch.')} ({few})"


def poison(tensor: Tensor) -> Tensor:
    """Fill ``tensor`` in place with a value that no initialisation produces: NaN, True, or the smallest integer."""
    if tensor.is_floating_point():
        return tensor.fill_(float("nan"))
    return tensor.fill_(True if tensor.dtype == torch.bool else torch.iinfo(tensor.dtype).min)


def poisoned(tensor: Tensor) -> bool:
    """Return True if any element still has the value that ``poison`` wrote.

    For booleans always return False."""
    if tensor.is_floating_point():
        return bool(tensor.isnan().any())
    return tensor.dtype != torch.bool and bool((tensor == torch.iinfo(tensor.dtype).min).any())


@torch.no_grad()
def materialize_buffers(model: nn.Module, device: torch.device) -> None:
    """Move all buffers to ``device``, after computing buffers that are on meta.

    These are computed by the model's ``_init_weights``, as ``from_pretrained`` does.

    Raises:
        UserError: ``_init_weights`` does not set a buffer that is on meta.
    """
    in_charge = owners(model)
    for path, module in model.named_modules():
        buffers = {name: buffer for name, buffer in module._buffers.items() if buffer is not None}
        if any(buffer.is_meta for buffer in buffers.values()):
            stand_in = copy.copy(module)
            stand_in.__dict__["_buffers"] = {
                name: poison(torch.empty_like(buffer, device="cpu")) for name, buffer in buffers.items()
            }
            # Only buffers are needed. Parameters on meta have no values to initialise.
            in_charge[path]._init_weights(stand_in)
            buffers = {name: buffer for name, buffer in stand_in._buffers.items() if buffer is not None}
            if wrong := [name for name, buffer in buffers.items() if poisoned(buffer)]:
                raise unsupported(
                    type(model).__name__,
                    f"buffer {path}.{wrong[0]} has no value on the meta device and the model's _init_weights sets none;"
                    " give a model that is not on meta",
                )
        for name, buffer in buffers.items():
            module._buffers[name] = buffer.to(device)
        for name, value in list(vars(module).items()):
            if name.endswith("long_inv_freq") and value.is_meta:  # computed by a forward pass on meta: recompute
                delattr(module, name)
