"""Reads folders of quantised weights, as their publishers have them, tensor by tensor as if they were dense.

The form is the ``quant_method`` in config.json, and the names of the tensors must fit it. These forms are read: FP8 (in
blocks, as in DeepSeek's folders, or with a scale for each tensor), MXFP4 (gpt-oss), nf4, fp4 and int8 of bitsandbytes,
and integers and FP8 of compressed-tensors. Values equal those of each format's library in every bit."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from tawpipe.model.bits.forms import AnyForm, BlockForm, PlainForm
from tawpipe.model.bits.lowbit import GROUP
from tawpipe.model.bits.quantized import NF4, matrices_of
from tawpipe.model.bits.stored import E2M1, StoredTensor, unpacked
from tawpipe.model.refuse import unsupported

FP8, MXFP4, BITSANDBYTES, COMPRESSED = "fp8", "mxfp4", "bitsandbytes", "compressed-tensors"
PARTS: dict[str, dict[str, tuple[str, str]]] = {
    FP8: {
        "_scale_inv": ("", "scales"),
        ".weight_scale": (".weight", "scales"),
        ".qscale_weight": (".weight", "scales"),
        ".scale": (".weight", "scales"),
    },
    MXFP4: {"_blocks": ("", "codes"), "_scales": ("", "scales")},
    BITSANDBYTES: {
        ".absmax": ("", "scales"),
        ".quant_map": ("", "table"),
        ".nested_absmax": ("", "nested scales"),
        ".nested_quant_map": ("", "nested table"),
        ".quant_state.bitsandbytes__nf4": ("", "state"),
        ".quant_state.bitsandbytes__fp4": ("", "state"),
        ".SCB": (".weight", "scales"),
        ".weight_format": (".weight", "layout"),
    },
    COMPRESSED: {
        ".weight_packed": (".weight", "codes"),
        ".weight_scale": (".weight", "scales"),
        ".weight_zero_point": (".weight", "zeros"),
        ".weight_shape": (".weight", "shape"),
        ".weight_g_idx": (".weight", "groups"),
    },
}
"""``quant_method`` -> end of a tensor's name -> what replaces it in the dense tensor's name, and the tensor's role."""
MARKS = {
    FP8: ("_scale_inv", ".qscale_weight"),
    MXFP4: ("_proj_blocks",),
    BITSANDBYTES: (".absmax", ".SCB"),
    COMPRESSED: (".weight_packed", ".weight_scale"),
    "gptq or awq": (".qweight",),
}
"""Form -> ends of names that dense folders do not have."""
OF_ACTIVATIONS = re.compile(r"[._](activation_scale|(input|output|[qkv])_(scale|zero_point|global_scale)|qscale_act)$")
"""Pattern for names of tensors that round activations, which training does not use."""
FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mixed-precision")
"""Values of ``format`` in a ``quantization_config`` of compressed-tensors that are read."""
READ = "dense, fp8, mxfp4, bitsandbytes or compressed-tensors weights"
OF_127 = 7.874015718698502e-3
"""1 / 127 as bitsandbytes rounds it."""
PLAIN = (torch.float32, [])
"""Header in place of those of tensors that a folder lacks."""
OPEN = Callable[[Path], Any]
"""Function that opens a safetensors file."""


def quantization_of(folder: Path, name: str = "") -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the content of a folder's config.json, and its ``quantization_config``; empty for dense weights.

    No weight is read.

    Args:
        folder: the folder.
        name: name of the model on the Hub, for messages; the folder's path by default.

    Raises:
        UserError: config.json cannot be read, or weights in its form are not supported.
    """
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        config = {}
    except (OSError, ValueError) as error:
        raise unsupported(str(folder), f"its config.json cannot be used ({error})") from error
    settings = config.get("quantization_config") or (config.get("text_config") or {}).get("quantization_config") or {}
    method = settings.get("quant_method") or (BITSANDBYTES if "load_in_4bit" in settings else "")
    if not settings or method in PARTS:
        return config, settings | {"quant_method": method} if settings else {}
    way = f"expected {READ}; take the model's folder in bf16 or FP8"
    name = name or str(folder)
    if method == "awq":
        code = "from compressed_tensors.entrypoints.convert import AutoAWQConverter as A, convert_checkpoint; "
        code += f'convert_checkpoint("{name}", "{Path(name).name}-w4a16", A.from_pretrained("{name}"))'
        way += f", or convert it to compressed-tensors: python -c {shlex.quote(code)}"
    raise unsupported(name, f"its weights are in the form {method}, which is not read; {way}")


def widened_dtype(config: Mapping[str, Any]) -> torch.dtype:
    """Return the dtype of the dense weights that quantised ones stand for: the config's, or bf16 if it names none."""
    levels = (config, config.get("text_config") or {})
    named = [level.get(key) for level in levels for key in ("dtype", "torch_dtype")]
    dtype = getattr(torch, str(next(filter(None, named), "")).removeprefix("torch."), None)
    return dtype if isinstance(dtype, torch.dtype) and dtype.itemsize > 1 else torch.bfloat16


