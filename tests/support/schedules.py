"""Small models, and schedules of all kinds, for the tests of schedules, traffic, the ring and the clock."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from tawpipe.schedule.build import PLAIN_WIRE, build_evaluation, build_training
from tawpipe.schedule.placement import ALL_PLACEMENTS, AT_ONE_PLACE
from tawpipe.schedule.spec import KEPT, WIRES, BlockSpec, Knobs, ModelSpec, Schedule, UnitSpec, share_micro_batches
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


def wires(placement: str, local: int) -> st.SearchStrategy[dict[str, str]]:
    """In what numbers travel between nodes, where the placement leaves a choice."""
    chosen: dict[str, st.SearchStrategy[str]] = {}
    if placement not in PLAIN_WIRE:
        chosen["weights_wire"] = st.sampled_from(WIRES)
        if placement != "flat" or local == 1:
            chosen["gradients_wire"] = st.sampled_from(WIRES)
    return st.fixed_dictionaries(chosen)


def scopes(placement: str) -> st.SearchStrategy[dict[str, str]]:
    """How long weights are kept and gradients added up, where the placement leaves a choice."""
    any_scope, visit = st.sampled_from(("visit", "step")), st.just("visit")
    return st.fixed_dictionaries(
        {
            "weights_scope": any_scope if placement in SCOPED else visit,
            "gradients_scope": any_scope if placement in (*SCOPED, "hybrid") else visit,
        }
    )


@st.composite
def scopes_and_caches(draw: st.DrawFn, placement: str) -> dict[str, Any]:
    """What is kept because it is needed again: for a scope, or in buffers."""
    found: dict[str, Any] = {**draw(scopes(placement)), "reuse": draw(st.booleans())}
    if placement in ("spread", "striped") and found["weights_scope"] == "visit":
        found["kept_units"] = draw(st.integers(0, 3))
    return found


@dataclass(frozen=True)
class Shape:
    """What decides the form of a schedule besides the sizes of its units."""

    topology: Topology
    layers: int
    knobs: Knobs


MOST_LAYERS = 12
"""Of a shape: those of a ring over the largest cluster."""


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    """Clusters, layers and knobs that go together; every rank has the same number of micro-batches in every round."""
    topology = Topology.grid(draw(st.integers(1, 4)), draw(st.integers(1, 3)))
    placement = draw(st.sampled_from(ALL_PLACEMENTS))
    ring = placement == "ring"
    least = topology.world_size if ring else 1
    per_visit = draw(st.integers(1, 2))
    count = draw(st.integers(1, 3)) * per_visit * topology.world_size
    knobs = Knobs(
        placement,
        share_micro_batches(count, topology.world_size),
        micro_batches_per_visit=per_visit,
        look_ahead=draw(st.integers(1 if ring else 0, 4)),
        gradient_buffers=draw(st.integers(1, 3)),
        **draw(scopes_and_caches(placement)),
    )
    return Shape(topology, draw(st.integers(least, max(5, least))), knobs)


@st.composite
def schedules(
    draw: st.DrawFn, placements: tuple[str, ...] = ALL_PLACEMENTS, *, training: bool | None = None
) -> Schedule:
    """Anything that can be built: clusters, models and knobs of all kinds."""
    nodes, local = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    placement = draw(st.sampled_from(placements))
    ring = placement == "ring"
    layers = draw(st.integers(nodes * local, nodes * local + 7) if ring else st.integers(1, 7))
    shape = draw(st.sampled_from(("plain", "tied", "lora", "frozen")))
    offloaded = 0 if ring else draw(st.integers(0, layers))
    others = layers - offloaded
    model = llama(layers, tied=shape == "tied", lora=shape == "lora", frozen=2 * (shape == "frozen"))
    homes: list[int] = []
    if placement in AT_ONE_PLACE and draw(st.booleans()):
        places = st.integers(0, (nodes if placement == "striped" else nodes * local) - 1)
        homes = draw(st.lists(places, min_size=len(model.units), max_size=len(model.units)))
    recompute = draw(st.lists(st.sampled_from(tuple(KEPT)), min_size=others, max_size=others))
    return make(
        model,
        nodes,
        local,
        draw(st.integers(1, 20)),
        build_training if (draw(st.booleans()) if training is None else training) else build_evaluation,
        placement=placement,
        homes=tuple(homes),
        micro_batches_per_visit=draw(st.integers(1, 3)),
        look_ahead=draw(st.integers(1 if ring else 0, 4)),
        gradient_buffers=draw(st.integers(1, 3)),
        recompute=("full", *["full"] * offloaded, *recompute, "full"),
        offloaded_layers=offloaded,
        early_updates=draw(st.booleans()),
        **draw(wires(placement, local)),
        **draw(scopes_and_caches(placement)),
    )
