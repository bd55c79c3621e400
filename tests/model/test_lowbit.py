"""Weights in few bits: what they stand for, and that the kernels compute with just that."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from served_families import plain_model, staying
from tawpipe.errors import UserError
from tawpipe.model.bits.lowbit import FEW, FewBitsLinear, dequantise_rows, quantise_rows
from tawpipe.model.chain import Chain
from tawpipe.model.weights import ModuleSource
from tawpipe.serving.engine import Engine
from tawpipe.serving.held import WeightBytes, hold_weights
from tawpipe.serving.passes import Pass, Row, Sampling, SlotLayout

FORMS = ("w4", "int8")


def wide(**changes: Any) -> Any:
    sizes = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
    return plain_model(dtype=torch.float32, **sizes, **changes)


@pytest.mark.parametrize("form", FORMS)
def test_quantized_rows_stay_within_half_a_step_of_the_weights(form: str) -> None:
    weight = torch.randn(48, 256, generator=torch.Generator().manual_seed(0))
    weight[3] = 0
    codes, scales = quantise_rows(weight, form)
    near = dequantise_rows(codes, scales, torch.float32)
    step = scales.float().repeat_interleave(256 // scales.shape[1], dim=1)
    assert ((near - weight).abs() <= 0.55 * step).all() and not near[3].any()
    lowest, highest = (-8, 7) if form == "w4" else (-127, 127)
    assert codes.dtype == torch.int8 and lowest <= codes.min() < 0 < codes.max() <= highest


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("tokens", [1, FEW, FEW + 1])
@pytest.mark.parametrize("shape", [(48, 256), (30, 128)])
def test_low_bit_product_equals_the_dequantized_product(
    form: str, dtype: torch.dtype, tokens: int, shape: tuple[int, int]
) -> None:
    torch.manual_seed(1)
    codes, scales = quantise_rows(torch.randn(shape), form)
    bias, given = torch.randn(shape[0]).to(dtype), torch.randn(1, tokens, shape[1]).to(dtype)
    layer = FewBitsLinear(form, codes, scales, bias, dtype)
    groups = codes.double().unflatten(1, (scales.shape[1], -1))
    matrix = (groups * scales.to(dtype).double()[..., None]).flatten(1)
    assert torch.equal(layer.matrix(), matrix.to(dtype))
    expected = given.double() @ matrix.T + bias.double()
    error = (layer(given).double() - expected).abs().max() / expected.abs().max()
    assert error < {torch.float32: 1e-5, torch.bfloat16: 5e-3, torch.float64: 1e-12}[dtype]


@pytest.mark.parametrize("form", ["none", *FORMS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weight_bytes_prediction_equals_the_held_bytes(form: str, dtype: torch.dtype) -> None:
    chain = Chain(wide(tie_word_embeddings=False))
    said = WeightBytes.of(chain, form, dtype, "cpu")
    staying(chain, dtype, form=form)
    few = [module for module in chain.model.modules() if isinstance(module, FewBitsLinear)]
    tensors = [value for module in few for value in vars(module).values() if isinstance(value, torch.Tensor)]
    slots = {slot.name for unit in chain.units for slot in unit.slots}
    tensors += [value for name, value in chain.model.named_parameters() if name in slots]
    held = sum(width * unit.numel for width, unit in zip(said.held, chain.units, strict=True))
    assert held == sum(tensor.nbytes for tensor in tensors) and bool(few) == (form != "none")
    layer = chain.blocks[1].units[0]
    if form == "none":
        assert said.held == said.few == said.many == (dtype.itemsize,) * len(chain.units)
    elif dtype == torch.bfloat16:
        assert said.few[layer] < 0.6 * dtype.itemsize < 2 * dtype.itemsize < said.many[layer]
    else:
        assert said.few[layer] == said.many[layer], "no kernel"


@pytest.mark.parametrize("form", FORMS)
def test_low_bit_logits_equal_those_of_dequantized_matrices(form: str) -> None:
    plain = wide()
    for path, module in plain.named_modules():
        if ".layers." in f".{path}" and isinstance(module, torch.nn.Linear):
            module.weight.data = dequantise_rows(*quantise_rows(module.weight.data, form), torch.float32)
    prompt = tuple(range(3, 9))
    with torch.no_grad():
        expected = plain(torch.tensor([prompt])).logits[0, -1].log_softmax(-1)
    for chunk in (len(prompt), 4):
        engine = Engine(staying(Chain(wide()), torch.float32, form=form), SlotLayout(1, 1, 16, len(prompt)))
        sampling = Sampling(temperature=0.0, logprobs=61)
        for at in range(0, len(prompt), chunk):
            drawn = engine.compute(Pass(0, (Row(0, at, prompt[at : at + chunk], sampling),)))
        logprobs = torch.zeros(61)
        for token, logprob in drawn[0].top:
            logprobs[token] = logprob
        assert torch.allclose(logprobs, expected, atol=1e-5)


@pytest.mark.parametrize("form", FORMS)
def test_stored_codes_are_used_without_requantizing(form: str) -> None:
    chain, model = Chain(wide()), wide()
    source, name = ModuleSource(chain), "model.layers.1.mlp.up_proj.weight"
    coded = quantise_rows(model.get_parameter(name).detach() * 2, form)
    chain.prepare("cpu", torch.float32)
    hold_weights(
        chain,
        range(len(chain.blocks)),
        lambda unit: source.unit(unit),
        form="auto",
        codes=lambda asked: coded if asked == name else None,
    )
    kinds = {path: layer for path, layer in chain.model.named_modules() if isinstance(layer, FewBitsLinear)}
    assert list(kinds) == [name.removesuffix(".weight")]
    (layer,) = kinds.values()
    assert layer.form == form and torch.equal(layer.matrix(), dequantise_rows(*coded, torch.float32))


def test_impossible_low_bit_forms_are_refused_and_embeddings_kept() -> None:
    with pytest.raises(UserError, match=r"weights: got .w5"):
        staying(Chain(wide()), torch.float32, form="w5")
    with pytest.raises(UserError, match="no linear layer"):
        staying(Chain(plain_model(dtype=torch.float32)), torch.float32, form="w4")  # rows of 32
    chain = staying(Chain(wide()), torch.float32, form="w4")
    kinds = {type(module).__name__ for layer in chain.layers for module in layer.modules()}
    assert "FewBitsLinear" in kinds and "Linear" not in kinds
    assert isinstance(chain.model.get_output_embeddings(), torch.nn.Linear)
