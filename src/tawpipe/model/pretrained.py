"""First values from a Hugging Face folder with safetensors, one unit at a time: no process could hold all of them."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from tawpipe.model.adapters import CONFIG, VALUES, AdapterValues
from tawpipe.model.chain import Chain
from tawpipe.model.compressed import FewBitsTensors
from tawpipe.model.facts import Fact, Facts, config_facts, tensor_facts
from tawpipe.model.refuse import unsupported
from tawpipe.model.units import Unit
from tawpipe.model.weights import Conversion, InitSource, base_name, canonical_names, flatten, is_adapter

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
SNAPSHOTS = "snapshots"
"""Folder of the Hub's cache that has a folder for every commit."""

_WEIGHTS = re.compile(r"\.(safetensors|bin|pt|pth|ckpt|h5|msgpack|gguf|distcp)(\.index(\.json)?)?$")
_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}
"""Types of numbers as safetensors names them."""
_TRAINING_STATE = re.compile(r"(training_args|optimizer|scheduler|scaler|rng_state)(\.|_\d)")
"""Files that a trainer leaves beside a model."""


class SafetensorsSource:
    """Values from a Hugging Face folder with ``model.safetensors`` or its shards.

    Names and layouts are converted by transformers' own rules (experts stored one by one become one tensor). Only the
    tensors of the unit asked for are read. Adapters, which are in no such folder, come from a folder of ``peft``, or
    from an ``InitSource``.

    Raises:
        UserError: where the folder's tensors do not fit the model, with the names of missing and unexpected ones.
    """

    def __init__(self, chain: Chain, folder: Path | str, *, seed: int = 0, adapter: Path | None = None) -> None:
        self._folder, self._adapter, self._model = Path(folder), adapter, chain.model
        self._tensors = FewBitsTensors(_files_by_key(self._folder))
        self._files = self._tensors.files
        self._init: InitSource | None = None
        self._trained = None if adapter is None else AdapterValues(chain, adapter)
        self._adapters = {n for n, _ in self._model.named_parameters() if is_adapter(self._model, n)}
        if self._adapters:
            self._init = InitSource(chain, seed, base=lambda name: self._read(self._group_of[name])[name])
        self._aliases = {base_name(name): canonical for name, canonical in canonical_names(self._model).items()}
        state = {base_name(name): value for name, value in self._model.state_dict().items()}
        self._buffer_names = set(state) - set(self._aliases)
        self._groups, self._group_of = self._plan(state)
        self._check_names()
        self._check_shapes(state)

    def _plan(self, state: dict[str, Tensor]) -> tuple[dict[str, Conversion], dict[str, str]]:
        """Groups by their first target, and for every canonical parameter or buffer the group that gives it."""
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

        mapping = get_model_conversion_mapping(self._model)
        renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
        converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
        by_pattern = {pattern: entry for entry in converters for pattern in entry.source_patterns}
        prefix = self._model.base_model_prefix

        groups: dict[str, Conversion] = {}
        group_of: dict[str, str] = {}
        self._unexpected: list[str] = []
        for key in sorted(self._files, key=dot_natural_key):
            target, pattern = rename_source_key(key, renamings, converters, prefix, state)
            if target not in state and key in state:
                target, pattern = rename_source_key(key, [], [], prefix, state)
            if target not in state:
                self._unexpected.append(key)
                continue
            transform = WeightRenaming(key, target) if pattern is None else by_pattern[pattern]
            group = groups.setdefault(target, Conversion(transform, target, []))
            group.sources.append((key, key if pattern is None else pattern))
            for target_pattern in transform.target_patterns if pattern is not None else (target,):
                name = target.replace(transform.target_patterns[0], target_pattern) if pattern is not None else target
                group_of.setdefault(self._aliases.get(name, name), target)
        return groups, group_of

    def _check_names(self) -> None:
        ignored = [
            *(self._model._keys_to_ignore_on_load_unexpected or ()),
            r"rotary_emb\.inv_freq",
            r"(^|\.)position_ids$",
        ]
        unexpected = [key for key in self._unexpected if not any(re.search(pattern, key) for pattern in ignored)]
        missing = [n for n, _ in self._model.named_parameters() if n not in self._group_of and n not in self._adapters]
        if missing or unexpected:
            parts = [
                f"{len(names)} {what} ({', '.join(names[:4])}{', ...' if len(names) > 4 else ''})"
                for what, names in (("missing", missing), ("unexpected", unexpected))
                if names
            ]
            raise unsupported(
                str(self._folder), f"its safetensors must fit {type(self._model).__name__}: {'; '.join(parts)}"
            )

    def unit(self, unit: Unit, *, dtype: torch.dtype = torch.float32) -> Tensor:
        def values() -> Iterator[Tensor]:
            pending: dict[str, Tensor] = {}  # results of a group that gives several parameters
            for slot in unit.slots:
                if slot.name in self._adapters:
                    assert self._init is not None
                    stored = self._trained
                    yield stored.parameter(slot.name) if stored else self._init.parameter(slot.name, dtype)
                    continue
                if slot.name not in pending:
                    pending.update(self._read(self._group_of[slot.name]))
                value = pending.pop(slot.name)
                self._check_shape(slot.name, slot.shape, tuple(value.shape))
                yield value

        return flatten(unit, values(), dtype)

    def codes(self, name: str) -> tuple[Tensor, Tensor] | None:
        """Codes and scales of a matrix as ``lowbit.quantise_rows`` gives them, where the folder has it in few bits."""
        from safetensors import safe_open

        group = self._groups[self._group_of[name]]
        if len(group.sources) > 1:
            return None
        return self._tensors.codes(group.sources[0][0], cache(lambda path: safe_open(path, framework="pt")))

    def _check_shapes(self, state: dict[str, Tensor]) -> None:
        """Compare what needs no conversion with the files' headers, before anything is read."""
        from safetensors import safe_open
        from transformers.core_model_loading import WeightRenaming

        opened = cache(lambda path: safe_open(path, framework="pt"))
        for group in self._groups.values():
            if isinstance(group.rule, WeightRenaming):
                stored = self._tensors.shape(group.sources[0][0], opened)
                self._check_shape(group.target, tuple(state[group.target].shape), stored)

    def _check_shape(self, name: str, expected: tuple[int, ...], stored: tuple[int, ...]) -> None:
        if stored != expected:
            raise unsupported(
                str(self._folder), f"{name} must have shape {list(expected)} as config.json says, not {list(stored)}"
            )

    def buffers(self) -> dict[str, Tensor]:
        names = sorted(self._buffer_names & self._group_of.keys())
        return {name: self._read(self._group_of[name])[name] for name in names}

    def facts(self) -> Facts:
        adapter = tensor_facts([self._adapter / VALUES]) if self._adapter is not None else {}
        return tensor_facts(_files_by_key(self._folder).values()) | adapter

    def _read(self, target: str) -> dict[str, Tensor]:
        """Read and convert one group; values by canonical name."""
        from safetensors import safe_open

        group, opened = self._groups[target], cache(lambda path: safe_open(path, framework="pt"))
        values = (self._tensors.tensor(key, opened) for key, _ in group.sources)
        converted = group.apply(values, self._model)
        return {self._aliases.get(name, name): value for name, value in converted.items()}


