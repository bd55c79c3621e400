"""Exports a Hugging Face folder from parameters that are on other ranks: sharded safetensors, config and tokenizer.

Every rank requests the parameters one by one in the same order. Only the writing rank keeps them, at most one shard at
a time."""

from __future__ import annotations

import json
import logging
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from tawpipe.errors import RunError, UserError
from tawpipe.files import replace_folder
from tawpipe.model.bits.compressed import PLAIN, FewBitsFolder
from tawpipe.model.buffers import persistent_buffers
from tawpipe.model.chain import Chain
from tawpipe.model.files.carried import CONFIG, Carried, base_folder, small_files, with_quantization, write_files
from tawpipe.model.files.exported import differences
from tawpipe.model.files.merged import Merged
from tawpipe.model.files.pretrained import SafetensorsSource, has_weights, stored_dtype, stored_dtypes
from tawpipe.model.refuse import unsupported
from tawpipe.model.units import base_name
from tawpipe.model.weights import Conversion, canonical_names, is_adapter

logger = logging.getLogger(__name__)

GetParameter = Callable[[str], Tensor | None]
"""Function from a canonical name to the full tensor on the writing rank, and to None on other ranks. It is collective:
every rank calls it, in the same order."""


def export_hugging_face(
    chain: Chain,
    folder: Path | str,
    get_parameter: GetParameter,
    *,
    dtype: torch.dtype | None = None,
    format: str = PLAIN,
    merge: bool = False,
    max_shard_bytes: int = 5 * 2**30,
    is_writer: bool,
    tokenizer: Any = None,
    carried: Carried | None = None,
) -> Path:
    """Write a folder that ``AutoModelForCausalLM.from_pretrained`` opens, or ``PeftModel`` for a ``peft`` model.

    A ``peft`` model is exported as an adapter folder (``adapter_model.safetensors``, ``adapter_config.json``), to be
    put on its base model. The frozen base weights are not written. Everything is written to ``<folder>.incomplete``,
    small files first, and renamed at the end. So a folder of this name is always complete. An existing one is replaced.
    Then the folder is opened again and compared with the model.

    A tensor that the model's own folder stores in another dtype than most, such as a router in fp32, keeps that dtype.

    Args:
        chain: the model. Its parameters may be placeholders.
        folder: the folder to make.
        get_parameter: returns the values; see ``GetParameter``. Every rank must call this function.
        dtype: dtype of the weights on disk. None takes the dtype of the model's own folder, or fp32 without one.
        format: ``hf``; or ``w4a16`` or ``w8a8``, with the matrices of linear layers in 4 or 8 bits (``compressed``).
        merge: write the whole model of a ``peft`` model, with the adapter merged into its weights.
        max_shard_bytes: size of a file, and of the memory that the writer takes. Only a single larger tensor exceeds
            it, and adapters, which ``peft`` reads from one file.
        is_writer: True on the rank that writes. All other ranks only take part in ``get_parameter``.
        tokenizer: a transformers tokenizer to save next to the weights.
        carried: result of ``carry``, which is called here by default.

    Raises:
        UserError: this model, or an adapter alone, does not support the format.
        RunError: the folder could not be written, or differs from the model. It is raised on the writer after all ranks
            have taken part. If writing failed, the folder that existed before is unchanged, and written files stay in
            ``<folder>.incomplete``.
    """
    folder, adapter = Path(folder), is_adapter_alone(chain, merge)
    if carried is None:
        carried = carry(chain, dtype=dtype, format=format, merge=merge, tokenizer=tokenizer)
    dtype = carried.dtype
    few_bits = few_bits_of(chain, format, dtype, adapter=adapter)
    if merge:
        get_parameter = Merged(chain, get_parameter).parameter
    tensors = _adapter_tensors(chain, get_parameter) if adapter else _model_tensors(chain, get_parameter)
    if not is_writer:
        _finish(tensors)
        return folder

    files = carried.files
    partial = folder.with_name(f"{folder.name}.incomplete")
    shutil.rmtree(partial, ignore_errors=True)
    stem, limit = ("adapter_model", sys.maxsize) if adapter else ("model", max_shard_bytes)
    writer = _ShardWriter(partial, stem, dtype, carried.dtypes, limit)
    try:
        write_files(partial, files)
        for name, tensor in tensors:
            assert tensor is not None, f"the writer was not given {name}"
            for part, value in few_bits.tensors(name, tensor) if few_bits else [(name, tensor)]:
                writer.add(part, value)
            for twin in carried.twins.get(name, ()):
                writer.add(twin, tensor)
        writer.finish()
        if few_bits is not None:
            files = {**files, CONFIG: with_quantization(files[CONFIG], few_bits.settings)}
            write_files(partial, {CONFIG: files[CONFIG]})
            logger.info("%s", few_bits.words)
        replace_folder(partial, folder)
    except (OSError, SafetensorError) as error:  # for example a full disk, or no permission
        _finish(tensors)
        kept = f"; {len(writer.shards)} files of weights stay in {partial}" if writer.shards else ""
        if not kept:
            shutil.rmtree(partial, ignore_errors=True)
        raise RunError(f"the model could not be exported to {folder}: {error}{kept}") from error
    if adapter:
        logger.info("%s holds the adapter only; peft.PeftModel.from_pretrained puts it on the base model", folder)
    if different := differences(chain, folder, writer.written, files, tokenizer, adapter=adapter):
        raise RunError(f"{folder} was written and differs from the model of this run: {'; '.join(different)}")
    return folder


