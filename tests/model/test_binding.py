"""Parameters that come and go with a visit: views of a buffer within it, NaN outside, gradients in one place."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tawpipe.errors import UserError
from tawpipe.model.binding import UnitBinding, refuse_emptied, refuse_use
from tawpipe.model.units import Unit, build_units

CPU = torch.device("cpu")


class Two(nn.Module):
    """Two layers of two units; the second is frozen."""

    first: Any
    second: Any

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.unused = nn.Linear(3, 3), nn.Linear(3, 2), nn.Parameter(torch.zeros(2))
        self.second.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


def bound(dtype: torch.dtype = torch.float32) -> tuple[Two, UnitBinding, tuple[Unit, ...]]:
    model = Two()
    uses = {name: (1 if name.startswith("second") else 0,) for name, _ in model.named_parameters()}
    units = build_units(model, uses, ("first", "second"))
    binding = UnitBinding(units)
    binding.empty(model, CPU, dtype)
    return model, binding, units


def flat(unit: Unit) -> Tensor:
    return torch.linspace(-1, 1, unit.numel + 3)


def test_parameters_are_buffer_views_within_a_visit_and_nan_outside() -> None:
    model, binding, units = bound()
    x = torch.ones(1, 3)
    assert model(x).isnan().all() and model.first.weight.untyped_storage().nbytes() == 4
    buffers = [flat(unit) for unit in units]
    for unit in units:
        assert binding.bind(unit.index, buffers[unit.index]) is buffers[unit.index]
    out = model(x)
    assert not out.isnan().any()
    slot = next(one for one in units[0].slots if one.name == "first.weight")
    assert model.first.weight.data_ptr() == slot.part(buffers[0]).data_ptr()
    binding.release(0)
    assert model(x).isnan().all() and not model.second.weight.isnan().any()
    binding.release(1)
    assert model.second.weight.isnan().all()


@pytest.mark.parametrize("accumulate", [False, True])
def test_gradients_fill_the_buffer_and_missing_gradients_are_zero(accumulate: bool) -> None:
    model, binding, (unit, frozen) = bound()
    binding.bind(0, flat(unit))
    binding.bind(1, flat(frozen))
    plain = Two()
    plain.load_state_dict({name: value.detach().clone() for name, value in nn.Module.state_dict(model).items()})
    sums = torch.full((unit.numel + 3,), 5.0)
    binding.collect(0, sums, accumulate)
    for _ in range(2):
        model(torch.ones(2, 3)).sum().backward()
        plain(torch.ones(2, 3)).sum().backward()
    binding.finish_collect(0)
    before = 5.0 if accumulate else 0.0
    for name, parameter in plain.named_parameters():
        slot = next((one for one in unit.slots if one.name == name), None)
        if slot is not None:
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            assert torch.allclose(slot.view(sums), gradient + before), name
    assert (sums[unit.numel :] == before).all()
    assert all(parameter.grad is None for parameter in model.parameters())


def test_gradients_of_chunks_are_summed_in_fp32_and_rounded_once() -> None:
    model, binding, (unit, _) = bound()
    binding.bind(0, flat(unit))
    target = torch.ones(unit.numel, dtype=torch.bfloat16)
    binding.collect(0, target, True, in_chunks=True)
    for _ in range(64):
        (model.first.bias.sum() * (1 + 2**-7)).backward()
    binding.finish_collect(0)
    slot = next(one for one in unit.slots if one.name == "first.bias")
    assert (slot.view(target) == torch.tensor(1 + 64 * (1 + 2**-7)).bfloat16()).all()
    with pytest.raises(AssertionError, match=r"a gradient of first.bias came while nobody collects it"):
        model.first.bias.sum().backward()


def test_gradient_buffers_start_with_zeros_unless_accumulating() -> None:
    model, binding, (unit, _) = bound()
    binding.bind(0, flat(unit))
    sums = torch.full((unit.numel,), 7.0)
    binding.collect(0, sums, False)
    assert not binding.gradient_of(model.first.weight).any()
    model.first.bias.sum().backward()
    assert (binding.gradient_of(model.first.bias) == 1).all()
    binding.gradient_of(model.first.weight).fill_(3.0)
    binding.finish_collect(0)
    assert sorted(sums.unique().tolist()) == [0.0, 1.0, 3.0]  # of `unused` none has come


def test_change_of_requires_grad_after_the_pipeline_is_made_is_refused() -> None:
    model, binding, _ = bound()
    binding.check_frozen()
    model.second.bias.requires_grad_(True)
    with pytest.raises(UserError, match=r"second.bias.requires_grad: got True; trained before the Pipeline is made"):
        binding.check_frozen()


def test_model_whose_weights_a_pipeline_took_refuses_use() -> None:
    model = Two()
    refuse_emptied(model)
    refuse_use(model)
    for use in (lambda: model(torch.ones(1, 3)), model.state_dict, lambda: refuse_emptied(model)):
        with pytest.raises(UserError, match=r"Two\.\w+: got 'a model whose weights a Pipeline has taken'"):
            use()
