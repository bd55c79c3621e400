"""Sources of initial weights: the model's own initialisation, or a model that holds values.

``pretrained`` adds folders with safetensors files. Every source returns one unit at a time, because the whole model may
not fit into the memory of one process."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from tawpipe.errors import UserError
from tawpipe.model.buffers import owners, poison, poisoned
from tawpipe.model.chain import Chain
from tawpipe.model.facts import Fact, Facts, value_facts
from tawpipe.model.refuse import unsupported
from tawpipe.model.units import Unit


class WeightSource(Protocol):
    """Interface of sources of initial values.

    Every rank gets equal values."""

    def unit(self, unit: Unit, *, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the values of ``unit`` in its flat layout, [numel] on the CPU."""
        ...

    def buffers(self) -> dict[str, Tensor]:
        """Return persistent buffers stored with the weights, by name, for ``Chain.load_buffers``."""
        ...


def flatten(unit: Unit, values: Iterator[Tensor], dtype: torch.dtype) -> Tensor:
    """Lay the parameters of a unit end to end, and convert each to ``dtype``.

    Args:
        unit: the unit.
        values: values of its parameters, in the order of its slots.
        dtype: dtype of the result.

    Raises:
        UserError: a parameter contains NaN. The message names it.
    """
    flat = torch.empty(unit.numel, dtype=dtype, device="cpu")
    for slot, value in zip(unit.slots, values, strict=True):
        slot.view(flat).copy_(value)
        if bool(slot.part(flat).sum().isnan()) and bool(value.isnan().any()):  # a sum of infinities may be NaN, too
            raise unsupported(slot.name, "its values must be numbers; there is NaN among those that are given")
    return flat


class ModuleSource:
    """Source of the values that the chain's model holds.

    Create it before ``Chain.prepare``, which removes them."""

    def __init__(self, chain: Chain) -> None:
        self._values = {name: parameter.detach() for name, parameter in chain.model.named_parameters()}
        self._state = chain.model.state_dict(keep_vars=True)
        if meta := [name for name, value in self._values.items() if value.is_meta]:
            raise unsupported(chain.name, f"the model holds no values: {meta[0]} is on the meta device")

    def unit(self, unit: Unit, *, dtype: torch.dtype = torch.float32) -> Tensor:
        return flatten(unit, (self._values[slot.name] for slot in unit.slots), dtype)

    def buffers(self) -> dict[str, Tensor]:
        return {}  # the chain's model already holds them

    def facts(self) -> Facts:
        """Return a fact about every tensor in the model's state dict."""
        return value_facts(
            {name: value for name, value in self._state.items() if isinstance(value, Tensor) and not value.is_meta}
        )


