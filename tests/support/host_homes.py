"""Training with homes in the host's memory beside the same on the device, bit by bit; what workers run, and the cases
that cover the settings in pairs.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.optim import SGD, Adafactor

import tawpipe
from cases import LAYERS, batches, llama, random_delays
from pipelines import make_pipeline
from schedules import EVERY
from states import momentum, plain
from tawpipe import Pipeline
from tawpipe.runtime.homes import portions
from tawpipe.runtime.homes.optimizer import OptimizerFactory, adamw
from tawpipe.runtime.world import World
from tawpipe.schedule.strategies.table import strategies

STEPS = 5
SMALL = 256
"""Elements of a slice here: a layer's matrices are cut, and vectors share a load."""


class Counting(SGD):
    """Steps that grow shorter with two counts of its own: a tensor in its groups and a number, which no slice may count
    for itself.
    """

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.05)
        self.steps = 0
        for group in self.param_groups:
            group["seen"] = torch.zeros(())

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        self.steps += 1
        for group in self.param_groups:
            group["seen"].add_(1)
            for value in group["params"]:
                value.sub_(value.grad / float(1 + group["seen"] * self.steps), alpha=0.05)


class Preconditioned(SGD):
    """Keeps a square of a matrix's first size for it, and a number for a vector."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            for value in group["params"]:
                if value.ndim < 2:
                    value.sub_(value.grad, alpha=0.01)
                    continue
                state = self.state[value]
                if not state:
                    state["left"] = torch.eye(len(value), dtype=value.dtype, device=value.device)
                state["left"].lerp_(value.grad.flatten(1) @ value.grad.flatten(1).T, 0.5)
                value.sub_((state["left"] @ value.grad.flatten(1)).view_as(value), alpha=0.01)


OPTIMIZERS: dict[str, OptimizerFactory] = {
    "counting": Counting,
    "preconditioned": tawpipe.whole_matrices(lambda parameters: Preconditioned(parameters, lr=0.01)),
    "adamw": adamw(1e-2),
    "momentum": momentum,
    "plain": plain,
    "muon": tawpipe.muon(1e-2),
    "adafactor": tawpipe.whole_matrices(lambda parameters: Adafactor(parameters, lr=1e-2)),
}
CHOICES: dict[str, tuple[Any, ...]] = {
    "strategy": EVERY,
    "host_homes": ("state", "all"),
    "topology": ((1, 1), (2, 1), (2, 2)),
    "end": ("clipped", "unclipped", "early"),
    "rounds": (1, 3),
    "scope": (None, "visit", "step"),
    "dtype": ("float64", "float32", "bfloat16"),
    "tied": (False, True),
    "optimizer": ("adamw", "momentum"),
    "gradient_buffers": (1, 2),
}


def every_case() -> list[dict[str, Any]]:
    """The whole grid, but for what strategies refuse."""
    found = []
    for values in itertools.product(*CHOICES.values()):
        case = dict(zip(CHOICES, values, strict=True))
        strategy = strategies()[case["strategy"]]
        if strategy.axis and (case["topology"] == (1, 1) or case["host_homes"] == "all"):
            continue
        if case["scope"] and "gradients_scope" in strategy.refusals and case["scope"] != "visit":
            continue
        found.append(case)
    return found


def pairwise(
    cases: list[dict[str, Any]], *, seed: int = 0, pairs: Callable[[str, str], bool] = lambda *_: True
) -> list[dict[str, Any]]:
    """Cases that have every value that any case has, and every pair of them.

    Args:
        pairs: whether values of these two choices are wanted together.
    """
    dice, chosen = random.Random(seed), list[dict[str, Any]]()

    def parts(case: dict[str, Any]) -> set[tuple[Any, ...]]:
        both = (two for two in itertools.combinations(case.items(), 2) if pairs(two[0][0], two[1][0]))
        return {*both, *((item,) for item in case.items())}

    left = set[tuple[Any, ...]]().union(*map(parts, cases))
    while left:
        tried = dice.sample(cases, min(len(cases), 200))
        gains = [len(left & parts(case)) for case in tried]
        if max(gains) == 0:
            tried = cases
            gains = [len(left & parts(case)) for case in tried]
        chosen.append(tried[gains.index(max(gains))])
        left -= parts(chosen[-1])
    return chosen


def knobs_of(case: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """A case's rows and settings."""
    nodes, local = case["topology"]
    world, axis = nodes * local, strategies()[case["strategy"]].axis
    knobs: dict[str, Any] = {name: case[name] for name in ("strategy", "host_homes", "steps") if name in case}
    knobs["dtype"] = getattr(torch, case["dtype"])
    if world == 4 and case["strategy"] in ("interleaved-1f1b", "zero-bubble"):  # the model has five layers
        knobs["stages"] = "nodes"
    knobs |= {"tied": case["tied"], "gradient_buffers": case["gradient_buffers"]}
    knobs["optimizer"] = case["optimizer"]
    if not axis:  # whose passes are alike in every layer
        knobs["layers"] = 3
    if case["end"] != "clipped":
        knobs |= {"clip_norm": None, "early_updates": case["end"] == "early"}
    if case["scope"] and "gradients_scope" not in strategies()[case["strategy"]].refusals:
        knobs["gradients_scope"] = case["scope"]
    rows = world * case["rounds"] - (1 if world > 1 and case["rounds"] > 1 and not axis else 0)
    return rows, knobs


