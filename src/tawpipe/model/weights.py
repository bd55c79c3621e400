"""Where a unit's first values come from: initialisation, a folder of safetensors, or a model that has them.

Imports torch, safetensors and transformers. Every source gives one unit at a time, and holds no other.
"""

from __future__ import annotations

import copy
import hashlib
import json
import re
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from tawpipe.errors import UserError
from tawpipe.model.buffers import owners, poison, poisoned
from tawpipe.model.chain import Chain
from tawpipe.model.refuse import SETTING
from tawpipe.model.units import Unit


class WeightSource(Protocol):
    """Gives initial values, the same on every rank."""

    def unit(self, unit: Unit, *, dtype: torch.dtype = torch.float32) -> Tensor:
        """The unit's flat layout, [numel] on the CPU."""
        ...

    def buffers(self) -> dict[str, Tensor]:
        """Persistent buffers that come with the weights, by name, for ``Chain.load_buffers``."""
        ...


def _flatten(unit: Unit, values: Iterator[Tensor], dtype: torch.dtype) -> Tensor:
    """Lay the parameters of a unit end to end, each converted as it comes."""
    flat = torch.empty(unit.numel, dtype=dtype)
    for slot, value in zip(unit.slots, values, strict=True):
        flat[slot.offset : slot.offset + slot.numel].view(slot.shape).copy_(value)
    return flat


class ModuleSource:
    """The values that the chain's model holds. Make it before ``Chain.prepare`` takes them away; dropping it frees them."""

    def __init__(self, chain: Chain) -> None:
        self._values = {name: parameter.detach() for name, parameter in chain.model.named_parameters()}
        if meta := [name for name, value in self._values.items() if value.is_meta]:
            raise UserError(SETTING, chain.name, f"the model holds no values: {meta[0]} is on the meta device")

    def unit(self, unit: Unit, *, dtype: torch.dtype = torch.float32) -> Tensor:
        return _flatten(unit, (self._values[slot.name] for slot in unit.slots), dtype)

    def buffers(self) -> dict[str, Tensor]:
        return {}  # the chain's model has them itself


class InitSource:
    """Random values as the model itself initialises them, drawn per parameter from (seed, name).

    So the values depend neither on the topology nor on what is frozen. The model's own ``_init_weights`` runs on a copy of
    the module tree in which everything but one parameter is on the meta device. Initialised in fp32 and then converted.
    LoRA adapters are initialised by ``peft``.
    """

    def __init__(self, chain: Chain, seed: int) -> None:
        self._seed = seed
        # The memo makes deepcopy put these in the place of the tensors, with ties kept.
        memo: dict[int, Any] = {}
        for parameter in chain.model.parameters():
            memo[id(parameter)] = nn.Parameter(torch.empty(parameter.shape, device="meta"), requires_grad=False)
        for buffer in chain.model.buffers():
            memo[id(buffer)] = torch.empty_like(buffer, device="meta")
        self._model = deepcopy(chain.model, memo)
        self._owners = owners(self._model)
        self._peft = getattr(chain.given, "peft_config", {})
        for thing in (*self._model.modules(), *self._model.parameters(), *self._model.buffers()):
            thing._is_hf_initialized = True  # transformers' mark for "leave it alone"

    def unit(self, unit: Unit, *, dtype: torch.dtype = torch.float32) -> Tensor:
        return _flatten(unit, (self.parameter(slot.name) for slot in unit.slots), dtype)

    def buffers(self) -> dict[str, Tensor]:
        return {}  # computed by Chain.prepare

    @torch.no_grad()
    def parameter(self, name: str) -> Tensor:
        """The initial value of one parameter, fp32 on the CPU."""
        digest = hashlib.sha256(f"{self._seed} {name}".encode()).digest()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int.from_bytes(digest[:8], "little", signed=True))
            value = self._adapter(name) if is_adapter(self._model, name) else self._own(name)
        if poisoned(value):
            raise UserError(
                SETTING,
                type(self._model).__name__,
                f"the model's _init_weights does not initialise {name}; give a folder with weights",
            )
        return value

    def _own(self, name: str) -> Tensor:
        """By ``_init_weights`` of the module that holds the parameter and of all modules above, innermost first."""
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

    def _adapter(self, name: str) -> Tensor:
        path = next(p for p in _prefixes(name) if hasattr(self._model.get_submodule(p), "reset_lora_parameters"))
        layer: Any = self._model.get_submodule(path)
        adapter = name.removeprefix(f"{path}.").split(".")[1]
        how = self._peft[adapter].init_lora_weights
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
        # init_lora_weights=False asks for adapters that are not zero, as the constructors of nn.Linear leave them.
        stand_in.reset_lora_parameters(adapter, True)
        leaf = stand_in.get_submodule(name.removeprefix(f"{path}.").rpartition(".")[0])
        value = leaf._parameters[name.rpartition(".")[2]]
        if how is False:
            nn.init.kaiming_uniform_(value, a=5**0.5)
        return value.data


