"""Tensors in the forms in which weights are published: values equal those of each format's library in every bit."""

from __future__ import annotations

import json
import shlex
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from bitsandbytes_file import CASES, case_of
from published_folders import BITS_4, FP8_CONFIG, by_formula, compressed, compressed_config, fp8, mxfp4, nf4, scheme
from tawpipe.errors import UserError
from tawpipe.model.bits.published import PublishedTensors, quantization_of
from tawpipe.model.bits.stored import StoredTensor

NAME = "model.layers.0.mlp.up_proj.weight"


def published(folder: Path, parts: dict[str, Tensor], settings: Any, dtype: str = "bfloat16") -> PublishedTensors:
    """The reader of a folder with these tensors and settings."""
    folder.mkdir(exist_ok=True)
    save_file({key: part.contiguous() for key, part in parts.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"dtype": dtype, "quantization_config": settings}))
    return PublishedTensors(folder, dict.fromkeys(parts, folder / "model.safetensors"))


def opened(path: Path) -> Any:
    return cache(lambda path: safe_open(path, framework="pt"))(path)


def read(folder: Path, parts: dict[str, Tensor], settings: Any, dtype: str = "bfloat16") -> Tensor:
    """The only tensor that a folder with these tensors shows."""
    tensors = published(folder, parts, settings, dtype)
    (name,) = tensors.files
    value = tensors.tensor(name, opened)
    assert tuple(value.shape) == tensors.shape(name, opened) and value.dtype == tensors.dtypes()[name]
    return value


def values(*shape: int) -> Tensor:
    torch.manual_seed(sum(shape))
    return torch.randn(shape) * torch.rand(shape[-1]) * 0.1


def equal(value: Tensor, other: Tensor) -> bool:
    return value.dtype == other.dtype and torch.equal(value, other)


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float8_e8m0fnu, torch.uint8])
@pytest.mark.parametrize("shape", [(256, 384), (3, 128, 256)])
def test_fp8_blocks_equal_transformers_dequantize(tmp_path: Path, shape: tuple[int, ...], kind: torch.dtype) -> None:
    name = NAME if len(shape) == 2 else "model.layers.0.mlp.experts.gate_up_proj"
    parts, _ = fp8(name, values(*shape), kind=torch.float8_e8m0fnu if kind == torch.uint8 else kind)
    scales = parts[f"{name}_scale_inv"]
    parts[f"{name}_scale_inv"] = scales.view(torch.uint8) if kind == torch.uint8 else scales
    judge = Fp8Dequantize(None)._dequantize_one(parts[name], parts[f"{name}_scale_inv"], torch.bfloat16)
    assert equal(read(tmp_path, parts, FP8_CONFIG), judge)


@pytest.mark.parametrize("shape", [(576, 384), (192, 256), (130, 70), (2, 130, 70), (1, 1)])
def test_fp8_blocks_of_odd_sizes_follow_weight_block_size(tmp_path: Path, shape: tuple[int, ...]) -> None:
    name = NAME if len(shape) == 2 else "model.layers.0.mlp.experts.gate_up_proj"
    parts, dense = fp8(name, values(*shape))
    assert equal(read(tmp_path, parts, FP8_CONFIG), dense)


@pytest.mark.parametrize("spelled", [".scale", ".qscale_weight", ".weight_scale"])
def test_other_names_of_fp8_scales_are_read_and_those_of_activations_dropped(tmp_path: Path, spelled: str) -> None:
    parts, dense = fp8(NAME, values(130, 70))
    stem = NAME.removesuffix(".weight")
    parts[stem + spelled] = parts.pop(f"{NAME}_scale_inv")
    parts |= {stem + end: torch.ones(()) for end in (".input_scale", ".activation_scale", ".qscale_act")}
    assert equal(read(tmp_path, parts, FP8_CONFIG), dense)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_fp8_without_blocks_has_a_scale_for_each_tensor(tmp_path: Path, shape: tuple[int, ...]) -> None:
    codes = values(130, 70).to(torch.float8_e4m3fn)
    parts = {NAME: codes, f"{NAME}_scale_inv": torch.full(shape, 0.3)}
    assert equal(read(tmp_path, parts, {"quant_method": "fp8"}), (codes.float() * 0.3).bfloat16())


