"""Weights in 4 and 8 bits: what is left of numbers, which weights have them, and the bytes of a unit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, MixtralConfig

from bitsandbytes_file import CASES, case_of
from cases import from_bits
from tawpipe.errors import UserError
from tawpipe.model.bits import quantized
from tawpipe.model.bits.forms import FlatForm
from tawpipe.model.bits.quantized import CELLS, NF4, dequantise, matrices_of, passing_bytes, quantise
from tawpipe.model.chain import Chain
from tawpipe.model.units import Packing, ParameterSlot
from tawpipe.runtime.peak import peaks

SMALL: dict[str, Any] = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
HEADS: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1}


def there_and_back(form: str, values: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    blocks = -(-values.numel() // 64)
    codes = torch.zeros(blocks * (32 if form == "nf4" else 64), dtype=torch.uint8)
    scales, out = torch.zeros(blocks), torch.empty(values.numel(), dtype=dtype)
    quantise(form, values.flatten(), codes, scales)
    dequantise(form, codes, scales, out)
    return out.view(values.shape)


@pytest.mark.parametrize("form", ["nf4", "int8"])
@pytest.mark.parametrize("shape", [(1,), (64,), (37, 91), (3, 5, 7)])
def test_nf4_and_int8_values_equal_their_definition(form, shape):
    torch.manual_seed(0)
    values = torch.randn(shape) * 0.02
    assert torch.equal(there_and_back(form, values), from_bits(form, values))
    assert torch.equal(there_and_back(form, values, torch.bfloat16), from_bits(form, values).bfloat16())
    assert there_and_back(form, torch.zeros(shape)).eq(0).all()


class OnCuda(torch.Tensor):
    """Of the CPU, and says that it is not."""

    is_cuda = True


@pytest.mark.parametrize("form", ["nf4", "int8"])
def test_large_matrix_is_dequantized_in_one_piece_on_cuda(form, monkeypatch):
    """Each is some kernels, and a matrix is read twice a step and micro-batch: 218 million elements are 7 pieces."""
    read, multiply = list[int](), torch.mul
    monkeypatch.setattr(torch, "mul", lambda *given, **out: read.append(given[0].numel()) or multiply(*given, **out))
    out = torch.empty(2**23 + 64, dtype=torch.bfloat16).as_subclass(OnCuda)
    codes = torch.zeros(out.numel() // (2 if form == "nf4" else 1), dtype=torch.uint8)
    dequantise(form, codes, torch.zeros(out.numel() // 64), out)
    assert read == [out.numel()]


@pytest.mark.parametrize("form", ["nf4", "int8"])
@pytest.mark.parametrize("pieces", [0.5, 3])
def test_dequantization_uses_the_predicted_temporary_bytes(form, pieces, monkeypatch):
    """However many pieces a matrix is read in."""
    monkeypatch.setattr(quantized, "READ_AT_ONCE", 2**16)
    monkeypatch.setattr(quantized, "_at_once", lambda _, on_cuda: on_cuda)
    out = torch.empty(int(pieces * 2**16))
    codes, scales = torch.zeros(out.numel(), dtype=torch.uint8), torch.ones(out.numel() // 64)
    codes = codes[: out.numel() // 2] if form == "nf4" else codes
    dequantise(form, codes, scales, out)  # the table is made
    (found,) = peaks([lambda: dequantise(form, codes, scales, out)], torch.device("cpu"))
    assert found.most == passing_bytes(form, out.numel())


def test_nf4_rounds_to_the_nearest_code_at_every_border():
    table = torch.tensor(NF4)
    ends = torch.cat([(table[1:] + table[:-1]) / 2, torch.arange(CELLS) / (CELLS / 2) - 1])
    up, down = torch.full((1,), 2.0), torch.full((1,), -2.0)
    values = torch.cat([ends, ends.nextafter(up), ends.nextafter(down)]).clamp(-1, 1)
    rows = torch.nn.functional.pad(values.view(-1, 1), (0, 63), value=1.0)  # the largest of a block is 1
    nearest = torch.bucketize(values, (table[1:] + table[:-1]) / 2)
    assert torch.equal(there_and_back("nf4", rows)[:, 0], table[nearest])


def test_nonfinite_values_stay_within_their_quantization_block():
    for form in ("nf4", "int8"):
        values = torch.ones(3, 64)
        values[0, 5], values[2, 7] = float("nan"), float("inf")
        left = there_and_back(form, values)
        assert not left[0].isfinite().any() and left[1].isfinite().all() and not left[2].isfinite().all()


@pytest.mark.parametrize("number", [number for number, case in enumerate(CASES) if case[:2] == ("nf4", False)])
def test_nf4_equals_a_file_of_bitsandbytes(number):
    parts, dense, values = case_of(Path(__file__).with_name("bitsandbytes.safetensors"), number)
    codes = torch.zeros(parts["weight.absmax"].numel() * 32, dtype=torch.uint8)
    scales = torch.zeros(parts["weight.absmax"].numel())
    quantise("nf4", values.flatten(), codes, scales)
    assert torch.equal(codes[: values.numel() // 2], parts["weight"].flatten())
    assert torch.equal(scales, parts["weight.absmax"])
    assert torch.equal(there_and_back("nf4", values, torch.bfloat16), dense)


@pytest.mark.slow
@pytest.mark.usefixtures("judges")
def test_nf4_equals_bitsandbytes():
    functional = pytest.importorskip("bitsandbytes.functional")
    torch.manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16):
        values = (torch.randn(100, 300) * 0.02).to(dtype)
        theirs, state = functional.quantize_4bit(values, blocksize=64, quant_type="nf4", compress_statistics=False)
        codes, scales = torch.zeros(values.numel() // 2 + 32, dtype=torch.uint8), torch.zeros(469)
        quantise("nf4", values.flatten(), codes, scales)
        assert torch.equal(codes[: values.numel() // 2], theirs.flatten()[: values.numel() // 2])
        assert torch.equal(scales, state.absmax.flatten())
        assert torch.equal(there_and_back("nf4", values, dtype), functional.dequantize_4bit(theirs, state))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_packed_unit_stores_quantized_matrices_and_exact_others(dtype):
    """Matrices are quantised, and read as they compute; the rest is exact. Four bits and a scale are what it takes."""
    shapes = {"q": (40, 24), "norm": (24,), "odd": (3, 5)}
    slots, offset = [], 0
    for name, shape in shapes.items():
        slots.append(ParameterSlot(name, shape, offset, torch.Size(shape).numel()))
        offset += slots[-1].numel
    packing = Packing.of(slots, dict.fromkeys(("q", "odd"), FlatForm("nf4")), "nf4", dtype)
    values = torch.randn(offset, dtype=torch.promote_types(dtype, torch.float32))
    flat, back = torch.zeros(packing.elements, dtype=dtype), torch.empty_like(values)
    packing.pack(values, flat)
    packing.unpack(flat, back)
    assert torch.equal(slots[1].view(back), slots[1].view(values))
    for slot in (slots[0], slots[2]):
        assert torch.equal(slot.view(back), from_bits("nf4", slot.view(values)).to(dtype).to(back))
    computes = torch.empty(offset, dtype=dtype)
    packing.unpack(flat, computes)
    assert torch.equal(computes, back.to(dtype))
    assert packing.elements * dtype.itemsize == 480 + 60 + 4 + 24 * values.itemsize + 32 + 4 + 12  # and two gaps


def test_only_linear_weights_and_experts_are_quantized():
    def names(config: Any) -> set[str]:
        with torch.device("meta"):
            found = matrices_of(AutoModelForCausalLM.from_config(config))
        return {name for name in found if "layers.1." in name or "h.1." in name or "layer" not in name}

    llama = {f"model.layers.1.{name}.weight" for name in (
        *(f"self_attn.{one}_proj" for one in "qkvo"), *(f"mlp.{one}_proj" for one in ("gate", "up", "down"))
    )}  # fmt: skip
    assert names(LlamaConfig(**SMALL, **HEADS)) == llama | {"lm_head.weight"}
    gpt2 = names(GPT2Config(vocab_size=50, n_embd=16, n_layer=2, n_head=2))
    assert {name.rpartition("h.1.")[2] for name in gpt2} >= {"attn.c_attn.weight", "mlp.c_fc.weight"}
    mixtral = names(MixtralConfig(**SMALL, **HEADS, num_local_experts=4))
    experts = {name.rpartition(".")[2] for name in mixtral if ".mlp." in name}
    assert experts == {"gate_up_proj", "down_proj"}


def test_only_frozen_layer_matrices_are_quantized():
    def chain() -> Chain:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(LlamaConfig(**SMALL, **HEADS))
        model.lm_head.requires_grad_(False)
        model.model.embed_tokens.requires_grad_(False)
        return Chain(model)

    made = chain()
    with pytest.raises(UserError, match="quantize"):
        made.quantise("fp4", torch.float32)
    with pytest.raises(UserError, match="no matrix of a layer is frozen: train an adapter"):
        made.quantise("nf4", torch.float32)
    frozen = chain()
    frozen.model.model.layers[1].requires_grad_(False)
    one = Chain(frozen.model)
    one.quantise("nf4", torch.bfloat16)
    packed = [unit for unit in one.units if unit.packing]
    assert [unit.name for unit in packed] == ["layer.1.frozen.nf4"]
    spec = one.spec.units[packed[0].index]
    assert spec.parameters == packed[0].numel and spec.numel < spec.parameters / 3
    assert one.unpacked_elements >= packed[0].numel
