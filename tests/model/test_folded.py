"""Adapters on linear layers are added in one product, and have the numbers of peft in every way a layer runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from borders import llama, right_or_refused, rows_of
from model_families import keep_fp64
from tawpipe.model.adapters.folded import fold_adapters
from tawpipe.runtime.compute.split import DeferredProducts

peft = pytest.importorskip("peft")
SIZES = 12, 8
"""Inputs and outputs of the layer."""


@pytest.fixture(autouse=True)
def exact(monkeypatch: pytest.MonkeyPatch):
    torch.set_num_threads(1)
    keep_fp64(monkeypatch)


class Layer(nn.Module):
    """A linear layer by the name ``q``; ``bias`` and ``trained`` are its own."""

    def __init__(self, *, bias: bool = False, trained: bool = False) -> None:
        super().__init__()
        self.q, self.trained = nn.Linear(*SIZES, bias=bias), trained

    def forward(self, hidden: Tensor, **more: Any) -> Tensor:
        return self.q(hidden, **more).tanh()


def layer(base: Layer | None = None, **given: Any) -> Any:
    """A layer with an adapter that does something, in fp64."""
    torch.manual_seed(4)
    base = base or Layer()
    config = peft.LoraConfig(**{"r": 3, "lora_alpha": 7, "init_lora_weights": False, "target_modules": ["q"], **given})
    model = peft.inject_adapter_in_model(config, base).double()
    model.q.base_layer.requires_grad_(base.trained)
    return model


def another(*active: str) -> Any:
    """Two adapters, of which some are active."""
    model = layer()
    config = peft.LoraConfig(r=2, init_lora_weights=False, target_modules=["q"])
    peft.inject_adapter_in_model(config, model, adapter_name="other")
    model.q.set_adapter([*active])
    return model.double()


def changed(change: Callable[[Any], object], model: Any) -> Any:
    change(model.q)
    return model


def in_few_bits(module: Any) -> None:
    """The base layer in bf16; adapters stay wider."""
    module.base_layer.bfloat16()


def hooked(module: Any) -> None:
    module.base_layer.register_forward_hook(lambda _, given, output: output * given[0].ndim)


LAYERS: dict[str, tuple[Callable[[], Any], bool]] = {
    "plain": (layer, True),
    "bias": (lambda: layer(Layer(bias=True)), True),
    "trained base": (lambda: layer(Layer(bias=True, trained=True)), True),
    "dropout": (lambda: layer(lora_dropout=0.4), True),
    "rslora": (lambda: layer(use_rslora=True), True),
    "two adapters": (lambda: another("default", "other"), True),
    "one of two": (lambda: another("other"), True),
    "dora": (lambda: layer(use_dora=True), False),
    "adapter with a bias": (lambda: layer(Layer(bias=True), lora_bias=True), False),
    "disabled": (lambda: changed(lambda one: one.enable_adapters(False), layer()), False),
    "merged": (lambda: changed(lambda one: one.merge(), layer()), False),
    "hook on the base": (lambda: changed(hooked, layer()), False),
}
"""Layers, and whether their adapters are folded; others are left to peft."""


VIEWS = {"detach", "t", "transpose", "view", "_unsafe_view"}


class Operators(TorchDispatchMode):
    """Counts the operators that launch kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name not in VIEWS:
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


def run(
    model: Any, hidden: Tensor, forward: Callable[..., Tensor] | None = None, **more: Any
) -> tuple[dict[str, Tensor], Counter[str]]:
    """The output and all gradients, and the operators of the forward pass, which is the model's unless ``forward``."""
    torch.manual_seed(1)
    leaf = hidden.detach().requires_grad_()
    leaf.grad = None
    model.zero_grad()
    with Operators() as operators:
        output = (model if forward is None else forward)(leaf, **more)
    output.square().sum().backward()
    assert leaf.grad is not None
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"output": output.detach(), "input": leaf.grad, **gradients}, operators.counts


def both(model: Any, hidden: Tensor, **more: Any) -> tuple[Counter[str], Counter[str]]:
    """Compare a model with its folded copy; return the operators of both."""
    folded = deepcopy(model)
    fold_adapters(folded)
    (expected, before), (numbers, after) = (run(one, hidden, **more) for one in (model, folded))
    assert numbers.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(numbers[name], value, rtol=1e-10, atol=1e-12)
    return before, after