def test_stacked_fp8_experts_may_have_a_scale_for_gate_and_for_up(tmp_path: Path) -> None:
    codes, scales = values(3, 10, 8).to(torch.float8_e4m3fn), torch.rand(3, 2, 1)
    name = "layers.0.mlp.experts.gate_up_proj"
    value = read(tmp_path, {name: codes, f"{name}_scale_inv": scales}, {"quant_method": "fp8"})
    assert equal(value, by_formula(codes, scales, (5, 8)).bfloat16())


def test_fp4_experts_of_deepseek_equal_transformers_dequantize(tmp_path: Path) -> None:
    codes = torch.randint(0, 256, (24, 32), dtype=torch.uint8).view(torch.int8)
    scales = torch.rand(24, 2).to(torch.float8_e8m0fnu)
    parts = {"ffn.experts.0.w1.weight": codes, "ffn.experts.0.w1.scale": scales}
    judge = Fp8Dequantize(None)._dequantize_one(codes, scales, torch.bfloat16)
    assert equal(read(tmp_path, parts, FP8_CONFIG), judge)


def test_mxfp4_equals_transformers_convert_moe_packed_tensors(tmp_path: Path) -> None:
    name = "model.layers.0.mlp.experts.down_proj"
    parts, dense = mxfp4(name, values(3, 64, 40))
    blocks, scales = parts.values()
    assert equal(read(tmp_path, parts, {"quant_method": "mxfp4"}), dense)
    assert equal(dense, convert_moe_packed_tensors(blocks, scales))
    every = torch.arange(256, dtype=torch.uint8).expand(2, 1, 16, 256).unflatten(3, (16, 16)).flatten(2, 3)
    powers = torch.randint(1, 250, every.shape[:3], dtype=torch.uint8)
    parts = {f"{name}_blocks": every, f"{name}_scales": powers}
    assert equal(read(tmp_path, parts, {"quant_method": "mxfp4"}), convert_moe_packed_tensors(every, powers))


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("kind", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("shape", [(64, 256), (70, 130), (3, 5)])
def test_nf4_equals_the_formula_with_scales_of_any_number(
    tmp_path: Path, shape: tuple[int, int], kind: str, nested: bool
) -> None:
    parts, dense = nf4(NAME, values(*shape), nested=nested, kind=kind)
    assert equal(read(tmp_path, parts, BITS_4), dense)


@pytest.mark.parametrize("number", range(len(CASES)), ids=lambda number: str(CASES[number]))
def test_bitsandbytes_4_bits_equal_what_it_read_itself(tmp_path: Path, number: int) -> None:
    """The file is bitsandbytes' own work, which need not be installed."""
    parts, dense, _ = case_of(Path(__file__).with_name("bitsandbytes.safetensors"), number)
    assert equal(
        read(tmp_path, {f"{NAME.removesuffix('weight')}{key}": part for key, part in parts.items()}, BITS_4), dense
    )


@pytest.mark.slow
@pytest.mark.usefixtures("judges")
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("form", ["nf4", "fp4"])
@pytest.mark.parametrize("shape", [(64, 256), (70, 130), (300, 222)])
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_bitsandbytes_4_bits_equal_its_dequantize(
    tmp_path: Path, shape: tuple[int, int], form: str, nested: bool, kind: torch.dtype
) -> None:
    functional: Any = pytest.importorskip("bitsandbytes").functional
    codes, state = functional.quantize_4bit(values(*shape).to(kind), quant_type=form, compress_statistics=nested)
    parts = {NAME: codes} | {f"{NAME}.{key}": part for key, part in state.as_dict(packed=True).items()}
    judge = functional.dequantize_4bit(codes, state)
    assert equal(read(tmp_path, parts, BITS_4), judge.bfloat16())
    assert equal(read(tmp_path, parts, BITS_4, str(kind).removeprefix("torch.")), judge)
    stored = published(tmp_path, parts, BITS_4).stored(NAME, opened)
    assert stored is not None and torch.equal(stored.codes.flatten()[: codes.numel()], codes.flatten())


@pytest.mark.slow
@pytest.mark.usefixtures("judges")
@pytest.mark.parametrize("nested", [False, True])
def test_written_nf4_is_read_equally_by_bitsandbytes(nested: bool) -> None:
    functional: Any = pytest.importorskip("bitsandbytes").functional
    parts, dense = nf4(NAME, values(70, 130), nested=nested)
    state = {key.removeprefix(f"{NAME}."): part for key, part in parts.items() if key != NAME}
    state = functional.QuantState.from_dict(state, torch.device("cpu"))
    assert equal(functional.dequantize_4bit(parts[NAME], state), dense)


def bitsandbytes_int8(folder: Path) -> tuple[Tensor, Tensor, Tensor]:
    """Random codes and scales, and what is read from a file of them."""
    stem = NAME.removesuffix("weight")
    codes, scales = torch.randint(-127, 128, (40, 24), dtype=torch.int8), torch.rand(40)
    parts = {NAME: codes, f"{stem}SCB": scales, f"{stem}weight_format": torch.zeros((), dtype=torch.uint8)}
    return codes, scales, read(folder, parts, {"quant_method": "bitsandbytes", "load_in_8bit": True})


def test_bitsandbytes_int8_equals_its_formula(tmp_path: Path) -> None:
    codes, scales, value = bitsandbytes_int8(tmp_path)
    assert equal(value, (codes * scales.view(-1, 1) * 7.874015718698502e-3).bfloat16())


@pytest.mark.slow
@pytest.mark.usefixtures("judges")
def test_bitsandbytes_int8_equals_its_dequantize(tmp_path: Path) -> None:
    judge: Any = pytest.importorskip("bitsandbytes").functional
    codes, scales, value = bitsandbytes_int8(tmp_path)
    assert equal(value, judge.int8_vectorwise_dequant(codes, scales).bfloat16())


PACKED, INT, FLOAT = "pack-quantized", "int-quantized", "float-quantized"


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("format", "bits", "number", "more"),
    [
        (PACKED, 4, "int", {}),
        (PACKED, 4, "int", {"symmetric": False}),
        (PACKED, 4, "int", {"group_size": 8, "symmetric": False}),
        (PACKED, 4, "int", {"strategy": "channel"}),
        (PACKED, 4, "int", {"strategy": "channel", "symmetric": False}),
        (PACKED, 8, "int", {}),
        (PACKED, 8, "int", {"strategy": "channel", "symmetric": False}),
        (PACKED, 2, "int", {}),
        (INT, 8, "int", {"strategy": "channel"}),
        (INT, 8, "int", {"strategy": "channel", "symmetric": False}),
        (INT, 8, "int", {"strategy": "tensor"}),
        (FLOAT, 8, "float", {"strategy": "channel"}),
        (FLOAT, 8, "float", {"strategy": "tensor"}),
        (FLOAT, 8, "float", {"strategy": "block", "block_structure": [32, 64]}),
    ],
)
def test_compressed_tensors_equal_its_decompression(
    tmp_path: Path, format: str, bits: int, number: str, more: dict[str, Any], kind: torch.dtype
) -> None:
    grouped = more.get("strategy", "group") == "group"
    of = scheme(bits, number, **more)
    parts, dense = compressed(NAME, values(36, 96 if grouped else 70), format, of, kind)
    assert equal(read(tmp_path, parts, compressed_config(format, of)), dense)


