"""Optimizers that look at whole matrices: the numbers of one process, resume, refusals, and what they keep."""

from __future__ import annotations

import pytest
import torch
from torch.optim import Adafactor, Muon

import tawpipe
from cases import batches
from states import ALONE
from tawpipe.errors import UserError
from tawpipe.runtime.homes import named_optimizers
from tawpipe.runtime.homes.named_optimizers import BY_NAME
from tawpipe.runtime.homes.optimizer import WholeMatrices, check_elementwise
from whole import experts, factory

WHOLE = {"strategy": "tawpipe-whole"}


def test_whole_matrix_optimizers_match_one_process(pool):
    """With clipping, with frozen units, with updates that do not wait, with experts; and alone under any strategy."""
    settings = [
        {"name": "muon", **WHOLE},
        {"name": "muon", **WHOLE, "clip_norm": None, "early_updates": True},
        {"name": "adafactor", **WHOLE, "frozen": ("q_proj", "embed", "layers.1")},
    ]
    assert max(max(found) for found in pool.run("whole:exact", 2, 2, settings=settings)) < 1e-9
    alone = [{"name": "adafactor", "strategy": "tawpipe-spread"}]
    assert max(pool.run("whole:exact", 1, 1, settings=alone)[0]) < 1e-9


@pytest.mark.parametrize("name", ["muon", pytest.param("adafactor", marks=pytest.mark.slow)])
def test_whole_matrix_optimizer_state_resumes_exactly_on_any_device_count(pool, tmp_path, name):
    folder = str(tmp_path / "state")
    (losses, again), *_ = pool.run("whole:resumed", 2, 2, name=name, folder=folder)
    assert losses == again
    assert pool.run("whole:go_on", 1, 1, name=name, folder=folder)[0] == pytest.approx(losses, rel=1e-9)


def test_cut_matrices_are_refused_and_a_suitable_strategy_is_named(pool):
    for said in pool.run("whole:refused", 2, 2):
        assert "tawpipe-striped" in said and "--schedule.strategy tawpipe-whole" in said and "AdamW+Muon" in said


def test_learning_rates_that_differ_between_ranks_are_refused(pool):
    assert all("learning rates" in said for said in pool.run("whole:apart", 2, 1))


@pytest.mark.parametrize("optimizer", [Muon, Adafactor])
def test_whole_matrix_optimizers_name_the_required_wrapper(optimizer):
    with pytest.raises(UserError, match=r"tawpipe.whole_matrices\(factory\)"):
        check_elementwise(lambda parameters: optimizer(parameters))


@pytest.mark.parametrize("options", [{}, {"lr": 0.3, "weight_decay": 0.1, "d": 1.3, "eps": (1e-3, 1e-2)}])
def test_our_adafactor_has_the_values_and_states_of_torch(options):
    """Whose step reads two norms of every parameter, for which the host waits."""
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(shape, generator=generator).double() for shape in ((7, 5), (9,), (1, 6), (3, 4, 5), (1,))]
    ours, theirs = ([torch.nn.Parameter(value.clone()) for value in values] for _ in range(2))
    made = named_optimizers.Adafactor(ours, **options), Adafactor(theirs, **options)
    for step in range(6):
        for pair in zip(ours, theirs, strict=True):
            gradient = torch.randn(pair[0].shape, generator=generator).double() * 10.0 ** (step % 3 - 1)
            for value in pair:
                value.grad = gradient.clone()
        for optimizer in made:
            optimizer.step()
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(dict(made[0].state[one]), dict(made[1].state[other]), rtol=1e-12, atol=1e-14)


def test_nonfinite_step_changes_neither_weights_nor_states_under_muon():
    poisoned = [False]

    def loss(logits, labels):
        total = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        return total * float("inf") if poisoned[0] else total

    pipeline = tawpipe.Pipeline(
        experts(),
        optimizer=factory("muon"),
        loss=loss,
        training=tawpipe.TrainingSettings(skip_limit=3),
        world=ALONE,
        checks=tawpipe.CheckSettings(check="never"),
        dtype=torch.float64,
    )
    batch = {"input_ids": batches(2, 1)[0]["input_ids"]} | {"labels": batches(2, 1)[0]["input_ids"]}

    def everything() -> dict[str, torch.Tensor]:
        pipeline.drain()
        found = {
            name: value.clone() for name in pipeline.parameter_names if (value := pipeline.parameter(name)) is not None
        }
        for unit, states in pipeline.optimizers.states().items():
            for at, state in enumerate(states):
                found |= {f"{unit} {at} {key}": value.clone() for key, value in state.items()}
        return found

    pipeline.step(batch)
    before = everything()
    poisoned[0] = True
    assert not pipeline.step(batch).finite
    after = everything()
    assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)
    poisoned[0] = False
    pipeline.step(batch)
    assert not torch.equal(everything()["lm_head.weight"], before["lm_head.weight"])
    pipeline.close()


@pytest.mark.parametrize("name", BY_NAME)
def test_every_named_optimizer_trains_and_keeps_its_declared_states(name):
    decay = {"weight_decay": 0.1} | ({"betas": (0.9, 0.95)} if name == "adam" else {})
    made = BY_NAME[name](1e-2, **decay, **({"eps": 1e-8} if name in ("adam", "rmsprop") else {}))
    pipeline = tawpipe.Pipeline(
        experts(), optimizer=made, world=ALONE, checks=tawpipe.CheckSettings(check="never"), dtype=torch.float64
    )
    losses = [pipeline.step(batches(2, 1)[0]).loss for _ in range(3)]
    pipeline.drain()
    assert losses[2] < losses[0]
    for unit, states in pipeline.optimizers.states().items():
        kept = sum(value.numel() for state in states for value in state.values() if value.ndim)
        said = pipeline.optimizers.states_per_element[unit] * pipeline.storage.units[unit].numel
        assert kept == pytest.approx(said), unit
    assert isinstance(made, WholeMatrices) == (name in ("adafactor", "muon"))
    pipeline.close()
