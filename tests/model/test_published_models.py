"""Models from folders of quantised weights: all parameters, dtypes, words, exports without the quantisation."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.utils.quantization_config import CompressedTensorsConfig, FineGrainedFP8Config, Mxfp4Config

from borders import rows_of
from model_families import family_config, real_model
from pipelines import make_pipeline
from published_folders import (
    BITS_4,
    FP8_CONFIG,
    compressed,
    compressed_config,
    fp8,
    mxfp4,
    nf4,
    publish,
    scheme,
)
from tawpipe.errors import UserError
from tawpipe.model.bits.forms import BlockForm, PlainForm
from tawpipe.model.bits.published import tensor_headers
from tawpipe.model.bits.stored import E2M1
from tawpipe.model.chain import Chain
from tawpipe.model.files.build import build_model
from tawpipe.model.files.export import carry, export_hugging_face
from tawpipe.model.files.exported import differences
from tawpipe.model.files.pretrained import SafetensorsSource, published_words, stored_dtype, stored_dtypes
from tawpipe.model.settings import LoraSettings
from tawpipe.pipeline.pipeline import Pipeline
from tawpipe.runtime.homes.optimizer import adamw

W4A16 = scheme(4, group_size=8)
MATRICES = r"layers.*(proj|proj_with_mqa|experts\.\d+\.\w+)\.weight$"
SIZES: dict[str, dict[str, Any]] = {
    "llama-nf4": {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16},
    "gpt_oss": {"hidden_size": 64, "intermediate_size": 32, "head_dim": 16},
    "qwen3_moe": {"intermediate_size": 48},  # transformers reads no FP8 whose sizes are no multiples of the blocks
}
MODELS: dict[str, tuple[str, Any, str, Any, str]] = {
    "gpt_oss": ("gpt_oss", {"quant_method": "mxfp4"}, r"experts\.\w+_proj$", mxfp4, "MXFP4"),
    "qwen3_moe": (
        "qwen3_moe",
        FP8_CONFIG | {"weight_block_size": [16, 8]},
        MATRICES,
        lambda name, value: fp8(name, value, (16, 8)),
        "FP8 in blocks of 16 x 8",
    ),
    "deepseek_v3": ("deepseek_v3", FP8_CONFIG, MATRICES, fp8, "FP8 in blocks of 128 x 128"),
    "llama-fp8": ("llama", FP8_CONFIG, MATRICES, fp8, "FP8 in blocks of 128 x 128"),
    "llama-nf4": ("llama", BITS_4, MATRICES, nf4, "nf4 of bitsandbytes"),
    "llama-w4a16": (
        "llama",
        compressed_config("pack-quantized", W4A16),
        MATRICES,
        lambda name, value: compressed(name, value, "pack-quantized", W4A16),
        "4 bits in groups of 8",
    ),
    "qwen3_moe-w4a16": (
        "qwen3_moe",
        compressed_config("pack-quantized", W4A16),
        MATRICES,
        lambda name, value: compressed(name, value, "pack-quantized", W4A16),
        "4 bits in groups of 8",
    ),
}


def folder_of(tmp_path: Path, which: str) -> tuple[Path, str]:
    """A folder of a tiny model in few bits, with a dense one beside it, and the words for its form."""
    family, settings, pattern, encode, words = MODELS[which]
    config = family_config(family, **SIZES.get(which, SIZES.get(family, {})))
    publish(real_model(config, torch.float32), folder := tmp_path / "few", settings, pattern, encode)
    return folder, words


def different(few: dict[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> list[str]:
    """Names of tensors that are missing or other than expected."""
    return [name for name in expected if name not in few or not few[name].equal(expected[name].float())]


def parameters(chain: Chain, folder: Path) -> dict[str, torch.Tensor]:
    source = SafetensorsSource(chain, folder)
    units = ((unit, source.unit(unit)) for unit in chain.units)
    return {slot.name: slot.view(flat) for unit, flat in units for slot in unit.slots} | source.buffers()


def chain_of(folder: Path) -> Chain:
    return Chain(build_model(str(folder), max_positions=8).model)


@pytest.mark.parametrize("which", MODELS)
def test_every_parameter_equals_that_of_the_dense_folder(tmp_path: Path, which: str) -> None:
    folder, words = folder_of(tmp_path, which)
    chain, dense = chain_of(folder), folder.with_name("few-dense")
    few, expected = parameters(chain, folder), parameters(chain, dense)
    assert few.keys() == expected.keys() and different(few, expected) == []
    assert published_words(folder, kept=False) == f"{words}, widened to bfloat16"
    assert published_words(folder, kept=True) == f"{words}, stored and sent as published"
    assert published_words(dense, kept=False) == ""
    assert stored_dtype(folder) == torch.bfloat16 and stored_dtypes(folder) == stored_dtypes(dense)
    source = SafetensorsSource(chain, folder)
    assert source.wide_parameters == SafetensorsSource(chain, dense).wide_parameters
    assert source.facts().keys() == load_file(folder / "model.safetensors").keys()


def test_digests_of_a_frozen_base_equal_those_of_the_dense_folder(tmp_path: Path) -> None:
    folder, _ = folder_of(tmp_path, "llama-nf4")
    chain = Chain(build_model(str(folder), max_positions=8, lora=LoraSettings(rank=2)).model)
    sources = [SafetensorsSource(chain, each) for each in (folder, folder.with_name("few-dense"))]
    for source in sources:
        source.digests = {}
        _ = [source.unit(unit) for unit in chain.units]
    assert sources[0].digests and sources[0].digests == sources[1].digests


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`")
@pytest.mark.parametrize(
    ("which", "widen"),
    [("gpt_oss", Mxfp4Config), ("qwen3_moe", FineGrainedFP8Config), ("llama-w4a16", CompressedTensorsConfig)],
)
def test_every_parameter_equals_that_of_transformers(tmp_path: Path, which: str, widen: Any) -> None:
    folder, _ = folder_of(tmp_path, which)
    widened = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, quantization_config=widen(dequantize=True)
    )
    few, expected = parameters(chain_of(folder), folder), dict(widened.named_parameters())
    assert different(few, expected) == []


@pytest.mark.parametrize("merge", [False, True])
def test_dense_exports_no_longer_claim_a_quantisation(tmp_path: Path, merge: bool) -> None:
    folder, _ = folder_of(tmp_path, "qwen3_moe")
    lora = LoraSettings(rank=2) if merge else LoraSettings()
    chain = Chain(build_model(str(folder), max_positions=8, lora=lora).model)
    values = parameters(chain, folder)
    export_hugging_face(chain, tmp_path / "out", values.__getitem__, merge=merge, is_writer=True)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "quantization_config" not in config and config["dtype"] == "bfloat16"
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert loaded.dtype == torch.bfloat16
    for name, value in loaded.named_parameters():
        expected = values.get(name, values.get(f"{name.removesuffix('.weight')}.base_layer.weight"))
        assert expected is not None and value.float().equal(expected)  # an untrained adapter adds nothing
    carried = carry(chain, folder, merge=merge)
    assert carried.dtype == torch.bfloat16 and not any("scale" in name for name in carried.dtypes)
    written = tensor_headers((tmp_path / "out").glob("*.safetensors"))
    assert differences(chain, tmp_path / "out", written, carried.files, None, adapter=False) == []


def test_a_line_says_what_is_read_and_what_is_trained(tmp_path: Path) -> None:
    folder, _ = folder_of(tmp_path, "qwen3_moe")
    words = "weights: FP8 in blocks of 16 x 8, "
    full = build_model(str(folder), max_positions=8)
    adapted = build_model(str(folder), max_positions=8, lora=LoraSettings(rank=2))
    assert full.published_words("none") == words + "widened to bfloat16; training starts from the widened values"
    assert adapted.published_words("none") == words + "widened to bfloat16; frozen base"
    kept = "stored and sent as published; frozen base (--quantize)"
    assert adapted.published_words("published") == words + kept
    again = "widened to bfloat16; frozen base, rounded again to nf4 (--quantize)"
    assert adapted.published_words("nf4") == words + again
    assert build_model(str(folder.with_name("few-dense")), max_positions=8).published_words("none") == ""


def test_truncated_file_of_quantised_weights_is_refused(tmp_path: Path) -> None:
    folder, _ = folder_of(tmp_path, "llama-nf4")
    chain, file = chain_of(folder), folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(UserError, match="safetensors cannot be read"):
        SafetensorsSource(chain, folder)


def test_blocks_of_experts_that_do_not_fit_are_refused_before_training(tmp_path: Path) -> None:
    folder, _ = folder_of(tmp_path, "qwen3_moe")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["weight_block_size"] = [16, 16]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="weight_scale_inv must have shape"):
        SafetensorsSource(chain_of(folder), folder)


def test_gptq_folder_is_refused_by_name(tmp_path: Path) -> None:
    config = family_config("llama").to_dict() | {"quantization_config": {"quant_method": "gptq", "bits": 4}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="in the form gptq"):
        build_model(str(tmp_path), max_positions=8)


KEPT = {
    "gpt_oss": {"experts.gate_up_proj": (32, 1), "experts.down_proj": (32, 1)},
    "qwen3_moe": {"experts.gate_up_proj": (16, 8), "experts.down_proj": (16, 8), "k_proj.weight": (16, 8)},
    "deepseek_v3": {"kv_a_proj_with_mqa.weight": (128, 128)},
    "llama-nf4": {"o_proj.weight": (1, 64)},
    "llama-w4a16": {"down_proj.weight": (1, 8), "q_proj.weight": (1, 8)},
    "qwen3_moe-w4a16": {"experts.gate_up_proj": (1, 8), "q_proj.weight": (1, 8)},
}
"""Model -> ends of names of matrices whose codes are kept, with their blocks."""


@pytest.mark.parametrize("which", KEPT)
def test_published_codes_stand_for_the_widened_values_bit_by_bit(tmp_path: Path, which: str) -> None:
    """Also where blocks compute in fp32, which could hold products that no library rounds to bf16."""
    folder, _ = folder_of(tmp_path, which)
    chain = Chain(build_model(str(folder), max_positions=8, lora=LoraSettings(rank=2)).model)
    assert chain.form_of("auto") == "published" and chain_of(folder).form_of("auto") == "none"
    source = SafetensorsSource(chain, folder)
    chain.quantise("published", torch.float32)
    blocks = dict[str, tuple[int, int]]()
    for unit in chain.units:
        if unit.packing is None:
            continue
        values = source.unit(unit)
        packed, numbers = torch.zeros(unit.packing.elements), torch.empty(unit.numel)
        unit.packing.pack(values, packed, source.published)
        unit.packing.unpack(packed, numbers)
        assert numbers.equal(values)
        forms = zip(unit.slots, unit.packing.forms, strict=True)
        blocks |= {
            slot.name.replace(".base_layer", ""): form.block for slot, form in forms if isinstance(form, BlockForm)
        }
    for end, block in KEPT[which].items():
        assert {size for name, size in blocks.items() if name.endswith(end)} == {block}


@pytest.mark.parametrize(("which", "name"), [("llama-nf4", "o_proj"), ("llama-fp8", "down_proj")])
def test_published_form_holds_the_bytes_of_the_file(tmp_path: Path, which: str, name: str) -> None:
    """Other forms have their codes in another order, those of 4 bits with the first one in the upper half of a byte."""
    folder, _ = folder_of(tmp_path, which)
    chain = Chain(build_model(str(folder), max_positions=8, lora=LoraSettings(rank=2, targets=["q_proj"])).model)
    source = SafetensorsSource(chain, folder)
    chain.quantise("published", torch.bfloat16)
    unit = next(unit for unit in chain.units if unit.packing is not None)
    assert unit.packing is not None
    packed = torch.zeros(unit.packing.elements, dtype=torch.bfloat16)
    unit.packing.pack(source.unit(unit), packed, source.published)
    index = next(index for index, slot in enumerate(unit.slots) if name in slot.name)
    place, stored = unit.packing.places[index], load_file(folder / "model.safetensors")[unit.slots[index].name]
    held = packed.view(torch.uint8)[place.begin : place.begin + place.codes]
    assert held.equal(stored.view(torch.uint8).flatten())


def test_codes_that_other_tables_read_are_widened(tmp_path: Path) -> None:
    """FP8 with five bits of exponent, and nf4 with a map of its own."""
    folder, _ = folder_of(tmp_path / "map", "llama-nf4")
    tensors = load_file(folder / "model.safetensors")
    tensors = {name: value.half().float() if name.endswith(".quant_map") else value for name, value in tensors.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    fives, _ = folder_of(tmp_path / "fives", "llama-fp8")
    tensors = load_file(fives / "model.safetensors")
    coded = {name: value.float().to(torch.float8_e5m2) for name, value in tensors.items() if value.dtype.itemsize == 1}
    save_file(tensors | coded, fives / "model.safetensors", {"format": "pt"})
    for each in (folder, fives):
        chain = Chain(build_model(str(each), max_positions=8, lora=LoraSettings(rank=2)).model)
        assert chain.form_of("auto") == "none"


def test_block_forms_hold_every_scale_of_mxfp4_and_odd_columns() -> None:
    """Powers of 2 in one byte, from the smallest number of fp32 on, and codes of 4 bits in rows of three."""
    form, shape = BlockForm("mxfp4", (32, 1), torch.float32), (32 * 85, 3)
    codes = torch.randint(0, 16, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    scales = torch.arange(255, dtype=torch.uint8).view(torch.float8_e8m0fnu).float().view(85, 3)
    packed, of_scales = (torch.zeros(size(shape), dtype=torch.uint8) for size in (form.code_bytes, form.scale_bytes))
    form.store((codes, scales), packed, of_scales)
    numbers = torch.empty(shape)
    form.dequantise(packed, of_scales, numbers)
    assert numbers.equal(torch.tensor(E2M1)[codes.int()] * scales.repeat_interleave(32, dim=0))


def test_matrices_whose_codes_cannot_be_kept_are_sent_in_16_bits(tmp_path: Path) -> None:
    """Experts of 16 rows in blocks of 128, of which gate and up are one matrix."""
    folder, _ = folder_of(tmp_path, "deepseek_v3")
    chain = Chain(build_model(str(folder), max_positions=8, lora=LoraSettings(rank=2)).model)
    chain.quantise("published", torch.bfloat16)
    forms = [
        (slot.name, form)
        for unit in chain.units
        if unit.packing is not None
        for slot, form in zip(unit.slots, unit.packing.forms, strict=True)
    ]
    assert {form for name, form in forms if name.endswith("gate_up_proj")} == {PlainForm(torch.bfloat16)}
    assert any(isinstance(form, BlockForm) for name, form in forms if "kv_a_proj_with_mqa" in name)


def test_published_unit_is_about_as_large_as_the_file(tmp_path: Path) -> None:
    """Matrices that the folder does not quantise keep their 16 bits, and scales of MXFP4 their 8."""
    folder, _ = folder_of(tmp_path, "gpt_oss")
    chain = Chain(build_model(str(folder), max_positions=8, lora=LoraSettings(rank=2)).model)
    chain.quantise("published", torch.bfloat16)
    packed = sum(unit.packing.elements * 2 for unit in chain.units if unit.packing is not None)
    names = {slot.name.replace(".base_layer", "") for unit in chain.units if unit.packing for slot in unit.slots}
    stored = load_file(folder / "model.safetensors")
    stem = lambda key: key.removesuffix("_blocks").removesuffix("_scales")  # noqa: E731
    of_file = sum(value.nbytes for key, value in stored.items() if stem(key) in names)
    assert packed < 1.15 * of_file


def test_lossy_transfers_are_refused_for_the_codes_that_auto_takes(tmp_path: Path) -> None:
    folder, _ = folder_of(tmp_path, "llama-fp8")
    with pytest.raises(UserError, match=r"weights_compression.*or exact with quantize=published, or quantize=none"):
        steps_of(folder, "auto", weights_compression="fp8")


def test_published_without_weights_is_refused_by_name(tmp_path: Path) -> None:
    folder, _ = folder_of(tmp_path, "llama-fp8")
    (folder / "model.safetensors").unlink()
    with pytest.raises(UserError, match="quantize: got 'published'; none, nf4 or int8: these weights have no"):
        steps_of(folder, "published")


def test_plans_of_a_config_alone_assume_its_forms(tmp_path: Path) -> None:
    for which in ("gpt_oss", "qwen3_moe", "llama-nf4"):
        folder, _ = folder_of(tmp_path / which, which)
        (folder / "model.safetensors").unlink()
        chain = Chain(build_model(str(folder), max_positions=8, lora=LoraSettings(rank=2)).model)
        assert chain.form_of("auto") == "published", which


def test_published_is_refused_for_dense_weights(tmp_path: Path) -> None:
    folder, _ = folder_of(tmp_path, "llama-nf4")
    chain = Chain(build_model(str(folder.with_name("few-dense")), max_positions=8, lora=LoraSettings(rank=2)).model)
    assert chain.form_of("auto") == "none"
    with pytest.raises(UserError, match=r"quantize: got 'published'; none, nf4 or int8: .* has no codes"):
        chain.quantise("published", torch.float32)


def steps_of(folder: Path, quantize: str, state: Path | None = None, **knobs: Any) -> list[float]:
    """Losses of three steps with adapters on experts, the last one after saving to ``state`` and loading it again."""
    has_experts = "experts" in (folder / "config.json").read_text()
    lora = LoraSettings(rank=2, targets=["all-linear", *["experts"] * has_experts])

    def made() -> Pipeline:
        built = build_model(str(folder), max_positions=16, lora=lora)
        source = lambda chain: built.source(chain, seed=3)  # noqa: E731
        return make_pipeline(
            built.model, weights=source, quantize=quantize, optimizer=adamw(1e-2), dtype=torch.float32, **knobs
        )

    pipeline = made()
    losses = [pipeline.step(rows_of(step)).loss for step in range(2)]
    if state is not None:
        pipeline.save(state)
        pipeline.close()
        pipeline = made()
        pipeline.load(state)
    losses.append(pipeline.step(rows_of(2)).loss)
    pipeline.close()
    return losses


@pytest.mark.parametrize("which", [pytest.param("gpt_oss", marks=pytest.mark.slow), "qwen3_moe"])
def test_training_on_published_codes_equals_training_on_widened_values(tmp_path: Path, which: str) -> None:
    folder, _ = folder_of(tmp_path, which)
    expected = steps_of(folder, "none")
    assert steps_of(folder, "auto", tmp_path / "state") == expected
    assert steps_of(folder, "published", recompute="none", offloaded_layers=2) == pytest.approx(expected, rel=1e-6)
