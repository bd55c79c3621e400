"""Writers of folders in FP8, MXFP4, bitsandbytes and compressed-tensors form, with the dense values of each tensor."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
Encoded = tuple[dict[str, Tensor], Tensor]
"""Tensors to write by name, and the dense values that they represent."""
FP8_CONFIG = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
BITS_4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}


def by_formula(codes: Tensor, scales: Tensor, block: tuple[int, int]) -> Tensor:
    """Element (i, j) of fp32 codes times the scale of (i // block[0], j // block[1])."""
    rows, columns = (torch.arange(side) // each for side, each in zip(codes.shape[-2:], block, strict=True))
    return codes.float() * scales.float()[..., rows[:, None], columns]


def fp8(name: str, value: Tensor, block: tuple[int, int] = (128, 128), kind: torch.dtype = torch.float32) -> Encoded:
    """FP8 with a scale for each block of the last two dimensions; a block of zeros has the scale 0."""
    grid = [-(-side // each) for side, each in zip(value.shape[-2:], block, strict=True)]
    padded = torch.nn.functional.pad(
        value.float(), (0, grid[1] * block[1] - value.shape[-1], 0, grid[0] * block[0] - value.shape[-2])
    )
    largest = padded.unflatten(-1, (grid[1], block[1])).unflatten(-3, (grid[0], block[0])).abs().amax((-3, -1))
    scales = (largest / 448).to(kind)
    codes = (value / by_formula(torch.ones_like(value), scales, block)).nan_to_num(0).clamp(-448, 448)
    codes = codes.to(torch.float8_e4m3fn)
    end = "_scale_inv" if name.endswith("weight") or value.ndim == 3 else "unknown"
    return {name: codes, name + end: scales}, by_formula(codes, scales, block).bfloat16()


def mxfp4(name: str, value: Tensor) -> Encoded:
    """MXFP4 of gpt-oss: ``value`` [experts, in, out] is stored transposed, in groups of 32 numbers along ``in``."""
    groups = value.float().mT.unflatten(-1, (-1, 32))
    exponents = groups.abs().amax(-1).log2().floor().clamp(-120, 120) - 2
    scaled = groups / exponents.exp2()[..., None]
    nearest = (scaled.abs()[..., None] - E2M1).abs().argmin(-1)
    codes = (nearest + 8 * (scaled < 0)).to(torch.uint8)
    dense = E2M1[nearest] * torch.where(scaled < 0, -1, 1) * exponents.exp2()[..., None]
    blocks = codes[..., ::2] | codes[..., 1::2] << 4
    scales = (exponents + 127).to(torch.uint8)
    return {f"{name}_blocks": blocks, f"{name}_scales": scales}, dense.flatten(-2).mT.contiguous().bfloat16()


def nf4(name: str, value: Tensor, *, nested: bool = True, kind: str = "bfloat16", block: int = 64) -> Encoded:
    """nf4 of bitsandbytes, with scales in 8 bits if ``nested``."""
    from tawpipe.model.bits.quantized import NF4

    table, flat = torch.tensor(NF4), value.float().flatten()
    blocks = torch.nn.functional.pad(flat, (0, -len(flat) % block)).view(-1, block)
    scales, parts = blocks.abs().amax(1), {f"{name}.quant_map": table}
    state: dict[str, Any] = {"quant_type": "nf4", "blocksize": block, "dtype": kind, "shape": list(value.shape)}
    stored = scales
    if nested:
        offset, of_256 = scales.mean(), torch.linspace(-1, 1, 256)
        parts_of_256 = (scales - offset).split(256)
        largest = torch.stack([part.abs().max() for part in parts_of_256])
        indices = [
            (part[:, None] / most - of_256).abs().argmin(1) for part, most in zip(parts_of_256, largest, strict=True)
        ]
        stored = torch.cat(indices).to(torch.uint8)
        scales = of_256[stored.int()] * largest.repeat_interleave(256)[: len(stored)] + offset
        parts |= {f"{name}.nested_absmax": largest, f"{name}.nested_quant_map": of_256}
        state |= {"nested_blocksize": 256, "nested_offset": offset.item(), "nested_dtype": "float32"}
    codes = ((blocks / scales[:, None])[..., None] - table).abs().argmin(-1)
    dense = (table[codes] * scales[:, None]).flatten()[: len(flat)].view(value.shape).to(getattr(torch, kind))
    codes = codes.flatten().to(torch.uint8)
    packed = (codes[::2] << 4 | codes[1::2])[: -(-len(flat) // 2), None].clone()
    state_bytes = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    parts |= {name: packed, f"{name}.absmax": stored, f"{name}.quant_state.bitsandbytes__nf4": state_bytes}
    return parts, dense.bfloat16()


def scheme(bits: int, kind: str = "int", *, strategy: str = "group", **more: Any) -> Any:
    """A scheme of compressed-tensors."""
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    weights: dict[str, Any] = {"num_bits": bits, "type": kind, "symmetric": True, "strategy": strategy} | more
    if strategy == "group":
        weights.setdefault("group_size", 32)
    return QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights))


def compressed(name: str, value: Tensor, format: str, of: Any, kind: torch.dtype = torch.bfloat16) -> Encoded:
    """A matrix as the compressor of compressed-tensors writes it, and as it decompresses it."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization.utils import calculate_qparams

    weights, value = of.weights, value.float()
    blocks = {
        "group": lambda: value.unflatten(1, (-1, weights.group_size)).aminmax(dim=2),
        "channel": lambda: value.aminmax(dim=1, keepdim=True),
        "tensor": lambda: value.flatten().aminmax(dim=0, keepdim=True),
        "block": lambda: _blocks(value, weights.block_structure).aminmax(dim=2),
    }
    scales, zeros = calculate_qparams(*blocks[weights.strategy](), weights)  # pyright: ignore[reportCallIssue]
    compressor: Any = BaseCompressor.get_value_from_registry(format)
    parts = {"weight": value.to(kind), "weight_scale": scales.to(kind), "weight_zero_point": zeros}
    parts = compressor.compress(parts, of)
    dense = compressor.decompress(parts, of)["weight"]
    stem = name.removesuffix("weight")
    return {stem + key: part.contiguous() for key, part in parts.items()}, dense.bfloat16()


def _blocks(value: Tensor, block: list[int]) -> Tensor:
    """[block rows, block columns, numbers] of a matrix that is padded with zeros."""
    rows, columns = (-side % each for side, each in zip(value.shape, block, strict=True))
    padded = torch.nn.functional.pad(value, (0, columns, 0, rows))
    return padded.unflatten(1, (-1, block[1])).unflatten(0, (-1, block[0])).transpose(1, 2).flatten(2)


def compressed_config(format: str, of: Any) -> dict[str, Any]:
    """The ``quantization_config`` of a folder of compressed-tensors."""
    group = {"targets": ["Linear"], "weights": of.weights.model_dump(mode="json"), "format": format}
    settings = {"quant_method": "compressed-tensors", "format": format, "quantization_status": "compressed"}
    return settings | {"config_groups": {"group_0": group}, "ignore": ["lm_head"]}


def publish(
    model: Any, folder: Path, settings: Mapping[str, Any], pattern: str, encode: Callable[[str, Tensor], Encoded]
) -> None:
    """Write a model's matrices in few bits into ``folder``, and as dense bf16 into ``folder``-dense.

    Args:
        model: a transformers model.
        folder: folder to write.
        settings: ``quantization_config`` for config.json.
        pattern: names of the tensors on disk that ``encode`` writes.
        encode: writer of one tensor.
    """
    dense = folder.with_name(f"{folder.name}-dense")
    model.bfloat16().save_pretrained(folder)
    values, few = load_file(folder / "model.safetensors"), dict[str, Tensor]()
    for name, value in list(values.items()):
        if re.search(pattern, name):
            parts, values[name] = encode(name, value)
            few |= parts
        else:
            few[name] = value
    save_file(few, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    dense.mkdir()
    (dense / "config.json").write_text(json.dumps(config))
    save_file(values, dense / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": dict(settings)}))