def training(
    world: World, *, rows: int, steps: int = STEPS, tied: bool = False, layers: int = LAYERS, **knobs: Any
) -> Pipeline:
    """A pipeline after some steps on small slices, with nothing under way; ``numbers`` are its losses and norms."""
    optimizer, delays = OPTIMIZERS[knobs.pop("optimizer", "adamw")], knobs.pop("delays", None)
    delay = (lambda lane: random_delays(hash((lane, world.rank, delays)), 0.002)) if delays is not None else None
    dtype = torch.float64 if knobs.get("dtype") == torch.float64 else torch.float32
    model: Any = llama(dtype, tied=tied, layers=layers)
    if knobs.pop("lora", False):
        peft = pytest.importorskip("peft")
        torch.manual_seed(5)
        model = peft.get_peft_model(
            model, peft.LoraConfig(r=2, target_modules=["q_proj", "o_proj"], init_lora_weights=False)
        )
    pipeline = make_pipeline(
        model, optimizer=optimizer, world=world, strict=True, loss_chunk_tokens=8, delay=delay, **knobs
    )
    results = [pipeline.step(batch) for batch in batches(rows, steps)]
    pipeline.numbers = [(result.loss, result.grad_norm) for result in results]  # pyright: ignore
    pipeline.drain()
    return pipeline


def state_of_rank(pipeline: Pipeline) -> Iterator[tuple[str, Tensor]]:
    """Masters, moments and what travels, of this rank; and the gradients that the last update used, of all."""
    storage, states = pipeline.storage, pipeline.optimizers.states()
    others = {unit.index for unit in storage.units} - storage.master.keys()
    for unit, pieces in storage.pieces.items():
        yield f"{unit} travels", storage.compute_copy[unit].clone().view(torch.uint8)
        for number, piece in enumerate(pieces):
            yield f"{unit}.{number} master", piece.value.detach().clone()
        for number, state in enumerate(states.get(unit, ())):
            yield from ((f"{unit}.{number} {key}", value.clone()) for key, value in state.items())
    for name in pipeline.parameter_names:
        kept = (unit for unit in storage.units if unit.trainable and unit.index in {*storage.gradient, *others})
        if name in {slot.name for unit in kept for slot in unit.slots}:
            gradient = pipeline.gradient(name)
            yield f"gradient {name}", torch.zeros(0) if gradient is None else gradient


def after(world: World, **knobs: Any) -> tuple[list[tuple[float, float]], dict[str, Tensor]]:
    """Losses and norms, and the state of this rank."""
    with patch.object(portions, "PORTION_SIZE", SMALL):
        pipeline = training(world, **knobs)
        state = dict(state_of_rank(pipeline))
        pipeline.close()
    return pipeline.numbers, state  # pyright: ignore


def differences(one: tuple[Any, dict[str, Tensor]], other: tuple[Any, dict[str, Tensor]]) -> list[str]:
    """What is not equal in every bit."""
    found = [] if one[0] == other[0] else [f"losses and norms {one[0]} and {other[0]}"]
    missing = one[1].keys() ^ other[1].keys()  # no gradient is kept that is used where it is made
    found += sorted(name for name in missing if not (name in one[1] and name.startswith("gradient ")))
    return found + [name for name in one[1].keys() & other[1].keys() if not torch.equal(one[1][name], other[1][name])]


def compared(world: World, *, cases: list[dict[str, Any]]) -> list[list[str]]:
    """For every case what differs on this rank."""
    found = []
    for case in cases:
        rows, knobs = knobs_of(case) if "topology" in case else (case["rows"], {**case})
        knobs.pop("rows", None)
        expected = after(world, rows=rows, **{**knobs, "delays": None, "host_homes": "none"})
        levels = [knobs.pop("host_homes")] if "host_homes" in knobs else levels_of(knobs["strategy"])
        for level in levels:
            found.append(differences(expected, after(world, rows=rows, host_homes=level, **knobs)))
    return found


def delayed(world: World, *, seeds: int, **knobs: Any) -> list[list[str]]:
    """What differs under random delays in every lane, for every seed."""
    expected = after(world, **knobs)
    return [differences(expected, after(world, delays=1 + seed, **knobs)) for seed in range(seeds)]


def saved(world: World, *, folder: str, steps: int, load: str = "", save: str = "", **knobs: Any) -> list[float]:
    """Losses of steps after a load, or from the beginning, and a save after them."""
    with patch.object(portions, "PORTION_SIZE", SMALL):
        pipeline = training(world, rows=6, steps=0, **knobs)
        if load:
            pipeline.load(f"{folder}/{load}")
        batch = batches(6, 4)
        losses = [pipeline.step(batch[pipeline.step_number]).loss for _ in range(steps)]
        if save:
            result = pipeline.save(f"{folder}/{save}")
            assert not result.problem
        pipeline.close()
    return losses


def levels_of(strategy: str) -> tuple[str, ...]:
    """The places of homes besides the device that a strategy has."""
    return ("state",) if strategies()[strategy].axis else ("state", "all")
