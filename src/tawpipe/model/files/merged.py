"""Merges a LoRA adapter into a model's weights, one parameter at a time, because no process could hold all of them."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from tawpipe.errors import UserError
from tawpipe.model.chain import Chain, inner_model
from tawpipe.model.experts.adapted import LowRank
from tawpipe.model.units import Unit, base_name
from tawpipe.model.weights import canonical_names, is_adapter


def refuse_unmergeable(outer_model: nn.Module) -> None:
    """Raise UserError if a model has no LoRA adapter, or has one that cannot be merged into its weights."""
    model = inner_model(outer_model)
    setting = "merge"
    layers = {name: module for name, module in model.named_modules() if hasattr(module, "reset_lora_parameters")}
    if not layers:
        raise UserError(setting, True, "false: the model has no LoRA adapter")
    for name, module in model.named_modules():
        if hasattr(module, "adapter_layer_names") and hasattr(module, "base_layer") and name not in layers:
            raise UserError(setting, True, f"false: {name} has an adapter that is not LoRA")
        if hasattr(module, "modules_to_save") and hasattr(module, "original_module"):
            raise UserError(setting, True, f"false: {name} is trained as a whole (modules_to_save)")
    names = canonical_names(model)
    for name, layer in layers.items():
        if hasattr(layer, "parameter_name"):  # of experts, which are never tied and have no bias of their own
            continue
        base = names[f"{name}.base_layer.weight"]
        if tied := [base_name(other) for other, canonical in names.items() if canonical == base and other != base]:
            words = f"false: {base_name(base)} has an adapter and is tied to {tied[0]}, which has none"
            raise UserError(setting, True, words)
        if any(layer.lora_bias.values()) and getattr(layer.get_base_layer(), "bias", None) is None:
            raise UserError(setting, True, f"false: the adapter of {name} has a bias (lora_bias), the layer has none")


class Merged:
    """Parameters of the base model with the active adapter merged in, by their names without ``peft``.

    The adapter's tensors of a layer are collected once and kept while weights of the layer are requested.

    Args:
        chain: the model.
        get_parameter: see ``export.GetParameter``. Every rank must request the same names in the same order.
    """

    def __init__(self, chain: Chain, get_parameter: Callable[[str], Tensor | None]) -> None:
        refuse_unmergeable(chain.outer_model)
        self._model, self._get = chain.model, get_parameter
        self._names = {base_name(n): n for n in canonical_names(chain.model) if not is_adapter(chain.model, n)}
        self._units = {slot.name: unit for unit in chain.units for slot in unit.slots}
        self._adapters: dict[int, dict[str, Tensor | None]] = {}
        """Index of a unit -> its adapter tensors, for the layer that was requested last."""

    def parameter(self, name: str) -> Tensor | None:
        """Return one merged parameter in the dtype of the master weights on the writing rank, None on other ranks.

        Collective: every rank must call it."""
        peft_name = self._names[name]
        path, base, leaf = peft_name.rpartition(".base_layer.")
        while base and not self._adapts(path, leaf):  # experts have one layer of peft for each adapted parameter
            path, base, _ = path.rpartition(".base_layer")
        if not base:
            return self._get(peft_name)
        layer: Any = self._model.get_submodule(path)
        parts = {part: f"{path}.{part}" for part, _ in layer.named_parameters() if not part.startswith("base_layer.")}
        units = {self._units[full].index: self._units[full] for full in parts.values()}
        self._adapters = {index: self._adapters.get(index) or self._collect(unit) for index, unit in units.items()}
        value = self._get(peft_name)
        if value is None:
            return None
        return _merge(
            layer, leaf, value, {part: self._adapters[self._units[full].index][full] for part, full in parts.items()}
        )

    def _adapts(self, path: str, leaf: str) -> bool:
        """Return True if the layer of ``peft`` at ``path`` may change the parameter ``leaf`` of its base layer."""
        return getattr(self._model.get_submodule(path), "parameter_name", leaf) == leaf

    def _collect(self, unit: Unit) -> dict[str, Tensor | None]:
        """Collect the adapter tensors of a unit, by canonical name."""
        return {slot.name: self._get(slot.name) for slot in unit.slots if is_adapter(self._model, slot.name)}


@torch.no_grad()
def _merge(layer: Any, leaf: str, value: Tensor, adapters: dict[str, Tensor | None]) -> Tensor:
    """Return the parameter ``leaf`` of a layer with the adapter merged in.

    ``peft`` merges a copy of the layer. Experts are merged one by one, since a copy of all could be too large.

    Args:
        layer: a ``peft`` layer.
        leaf: name of the parameter in the base layer, for example ``weight``.
        value: the base value.
        adapters: the layer's adapter tensors, by name within the layer.
    """
    if hasattr(layer, "parameter_name"):
        low_rank = LowRank.of(layer, adapters)
        return low_rank.merged(value.clone(), transposed=layer.get_base_layer().is_transposed)
    memo: dict[int, Any] = {}
    for name, parameter in layer.named_parameters():
        if name == f"base_layer.{leaf}":
            content = value
        elif (content := adapters.get(name)) is None:  # another tensor of the base layer, not requested
            content = torch.zeros(parameter.shape, dtype=value.dtype)
        memo[id(parameter)] = nn.Parameter(content.clone(), requires_grad=False)
    copy = deepcopy(layer, memo)
    copy.merge(safe_merge=False)
    return getattr(copy.get_base_layer(), leaf).data
