"""Schedules of the learning rate: those of transformers, with a floor and a warm-up that has no step at zero."""

from __future__ import annotations

import pytest
import torch
from transformers import get_scheduler

from tawpipe.train.settings.learning_rate import SCHEDULES, RunSpan, factor

STEPS = 40
THEIRS = {
    "cosine": ("cosine", {}),
    "linear": ("linear", {}),
    "constant": ("constant_with_warmup", {}),
    "wsd": ("warmup_stable_decay", {"num_decay_steps": 9}),
    "inverse-sqrt": ("inverse_sqrt", {}),
    "cosine-restarts": ("cosine_with_restarts", {"num_cycles": 3}),
}


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("warmup", [0, 7])
def test_learning_rates_equal_transformers_after_the_warm_up(name, warmup):
    theirs, options = THEIRS[name]
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    expected = get_scheduler(
        theirs, optimizer, num_warmup_steps=warmup, num_training_steps=STEPS, scheduler_specific_kwargs=options
    )
    of = RunSpan(STEPS, warmup, decay=9, cycles=3)
    for step in range(STEPS):
        if step >= warmup:
            assert factor(name, step, of) == pytest.approx(expected.lr_lambdas[0](step), abs=1e-12), step  # type: ignore[attr-defined]
        else:
            assert factor(name, step, of) == (step + 1) / warmup


@pytest.mark.parametrize("name", SCHEDULES)
def test_learning_rate_stays_between_its_floor_and_maximum(name):
    of = RunSpan(STEPS, 5, decay=10, least=0.3)
    factors = [factor(name, step, of) for step in range(5, STEPS)]
    assert factors[0] == 1 and min(factors) >= 0.3 and max(factors) == 1
    if name in ("cosine", "linear", "wsd"):
        assert factors == sorted(factors, reverse=True) and factors[-1] < 0.35