def carry(
    chain: Chain,
    base: Path | None = None,
    *,
    dtype: torch.dtype | None = None,
    format: str = PLAIN,
    merge: bool = False,
    tokenizer: Any = None,
    ends: Sequence[int] = (),
) -> Carried:
    """Return the small files of an export, and the dtypes and duplicate tensor names to keep. Writes no folder.

    They are read from the model's folder, so that an export does not need it later. The small files are made and
    tested.

    Args:
        chain: the model.
        base: the folder that the model was loaded from; by default the one that its config names.
        dtype, format, merge, tokenizer: as in ``export_hugging_face``.
        ends: tokens that end learned turns; see ``small_files``.

    Raises:
        UserError: this model does not support the format, or files cannot be made or read.
    """
    adapter, base = is_adapter_alone(chain, merge), base or base_folder(chain.config)
    weights = None if adapter or base is None or not has_weights(base) else base
    dtype = dtype or (torch.float32 if weights is None else stored_dtype(weights))
    _ = few_bits_of(chain, format, dtype, adapter=adapter)
    files = small_files(chain, base, dtype=dtype, adapter=adapter, tokenizer=tokenizer, ends=ends)
    if weights is None:
        return Carried(files, dtype)
    usual, (dtypes, copies), (_, renamed) = (
        stored_dtype(weights),
        SafetensorsSource(chain, weights, checks=False).stored(),
        _groups(chain),
    )
    raw = {name: other for name, other in stored_dtypes(weights).items() if other != usual}
    unusual = {renamed(base_name(name)): other for name, other in dtypes.items() if other != usual}
    twins = {
        renamed(base_name(name)): {*map(renamed, names)} - {renamed(base_name(name))} for name, names in copies.items()
    }
    return Carried(files, dtype, raw | unusual, {} if format != PLAIN else twins)


def is_adapter_alone(chain: Chain, merge: bool) -> bool:
    """Return True if a model is exported as an adapter folder: it has an adapter, which is not merged."""
    return getattr(chain.outer_model, "peft_config", None) is not None and not merge


def few_bits_of(chain: Chain, format: str, dtype: torch.dtype, *, adapter: bool) -> FewBitsFolder | None:
    """Return the writer of matrices in 4 or 8 bits for an exported model, or None in full precision.

    Raises:
        UserError: this model, or an adapter alone, does not support the format.
    """
    if format == PLAIN:
        return None
    if adapter:
        raise UserError("format", format, f"{PLAIN} for an adapter alone; or merge it")
    return _few_bits(format, chain, dtype)


def _finish(tensors: Iterator[object]) -> None:
    """Request all remaining tensors, to take part in their collective operations, and discard them."""
    for _ in tensors:
        pass


