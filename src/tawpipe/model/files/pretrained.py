"""Reads initial weights from a Hugging Face folder with safetensors, one unit at a time.

No process could hold all of them."""

from __future__ import annotations

import json
import re
import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tawpipe.model.bits.forms import AnyForm, PlainForm
from tawpipe.model.bits.published import (
    PublishedTensors,
    assumed_forms,
    quantization_of,
    tensor_headers,
    widened_dtype,
)
from tawpipe.model.buffers import persistent_buffers
from tawpipe.model.chain import Chain
from tawpipe.model.facts import Fact, Facts, config_facts, tensor_facts, value_digest
from tawpipe.model.files.adapters import CONFIG, VALUES, AdapterValues
from tawpipe.model.refuse import unsupported
from tawpipe.model.units import Unit, base_name
from tawpipe.model.weights import Conversion, InitSource, canonical_names, flatten, is_adapter

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
SNAPSHOTS = "snapshots"
"""Folder of the Hub's cache that contains one folder per commit."""

_WEIGHTS = re.compile(r"\.(safetensors|bin|pt|pth|ckpt|h5|msgpack|gguf|distcp)(\.index(\.json)?)?$")
_TRAINING_STATE = re.compile(r"(training_args|optimizer|scheduler|scaler|rng_state)(\.|_\d)")
"""Pattern for files that a trainer writes next to a model."""