def assumed_forms(config: Mapping[str, Any], settings: Mapping[str, Any], model: Any) -> dict[str, AnyForm]:
    """Return parameter name -> form that a config describes, for FP8 in blocks, MXFP4 and nf4; else empty.

    Args:
        config: content of config.json.
        settings: its ``quantization_config``.
        model: the model, without ``peft``.
    """
    rows, columns = settings.get("weight_block_size") or (1, 64)
    forms = {FP8: ("fp8", (rows, columns)), MXFP4: ("mxfp4", (32, 1)), BITSANDBYTES: ("nf4", (1, 64))}
    stays = settings.get("modules_to_not_convert") or settings.get("llm_int8_skip_modules") or ()
    method, dtype = settings.get("quant_method", ""), widened_dtype(config)
    if method not in forms or (method == BITSANDBYTES and settings.get("bnb_4bit_quant_type") != "nf4"):
        return {}
    (kind, block), names = forms[method], matrices_of(model)
    kept = {name for name in names if not any(f".{stay}." in f".{name}." for stay in stays)}
    kept = {name for name in kept if ".experts." in name} if method == MXFP4 else kept
    return {name: BlockForm(kind, block, dtype) if name in kept else PlainForm(dtype) for name in names}


class PublishedTensors:
    """Tensors of a folder by the names that they have in full precision.

    Args:
        folder: the folder, with its config.json.
        files: tensor name -> the file that contains it.

    Raises:
        UserError: the names do not fit the config's ``quantization_config``, or tensors lack their scales.
    """

    def __init__(self, folder: Path, files: Mapping[str, Path]) -> None:
        self._folder, self._file_of = folder, files
        config, self._settings = quantization_of(folder)
        self._method: str = self._settings.get("quant_method", "")
        self.dtype = widened_dtype(config)
        """Dtype in which quantised tensors are returned."""
        self._parts = self._find_parts()
        """Name of a quantised tensor -> role of its parts -> their names in the folder."""
        parts = {key for parts in self._parts.values() for key in parts.values()}
        rounds = self._method in (FP8, COMPRESSED)
        parts |= {key for key in files if rounds and OF_ACTIVATIONS.search(key)}
        self.files = {key: file for key, file in files.items() if key not in parts}
        for name, (dtype, _) in self._headers.items() if self._settings else ():
            if name in self.files and dtype.itemsize == 1 and dtype != torch.bool:
                raise self._lacking(name, "scales")
        self.files |= {name: files[parts["scales"]] for name, parts in self._parts.items()}
        """Tensor name -> a file; for a quantised tensor the file with its scales."""

    @cached_property
    def _headers(self) -> dict[str, tuple[torch.dtype, list[int]]]:
        return tensor_headers(self._file_of.values())

    def _find_parts(self) -> dict[str, dict[str, str]]:
        """Return name of a quantised tensor -> role of its parts -> their names in the folder.

        Raises:
            UserError: the folder has no tensor in the config's form, or a tensor lacks codes or scales.
        """
        forms = [form for form, ends in MARKS.items() if any(key.endswith(ends) for key in self._file_of)]
        names = f"its names are those of {forms[0] if forms else 'dense weights'}"
        if not self._settings:
            if forms:
                raise self._refused(f"{names}, but its config.json has no quantization_config: add the publisher's")
            return {}
        tensors = dict[str, dict[str, str]]()
        for key in self._file_of:
            for end, (instead, role) in PARTS[self._method].items():
                name = key.removesuffix(end) + instead
                # other modules have a parameter ``scale``, too
                if key.endswith(end) and (end != ".scale" or self._headers.get(name, PLAIN)[0].itemsize == 1):
                    tensors.setdefault(name, {}).setdefault(role, key)
        if not tensors:
            way = "correct it" if forms else "remove quantization_config there if they are dense"
            raise self._refused(f"its config.json says {self._method}, but {names}: {way}")
        for name, parts in tensors.items():
            if name in self._file_of:
                parts.setdefault("codes", name)
            if absent := {"codes", "scales"} - parts.keys():
                raise self._lacking(name, absent.pop())
            dtype = self._headers[parts["codes"]][0]
            if self._method != BITSANDBYTES and dtype.itemsize > 1 and dtype != torch.int32:
                raise self._refused(f"{name} is {dtype} beside {parts['scales']}: remove that if {name} is dense")
        return tensors

    def _refused(self, why: str) -> Exception:
        """Return the error for this folder."""
        return unsupported(str(self._folder), why)

    def _lacking(self, name: str, role: str) -> Exception:
        """Return the error for a quantised tensor without one of its parts."""
        ends = ((end, new) for end, (new, other) in PARTS[self._method].items() if other == role and name.endswith(new))
        end, new = next(ends, ("", ""))
        key = name.removesuffix(new) + end
        return self._refused(f"{name} is quantised and lacks its {role} ({key}): download the folder again")

    @property
    def words(self) -> str:
        """Form of the weights, for example ``FP8 in blocks of 128 x 128``; empty for dense weights."""
        if self._method in ("", MXFP4):
            return self._method.upper()
        if self._method == FP8:
            block = self._block_size()
            return f"FP8 in blocks of {block[0]} x {block[1]}" if block else "FP8 with a scale for each tensor"
        if self._method == BITSANDBYTES:
            kinds = {"nf4" if "__nf4" in key else "fp4" for key in self._file_of if "bitsandbytes__" in key}
            return f"{' and '.join(sorted(kinds)) or 'int8'} of bitsandbytes"
        scheme = self._scheme(next(iter(self._parts)))
        bits = "FP8" if scheme["type"] == "float" else f"{scheme['num_bits']} bits"
        return bits + (f" in groups of {group}" if (group := scheme.get("group_size") or 0) > 0 else "")

    def dtypes(self) -> dict[str, torch.dtype]:
        """Return tensor name -> dtype of the tensor as if dense."""
        return {name: self.dtype if name in self._parts else self._headers[name][0] for name in self.files}

    def tensor(self, name: str, opened: OPEN) -> Tensor:
        """Return a tensor; a quantised one is returned in ``dtype``."""
        if (stored := self.stored(name, opened)) is not None:
            return stored.dense(self.dtype)
        return opened(self._file_of[name]).get_tensor(name)

    def shape(self, name: str, opened: OPEN) -> tuple[int, ...]:
        """Return the shape of a tensor in full precision, from its file's header.

        Raises:
            UserError: the parts of a quantised tensor do not fit each other or config.json.
        """
        if name not in self._parts:
            return tuple(opened(self._file_of[name]).get_slice(name).get_shape())
        shape = self._layout(name, opened)[0]
        return (shape[0], shape[2], shape[1]) if self._method == MXFP4 else shape

    def codes(self, name: str, opened: OPEN) -> tuple[Tensor, Tensor] | None:
        """Return codes and scales of a matrix in the form of ``lowbit.quantise_rows``, or None if it has another form.

        Args:
            name: name of the matrix in full precision.
            opened: function that opens a file.
        """
        stored = self.stored(name, opened) if self._method == COMPRESSED else None
        if stored is None or stored.zeros is not None or stored.codes.is_floating_point():
            return None
        scales, half = stored.scales, stored.scales.bfloat16()
        if stored.bits == 4 and stored.block == (1, GROUP) and half.float().equal(scales):
            return stored.integers(stored.codes), half
        return (stored.codes, scales) if not stored.bits and stored.block == (1, stored.shape[1]) else None

    def stored(self, name: str, opened: OPEN) -> StoredTensor | None:
        """Return the codes and scales of a quantised tensor as the folder has them, or None for a dense tensor.

        Raises:
            UserError: its parts do not fit each other or config.json, or scales are infinite or no number.
        """
        if name not in self._parts:
            return None
        shape, block = self._layout(name, opened)
        codes = self._part(name, "codes", opened)
        if self._method == BITSANDBYTES:
            return self._of_bitsandbytes(name, opened, codes, shape)
        scales = self._scales(name, opened, shape, block)
        if self._method == COMPRESSED:
            return self._of_compressed(name, opened, codes, scales, shape, block)
        if self._method == FP8 and codes.is_floating_point():
            return StoredTensor("fp8", codes, scales, block, shape)
        codes, turned = codes.view(torch.uint8), self._method == MXFP4
        dense = (shape[0], shape[2], shape[1]) if turned else shape
        codes = codes.flatten(2) if turned else codes
        return StoredTensor(MXFP4, codes, scales, block, dense, table=torch.tensor(E2M1), transposed=turned)

    def form(self, name: str, opened: OPEN) -> BlockForm | None:
        """Return the form in which a tensor's codes and scales are stored and sent as published.

        It is None for dense tensors, for codes that need more than a scale for each block, and for other tables."""
        if name not in self._parts:
            return None
        (shape, block), parts = self._layout(name, opened), self._parts[name]
        codes, rounded = self._headers[parts["codes"]][0], self._headers[parts["scales"]][0]
        e4m3 = "fp8" if codes == torch.float8_e4m3fn else ""
        if self._method == MXFP4:
            return BlockForm("mxfp4", (32, 1), self.dtype)
        if self._method == FP8:
            powers = "mxfp4" if rounded.itemsize == 1 else ""  # scales of powers of 2, which a byte holds
            kind, rounded = e4m3 if codes.is_floating_point else powers, self.dtype
        elif self._method == BITSANDBYTES:
            nf4 = "nf4" in parts.get("state", "") and shape[-1] % block[1] == 0
            nf4 = nf4 and self._part(name, "table", opened).float().equal(torch.tensor(NF4))
            kind, rounded = "nf4" if nf4 else "", self._state(name, opened).get("dtype", torch.float32)
        else:
            scheme = self._scheme(name)
            kind = e4m3 if codes.is_floating_point else f"int{scheme['num_bits']}"
            plain = scheme.get("symmetric", True) and "groups" not in parts
            kind = kind if plain and (codes == torch.int32) == (kind == "int4") else ""
        even = shape[-1] % 2 == 0 or kind in ("fp8", "int8")
        once = rounded in (self.dtype, torch.float32)  # further roundings would have to be repeated
        return BlockForm(kind, block, self.dtype) if kind and even and once else None

    def _part(self, name: str, role: str, opened: OPEN) -> Tensor:
        """Return one part of a quantised tensor."""
        if (key := self._parts[name].get(role)) is None:
            raise self._lacking(name, role)
        return opened(self._file_of[key]).get_tensor(key)

    def _block_size(self) -> tuple[int, int] | None:
        """Return the rows and columns of a block of FP8, or None for a scale for each tensor."""
        size = self._settings.get("weight_block_size")
        plain = isinstance(size, list) and [type(each) for each in size] == [int, int] and min(size) > 0
        if size is not None and not plain:
            raise self._refused(f"its weight_block_size is {size}; expected two numbers, as [128, 128], or null")
        return None if size is None else (size[0], size[1])

    def _scheme(self, name: str) -> dict[str, Any]:
        """Return the settings of compressed-tensors for a tensor: the config group that targets it.

        Raises:
            UserError: the settings are incomplete, or in a format that is not read.
        """
        stem, settings = name.removesuffix(".weight"), self._settings
        try:
            groups = list(settings["config_groups"].values())
            exact = [group for group in groups if any(_targets(to, stem) for to in group["targets"])]
            classes = [group for group in groups if not all(to.startswith("re:") for to in group["targets"])]
            group = (exact or classes or groups)[0]
            scheme, format = group["weights"], group.get("format") or settings["format"]
            size, numbers = scheme.get("group_size"), (scheme["type"], scheme["num_bits"])
            strategy = scheme.get("strategy") or ("tensor" if size is None else "group" if size > 0 else "channel")
        except (KeyError, TypeError, AttributeError, IndexError) as error:
            raise self._refused(f"its quantization_config of compressed-tensors lacks {error}") from error
        sparse = (settings.get("sparsity_config") or {}).get("format", "dense") != "dense"
        if format not in FORMATS or sparse or settings.get("transform_config"):
            form = "a sparse or transformed form" if format in FORMATS else f"the format {format}"
            raise self._refused(f"its weights are in {form} of compressed-tensors; expected {', '.join(FORMATS)}")
        if numbers not in (("int", 2), ("int", 4), ("int", 8), ("float", 8)):
            raise self._refused(f"its weights are {numbers[0]} of {numbers[1]} bits; expected int 2, 4, 8 or float 8")
        return scheme | {"strategy": strategy}

    def _layout(self, name: str, opened: OPEN) -> tuple[tuple[int, ...], tuple[int, int]]:
        """Return the shape of the numbers that a tensor's codes stand for, and the rows and columns of a block.

        Raises:
            UserError: codes and scales do not fit each other or config.json.
        """
        parts, method = self._parts[name], self._method
        (kind, size), (_, grid) = (self._headers[parts[role]] for role in ("codes", "scales"))
        if method == BITSANDBYTES:
            state = self._state(name, opened)
            return state["shape"], (1, state["blocksize"])
        if len(size) < 2 or (len(size) == 4) != (method == MXFP4):
            raise self._refused(f"{parts['codes']} must be a matrix or a stack of matrices, not {size}")
        if method == MXFP4:
            shape, block, why = (*size[:2], size[2] * size[3] * 2), (1, 32), "MXFP4 has one for 32 numbers"
        elif method == FP8 and not kind.is_floating_point:
            shape, block, why = (*size[:-1], size[-1] * 2), (1, 32), "FP4 has one for 32 numbers"
        elif method == FP8:
            rows = -(-size[-2] // grid[1]) if len(grid) == 3 and grid[1:] == [2, 1] else size[-2]  # gate and up
            shape, why = tuple(size), f"weight_block_size is {self._settings.get('weight_block_size')}"
            block = self._block_size() or (rows, size[-1])
        else:
            scheme = self._scheme(name)
            shape, why = self._shape_of_compressed(name, opened, scheme), f"the strategy is {scheme['strategy']}"
            whole, group = (shape[-2], shape[-1]), scheme.get("group_size") or 0
            blocks = {"tensor": whole, "channel": (1, whole[1]), "block": tuple(scheme.get("block_structure") or ())}
            block = (1, group) if scheme["strategy"] == "group" else blocks.get(scheme["strategy"], ())
            if len(block) != 2 or min(block) < 1:
                sizes = "group_size, or block with block_structure"
                raise self._refused(f"{why}; expected tensor, channel, group with {sizes} in quantization_config")
        expected = [*shape[:-2], -(-shape[-2] // block[0]), -(-shape[-1] // block[1])]
        if grid != expected and not (len(grid) < 2 and prod(grid) == prod(expected)):
            words = f"as {why}, not {grid}: correct quantization_config, or download the folder again"
            raise self._refused(f"{parts['scales']} must have shape {expected} for {list(shape)} numbers, {words}")
        return shape, block

    def _shape_of_compressed(self, name: str, opened: OPEN, scheme: Mapping[str, Any]) -> tuple[int, ...]:
        """Return the shape of a tensor of compressed-tensors."""
        key = self._parts[name]["codes"]
        kind, size = self._headers[key]
        if kind != torch.int32:
            if kind.is_floating_point != (scheme["type"] == "float"):
                raise self._refused(f"{key} is {kind}, but its quantization_config says {scheme['type']}")
            return tuple(size)
        shape = tuple(self._part(name, "shape", opened).tolist())
        if size != (words := [*shape[:-1], -(-shape[-1] * scheme["num_bits"] // 32)]):
            why = f"as its weight_shape and num_bits {scheme['num_bits']} say, not {size}"
            raise self._refused(f"{key} must have shape {words}, {why}")
        return shape

    def _state(self, name: str, opened: OPEN) -> dict[str, Any]:
        """Return the settings of a tensor of bitsandbytes: its shape, and the numbers of the flat tensor in a block."""
        parts = self._parts[name]
        (kind, size), (_, grid) = (self._headers[parts[role]] for role in ("codes", "scales"))
        if parts["scales"].endswith("SCB"):
            return {"shape": tuple(size), "blocksize": size[-1]}
        try:
            state = json.loads(bytes(self._part(name, "state", opened).tolist()))
            state |= {"shape": tuple(state["shape"]), "dtype": getattr(torch, state["dtype"])}
            numbers, block = prod(state["shape"]), state["blocksize"]
            sizes, expected = (prod(size) * kind.itemsize, prod(grid)), (-(-numbers // 2), -(-numbers // block))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise self._refused(f"the quant_state of {name} cannot be read ({error})") from error
        if sizes != expected:
            words = f"{sizes[0]} bytes and {sizes[1]} scales, which do not fit its shape {list(state['shape'])}"
            raise self._refused(f"{name} has {words}: download the folder again")
        return state

    def _scales(self, name: str, opened: OPEN, shape: Sequence[int], block: tuple[int, int]) -> Tensor:
        """Return the scales of a tensor in fp32, [..., rows / block[0], columns / block[1]]."""
        scales = self._part(name, "scales", opened)
        scales = (scales.view(torch.float8_e8m0fnu) if scales.dtype == torch.uint8 else scales).float()
        self._check_finite(name, scales)
        return scales.view(*shape[:-2], -(-shape[-2] // block[0]), -(-shape[-1] // block[1]))

    def _check_finite(self, name: str, scales: Tensor) -> None:
        """Raise UserError if a scale is infinite or no number."""
        if not scales.isfinite().all():
            raise self._refused(f"a scale of {name} is infinite or NaN: take weights that were quantised again")

    def _of_bitsandbytes(self, name: str, opened: OPEN, codes: Tensor, shape: tuple[int, ...]) -> StoredTensor:
        """Return a tensor of bitsandbytes in 4 or 8 bits."""
        parts, scales, state = self._parts[name], self._part(name, "scales", opened), self._state(name, opened)
        if scales.dtype == torch.uint8:
            nested, table = (self._part(name, f"nested {role}", opened).float() for role in ("scales", "table"))
            each = nested.repeat_interleave(int(state["nested_blocksize"]))[: scales.numel()]
            if len(each) < scales.numel() or len(table) != 256:
                raise self._refused(f"the nested scales of {name} do not fit its scales: download the folder again")
            scales = table[scales.flatten().int()] * each + torch.tensor(float(state["nested_offset"]))
        self._check_finite(name, scales)
        scales, block = scales.float().view(-1, 1), state["blocksize"]
        if "state" not in parts:
            if "layout" in parts and self._part(name, "layout", opened).any():
                raise self._refused(f"the weight_format of {name} is not 0 (rows): save it with a newer bitsandbytes")
            return StoredTensor("int8", codes, scales, (1, block), shape, factor=OF_127)
        codes, table = codes.view(torch.uint8).flatten(), self._part(name, "table", opened).float()
        codes = pad(codes, (0, len(scales) * block // 2 - len(codes))).view(-1, block // 2)
        form = parts["state"].rpartition("__")[2]
        return StoredTensor(form, codes, scales, (1, block), shape, state["dtype"], table=table, low_first=False)

    def _of_compressed(
        self, name: str, opened: OPEN, codes: Tensor, scales: Tensor, shape: tuple[int, ...], block: tuple[int, int]
    ) -> StoredTensor:
        """Return a tensor of compressed-tensors."""
        scheme, parts, zeros = self._scheme(name), self._parts[name], None
        bits = scheme["num_bits"] if codes.dtype == torch.int32 else 0
        if not scheme.get("symmetric", True):
            zeros = self._part(name, "zeros", opened)
            zeros = unpacked(zeros.T, bits)[:, : shape[0]].T if zeros.dtype == torch.int32 else zeros
            zeros = zeros.float().view(scales.shape)
        if "groups" in parts and not (groups := self._part(name, "groups", opened).long()).lt(0).any():
            if len(groups) != shape[1] or groups.max() >= scales.shape[1]:
                raise self._refused(f"{parts['groups']} does not fit {parts['scales']}: download the folder again")
            if not groups.equal(torch.arange(shape[1]) // block[1]):  # columns were sorted by their activations
                scales, block = scales[:, groups], (1, 1)
                zeros = zeros[:, groups] if zeros is not None else None
        # in a model of fp32, compressed-tensors has scales of fp32
        rounded = self.dtype if self.dtype == torch.float32 else self._headers[parts["scales"]][0]
        form = "fp8" if codes.is_floating_point() else f"int{scheme['num_bits']}"
        return StoredTensor(form, codes, scales, block, shape, rounded, zeros, bits=bits)


def _targets(target: str, stem: str) -> bool:
    """Return True if a target in a config group of compressed-tensors names this module, itself or by a pattern."""
    return bool(re.match(target[3:], stem)) if target.startswith("re:") else target == stem


def tensor_headers(files: Iterable[Path]) -> dict[str, tuple[torch.dtype, list[int]]]:
    """Return tensor name -> its dtype and shape, from the headers of safetensors files."""
    from safetensors import safe_open

    headers: dict[str, tuple[torch.dtype, list[int]]] = {}
    for path in sorted(set(files)):
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118
                part = file.get_slice(key)
                headers[key] = part[:0].dtype if part.get_shape() else file.get_tensor(key).dtype, part.get_shape()
    return headers