class InitSource:
    """Source of random values as the model itself initialises them.

    Each parameter is drawn from (seed, name). So the values do not depend on the number of machines or on frozen
    parameters. The model's own ``_init_weights`` runs on a copy of the module tree in which all tensors except one
    parameter are on the meta device. Values are initialised in fp32 and then converted. LoRA adapters are initialised
    by ``peft``.

    Args:
        chain: the model.
        seed: seed of the random values.
        base: function from a name to the weights under adapters; by default these are drawn as well.
    """

    def __init__(self, chain: Chain, seed: int, *, base: Callable[[str], Tensor] | None = None) -> None:
        self._chain, self._seed, self._base = chain, seed, base or self.parameter
        # The memo makes deepcopy use these instead of the tensors, and keeps ties.
        memo: dict[int, Any] = {}
        for parameter in chain.model.parameters():
            memo[id(parameter)] = nn.Parameter(torch.empty(parameter.shape, device="meta"), requires_grad=False)
        for buffer in chain.model.buffers():
            memo[id(buffer)] = torch.empty_like(buffer, device="meta")
        self._model = deepcopy(chain.model, memo)
        self._owners = owners(self._model)
        self._peft = getattr(chain.outer_model, "peft_config", {})
        for thing in (*self._model.modules(), *self._model.parameters(), *self._model.buffers()):
            thing._is_hf_initialized = True  # makes transformers skip it

    def unit(self, unit: Unit, *, dtype: torch.dtype = torch.float32) -> Tensor:
        return flatten(unit, (self.parameter(slot.name, dtype) for slot in unit.slots), dtype)

    def buffers(self) -> dict[str, Tensor]:
        return {}  # Chain.prepare computes them

    def facts(self) -> Facts:
        """Return the seed as the only fact, because it determines all values."""
        return {"the seed": Fact("", str(self._seed))}

    @torch.no_grad()
    def parameter(self, name: str, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the initial value of one parameter, in fp32 on the CPU.

        Args:
            name: canonical name of the parameter.
            dtype: dtype for values computed from other parameters (the magnitudes of DoRA).

        Raises:
            UserError: the model's ``_init_weights`` does not initialise the parameter.
        """
        digest = hashlib.sha256(f"{self._seed} {name}".encode()).digest()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int.from_bytes(digest[:8], "little", signed=True))
            value = self._adapter(name, dtype) if is_adapter(self._model, name) else self._own(name)
        if poisoned(value):
            raise unsupported(
                type(self._model).__name__,
                f"the model's _init_weights does not initialise {name}; give a folder with weights",
            )
        return value

    def _own(self, name: str) -> Tensor:
        """Return a parameter's value, set by ``_init_weights`` of the module that holds it and of all modules above it.

        The innermost module runs first. Afterwards the parameter of the copied model is on the meta device again."""
        path, _, leaf = name.rpartition(".")
        holder = self._model.get_submodule(path)
        on_meta = holder._parameters[leaf]
        real = nn.Parameter(poison(torch.empty(on_meta.shape)), requires_grad=False)
        holder._parameters[leaf] = real
        try:
            while True:
                module = self._model.get_submodule(path)
                self._owners[path]._init_weights(module)
                if not path:
                    return real.data
                path = path.rpartition(".")[0]
        finally:
            holder._parameters[leaf] = on_meta

    def _adapter(self, name: str, dtype: torch.dtype) -> Tensor:
        """Return the initial value of a LoRA parameter, by the method that ``peft`` uses for it.

        Raises:
            UserError: ``init_lora_weights`` needs the values of the model.
        """
        path = next(p for p in _prefixes(name) if hasattr(self._model.get_submodule(p), "reset_lora_parameters"))
        layer: Any = self._model.get_submodule(path)
        part, adapter = name.removeprefix(f"{path}.").split(".")[:2]
        how = self._peft[adapter].init_lora_weights
        if part == "lora_magnitude_vector" and how is not False:  # norms of the base: the adapter is still 0
            base = canonical_names(self._model)[f"{path}.base_layer.weight"]
            unit = next(unit for unit in self._chain.units if any(slot.name == base for slot in unit.slots))
            weight = self._base(base).to(dtype)
            weight = weight if unit.packing is None else unit.packing.as_computed(base, weight)
            return layer.lora_magnitude_vector[adapter].get_weight_norm(weight, torch.zeros((), dtype=dtype), 1.0)
        if not isinstance(how, bool) and str(how).lower() != "gaussian":
            raise UserError(
                "init_lora_weights", how, "on the meta device it must be true or gaussian; or give a model with values"
            )
        stand_in = copy.copy(layer)
        stand_in.__dict__["_modules"] = {
            key: deepcopy(child).to_empty(device="cpu") if key.startswith("lora_") else child
            for key, child in layer._modules.items()
        }
        for parameter in stand_in.parameters():
            if not parameter.is_meta:
                poison(parameter.data)
        # init_lora_weights=False means adapters that are not zero, but initialised like nn.Linear.
        stand_in.reset_lora_parameters(adapter, True)
        leaf = stand_in.get_submodule(name.removeprefix(f"{path}.").rpartition(".")[0])
        value = leaf._parameters[name.rpartition(".")[2]]
        if how is False:
            nn.init.kaiming_uniform_(value, a=5**0.5)
        return value.data


@dataclass
class Conversion:
    """Rule that converts tensors from the form in which transformers stores them to the form in the model, or back.

    Args:
        rule: a transformers WeightConverter or WeightRenaming, without tensors.
        target: name of the first tensor that the rule returns.
        sources: (name, source pattern of the rule) of its input tensors, in order.
    """

    rule: Any
    target: str
    sources: list[tuple[str, str]]

    def apply(self, values: Iterable[Any], model: Any) -> dict[str, Tensor]:
        """Return the converted tensors by name.

        Args:
            values: input tensors, in the order of ``sources``.
            model: the transformers model, with its config.
        """
        rule = deepcopy(self.rule)
        for (name, pattern), value in zip(self.sources, values, strict=True):
            rule.add_tensor(self.target, name, pattern, value)
        converted = rule.convert(self.target, model=model, config=model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in converted.items()}


def canonical_names(model: nn.Module) -> dict[str, str]:
    """Return every name of every parameter -> its first name.

    Tied parameters have several names."""
    canonical = {id(parameter): name for name, parameter in model.named_parameters()}
    return {name: canonical[id(parameter)] for name, parameter in model.named_parameters(remove_duplicate=False)}


def _prefixes(name: str) -> Iterator[str]:
    """Yield the dotted prefixes of a parameter's name, longest first, down to ``""`` for the model itself."""
    while name:
        name = name.rpartition(".")[0]
        yield name


def is_adapter(model: nn.Module, name: str) -> bool:
    """Return True if ``peft`` has added the parameter ``name``, so that no checkpoint of the base model contains it.

    Raises:
        UserError: the parameter belongs to an adapter other than LoRA. It needs a model that holds values, not
            one on the meta device.
    """
    for path in _prefixes(name):
        module: Any = model.get_submodule(path)
        if hasattr(module, "base_layer") and hasattr(module, "adapter_layer_names"):
            if name.startswith(f"{path}.base_layer." if path else "base_layer."):
                return False
            if not hasattr(module, "reset_lora_parameters"):
                raise unsupported(
                    type(module).__name__,
                    "on the meta device only LoRA adapters are supported; give a model with values",
                )
            return True
    return False