def _files_by_key(folder: Path) -> dict[str, Path]:
    """Tensor name -> the file that holds it."""
    from safetensors import SafetensorError, safe_open

    index, single = folder / INDEX, folder / SINGLE
    try:
        if index.is_file():
            names = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            files = {key: folder / name for key, name in names.items()}
            if absent := sorted({path.name for path in files.values() if not path.is_file()}):
                raise unsupported(str(folder), f"its index names files that are not there: {', '.join(absent)}")
            return files
        if single.is_file():
            with safe_open(single, framework="pt") as file:
                return dict.fromkeys(file.keys(), single)
    except (SafetensorError, ValueError, KeyError, OSError) as error:
        raise unsupported(str(folder), f"its safetensors cannot be read ({error})") from error
    raise unsupported(str(folder), f"expected {SINGLE} or {INDEX} in the folder")


def folder_facts(folder: Path, *, code: bool = False) -> Facts:
    """Facts about the folder of a model or an adapter: what is read of it to train.

    Args:
        code: modules in it are run.

    Raises:
        UserError, OSError, ValueError: a file cannot be read.
    """
    commit = {"the Hub's commit": Fact("", folder.name)} if folder.parent.name == SNAPSHOTS else {}
    modules = sorted(folder.glob("*.py")) if code else ()
    facts = commit | {path.name: Fact("", path.read_text(encoding="utf-8")) for path in modules}
    for path in (folder / name for name in ("config.json", CONFIG)):
        if path.is_file():
            facts |= config_facts(path.name, json.loads(path.read_text(encoding="utf-8")))
    weights = _files_by_key(folder).values() if has_weights(folder) else filter(Path.is_file, [folder / VALUES])
    return facts | tensor_facts(weights)


