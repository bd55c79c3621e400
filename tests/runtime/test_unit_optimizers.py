"""Homes and what updates them: storage cuts units into pieces, and every unit has its optimizers by itself."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW
from torch.utils._python_dispatch import TorchDispatchMode

from tawpipe.errors import UserError
from tawpipe.model.units import Unit, build_units
from tawpipe.runtime.homes.groups import PipelineOptimizer
from tawpipe.runtime.homes.optimizer import adamw, check_elementwise, whole_matrices
from tawpipe.runtime.homes.storage import Storage, piece_of
from tawpipe.runtime.homes.unit_optimizers import UnitOptimizers, refuse_cut_matrices, try_factory
from tawpipe.schedule.placement import Home

CPU = torch.device("cpu")


def units_of_two_layers() -> tuple[Unit, ...]:
    """An embedding that is frozen, a layer and a head, with matrices and vectors."""
    model = nn.ModuleDict(
        {"embed": nn.Embedding(5, 3), "layer": nn.Linear(3, 3), "norm": nn.LayerNorm(3), "head": nn.Linear(3, 5)}
    )
    model["embed"].requires_grad_(False)
    block = {"embed": 0, "layer": 1, "norm": 1, "head": 2}
    uses = {name: (block[name.partition(".")[0]],) for name, _ in model.named_parameters()}
    return build_units(model, uses, ("embedding", "layer", "head"))


def stored(units: tuple[Unit, ...], rank: int = 0, ranks: int = 1, dtype: torch.dtype = torch.float32) -> Storage:
    homes = [Home.over(tuple(range(ranks)), unit.numel) for unit in units]
    made = Storage(units, homes, rank, device=CPU, compute_dtype=dtype, master_dtype=torch.float32)
    for unit, master in made.master.items():
        master.copy_(torch.linspace(-1, 1, len(master)) + unit)
        made.refresh(unit)
        if unit in made.gradient:
            made.gradient[unit].copy_(torch.linspace(1, 2, len(master)))
    return made


def made(factory=None) -> tuple[Storage, UnitOptimizers]:
    storage = stored(units_of_two_layers())
    return storage, UnitOptimizers(storage, factory or partial(SGD, lr=0.5, momentum=0.9))


def test_unit_optimizer_updates_only_its_unit_at_its_rate() -> None:
    storage, optimizers = made(partial(SGD, lr=0.5))
    before = {unit: master.clone() for unit, master in storage.master.items()}
    optimizers.step(1, None, 0.1)
    numel = storage.units[1].numel
    moved = before[1][:numel] - storage.master[1][:numel]
    assert torch.allclose(moved, 0.05 * storage.gradient[1][:numel], atol=1e-6)
    assert torch.equal(storage.master[1][numel:], before[1][numel:])  # the padding is nobody's
    for unit in (0, 2):
        assert torch.equal(storage.master[unit], before[unit])
    optimizers.step(0, None, 1.0)  # frozen: it has none
    assert torch.equal(storage.master[0], before[0])


def test_nonfinite_gradients_change_neither_weights_nor_states_of_a_unit() -> None:
    for factory in (None, adamw(1e-2)):  # torch's fused AdamW looks at the flag by itself
        storage, optimizers = made(factory)
        optimizers.step(1, torch.ones(()), 1.0)
        before, states = storage.master[1].clone(), optimizers.states()[1]
        kept = [{key: value.clone() for key, value in state.items()} for state in states]
        storage.gradient[1].fill_(float("nan"))
        optimizers.step(1, torch.zeros(()), 1.0)
        assert torch.equal(storage.master[1], before)
        for old, new in zip(kept, optimizers.states()[1], strict=True):
            assert all(torch.equal(old[key], new[key]) for key in ("momentum_buffer", "exp_avg") if key in old)


def test_changed_update_flag_is_read_once_per_step() -> None:
    """As it is once a step, by the optimizers of all units."""
    storage, optimizers = made(partial(SGD, lr=0.5))
    updates, reads = torch.ones(()), _Reads()
    for happens in (1.0, 0.0, 1.0, 1.0):
        updates.fill_(happens)
        before = {unit: storage.master[unit].clone() for unit in optimizers.pieces}
        with reads:
            for unit in optimizers.pieces:
                optimizers.step(unit, updates, 1.0)
        for unit in optimizers.pieces:
            assert torch.equal(storage.master[unit], before[unit]) == (not happens)
    assert reads.number == 4 and len(optimizers.pieces) > 1


class _Reads(TorchDispatchMode):
    """Counts the numbers that the host reads."""

    number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def test_adopted_optimizer_states_continue_and_missing_ones_start_empty() -> None:
    _, first = made()
    for _ in range(3):
        first.step(1, None, 1.0)
    states = {1: [{key: value.clone() for key, value in state.items()} for state in first.states()[1]]}
    storage, second = made()
    second.step(2, None, 1.0)
    second.adopt(states)
    assert all(not state for state in second.states()[2])
    before, momentum = storage.master[1].clone(), states[1][0]["momentum_buffer"].clone()
    second.step(1, None, 1.0)
    place = storage.pieces[1][0]
    size = place.value.numel()
    start = storage.units[1].slots[0].offset
    assert torch.allclose(
        before[start : start + size] - place.value, 0.5 * (0.9 * momentum + place.gradient), atol=1e-5
    )


def test_full_states_allocate_without_making_a_step() -> None:
    storage, optimizers = made(adamw(1e-2))
    before = storage.master[1].clone()
    full = optimizers.full_states()
    assert not any(optimizers.states()[1]) and torch.equal(storage.master[1], before)
    for unit, pieces in optimizers.pieces.items():
        for state, piece in zip(full[unit], pieces, strict=True):
            assert state["exp_avg"].shape == piece.value.shape


def test_chosen_options_apply_to_the_parameters_of_their_group() -> None:
    storage, optimizers = made(adamw(1e-2))
    groups = optimizers.groups
    decaying = groups.group_of["layer.weight"]
    assert groups.group_of["head.weight"] == decaying != groups.group_of["layer.bias"]
    chosen = list(groups.chosen())
    chosen[decaying] = {**chosen[decaying], "lr": 0.0}
    before = storage.master[1].clone()
    optimizers.step(1, None, 1.0, chosen)
    for piece, slot in zip(storage.pieces[1], storage.units[1].slots, strict=True):
        moved = not torch.equal(piece.value, before[slot.offset : slot.offset + slot.numel])
        assert moved == (len(slot.shape) < 2), slot.name


def test_whole_matrix_optimizers_refuse_cut_matrices() -> None:
    units = units_of_two_layers()
    assert set(try_factory(adamw(), units)) == {1, 2}  # the frozen one has no optimizer
    factory = whole_matrices(partial(AdamW, lr=0.1))
    cut = [Home.over((0, 1), unit.numel) for unit in units]
    with pytest.raises(
        UserError, match=r"schedule.strategy: got 'flat'; tawpipe-whole .*AdamW.*layer is in pieces on 2"
    ):
        refuse_cut_matrices(factory, units, cut, "flat")
    frozen_alone = [cut[0], *(Home.over((0,), unit.numel) for unit in units[1:])]
    refuse_cut_matrices(factory, units, frozen_alone, "tawpipe-whole")
    refuse_cut_matrices(adamw(), units, cut, "flat")


# groups


def test_equal_options_form_one_group_and_changes_are_found() -> None:
    decay, plain = ("AdamW", {"lr": 0.1, "weight_decay": 0.1}), ("AdamW", {"lr": 0.1, "weight_decay": 0.0})
    groups = PipelineOptimizer({"a.weight": decay, "a.bias": plain, "b.weight": decay})
    assert [[piece_of(p).name for p in group["params"]] for group in groups.param_groups] == [
        ["a.weight", "b.weight"],
        ["a.bias"],
    ]
    assert groups.chosen() == ({"lr": 0.1}, {"lr": 0.1})
    torch.optim.lr_scheduler.LambdaLR(groups, lambda _: 0.5)
    groups.param_groups[1]["weight_decay"] = torch.tensor(0.25)
    assert groups.chosen() == ({"lr": 0.05}, {"lr": 0.05, "weight_decay": 0.25})
    with pytest.raises(UserError, match="another parameter group"):
        groups.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})


def clipped(hang_on: str):
    """A factory of torch's AdamW that makes gradients of one norm first: an element's update depends on others."""

    def make(parameters: list[nn.Parameter]) -> AdamW:
        made = AdamW(parameters, lr=0.1)
        step = made.step

        def before(*_: object) -> None:
            for parameter in parameters:
                assert parameter.grad is not None
                parameter.grad /= parameter.grad.norm() + 0.1

        if hang_on == "a hook":
            made.register_step_pre_hook(before)
        else:
            made.step = lambda *_: (before(), step())[1]  # type: ignore[method-assign]
        return made

    return make


@pytest.mark.parametrize("hang_on", ["a hook", "another step"])
def test_optimizers_with_hooks_are_tried_despite_a_known_class(hang_on: str) -> None:
    tried = check_elementwise(partial(AdamW, lr=0.1))
    assert tried.states == 2
    with pytest.raises(UserError, match="gives other numbers when a parameter is cut"):
        check_elementwise(clipped(hang_on))
    assert check_elementwise(partial(AdamW, lr=0.1)) == tried