class SafetensorsSource:
    """Source of values from a Hugging Face folder with ``model.safetensors`` or its shards.

    Names and layouts are converted by transformers' own rules (experts stored one by one become one tensor). Only
    tensors of the requested unit are read. The folder contains no adapters. They are read from a ``peft`` folder, or
    drawn by an ``InitSource``.

    Args:
        chain: the model.
        folder: folder with the weights.
        seed: seed for adapters that are drawn.
        adapter: ``peft`` folder with the adapter's values, or None.
        checks: True to compare names and shapes; False for a model whose values were already removed.

    Raises:
        UserError: the folder's tensors do not fit the model. The message names missing and unexpected ones.
    """

    def __init__(
        self, chain: Chain, folder: Path | str, *, seed: int = 0, adapter: Path | None = None, checks: bool = True
    ) -> None:
        self._folder, self._adapter, self._model = Path(folder), adapter, chain.model
        self.digests: dict[str, str] | None = None
        """Set it to a dictionary to collect, by name, the digest of every parameter of the folder read in a frozen
        unit."""
        self._tensors = PublishedTensors(self._folder, _files_by_key(self._folder))
        self._files = self._tensors.files
        self._init: InitSource | None = None
        self._trained = None if adapter is None else AdapterValues(chain, adapter)
        self._adapters = {n for n, _ in self._model.named_parameters() if is_adapter(self._model, n)}
        if self._adapters:
            self._init = InitSource(chain, seed, base=self.parameter)
        self._aliases = {base_name(name): canonical for name, canonical in canonical_names(self._model).items()}
        kept = persistent_buffers(self._model)
        buffers = ((name, buffer) for name, buffer in self._model.named_buffers() if name in kept)
        named = (*self._model.named_parameters(remove_duplicate=False), *buffers)
        state = {base_name(name): value for name, value in named}
        self._buffer_names = set(state) - set(self._aliases)
        self._groups, self._group_of = self._plan(state)
        if checks:
            self._check_names()
            self._check_shapes(state)

    def _plan(self, state: dict[str, Tensor]) -> tuple[dict[str, Conversion], dict[str, str]]:
        """Assign every tensor of the folder to a ``Conversion``, which makes parameters or buffers of the model.

        Tensors that belong to nothing in the model are listed in ``_unexpected``. Names of further conversions that
        make a parameter once more are listed in ``_copies``.

        Args:
            state: parameters and buffers of the model, by name without ``peft``.

        Returns:
            Two mappings. The first has the conversions, by the name of the first tensor that each one makes (its
            target). The second maps the canonical name of a parameter or buffer to the target of the conversion that
            makes it.

        Raises:
            UserError: two tensors of the folder that need no conversion have one name in the model.
        """
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
        self._copies: dict[str, list[str]] = {}
        for key in sorted(self._files, key=dot_natural_key):
            target, pattern = rename_source_key(key, renamings, converters, prefix, state)
            if target not in state and key in state:
                target, pattern = rename_source_key(key, [], [], prefix, state)
            if target not in state:
                self._unexpected.append(key)
                continue
            transform = WeightRenaming(key, target) if pattern is None else by_pattern[pattern]
            if pattern is None and target in groups:
                both = f"{groups[target].sources[0][0]} and {key} are both {target}: remove one from its safetensors"
                raise unsupported(str(self._folder), both)
            group = groups.setdefault(target, Conversion(transform, target, []))
            group.sources.append((key, key if pattern is None else pattern))
            for target_pattern in transform.target_patterns if pattern is not None else (target,):
                name = target.replace(transform.target_patterns[0], target_pattern) if pattern is not None else target
                name = self._aliases.get(name, name)
                if group_of.setdefault(name, target) != target and target not in self._copies.setdefault(name, []):
                    self._copies[name].append(target)
        return groups, group_of

    def _check_names(self) -> None:
        """Raise UserError if the folder lacks a parameter, or has tensors that the model lacks.

        Accepted are missing adapters, and superfluous tensors that transformers would ignore, such as rotary
        frequencies."""
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
            pending: dict[str, Tensor] = {}  # results of a group that makes several parameters
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
                self._check_tied(slot.name, value)
                if self.digests is not None and not unit.trainable:
                    self.digests[slot.name] = value_digest(value)
                yield value

        return flatten(unit, values(), dtype)

    @property
    def folder(self) -> Path:
        """Absolute path of the folder."""
        return self._folder.absolute()

    def parameter(self, name: str) -> Tensor:
        """Return the value of one parameter as stored in the folder.

        Adapter parameters are not supported."""
        return self._read(self._group_of[name])[name]

    def codes(self, name: str) -> tuple[Tensor, Tensor] | None:
        """Return the codes and scales of a matrix that the folder stores in 4 or 8 bits, or None for other parameters.

        They have the form that ``lowbit.quantise_rows`` returns."""
        from safetensors import safe_open

        group = self._groups[self._group_of[name]]
        if len(group.sources) > 1:
            return None
        return self._tensors.codes(group.sources[0][0], cache(lambda path: safe_open(path, framework="pt")))

    def forms(self) -> dict[str, AnyForm]:
        """Return name of a matrix -> form in which its published codes can be stored and sent, else its numbers.

        Codes of a matrix that is made of several tensors are kept if blocks end where the tensors do."""
        from safetensors import safe_open

        opened = cache(lambda path: safe_open(path, framework="pt"))
        shapes = {name: tuple(p.shape) for name, p in self._model.named_parameters() if p.ndim > 1}
        forms: dict[str, AnyForm] = {n: PlainForm(dtype) for n, dtype in self.stored()[0].items() if n in shapes}
        for group in self._groups.values():
            keys = [key for key, _ in group.sources]
            form, *others = {self._tensors.form(key, opened) for key in keys}
            if form is None or others:
                continue
            dense = [self._tensors.shape(key, opened) for key in keys]
            if len(keys) > 1 and any(shape[dim] % form.block[dim] for shape in dense for dim in (-2, -1)):
                continue
            grids = group.apply((torch.empty(form.grid(shape), device="meta") for shape in dense), self._model)
            for name, grid in grids.items() if len(grids) == 1 else ():
                name = self._aliases.get(name, name)
                if name in shapes and tuple(grid.shape) == form.grid(shapes[name]):
                    forms[name] = form
        return forms

    def published(self, name: str) -> tuple[Tensor, Tensor]:
        """Return the codes of a parameter that ``forms`` names, one in each uint8, and its fp32 scales."""
        from safetensors import safe_open

        opened, group = cache(lambda path: safe_open(path, framework="pt")), self._groups[self._group_of[name]]
        stored = [self._tensors.stored(key, opened) for key, _ in group.sources]
        codes, scales = zip(*(each.elements() for each in stored if each is not None), strict=True)
        parts = [group.apply(each, self._model)[base_name(name)] for each in (codes, scales)]
        return parts[0], parts[1]

    def _check_shapes(self, state: dict[str, Tensor]) -> None:
        """Raise UserError if a stored tensor that needs no conversion has another shape than in the model.

        Shapes are read from the files' headers, before any values are read."""
        from safetensors import safe_open
        from transformers.core_model_loading import WeightRenaming

        opened = cache(lambda path: safe_open(path, framework="pt"))
        for group in self._groups.values():
            stored = self._tensors.shape(group.sources[0][0], opened)  # checks scales as well
            if isinstance(group.rule, WeightRenaming):
                self._check_shape(group.target, tuple(state[group.target].shape), stored)

    def _check_shape(self, name: str, expected: tuple[int, ...], stored: tuple[int, ...]) -> None:
        """Raise UserError if the stored shape of a tensor differs from the expected one."""
        if stored != expected:
            raise unsupported(
                str(self._folder), f"{name} must have shape {list(expected)} as config.json says, not {list(stored)}"
            )

    def stored(self) -> tuple[dict[str, torch.dtype], dict[str, list[str]]]:
        """Return the stored dtypes of all parameters and buffers, and the parameters that are stored several times.

        Returns:
            Parameter or buffer -> the widest dtype of its tensors in the folder, and parameter -> its names in the
            folder, for parameters with several.
        """
        dtypes, widest = stored_dtypes(self._folder), dict[str, torch.dtype]()
        for name, target in self._group_of.items():
            widths = [dtypes[key] for key, _ in self._groups[target].sources if key in dtypes]
            widest |= {name: max(widths, key=lambda dtype: dtype.itemsize)} if widths else {}
        return widest, {name: [self._group_of[name], *others] for name, others in self._copies.items()}

    @property
    def wide_parameters(self) -> list[str]:
        """Names of parameters that the folder stores in 32 bits although most of its numbers have 16."""
        usual = stored_dtype(self._folder).itemsize
        return sorted(name for name, dtype in self.stored()[0].items() if usual < 4 <= dtype.itemsize)

    def check_copies(self) -> None:
        """Raise UserError if the copies of a parameter that the folder stores several times differ."""
        for name in self._copies:
            self._check_tied(name, self._read(self._group_of[name])[name])

    def _check_tied(self, name: str, value: Tensor) -> None:
        """Raise UserError if the folder stores parameter ``name`` again, with a value or shape other than ``value``."""
        for target in self._copies.get(name, ()):
            other = self._read(target)[name]
            if other.shape == value.shape and other.to(value.dtype).equal(value):
                continue
            first, second = (self._groups[group].sources[0][0] for group in (self._group_of[name], target))
            expected = f"{first} and {second} must be equal, as its config.json ties them; tie_word_embeddings: false "
            expected += "there trains both, or remove the one that is not to count from its safetensors"
            raise unsupported(str(self._folder), expected)

    def buffers(self) -> dict[str, Tensor]:
        names = sorted(self._buffer_names & self._group_of.keys())
        return {name: self._read(self._group_of[name])[name] for name in names}

    def facts(self) -> Facts:
        adapter = tensor_facts([self._adapter / VALUES]) if self._adapter is not None else {}
        return tensor_facts(_files_by_key(self._folder).values()) | adapter

    def _read(self, target: str) -> dict[str, Tensor]:
        """Read and convert one group of tensors; return its values by canonical name.

        Args:
            target: first target of the group.
        """
        from safetensors import safe_open

        group, opened = self._groups[target], cache(lambda path: safe_open(path, framework="pt"))
        values = (self._tensors.tensor(key, opened) for key, _ in group.sources)
        converted = group.apply(values, self._model)
        return {self._aliases.get(name, name): value for name, value in converted.items()}


