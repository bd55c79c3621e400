"""A Hugging Face folder from parameters that live elsewhere: sharded safetensors, config and tokenizer.

Parameters are asked for one after the other, in the
same order on every rank; only the writer keeps them, and at most one shard of them.
"""

from __future__ import annotations

import json
import logging
import shutil
import sys
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from tawpipe.errors import RunError, UserError
from tawpipe.files import replace_folder
from tawpipe.model.buffers import persistent_buffers
from tawpipe.model.chain import Chain
from tawpipe.model.compressed import PLAIN, FewBitsFolder
from tawpipe.model.merged import Merged
from tawpipe.model.refuse import unsupported
from tawpipe.model.weights import Conversion, base_name, canonical_names, is_adapter

logger = logging.getLogger(__name__)

GetParameter = Callable[[str], Tensor | None]
"""Canonical name -> the full tensor on the writing rank. Collective: every rank calls it, in the same order."""


def export_hugging_face(
    chain: Chain,
    folder: Path | str,
    get_parameter: GetParameter,
    *,
    dtype: torch.dtype,
    format: str = PLAIN,
    merge: bool = False,
    max_shard_bytes: int = 5 * 2**30,
    is_writer: bool,
    tokenizer: Any = None,
) -> Path:
    """Write a folder that ``AutoModelForCausalLM.from_pretrained`` opens, or for a ``peft`` model ``PeftModel``.

    A ``peft`` model is exported as an adapter folder (``adapter_model.safetensors``, ``adapter_config.json``) to be put
    on its base model; the frozen base weights are not written. Everything is written under ``<folder>.incomplete`` and
    renamed at the end, so that a folder of this name is always complete; one that is there already is replaced.

    Args:
        chain: the model; its parameters may be placeholders.
        folder: the folder to make.
        get_parameter: gives the values; see ``GetParameter``. Every rank must call this function.
        dtype: the type of the weights on disk.
        format: ``hf``; or ``w4a16`` or ``w8a8``, with the matrices of linear layers in few bits (``compressed``).
        merge: write the whole model of a ``peft`` model, with the adapter in its weights.
        max_shard_bytes: size of a file, and of what the writer holds; exceeded only by a single larger tensor, and by
            adapters, which ``peft`` reads from one file.
        is_writer: True on the rank that writes. The others only take part in ``get_parameter``.
        tokenizer: a transformers tokenizer to be saved beside the weights.

    Raises:
        UserError: a format that this model, or an adapter alone, cannot have.
        RunError: it could not be written, on the writer when all have taken part; what was there before is untouched.
    """
    folder = Path(folder)
    adapter = getattr(chain.given, "peft_config", None) is not None and not merge
    few_bits = None
    if format != PLAIN:
        if adapter:
            raise UserError("format", format, f"{PLAIN} for an adapter alone; or merge it")
        few_bits = _few_bits(format, chain, dtype)
    if merge:
        get_parameter = Merged(chain, get_parameter).parameter
    tensors = _adapter_tensors(chain, get_parameter) if adapter else _model_tensors(chain, get_parameter)
    if not is_writer:
        _finish(tensors)
        return folder

    partial = folder.with_name(f"{folder.name}.incomplete")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        stem, limit = ("adapter_model", sys.maxsize) if adapter else ("model", max_shard_bytes)
        writer = _ShardWriter(partial, stem, dtype, limit)
        for name, tensor in tensors:
            assert tensor is not None, f"the writer was not given {name}"
            for part, value in few_bits.tensors(name, tensor) if few_bits else [(name, tensor)]:
                writer.add(part, value)
        writer.finish()
        if adapter:
            _save_adapter_config(chain, partial)
            logger.info("%s holds the adapter only; peft.PeftModel.from_pretrained puts it on the base model", folder)
        else:
            _save_config(chain, partial, dtype, few_bits)
        if tokenizer is not None:
            save_tokenizer(tokenizer, partial)
        replace_folder(partial, folder)
    except (OSError, SafetensorError) as error:  # a full disk above all, or a place that is not ours
        _finish(tensors)
        raise RunError(f"the model could not be exported to {folder}: {error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder


def save_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Write a tokenizer into a folder.

    Raises:
        OSError: it could not be written.
    """
    try:
        tokenizer.save_pretrained(folder)
    except Exception as error:  # its library raises bare ones for a full disk
        raise OSError(str(error)) from error


def _finish(tensors: Iterator[object]) -> None:
    """Take part in what is left of the collective."""
    for _ in tensors:
        pass


class _ShardWriter:
    """Writer of safetensors files: of the tensors so far whenever the next one would make the file too large."""

    def __init__(self, folder: Path, stem: str, dtype: torch.dtype, max_shard_bytes: int) -> None:
        self._folder, self._stem, self._dtype, self._limit = folder, stem, dtype, max_shard_bytes
        self._pending: dict[str, Tensor] = {}
        self._pending_bytes = self._total_bytes = 0
        self._shards: list[list[str]] = []

    def add(self, name: str, tensor: Tensor) -> None:
        kept = tensor.detach().to(device="cpu", dtype=self._dtype if tensor.is_floating_point() else None, copy=True)
        size = kept.numel() * kept.element_size()
        if self._pending and self._pending_bytes + size > self._limit:
            self._flush()
        self._pending[name] = kept.contiguous()
        self._pending_bytes += size
        self._total_bytes += size

    def _flush(self) -> None:
        from safetensors.torch import save_file

        save_file(self._pending, self._shard_path(len(self._shards)), metadata={"format": "pt"})
        self._shards.append(list(self._pending))
        self._pending, self._pending_bytes = {}, 0

    def _shard_path(self, index: int) -> Path:
        return self._folder / f"{self._stem}.part-{index:05d}"

    def finish(self) -> None:
        """Write the rest and give the shards their final names, which tell how many there are."""
        if self._pending:
            self._flush()
        if len(self._shards) == 1:
            self._shard_path(0).rename(self._folder / f"{self._stem}.safetensors")
            return
        weight_map = {}
        for index, names in enumerate(self._shards):
            file = f"{self._stem}-{index + 1:05d}-of-{len(self._shards):05d}.safetensors"
            self._shard_path(index).rename(self._folder / file)
            weight_map.update(dict.fromkeys(names, file))
        content = {"metadata": {"total_size": self._total_bytes}, "weight_map": dict(sorted(weight_map.items()))}
        index_file = self._folder / f"{self._stem}.safetensors.index.json"
        index_file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _model_tensors(chain: Chain, get_parameter: GetParameter) -> Iterator[tuple[str, Tensor | None]]:
    """(name on disk, tensor) of the whole model; the tensor is None where this rank was not given it."""
    from transformers.core_model_loading import WeightConverter

    groups, renamed = _groups(chain)
    for group in groups:
        values = [get_parameter(name) for name, _ in group.sources]
        if any(value is None for value in values):
            yield group.target, None
            continue
        for name, value in group.apply(values, chain.model).items():
            yield renamed(name) if isinstance(group.rule, WeightConverter) else name, value

    declared = getattr(chain.model, "all_tied_weights_keys", {})
    for name, canonical in canonical_names(chain.model).items():
        name, canonical = base_name(name), base_name(canonical)
        if (
            name != canonical and name not in declared and canonical not in declared
        ):  # tied by hand: opening the folder would not tie it
            yield renamed(name), get_parameter(canonical)
    persistent = persistent_buffers(chain.model)
    parameters = {name for name, _ in chain.model.named_parameters(remove_duplicate=False)}
    for name, buffer in chain.model.named_buffers():
        if name in persistent and name not in parameters:
            yield renamed(base_name(name)), buffer


def _groups(chain: Chain) -> tuple[list[Conversion], Callable[[str], str]]:
    """The conversion of every parameter to its form on disk, as in ``save_pretrained``, and the renaming after it."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange, WeightConverter, WeightRenaming, rename_source_key

    mapping = get_model_conversion_mapping(chain.model, add_legacy=False)
    reverse = [entry.reverse_transform() for entry in mapping[::-1] if not isinstance(entry, PrefixChange)]
    renamings = [entry for entry in reverse if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in reverse if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: entry for entry in converters for pattern in entry.source_patterns}

    def renamed(name: str) -> str:
        return rename_source_key(name, renamings, [])[0]

    groups: dict[str, Conversion] = {}
    for given, _ in chain.model.named_parameters():
        if is_adapter(chain.model, given):
            continue
        name = base_name(given)
        target, pattern = rename_source_key(name, [], converters)
        if pattern is None:
            target, pattern = renamed(name), name
            groups[target] = Conversion(WeightRenaming(name, target), target, [(name, name)])
        else:
            groups.setdefault(target, Conversion(by_pattern[pattern], target, [])).sources.append((name, pattern))
    return list(groups.values()), renamed


def _adapter_tensors(chain: Chain, get_parameter: GetParameter) -> Iterator[tuple[str, Tensor | None]]:
    """(name on disk, tensor) of the adapter, and of base parameters that are trained beside it."""
    from peft import get_peft_model_state_dict

    given: Any = chain.given
    prefix = next(name for name, module in given.named_modules() if module is chain.model)
    names = {
        name: f"{prefix}.{name}"
        for name, parameter in chain.model.named_parameters()
        if is_adapter(chain.model, name) or parameter.requires_grad
    }
    for name, full in names.items():
        value = get_parameter(name)
        if value is None:
            yield name, None
            continue
        state = get_peft_model_state_dict(
            given, {full: value}, adapter_name=given.active_adapter, save_embedding_layers=False
        )
        if not state and not is_adapter(chain.model, name):
            raise unsupported(
                name,
                "a base parameter that is trained beside an adapter must be named in modules_to_save of its peft "
                "config, or the adapter folder could not hold it",
            )
        yield from state.items()


def _save_adapter_config(chain: Chain, folder: Path) -> None:
    given: Any = chain.given
    config = deepcopy(given.peft_config[given.active_adapter])
    config.inference_mode = True
    config.base_model_name_or_path = config.base_model_name_or_path or chain.config.name_or_path or None
    config.save_pretrained(folder)


def _few_bits(format: str, chain: Chain, dtype: torch.dtype) -> FewBitsFolder:
    from transformers.core_model_loading import WeightConverter

    groups, renamed = _groups(chain)
    split = {name for group in groups if isinstance(group.rule, WeightConverter) for name, _ in group.sources}
    ends = {0, len(chain.blocks) - 1}
    layers = {slot.name for unit in chain.units if ends.isdisjoint(unit.blocks) for slot in unit.slots}
    return FewBitsFolder(format, chain.model, layers, split, lambda name: renamed(base_name(name)), dtype)


def _save_config(chain: Chain, folder: Path, dtype: torch.dtype, few_bits: FewBitsFolder | None) -> None:
    """config.json, generation_config.json and, for code that came with the model, that code."""
    model = chain.model
    config = deepcopy(model.config)
    config.architectures = [type(model).__name__]
    config.dtype = str(dtype).removeprefix("torch.")
    if few_bits is not None:
        config.quantization_config = few_bits.settings
    config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)
    if model._auto_class is not None or type(model).__module__.startswith("transformers_modules"):
        from transformers.dynamic_module_utils import custom_object_save

        custom_object_save(model, str(folder), config=config)
