"""Folders in few bits: transformers loads them, and so do we; what stays as it is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from served_families import ALONE
from tawpipe.errors import UserError
from tawpipe.model.bits.compressed import packed
from tawpipe.model.bits.lowbit import FewBitsLinear, dequantise_rows, quantise_rows
from tawpipe.model.bits.stored import unpacked
from tawpipe.model.chain import Chain
from tawpipe.model.files.export import export_hugging_face
from tawpipe.model.files.pretrained import SafetensorsSource
from tawpipe.serving.engine import load_engine
from tawpipe.serving.held import stored_form
from tawpipe.serving.passes import Drawn, Sampling, SlotLayout
from tawpipe.serving.requests import Question, Slots

SHAPE = {
    "vocab_size": 300,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
FORMATS = ("w4a16", "w8a8")


def config(**more: Any) -> LlamaConfig:
    shape: dict[str, Any] = SHAPE | more
    return LlamaConfig(**shape)


def exported(folder: Path, format: str, *, shard: int = 2**30, dtype: torch.dtype = torch.bfloat16, **more: Any) -> Any:
    """A model with random values, and the folder that it was exported to."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(config(**more)).eval()
    values = {name: value.detach() for name, value in model.named_parameters()}
    chain = Chain(model)
    export_hugging_face(
        chain, folder, values.__getitem__, dtype=dtype, format=format, max_shard_bytes=shard, is_writer=True
    )
    return model


@pytest.mark.parametrize(
    ("format", "dtype", "most"),
    # Of w8a8 a token's number may be rounded to the next one where computing rounds, so it is compared in fp32.
    [("w4a16", torch.bfloat16, 2**-8), ("w4a16", torch.float32, 1e-5), ("w8a8", torch.float32, 1e-5)],
)
def test_transformers_loads_a_compressed_export_with_dequantized_logits(
    tmp_path: Path, format: str, dtype: torch.dtype, most: float
) -> None:
    model = exported(tmp_path / "few", format, dtype=dtype)
    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "few", dtype=dtype).eval()
    expected: Any = LlamaForCausalLM(config()).eval()
    state = dict(expected.named_parameters())
    for name, value in model.named_parameters():
        if ".layers." in name and value.ndim == 2:
            value = dequantise_rows(*quantise_rows(value, "w4" if format == "w4a16" else "int8"), torch.float32)
        state[name].data.copy_(value)
    expected.save_pretrained(tmp_path / "dequantised")
    expected = AutoModelForCausalLM.from_pretrained(tmp_path / "dequantised", dtype=dtype).eval()
    if format == "w8a8":  # every token's activations are rounded as it computes
        for module in expected.model.layers.modules():
            if isinstance(module, torch.nn.Linear):
                module.register_forward_pre_hook(rounded_tokens)
    ids = torch.randint(0, 300, (2, 17))
    with torch.no_grad():
        logits = [each(ids).logits.float() for each in (loaded, expected)]
    assert (logits[0] - logits[1]).abs().max() <= most * logits[1].abs().max()


def test_engine_serves_a_compressed_export_in_its_low_bit_form(tmp_path: Path) -> None:
    exported(tmp_path / "few", "w4a16", dtype=torch.float32)
    room = SlotLayout(1, 1, 64, 8)
    engine = load_engine(tmp_path / "few", room, ALONE, dtype="float32")
    assert any(isinstance(module, FewBitsLinear) for module in engine.chain.model.modules())
    told, slots = list[Drawn](), Slots(room, waiting=0)
    prompt = tuple(range(5, 30))
    slots.ask(Question(prompt, 20, Sampling(temperature=0)), lambda drawn, end, words: told.append(cast(Drawn, drawn)))
    slots.drain()
    engine.run(slots)
    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "few", dtype=torch.float32).eval()
    ids = [*prompt, *(drawn.token for drawn in told)]
    with torch.no_grad():
        logprobs = loaded(torch.tensor([ids])).logits[0].log_softmax(-1)[len(prompt) - 1 : -1]
    assert [drawn.token for drawn in told] == logprobs.argmax(-1).tolist()
    assert [drawn.logprob for drawn in told] == pytest.approx(logprobs.amax(-1).tolist(), abs=1e-4)


def rounded_tokens(_: torch.nn.Module, given: tuple[torch.Tensor]) -> torch.Tensor:
    scales = given[0].abs().amax(-1, keepdim=True) / 127.5
    return ((given[0] / scales).round().clamp(-128, 127) * scales).to(given[0].dtype)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("shard", [2**30, 40_000])
def test_compressed_export_loads_back_as_its_dequantized_matrices(tmp_path: Path, format: str, shard: int) -> None:
    model = exported(tmp_path / "few", format, shard=shard)
    chain = Chain(LlamaForCausalLM(config()))
    source = SafetensorsSource(chain, tmp_path / "few")
    assert stored_form(chain, source.codes) == ("w4" if format == "w4a16" else "int8")
    for unit in chain.units:
        flat = source.unit(unit)
        for slot in unit.slots:
            value = flat[slot.offset : slot.offset + slot.numel].view(slot.shape)
            original = dict(model.named_parameters())[slot.name].detach()
            if ".layers." in slot.name and value.ndim == 2:
                step = original.abs().amax() / (7 if format == "w4a16" else 127)
                assert 0 < (value - original).abs().max() <= step * 0.75
            else:
                assert torch.equal(value, original.bfloat16().float())