def _files_by_key(folder: Path) -> dict[str, Path]:
    """Return tensor name -> the file that contains it.

    Raises:
        UserError: the index and the files contradict each other, or a second form of the weights is another model.
    """
    from safetensors import SafetensorError, safe_open

    index, single = folder / INDEX, folder / SINGLE

    def names(path: Path) -> list[str]:
        with safe_open(path, framework="pt") as file:
            return list(file.keys())

    try:
        if not index.is_file():
            if single.is_file():
                return dict.fromkeys(names(single), single)
            raise unsupported(str(folder), f"expected {SINGLE} or {INDEX} in the folder")
        files = {key: folder / name for key, name in _weight_map(folder).items()}
        if absent := sorted({path.name for path in files.values() if not path.is_file()}):
            raise unsupported(str(folder), f"its index names files that are not there: {', '.join(absent)}")
        held = {path: set(names(path)) for path in sorted(set(files.values()))}
        if wrong := [f"{key} in {path.name}" for key, path in files.items() if key not in held[path]]:
            raise unsupported(str(folder), f"its {INDEX} says {_first(wrong)}, where the files have no such tensor")
        if surplus := [f"{key} in {path.name}" for path in held for key in held[path] if files.get(key) != path]:
            raise unsupported(str(folder), f"its {INDEX} does not say {_first(sorted(surplus))}, which the files hold")
        if single.is_file() and single not in held:
            _refuse_two_models(folder, tensor_facts(held), tensor_facts([single]))
        return files
    except (SafetensorError, ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise unsupported(str(folder), f"its safetensors cannot be read ({error})") from error


def _weight_map(folder: Path) -> dict[str, str]:
    """Return tensor name -> file name, from the index of a folder."""
    return dict(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"])


def files_to_fetch(folder: Path) -> list[str]:
    """Return the names of a folder's weight files to download.

    Only the small files must exist so far."""
    return sorted(set(_weight_map(folder).values())) if (folder / INDEX).is_file() else [SINGLE]


def _first(names: Sequence[str]) -> str:
    """Return the first of some names, and the number of the others, for messages."""
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def _refuse_two_models(folder: Path, indexed: Facts, single: Facts) -> None:
    """Raise UserError if the files of an index and a single file next to them differ in a tensor.

    Names, dtypes, shapes and contents are compared; of large tensors only samples of the content.

    Args:
        folder: folder with both, for the message.
        indexed: facts about the tensors in the files of the index.
        single: facts about the tensors in the single file.
    """
    bare = [{name: (fact.shown, fact.digest) for name, fact in facts.items()} for facts in (indexed, single)]
    if differing := sorted(name for name in {*bare[0], *bare[1]} if bare[0].get(name) != bare[1].get(name)):
        expected = f"one model; {SINGLE} and the files of {INDEX} differ in {_first(differing)}: remove one of the two"
        raise unsupported(str(folder), expected)


def commit_of(folder: Path) -> str:
    """Return the commit of a folder in the Hub's cache, or ``""`` for other folders."""
    return folder.name if folder.parent.name == SNAPSHOTS else ""


def folder_facts(folder: Path, *, code: bool = False) -> Facts:
    """Return facts about a folder of a model or an adapter, from all files that are read for training.

    Args:
        folder: folder of a model or an adapter.
        code: True if Python modules in the folder are run.

    Raises:
        UserError, OSError, ValueError: a file cannot be read.
    """
    commit = {"the Hub's commit": Fact("", commit)} if (commit := commit_of(folder)) else {}
    modules = sorted(folder.glob("*.py")) if code else ()
    facts = commit | {path.name: Fact("", path.read_text(encoding="utf-8")) for path in modules}
    for path in (folder / name for name in ("config.json", CONFIG)):
        if path.is_file():
            facts |= config_facts(path.name, json.loads(path.read_text(encoding="utf-8")))
    weights = _files_by_key(folder).values() if has_weights(folder) else filter(Path.is_file, [folder / VALUES])
    return facts | tensor_facts(weights)


def has_weights(folder: Path) -> bool:
    """Return True if a model folder contains safetensors weights."""
    return (folder / SINGLE).is_file() or (folder / INDEX).is_file()


def count_files(folder: Path) -> int:
    """Return the number of safetensors files with a folder's weights."""
    return len(set(_files_by_key(folder).values()))


def unread_files(folder: Path) -> list[str]:
    """Return the names of safetensors files in a folder that contain none of its weights."""
    return sorted(
        {path.name for path in folder.glob("*.safetensors")} - {p.name for p in _files_by_key(folder).values()}
    )


def published_words(folder: Path, *, kept: bool) -> str:
    """Return the form of a folder's quantised weights and what becomes of them; empty if they are dense.

    Args:
        folder: the folder.
        kept: True if their codes are stored and sent as they are.
    """
    tensors = PublishedTensors(folder, _files_by_key(folder))
    use = "stored and sent as published" if kept else f"widened to {str(tensors.dtype).removeprefix('torch.')}"
    return f"{tensors.words}, {use}" if tensors.words else ""


def stored_dtypes(folder: Path) -> dict[str, torch.dtype]:
    """Return tensor name -> its dtype in a folder, for floating-point numbers of 16 bits or more.

    Quantised tensors have the dtype that they are widened to. The result is empty for a folder without weights."""
    dtypes = PublishedTensors(folder, _files_by_key(folder)).dtypes() if has_weights(folder) else {}
    return {name: dtype for name, dtype in dtypes.items() if _is_plain(dtype)}


def stored_dtype(folder: Path) -> torch.dtype:
    """Return the dtype of most numbers in a folder, among floating-point numbers of 16 bits or more.

    Weights are not trained in fewer bits. Without any, it is fp32. For quantised weights it is the dtype that they are
    widened to."""
    config, settings = quantization_of(folder)
    if settings:
        return widened_dtype(config)
    counts = Counter[torch.dtype]()
    for dtype, shape in tensor_headers(_files_by_key(folder).values()).values():
        counts[dtype] += torch.Size(shape).numel() if _is_plain(dtype) else 0
    return max(+counts, key=lambda dtype: counts[dtype], default=torch.float32)


def _is_plain(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and dtype.itemsize > 1


def published_forms(model: Any, folder: Path) -> dict[str, AnyForm]:
    """Return parameter name -> form of its codes in a folder of quantised weights; empty for dense weights.

    A folder without weights gives the forms that its config.json describes, for plans.

    Args:
        model: the model of the folder, without ``peft``.
        folder: the folder.
    """
    config, settings = quantization_of(folder)
    if not settings or not has_weights(folder):
        return assumed_forms(config, settings, model)
    as_chain: Any = SimpleNamespace(model=model)  # a chain would be followed once more
    return SafetensorsSource(as_chain, folder, checks=False).forms()


def check_weights(folder: Path) -> None:
    """Check that a folder without safetensors has no weights at all.

    Raises:
        UserError: it has weights in another form, which would be ignored in favour of random ones.
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
    """Return the shell command that writes the model ``source`` as safetensors into ``folder``.

    If the two differ, the tokenizer is written as well.

    Args:
        source: name or folder of the model.
        folder: folder to write to.
        how: further arguments of ``from_pretrained``.
    """
    options = "".join(
        f", {name}={json.dumps(value) if isinstance(value, str) else value}" for name, value in how.items()
    )
    kinds = ["AutoModelForCausalLM"] + ["AutoTokenizer"] * (source != folder)
    parts = [f"from transformers import {', '.join(kinds)}"]
    parts += [
        f"{k}.from_pretrained({json.dumps(source)}{options}).save_pretrained({json.dumps(folder)})" for k in kinds
    ]
    return f"python -c {shlex.quote('; '.join(parts))}"