def _prefixes(name: str) -> Iterator[str]:
    """The dotted prefixes of a parameter's name, longest first, down to the model itself."""
    while name:
        name = name.rpartition(".")[0]
        yield name


def is_adapter(model: nn.Module, name: str) -> bool:
    """Whether a parameter was added by ``peft`` and so is in no checkpoint of the model.

    Raises:
        UserError: for adapters other than LoRA, whose values only a model that holds them can give.
    """
    for path in _prefixes(name):
        module: Any = model.get_submodule(path)
        if hasattr(module, "base_layer") and hasattr(module, "adapter_layer_names"):
            if name.startswith(f"{path}.base_layer." if path else "base_layer."):
                return False
            if not hasattr(module, "reset_lora_parameters"):
                raise UserError(
                    SETTING, type(module).__name__, "on the meta device only LoRA adapters are supported; give a model "
                    "with values"
                )
            return True
    return False


def base_name(name: str) -> str:
    """The name that a parameter has without ``peft`` around its module."""
    return name.replace(".base_layer.", ".")


@dataclass
class _Group:
    """Tensors of a checkpoint that become one or more parameters together, and the conversion that does it."""

    transform: Any
    """A transformers WeightConverter or WeightRenaming, without tensors."""
    target: str
    parts: list[tuple[str, str]]
    """(name in the checkpoint, source pattern of the transform), in natural order."""