@pytest.mark.parametrize("format", FORMATS)
def test_embedding_head_norms_and_ungroupable_matrices_are_not_quantized(tmp_path: Path, format: str) -> None:
    exported(tmp_path / "few", format, intermediate_size=144)
    tensors = load_file(tmp_path / "few" / "model.safetensors")
    settings = json.loads((tmp_path / "few" / "config.json").read_text())["quantization_config"]
    plain = {name for name, value in tensors.items() if name.endswith("weight") and value.dtype == torch.bfloat16}
    assert {"model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"} <= plain
    odd = [f"model.layers.{layer}.mlp.down_proj" for layer in (0, 1)]  # rows of 144 numbers: no groups of 32
    assert settings["ignore"] == ["lm_head", *(odd if format == "w4a16" else [])]
    assert ("model.layers.0.mlp.down_proj.weight" in plain) == (format == "w4a16")
    AutoModelForCausalLM.from_pretrained(tmp_path / "few")


@pytest.mark.parametrize(("more", "group"), [({"intermediate_size": 192}, 64), ({"intermediate_size": 160}, 32)])
def test_quantization_group_size_divides_most_matrices(tmp_path: Path, more: dict[str, int], group: int) -> None:
    model = exported(tmp_path / "few", "w4a16", dtype=torch.float32, **more)
    settings = json.loads((tmp_path / "few" / "config.json").read_text())["quantization_config"]
    assert settings["config_groups"]["group_0"]["weights"]["group_size"] == group and settings["ignore"] == ["lm_head"]
    values = {name: value.detach().clone() for name, value in model.named_parameters()}
    for name, value in values.items():
        if ".layers." in name and value.ndim == 2:
            values[name] = dequantise_rows(*quantise_rows(value, "w4", group=group), torch.float32)
    expected: Any = LlamaForCausalLM(config(**more)).eval()
    expected.load_state_dict(values)
    ids = torch.randint(0, 300, (2, 17))
    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "few", dtype=torch.float32).eval()
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, expected(ids).logits, rtol=1e-4, atol=1e-4)
    source = SafetensorsSource(chain := Chain(LlamaForCausalLM(config(**more))), tmp_path / "few")
    for unit in chain.units:
        for slot in unit.slots:
            assert torch.equal(slot.view(source.unit(unit)), values[slot.name]), slot.name


def test_export_that_quantizes_too_few_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="37% of its numbers would be in few bits"):
        exported(tmp_path / "few", "w4a16", vocab_size=2000)
    exported(tmp_path / "few", "w8a8", vocab_size=2000)


def test_int4_codes_pack_and_unpack_exactly() -> None:
    codes = torch.randint(-8, 8, (5, 64), dtype=torch.int8)
    assert packed(codes).shape == (5, 8) and torch.equal(unpacked(packed(codes)), codes)


def test_w4a16_export_takes_less_than_a_third_of_the_bytes(tmp_path: Path) -> None:
    exported(tmp_path / "few", "w4a16")
    exported(tmp_path / "hf", "hf")
    sizes = {
        name: sum(
            tensor.nbytes for key, tensor in load_file(tmp_path / name / "model.safetensors").items() if "layers" in key
        )
        for name in ("few", "hf")
    }
    assert sizes["few"] < 0.29 * sizes["hf"]


def experts(**more: Any) -> Any:
    few = {"num_experts": 4, "moe_intermediate_size": 128, "num_experts_per_tok": 2, "head_dim": 32}
    shape: dict[str, Any] = SHAPE | few | more
    torch.manual_seed(0)
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape)).eval()


def test_stacked_experts_are_exported_as_quantized_matrices(tmp_path: Path) -> None:
    model = experts()
    values, chain = {name: value.detach() for name, value in model.named_parameters()}, Chain(model)
    export_hugging_face(chain, tmp_path, values.__getitem__, dtype=torch.float32, format="w4a16", is_writer=True)
    settings = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert settings["ignore"] == ["lm_head", "model.layers.0.mlp.gate", "model.layers.1.mlp.gate"]
    loaded = dict(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).named_parameters())
    name = "model.layers.1.mlp.experts.gate_up_proj"
    stands_for = torch.stack([dequantise_rows(*quantise_rows(value, "w4"), torch.float32) for value in values[name]])
    assert torch.equal(loaded[name], stands_for)
    source, fresh = SafetensorsSource(chain := Chain(experts()), tmp_path), dict[str, torch.Tensor]()
    for unit in chain.units:
        flat = source.unit(unit)
        fresh |= {slot.name: flat[slot.offset : slot.offset + slot.numel].view(slot.shape) for slot in unit.slots}
    assert torch.equal(fresh[name], stands_for)
    assert torch.equal(fresh["model.layers.1.mlp.gate.weight"], values["model.layers.1.mlp.gate.weight"])


@pytest.mark.parametrize(
    ("format", "more", "said"),
    [("w8a8", {}, "hf or w4a16"), ("w4a16", {"moe_intermediate_size": 48}, "no stack of matrices with rows of 32")],
)
def test_quantized_experts_that_transformers_cannot_load_are_refused(
    tmp_path: Path, format: str, more: dict[str, int], said: str
) -> None:
    chain = Chain(experts(**more))
    with pytest.raises(UserError, match=said):
        export_hugging_face(
            chain, tmp_path / "few", lambda name: None, dtype=torch.bfloat16, format=format, is_writer=True
        )
    assert list(tmp_path.iterdir()) == []
