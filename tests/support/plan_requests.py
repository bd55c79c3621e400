"""A plan asked for without a model: made-up sizes, seconds and links."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from schedules import llama
from tawpipe.plan.cost.profile import Profile, size_of
from tawpipe.plan.cost.request import PlanRequest
from tawpipe.plan.machine.machine import Device, Machine, uniform
from tawpipe.plan.search import search as searching
from tawpipe.plan.search.candidate import Candidate
from tawpipe.schedule.settings import RECOMPUTE
from tawpipe.schedule.sizes.footprint import BlockMemory, Widths
from tawpipe.schedule.step import StepSpec
from tawpipe.schedule.strategies.table import strategies
from tawpipe.simulate import BlockCost, LinkModel, Seconds

LAYERS = 6
FEW = ("tawpipe-spread", "tawpipe-step", "flat", "hsdp", "1f1b")
"""Strategies of every kind that are planned in a moment: a pipeline that is made for costs takes seconds."""


def profile(layers: int = LAYERS, forward_s: float = 0.01) -> Profile:
    layer = BlockCost(Seconds(forward_s), Seconds(3 * forward_s), Seconds(forward_s / 4))
    ends = BlockCost(Seconds(forward_s / 10), Seconds(forward_s / 5))
    kept, backward = {"graph": 300, "kept": 60}, {f"backward {name}": (0, 300) for name in RECOMPUTE}
    memory = BlockMemory(20, kept, {"layer": backward, "head": {"backward full": (1000, 0)}})
    return Profile((ends, *[layer] * layers, ends), 1e-9, memory, "made up")


def plan_request(
    machine: Machine | None = None, *, global_batch: int = 16, memory: int = 0, **changes: Any
) -> PlanRequest:
    machine = machine or uniform(2, 2, between=LinkModel(2e5, 1e-5), inside=LinkModel(1e8), device=Device())
    asked = PlanRequest(
        model=llama(LAYERS),
        profile=profile(),
        machine=machine,
        global_batch=global_batch,
        micro_batch=1,
        sequence_length=10,
        size=size_of([10]),
        widths=Widths(2, 4, 4, 2),
        memory_bytes=memory,
    )
    return replace(asked, **changes)


def step_of(asked: PlanRequest, strategy: str, **settings: Any) -> StepSpec:
    """A step of what is asked for, with one micro-batch a visit unless ``settings`` say otherwise."""
    return asked.step(replace(asked.settings, strategy=strategy, **{"micro_batches_per_visit": 1, **settings}))


@contextmanager
def looking_at(*names: str) -> Iterator[None]:
    """Searches look at these strategies alone."""
    table = strategies()
    with patch.object(searching, "strategies", lambda: {name: table[name] for name in names}):
        yield


def search_only(asked: PlanRequest, *names: str, **limits: Any) -> list[Candidate]:
    """What a search finds among these strategies, ``FEW`` by default."""
    with looking_at(*(names or FEW)):
        return searching.search(asked, **limits)