class SafetensorsSource:
    """Values from a Hugging Face folder with ``model.safetensors`` or its shards.

    Names and layouts are converted by transformers' own rules (experts stored one by one become one tensor). Only the
    tensors of the unit asked for are read. Adapters, which are in no such folder, come from an ``InitSource``.

    Raises:
        UserError: where the folder's tensors do not fit the model, with the names of missing and unexpected ones.
    """

    def __init__(self, chain: Chain, folder: Path | str, *, seed: int = 0) -> None:
        self._folder, self._model = Path(folder), chain.model
        self._files = _files_by_key(self._folder)
        self._init: InitSource | None = None
        adapters = {n for n, _ in self._model.named_parameters() if is_adapter(self._model, n)}
        if adapters:
            self._init = InitSource(chain, seed)
        self._adapters = adapters

        self._aliases: dict[str, str] = {}
        canonical = {id(parameter): name for name, parameter in self._model.named_parameters()}
        for name, parameter in self._model.named_parameters(remove_duplicate=False):
            self._aliases[base_name(name)] = canonical[id(parameter)]
        state = {base_name(name): value for name, value in self._model.state_dict().items()}
        self._buffer_names = set(state) - set(self._aliases)
        self._groups, self._found = self._plan(state)
        self._check_names(adapters)
        self._check_shapes(state)

    def _plan(self, state: dict[str, Tensor]) -> tuple[dict[str, _Group], dict[str, str]]:
        """Groups by their first target, and for every canonical parameter or buffer the group that gives it."""
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

        mapping = get_model_conversion_mapping(self._model)
        renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
        converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
        by_pattern = {pattern: entry for entry in converters for pattern in entry.source_patterns}
        prefix = self._model.base_model_prefix

        groups: dict[str, _Group] = {}
        found: dict[str, str] = {}
        self._unexpected: list[str] = []
        for key in sorted(self._files, key=dot_natural_key):
            target, pattern = rename_source_key(key, renamings, converters, prefix, state)
            if target not in state and key in state:
                target, pattern = rename_source_key(key, [], [], prefix, state)
            if target not in state:
                self._unexpected.append(key)
                continue
            transform = WeightRenaming(key, target) if pattern is None else by_pattern[pattern]
            group = groups.setdefault(target, _Group(transform, target, []))
            group.parts.append((key, key if pattern is None else pattern))
            for target_pattern in transform.target_patterns if pattern is not None else (target,):
                name = target.replace(transform.target_patterns[0], target_pattern) if pattern is not None else target
                found.setdefault(self._aliases.get(name, name), target)
        return groups, found

    def _check_names(self, adapters: set[str]) -> None:
        ignored = [*(self._model._keys_to_ignore_on_load_unexpected or ()), r"rotary_emb\.inv_freq", r"(^|\.)position_ids$"]
        unexpected = [key for key in self._unexpected if not any(re.search(pattern, key) for pattern in ignored)]
        missing = [n for n, _ in self._model.named_parameters() if n not in self._found and n not in adapters]
        if missing or unexpected:
            parts = [
                f"{len(names)} {what} ({', '.join(names[:4])}{', ...' if len(names) > 4 else ''})"
                for what, names in (("missing", missing), ("unexpected", unexpected))
                if names
            ]
            raise UserError(
                SETTING, str(self._folder), f"its safetensors must fit {type(self._model).__name__}: {'; '.join(parts)}"
            )

    def unit(self, unit: Unit, *, dtype: torch.dtype = torch.float32) -> Tensor:
        def values() -> Iterator[Tensor]:
            pending: dict[str, Tensor] = {}  # results of a group that gives several parameters
            for slot in unit.slots:
                if slot.name in self._adapters:
                    assert self._init is not None
                    yield self._init.parameter(slot.name)
                    continue
                if slot.name not in pending:
                    pending.update(self._read(self._found[slot.name]))
                value = pending.pop(slot.name)
                self._check_shape(slot.name, slot.shape, tuple(value.shape))
                yield value

        return _flatten(unit, values(), dtype)

    def _check_shapes(self, state: dict[str, Tensor]) -> None:
        """Compare what needs no conversion with the files' headers, before anything is read."""
        from safetensors import safe_open
        from transformers.core_model_loading import WeightRenaming

        plain: dict[Path, list[tuple[str, str]]] = {}
        for group in self._groups.values():
            if isinstance(group.transform, WeightRenaming):
                key = group.parts[0][0]
                plain.setdefault(self._files[key], []).append((key, group.target))
        for path, pairs in plain.items():
            with safe_open(path, framework="pt") as file:
                for key, target in pairs:
                    self._check_shape(target, tuple(state[target].shape), tuple(file.get_slice(key).get_shape()))

    def _check_shape(self, name: str, expected: tuple[int, ...], found: tuple[int, ...]) -> None:
        if found != expected:
            raise UserError(
                SETTING,
                str(self._folder),
                f"{name} must have shape {list(expected)} as config.json says, not {list(found)}",
            )

    def buffers(self) -> dict[str, Tensor]:
        names = sorted(self._buffer_names & self._found.keys())
        return {name: self._read(self._found[name])[name] for name in names}

    def _read(self, target: str) -> dict[str, Tensor]:
        """Read and convert one group; values by canonical name."""
        from safetensors import safe_open

        group = self._groups[target]
        transform = deepcopy(group.transform)
        opened: dict[Path, Any] = {}
        for key, pattern in group.parts:
            path = self._files[key]
            if path not in opened:
                opened[path] = safe_open(path, framework="pt")
            transform.add_tensor(target, key, pattern, opened[path].get_tensor(key))
        values = transform.convert(target, model=self._model, config=self._model.config)
        return {
            self._aliases.get(name, name): value[0] if isinstance(value, list) else value
            for name, value in values.items()
        }


def _files_by_key(folder: Path) -> dict[str, Path]:
    """Tensor name -> the file that holds it."""
    from safetensors import SafetensorError, safe_open

    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    try:
        if index.is_file():
            names = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            files = {key: folder / name for key, name in names.items()}
            if absent := sorted({path.name for path in files.values() if not path.is_file()}):
                raise UserError(SETTING, str(folder), f"its index names files that are not there: {', '.join(absent)}")
            return files
        if single.is_file():
            with safe_open(single, framework="pt") as file:
                return dict.fromkeys(file.keys(), single)
    except (SafetensorError, ValueError, KeyError, OSError) as error:
        raise UserError(SETTING, str(folder), f"its safetensors cannot be read ({error})") from error
    raise UserError(SETTING, str(folder), "expected model.safetensors or model.safetensors.index.json in the folder")


def has_weights(folder: Path) -> bool:
    """Whether a model folder brings weights of its own."""
    return (folder / "model.safetensors").is_file() or (folder / "model.safetensors.index.json").is_file()