class _ShardWriter:
    """Writer of safetensors files.

    It starts a new file when the next tensor would make the present one too large.

    Args:
        folder: folder to write to.
        stem: beginning of the files' names.
        dtype: dtype of the tensors on disk.
        unusual: tensor name -> its dtype, for tensors with another one.
        max_shard_bytes: limit of a file's size.
    """

    def __init__(
        self, folder: Path, stem: str, dtype: torch.dtype, unusual: Mapping[str, torch.dtype], max_shard_bytes: int
    ) -> None:
        self._folder, self._stem, self._dtype, self._limit = folder, stem, dtype, max_shard_bytes
        self._unusual = unusual
        self._pending: dict[str, Tensor] = {}
        self._pending_bytes = self._total_bytes = 0
        self.shards: list[list[str]] = []
        self.written: dict[str, tuple[torch.dtype, list[int]]] = {}
        """Tensor name -> its dtype and shape, for all tensors added so far."""

    def add(self, name: str, tensor: Tensor) -> None:
        """Add a copy of ``tensor`` on the CPU, in its dtype on disk.

        If the present file would exceed its size limit, it is written first."""
        dtype = self._unusual.get(name, self._dtype) if tensor.is_floating_point() else None
        kept = tensor.detach().to(device="cpu", dtype=dtype, copy=True)
        self.written[name] = kept.dtype, list(kept.shape)
        size = kept.numel() * kept.element_size()
        if self._pending and self._pending_bytes + size > self._limit:
            self._flush()
        self._pending[name] = kept.contiguous()
        self._pending_bytes += size
        self._total_bytes += size

    def _flush(self) -> None:
        """Write all pending tensors to the next file."""
        from safetensors.torch import save_file

        save_file(self._pending, self._shard_path(len(self.shards)), metadata={"format": "pt"})
        self.shards.append(list(self._pending))
        self._pending, self._pending_bytes = {}, 0

    def _shard_path(self, index: int) -> Path:
        return self._folder / f"{self._stem}.part-{index:05d}"

    def finish(self) -> None:
        """Write the remaining tensors, and rename the files to their final names, which contain the number of files."""
        if self._pending:
            self._flush()
        if len(self.shards) == 1:
            self._shard_path(0).rename(self._folder / f"{self._stem}.safetensors")
            return
        weight_map = {}
        for index, names in enumerate(self.shards):
            file = f"{self._stem}-{index + 1:05d}-of-{len(self.shards):05d}.safetensors"
            self._shard_path(index).rename(self._folder / file)
            weight_map.update(dict.fromkeys(names, file))
        content = {"metadata": {"total_size": self._total_bytes}, "weight_map": dict(sorted(weight_map.items()))}
        index_file = self._folder / f"{self._stem}.safetensors.index.json"
        index_file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _model_tensors(chain: Chain, get_parameter: GetParameter) -> Iterator[tuple[str, Tensor | None]]:
    """Yield (name on disk, tensor) of the whole model.

    The tensor is None on ranks that do not write."""
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
        if name != canonical and name not in declared and canonical not in declared:  # tied in code, not in the config
            yield renamed(name), get_parameter(canonical)
    persistent = persistent_buffers(chain.model)
    parameters = {name for name, _ in chain.model.named_parameters(remove_duplicate=False)}
    for name, buffer in chain.model.named_buffers():
        if name in persistent and name not in parameters:
            yield renamed(base_name(name)), buffer


def _groups(chain: Chain) -> tuple[list[Conversion], Callable[[str], str]]:
    """Return the conversions of all parameters to their form on disk, and a function that renames tensors.

    Both follow ``save_pretrained`` of transformers."""
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
    for full_name, _ in chain.model.named_parameters():
        if is_adapter(chain.model, full_name):
            continue
        name = base_name(full_name)
        target, pattern = rename_source_key(name, [], converters)
        if pattern is None:
            target, pattern = renamed(name), name
            groups[target] = Conversion(WeightRenaming(name, target), target, [(name, name)])
        else:
            groups.setdefault(target, Conversion(by_pattern[pattern], target, [])).sources.append((name, pattern))
    return list(groups.values()), renamed


def _adapter_tensors(chain: Chain, get_parameter: GetParameter) -> Iterator[tuple[str, Tensor | None]]:
    """Yield (name on disk, tensor) of the adapter, and of base parameters that are trained with it.

    Raises:
        UserError: a trained base parameter cannot be stored in an adapter folder.
    """
    from peft import get_peft_model_state_dict

    peft_model: Any = chain.outer_model
    prefix = next(name for name, module in peft_model.named_modules() if module is chain.model)
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
            peft_model, {full: value}, adapter_name=peft_model.active_adapter, save_embedding_layers=False
        )
        if not state and not is_adapter(chain.model, name):
            raise unsupported(
                name,
                "a base parameter that is trained beside an adapter must be named in modules_to_save of its peft "
                "config, or the adapter folder could not hold it",
            )
        yield from state.items()


def _few_bits(format: str, chain: Chain, dtype: torch.dtype) -> FewBitsFolder:
    """Return the writer of matrices in 4 or 8 bits, for layers only, not the embedding or the head."""
    from transformers.core_model_loading import WeightConverter

    groups, renamed = _groups(chain)
    split = {name for group in groups if isinstance(group.rule, WeightConverter) for name, _ in group.sources}
    ends = {0, len(chain.blocks) - 1}
    layers = {slot.name for unit in chain.units if ends.isdisjoint(unit.blocks) for slot in unit.slots}
    return FewBitsFolder(format, chain.model, layers, split, lambda name: renamed(base_name(name)), dtype)