@pytest.mark.parametrize("what", LAYERS)
def test_folded_adapter_has_the_numbers_of_peft(what: str):
    make, folds = LAYERS[what]
    rows = torch.randn(5, 2, SIZES[0], dtype=torch.float64)
    for hidden in (rows, rows.transpose(0, 1), rows[0], rows[0, 0], rows[:0]):
        before, after = both(make(), hidden)
        assert (after["addmm_"] > 0) is folds and (folds or after == before)


def test_folded_adapter_runs_on_the_meta_device():
    model = layer().to("meta")
    fold_adapters(model)
    assert model(torch.empty(2, 5, SIZES[0], dtype=torch.float64, device="meta")).shape == (2, 5, SIZES[1])


def test_folded_adapter_launches_one_product_in_the_place_of_three_operators():
    for count, model in ((1, layer(Layer(bias=True))), (2, another("default", "other"))):
        before, after = both(model, torch.randn(5, 2, SIZES[0], dtype=torch.float64))
        assert before.total() - after.total() == 2 * count and before["mul"] == before["add"] == count
        assert after["addmm_"] == count and not after["mul"] and not after["add"]


def test_adapter_of_another_dtype_or_row_is_left_to_peft():
    """Rows of several adapters, autocast, and adapters wider than their base."""
    hidden = torch.randn(3, 2, SIZES[0], dtype=torch.float64)
    before, after = both(another("default"), hidden, adapter_names=["default", "other", "__base__"])
    assert before == after
    wide = changed(in_few_bits, layer().float())
    before, after = both(wide, hidden.bfloat16())
    assert before == after
    with torch.autocast("cpu", torch.bfloat16):
        before, after = both(layer().float(), hidden.float())
    assert before == after


@pytest.mark.parametrize("what", ["bias", "trained base", "dropout", "two adapters"])
def test_weight_gradients_of_folded_adapters_are_deferred(what: str):
    """Gradients of both matrices are deferred, and that of a trained base. A bias gets its gradient at once."""
    model, hidden = LAYERS[what][0](), torch.randn(5, 2, SIZES[0], dtype=torch.float64)
    expected, _ = run(model, hidden)
    fold_adapters(model)
    deferred = DeferredProducts(model.parameters())
    numbers, counts = run(model, hidden, deferred.around(model))
    assert counts["addmm_"] and not any("weight" in name for name in numbers)
    sums = {p: torch.zeros_like(p) for p in model.parameters()}
    deferred.run(sums.__getitem__)
    numbers |= {name: sums[p] for name, p in model.named_parameters() if p.requires_grad and "weight" in name}
    for name, value in expected.items():
        torch.testing.assert_close(numbers[name], value, rtol=1e-10, atol=1e-12)


@pytest.mark.slow
def test_folded_adapter_is_compiled():
    model, hidden = LAYERS["dropout"][0](), torch.randn(5, 2, SIZES[0], dtype=torch.float64)
    expected, _ = run(model.eval(), hidden)
    fold_adapters(model)
    model.zero_grad()
    output = torch.compile(model, backend="aot_eager", fullgraph=True)(hidden)
    torch.testing.assert_close(output, expected["output"], rtol=1e-10, atol=1e-12)
    output.square().sum().backward()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-10, atol=1e-12)


WAYS = [
    {"recompute": "none"},
    {"sequence_chunk": 5},
    *(
        pytest.param(knobs, marks=pytest.mark.slow)
        for knobs in (
            {"recompute": "selective", "offloaded_layers": 2},
            {"sequence_chunk": 6, "recompute": "selective"},
            {"micro_batch": 3, "recompute": "none:1,full"},
        )
    ),
]


@pytest.mark.parametrize("knobs", WAYS, ids=str)
def test_folded_adapters_of_a_model_train_as_in_a_plain_process(knobs: dict[str, Any]):
    def make() -> Any:
        torch.manual_seed(8)
        config = peft.LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
        return peft.get_peft_model(llama()(), config).double()

    assert right_or_refused(make, rows_of(), limit=1e-10, **knobs) == "right"