def test_sorted_groups_of_columns_are_honoured(tmp_path: Path) -> None:
    of = scheme(4, symmetric=False)
    parts, dense = compressed(NAME, values(36, 96), PACKED, of)
    order, stem = torch.randperm(96), NAME.removesuffix("weight")
    codes = torch.stack([parts[f"{stem}weight_packed"] >> place & 15 for place in range(0, 32, 4)], 2).flatten(1)
    turned = codes[:, order].unflatten(1, (-1, 8))
    packed = sum((turned[..., place] << 4 * place for place in range(8)), torch.zeros(36, 12, dtype=torch.int32))
    parts |= {f"{stem}weight_packed": packed.int(), f"{stem}weight_g_idx": (order // 32).int()}
    assert equal(read(tmp_path, parts, compressed_config(PACKED, of)), dense[:, order])
    parts[f"{stem}weight_g_idx"] = torch.full((96,), 3, dtype=torch.int32)
    with pytest.raises(UserError, match="weight_g_idx does not fit"):
        read(tmp_path, parts, compressed_config(PACKED, of))


def test_mixed_schemes_of_compressed_tensors_are_told_apart_by_their_targets(tmp_path: Path) -> None:
    few, more = scheme(4), scheme(8, strategy="channel")
    settings = compressed_config(PACKED, few)
    experts = {"targets": ["re:.*experts.*"], "weights": more.weights.model_dump(mode="json")}
    settings["config_groups"] = {"group_1": experts, **settings["config_groups"]}
    names = ("layers.0.mlp.experts.0.up_proj.weight", "layers.0.attn.q_proj.weight")
    both = [compressed(name, values(32, 64), PACKED, of) for name, of in zip(names, (more, few), strict=True)]
    tensors = published(tmp_path, both[0][0] | both[1][0], settings)
    for name, (_, dense) in zip(names, both, strict=True):
        assert equal(tensors.tensor(name, opened), dense)


def test_stored_tensor_hands_out_the_bytes_of_the_folder(tmp_path: Path) -> None:
    parts, dense = fp8(NAME, values(130, 70))
    stored = published(tmp_path, parts, FP8_CONFIG).stored(NAME, opened)
    assert isinstance(stored, StoredTensor) and stored.block == (128, 128) and stored.form == "fp8"
    assert torch.equal(stored.codes.view(torch.uint8), parts[NAME].view(torch.uint8))
    assert equal(stored.dense(torch.bfloat16), dense)
    assert torch.equal(stored.dense(torch.float32), by_formula(stored.codes, stored.scales, stored.block))


def test_blocks_with_the_scale_zero_are_zeros_and_nan_is_refused(tmp_path: Path) -> None:
    value = values(256, 256)
    value[:128, 128:] = 0
    parts, _ = fp8(NAME, value)
    scales = parts[f"{NAME}_scale_inv"]
    assert scales[0, 1] == 0 and not read(tmp_path, parts, FP8_CONFIG)[:128, 128:].any()
    scales[1, 1] = torch.nan
    with pytest.raises(UserError, match=r"a scale of .*up_proj.weight is infinite or NaN"):
        read(tmp_path, parts, FP8_CONFIG)


FP8_PARTS, NF4_PARTS = fp8(NAME, values(130, 70))[0], nf4(NAME, values(70, 130))[0]
PACKED_PARTS = compressed(NAME, values(36, 96), PACKED, scheme(4))[0]
MXFP4_PARTS = mxfp4("mlp.experts.up_proj", values(2, 64, 40))[0]
DENSE = {NAME: values(8, 8).bfloat16()}
W4A16 = compressed_config(PACKED, scheme(4))
STEM = NAME.removesuffix("weight")


def without(parts: dict[str, Tensor], *ends: str) -> dict[str, Tensor]:
    return {key: part for key, part in parts.items() if not key.endswith(ends)}


@pytest.mark.parametrize(
    ("parts", "settings", "words"),
    [
        (without(FP8_PARTS, "_scale_inv"), FP8_CONFIG, "says fp8, but its names are those of dense weights"),
        (without(FP8_PARTS, "_scale_inv") | fp8("x.weight", values(2, 2))[0], FP8_CONFIG, f"lacks its scales .{NAME}_"),
        (without(FP8_PARTS, NAME), FP8_CONFIG, f"{NAME} is quantised and lacks its codes"),
        (without(MXFP4_PARTS, "_scales"), {"quant_method": "mxfp4"}, "lacks its scales .mlp.experts.up_proj_scales"),
        (without(NF4_PARTS, "absmax"), BITS_4, f"lacks its scales .{NAME}.absmax"),
        (without(NF4_PARTS, ".quant_map"), BITS_4, f"lacks its table .{NAME}.quant_map"),
        (without(NF4_PARTS, "__nf4"), BITS_4, f"lacks its state .{NAME}.quant_state"),
        (without(NF4_PARTS, "nested_quant_map"), BITS_4, f"lacks its nested table .{NAME}.nested_quant_map"),
        (without(PACKED_PARTS, "_scale"), W4A16, f"lacks its scales .{STEM}weight_scale"),
        (without(PACKED_PARTS, "_shape"), W4A16, f"lacks its shape .{STEM}weight_shape"),
        (FP8_PARTS, FP8_CONFIG | {"weight_block_size": [64, 64]}, r"must have shape \[3, 2\] .* not \[2, 1\]"),
        (FP8_PARTS, {"quant_method": "fp8"}, r"must have shape \[1, 1\] .* weight_block_size is None"),
        (FP8_PARTS, FP8_CONFIG | {"weight_block_size": [128]}, r"weight_block_size is \[128\]; expected two"),
        (PACKED_PARTS, compressed_config(PACKED, scheme(4, group_size=8)), r"must have shape \[36, 12\]"),
        (PACKED_PARTS, compressed_config(PACKED, scheme(8)), r"must have shape \[36, 24\].* num_bits 8"),
        (PACKED_PARTS, W4A16 | {"config_groups": {}}, "quantization_config of compressed-tensors lacks"),
        (PACKED_PARTS, compressed_config(PACKED, scheme(5)), "int of 5 bits; expected int 2, 4, 8 or float 8"),
        (without(NF4_PARTS, "nested_absmax"), BITS_4, f"lacks its nested scales .{NAME}.nested_absmax"),
        (NF4_PARTS | {f"{NAME}.quant_state.bitsandbytes__nf4": torch.ones(9).byte()}, BITS_4, "cannot be read"),
        (NF4_PARTS | {NAME: NF4_PARTS[NAME][:-8]}, BITS_4, r"do not fit its shape \[70, 130\]"),
        (NF4_PARTS | {f"{NAME}.nested_absmax": torch.ones(0)}, BITS_4, "nested scales of .* do not fit"),
        (NF4_PARTS, FP8_CONFIG, "says fp8, but its names are those of bitsandbytes"),
        (FP8_PARTS, BITS_4, "says bitsandbytes, but its names are those of fp8"),
        (MXFP4_PARTS, W4A16, "says compressed-tensors, but its names are those of mxfp4"),
        (DENSE, FP8_CONFIG, "remove quantization_config there"),
        (DENSE | {f"{NAME}_scale_inv": torch.ones(1, 1)}, FP8_CONFIG, "up_proj.weight is torch.bfloat16 beside"),
        (FP8_PARTS, {}, "names are those of fp8, but its config.json has no quantization_config"),
        (NF4_PARTS, {}, "names are those of bitsandbytes"),
    ],
)
def test_folder_that_does_not_fit_its_form_is_refused(
    tmp_path: Path, parts: dict[str, Tensor], settings: Any, words: str
) -> None:
    with pytest.raises(UserError, match=words):
        read(tmp_path, parts, settings)


@pytest.mark.parametrize(
    "more",
    [{"format": "nvfp4-pack-quantized"}, {"sparsity_config": {"format": "sparse-24-bitmask"}}],
)
def test_other_formats_of_compressed_tensors_are_refused_by_name(tmp_path: Path, more: dict[str, Any]) -> None:
    settings = json.loads(json.dumps(W4A16 | more))
    settings["config_groups"]["group_0"].pop("format")
    with pytest.raises(UserError, match=r"nvfp4-pack-quantized|sparse or transformed.*expected pack-quantized"):
        read(tmp_path, PACKED_PARTS, settings)


@pytest.mark.parametrize(
    ("method", "words"),
    [("gptq", "in the form gptq.*bf16 or FP8"), ("awq", "AutoAWQConverter"), ("quanto", "in the form quanto")],
)
def test_forms_that_are_not_read_are_refused_before_any_weight(tmp_path: Path, method: str, words: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": method, "bits": 4}}))
    with pytest.raises(UserError, match=words):
        quantization_of(tmp_path)


def test_command_for_awq_writes_a_folder_that_is_read(tmp_path: Path) -> None:
    stem, places = NAME.removesuffix("weight"), [0, 2, 4, 6, 1, 3, 5, 7]
    codes, zeros, scales = torch.randint(0, 16, (64, 24)), torch.randint(0, 16, (2, 24)), torch.rand(2, 24).half()

    def packed(numbers: Tensor) -> Tensor:
        words = sum(numbers[:, place::8] << 4 * index for index, place in enumerate(places))
        return torch.as_tensor(words).to(torch.int32)

    parts = {f"{stem}qweight": packed(codes), f"{stem}qzeros": packed(zeros), f"{stem}scales": scales}
    settings = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
    folder, result = tmp_path / "llama-awq", tmp_path / "llama-awq-w4a16"
    with pytest.raises(UserError, match="in the form awq") as refused:
        published(folder, parts, settings)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "quantization_config": settings}))
    code = shlex.split(str(refused.value).partition("python -c ")[2])[0]
    exec(code.replace('"llama-awq-w4a16"', repr(str(result))))  # it writes into the current folder
    tensors = PublishedTensors(
        result, dict.fromkeys(load_file(result / "model.safetensors"), result / "model.safetensors")
    )
    expected = (codes - zeros.repeat_interleave(32, 0)).half() * scales.repeat_interleave(32, 0)
    assert equal(tensors.tensor(NAME, opened), expected.T.bfloat16())