def has_weights(folder: Path) -> bool:
    """True if a model folder brings weights of its own."""
    return (folder / SINGLE).is_file() or (folder / INDEX).is_file()


def count_files(folder: Path) -> int:
    """Number of safetensors files that hold a folder's weights."""
    return len(set(_files_by_key(folder).values()))


def stored_dtype(folder: Path) -> torch.dtype:
    """The type that most of a folder's numbers have."""
    from safetensors import safe_open

    counts: dict[torch.dtype, int] = {}
    for path in sorted(set(_files_by_key(folder).values())):
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118
                part = file.get_slice(key)
                dtype = _DTYPES.get(part.get_dtype(), torch.float32)
                counts[dtype] = counts.get(dtype, 0) + torch.Size(part.get_shape()).numel()
    return max(counts, key=lambda dtype: counts[dtype], default=torch.float32)


def check_weights(folder: Path) -> None:
    """Check that a folder without safetensors has no weights at all.

    Raises:
        UserError: it has some in another form, which would be passed over for random ones.
    """
    if has_weights(folder):
        return
    others = sorted(path.name for path in folder.iterdir() if _WEIGHTS.search(path.name))
    others = [name for name in others if not _TRAINING_STATE.match(name)]
    if not others:
        return
    first, more = others[0], f" and {len(others) - 1} more files" if len(others) > 1 else ""
    if first.startswith("pytorch_model"):
        way = f"convert them: {conversion(str(folder), str(folder))}"
    elif first.endswith(".gguf"):
        way = f"convert them: {conversion(str(folder), str(folder), gguf_file=first)}"
    elif first.startswith(("tf_model", "flax_model")):
        framework = {"from_tf" if first.startswith("tf") else "from_flax": True}
        way = f"convert them with transformers before 5: {conversion(str(folder), str(folder), **framework)}"
    else:
        way = "convert them to what save_pretrained of transformers writes"
    expected = f"weights as {SINGLE} or {INDEX}, not {first}{more}; {way}; or config.json alone for random weights"
    raise unsupported(str(folder), expected)


def conversion(source: str, folder: str, **how: object) -> str:
    """The command that writes a model as safetensors into a folder; into another folder with its tokenizer."""
    given = "".join(f", {name}={json.dumps(value) if isinstance(value, str) else value}" for name, value in how.items())
    kinds = ["AutoModelForCausalLM"] + ["AutoTokenizer"] * (source != folder)
    parts = [f"from transformers import {', '.join(kinds)}"]
    parts += [f"{k}.from_pretrained({json.dumps(source)}{given}).save_pretrained({json.dumps(folder)})" for k in kinds]
    return f"python -c {shlex.quote('; '.join(parts))}"
