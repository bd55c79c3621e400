"""One rank's player by itself: it does what the schedule says, on numbers that are known, and fails once for all."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import SGD

from schedules import llama, make
from tawpipe.errors import RunError
from tawpipe.model.batch import MicroBatch
from tawpipe.model.units import ParameterSlot, Unit
from tawpipe.runtime.compute.step_input import StepInput
from tawpipe.runtime.executor import Executor
from tawpipe.runtime.frame import Frame, UpdateRule
from tawpipe.runtime.homes.step_result import StepResult
from tawpipe.runtime.homes.storage import Storage
from tawpipe.runtime.homes.unit_optimizers import UnitOptimizers
from tawpipe.runtime.transport.transport import Transport
from tawpipe.schedule.actions import Action
from tawpipe.schedule.step import Schedule

CPU = torch.device("cpu")


class KnownGradients:
    """In the place of blocks: the gradient of micro-batch m is m + 1 in every element, its loss m."""

    def __init__(self, gradient: Callable[[int], float] = lambda m: m + 1.0) -> None:
        self.gradient, self.fails = gradient, ""

    def forward(self, action: Action, frame: Frame) -> None:
        if self.fails and str(action).startswith(self.fails):
            raise ZeroDivisionError("in a block")

    def backward(self, action: Action, frame: Frame) -> None:
        for buffer in action.gradients:
            if buffer not in action.reads:
                frame.buffers[buffer].zero_()
            frame.buffers[buffer].add_(self.gradient(action.micro_batch))

    def losses(self, action: Action, frame: Frame) -> list[Tensor]:
        return [torch.tensor(float(one.at[0]), dtype=torch.float64) for one in action.frees]

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_: None


class Alone:
    """A rank of one, and what it plays: four micro-batches of two labels each."""

    def __init__(self, compute: Any, *, rate: float = 0.5, **settings) -> None:
        self.schedule: Schedule = make(llama(2), 1, 1, 4, **settings)
        units = []
        for number, spec in enumerate(self.schedule.model.units):
            slot = ParameterSlot(f"u{number}", (spec.numel,), 0, spec.numel)
            units.append(Unit(number, slot.name, spec.trainable, (slot,), spec.blocks, spec.numel))
        dtype = torch.float32
        self.storage = Storage(units, self.schedule.homes, 0, device=CPU, compute_dtype=dtype, master_dtype=dtype)
        self.executor = Executor(
            0,
            compute=compute,
            storage=self.storage,
            transport=Transport(self.schedule.topology, 0, [self.schedule], device=CPU),
            optimizers=UnitOptimizers(self.storage, lambda parameters: SGD(parameters, lr=rate)),
            reduce_dtype=dtype,
        )
        self.executor.adopt(self.schedule)
        labels = torch.tensor([[1, 2, -100]])
        row = MicroBatch(labels.clamp(min=0), labels, torch.arange(3)[None], (3,))
        self.given = StepInput(dict.fromkeys(range(4), row), scale=2.0, seed=0, step=0)

    def step(self, **rule) -> StepResult:
        result = self.executor.play(self.schedule, self.given, UpdateRule(**{"clip_norm": None, **rule}))
        self.executor.drain()
        return result

    @property
    def weights(self) -> Tensor:
        return torch.cat([self.storage.master[unit.index][: unit.numel] for unit in self.storage.units])


@pytest.mark.parametrize("early", [False, True])
def test_step_gradients_are_summed_and_divided_by_tokens(early: bool) -> None:
    alone = Alone(KnownGradients(), early_updates=early)
    result = alone.step()
    mean = (1 + 2 + 3 + 4) / (2.0 * 8)  # of all micro-batches; the backward pass multiplies by the scale
    assert torch.allclose(alone.weights, torch.full_like(alone.weights, -0.5 * mean))
    assert result.loss == (0 + 1 + 2 + 3) / 8 and result.tokens == 8 and result.finite
    assert result.grad_norm == pytest.approx(mean * len(alone.weights) ** 0.5 if not early else result.grad_norm)
    alone.step(rate=2.0)
    assert torch.allclose(alone.weights, torch.full_like(alone.weights, -1.5 * mean))
    alone.executor.close()


def test_clipping_scales_all_gradients_by_one_factor() -> None:
    alone = Alone(KnownGradients())
    norm = alone.step(clip_norm=0.25).grad_norm
    assert norm > 0.25
    assert float(alone.weights.norm()) <= 0.5 * 0.25 * (1 + 1e-3)
    alone.executor.close()


def test_nonfinite_gradient_blocks_updates_until_forgiven() -> None:
    compute = KnownGradients(lambda m: float("inf") if m == 2 else 1.0)
    alone = Alone(compute)
    assert not alone.step().finite and not alone.weights.any()
    compute.gradient = lambda m: 1.0
    assert not alone.step().finite and not alone.weights.any()
    alone.executor.forgive()
    assert alone.step().finite and alone.weights.any()
    compute.gradient = lambda m: float("nan")
    before = alone.weights
    assert not alone.step(memory=0.0).finite and torch.equal(alone.weights, before)
    compute.gradient = lambda m: 1.0
    assert alone.step(memory=0.0).finite and not torch.equal(alone.weights, before)
    alone.executor.close()


def test_failure_in_a_lane_is_raised_and_later_steps_are_refused() -> None:
    compute = KnownGradients()
    alone = Alone(compute)
    compute.fails = "COMPUTE FORWARD b1"
    result = alone.executor.play(alone.schedule, alone.given, UpdateRule())
    assert repr(result).startswith("StepResult(failed: ") and alone.executor.untold is alone.executor.failure
    with pytest.raises(Exception, match="in a block"):
        result.wait()
    assert alone.executor.failure is not None and alone.executor.untold is None
    with pytest.raises(RunError, match="an earlier step of this pipeline failed") as caught:
        alone.step()
    assert caught.value.__cause__ is alone.executor.failure
    assert all(alone.executor.end_lanes(5.0))
    alone.executor.watchdog.close()


def test_step_result_waits_for_the_step_and_reports_its_numbers() -> None:
    alone = Alone(KnownGradients())
    before = time.perf_counter()
    result = alone.step()
    assert alone.executor.idle and before < result.ended_s - result.took_s < result.ended_s < time.perf_counter()
    assert repr(result).startswith("StepResult(loss 0.7500, grad norm ") and repr(result).endswith(", 8 tokens)")
    seen = []
    alone.executor.on_compute(lambda: seen.append("on the lane"))
    assert seen and alone.executor.compute_s > 0
    alone.executor.close()
