"""Small models and schedules for the tests of schedules, traffic and the ring."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

from tawpipe.schedule.build import build_evaluation, build_training
from tawpipe.schedule.placement import ALL_PLACEMENTS
from tawpipe.schedule.spec import BlockSpec, Knobs, ModelSpec, Schedule, UnitSpec, share_micro_batches
from tawpipe.topology import Topology

SCOPED = ("spread", "striped", "whole")
"""Placements under which a node may keep weights and sum gradients up."""


def llama(layers: int, *, tied: bool = False, lora: bool = False, frozen: int = 0) -> ModelSpec:
    """An embedding, some layers, a head with a norm; sizes that nothing divides."""
    last = layers + 1
    units = [UnitSpec(1001, not lora and frozen == 0, (0, last) if tied else (0,))]
    blocks = [BlockSpec((0,), "embedding", False, units[0].trainable)]
    for layer in range(1, layers + 1):
        own = [len(units)]
        units.append(UnitSpec(333, not lora and layer >= frozen, (layer,)))
        if lora:
            own.append(len(units))
            units.append(UnitSpec(17, True, (layer,)))
        blocks.append(BlockSpec(tuple(own), "layer", True, lora or layer >= frozen))
    own = [0] if tied else []
    own.append(len(units))
    units.append(UnitSpec(7, not lora, (last,)))
    if not tied:
        own.append(len(units))
        units.append(UnitSpec(1001, not lora, (last,)))
    blocks.append(BlockSpec(tuple(own), "head"))
    return ModelSpec(tuple(blocks), tuple(units))


def make(
    model: ModelSpec,
    nodes: int,
    local: int,
    count: int,
    build: Callable[[ModelSpec, Topology, Knobs], Schedule] = build_training,
    **knobs: Any,
) -> Schedule:
    """A schedule for ``count`` micro-batches on ``nodes`` x ``local`` ranks."""
    topology = Topology.grid(nodes, local)
    return build(model, topology, Knobs(micro_batches=share_micro_batches(count, nodes * local), **knobs))


@st.composite
def schedules(
    draw: st.DrawFn, placements: tuple[str, ...] = ALL_PLACEMENTS, *, training: bool | None = None
) -> Schedule:
    """Anything that can be built: clusters, models and knobs of all kinds."""
    nodes, local = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    placement = draw(st.sampled_from(placements))
    ring = placement == "ring"
    layers = draw(st.integers(nodes * local, nodes * local + 7) if ring else st.integers(1, 7))
    scopes = st.sampled_from(("visit", "step"))
    shape = draw(st.sampled_from(("plain", "tied", "lora", "frozen")))
    return make(
        llama(layers, tied=shape == "tied", lora=shape == "lora", frozen=2 * (shape == "frozen")),
        nodes,
        local,
        draw(st.integers(1, 20)),
        build_training if (draw(st.booleans()) if training is None else training) else build_evaluation,
        placement=placement,
        micro_batches_per_visit=draw(st.integers(1, 3)),
        look_ahead=draw(st.integers(1 if ring else 0, 4)),
        gradient_buffers=draw(st.integers(1, 3)),
        weights_scope=draw(scopes) if placement in SCOPED else "visit",
        gradients_scope=draw(scopes) if placement in (*SCOPED, "hybrid") else "visit",
    )
