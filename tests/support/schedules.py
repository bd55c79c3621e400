"""Small models, and schedules of all kinds, for the tests of schedules, traffic, the ring and the clock."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import groupby, pairwise
from typing import Any

from hypothesis import strategies as st

from tawpipe.schedule.pipelines.strategy import ActivationPipeline
from tawpipe.schedule.settings import RECOMPUTE, ScheduleSettings, spell_homes
from tawpipe.schedule.spec import BlockSpec, ModelSpec, UnitSpec
from tawpipe.schedule.step import Schedule, StepSpec, Strategy
from tawpipe.schedule.strategies.build import build, shares_of, step_of
from tawpipe.schedule.strategies.table import find, strategies
from tawpipe.topology import Topology

EVERY = tuple(name for name, one in strategies().items() if type(one).__module__.startswith("tawpipe."))
"""All strategies but those that a test or the lab has brought."""
NAMES = tuple(name for name, one in strategies().items() if one.candidate and not one.axis)
"""Strategies whose weights travel."""
SCOPED = ("tawpipe-spread", "tawpipe-striped", "tawpipe-whole")
"""Strategies under which a node may keep weights and sum gradients up."""
COMPRESSIONS = ("none", "int8", "fp8")


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


def spell_recompute(layers: Iterable[str]) -> str:
    """The setting for layers from the first to the last.

    >>> spell_recompute(("full", "selective", "none", "none"))
    'none:2,selective:1,full'
    """
    runs = [(how, len(list(same))) for how, same in groupby(reversed(list(layers)))]
    words = [f"{how}:{count}" for how, count in runs[:-1]]
    return ",".join((*words, *(how for how, _ in runs[-1:]))) or "full"


def step_for(
    model: ModelSpec, topology: Topology, count: int, *, use: Strategy | None = None, **settings: Any
) -> StepSpec:
    """A step of ``count`` micro-batches; settings that are not given are the least."""
    usual = {"micro_batches_per_visit": 1, **settings}
    chosen = ScheduleSettings(**usual)
    return step_of(model, topology, chosen, shares_of(count, topology, chosen, use), strategy=use)


def make(model: ModelSpec, nodes: int, local: int, count: int, *, training: bool = True, **settings: Any) -> Schedule:
    """A schedule for ``count`` micro-batches on ``nodes`` x ``local`` ranks."""
    return build(step_for(model, Topology.grid(nodes, local), count, **settings), training=training)


def compressions(name: str, local: int) -> st.SearchStrategy[dict[str, str]]:
    """In what numbers travel between nodes, where the strategy leaves a choice."""
    chosen: dict[str, st.SearchStrategy[str]] = {}
    if "weights_compression" not in find(name).refusals:
        chosen["weights_compression"] = st.sampled_from(COMPRESSIONS)
        if name != "flat" or local == 1:
            coded = ("exact",) if find(name).sums_on_rings else ()
            chosen["gradients_compression"] = st.sampled_from((*COMPRESSIONS, *coded))
    return st.fixed_dictionaries(chosen)


@st.composite
def scopes_and_caches(draw: st.DrawFn, name: str) -> dict[str, Any]:
    """What is kept because it is needed again: for the step, or in buffers."""
    refused = find(name).refusals
    settings: dict[str, Any] = {"reuse": draw(st.booleans())}
    if "gradients_scope" not in refused:
        settings["gradients_scope"] = draw(st.sampled_from((None, "visit", "step")))
    if "step_cache" not in refused:
        some = (0, "all") if name == "tawpipe-whole" else (0, 1, 2, 3, "all")
        settings["step_cache"] = draw(st.sampled_from(some)) if settings["reuse"] else 0
    return settings


def group_sizes(topology: Topology) -> list[str]:
    """All that ``groups`` may say on some nodes."""
    local, world = topology.local_size, topology.world_size
    usable = [n for n in range(1, world + 1) if (local % n == 0 if n < local else n % local == 0 == world % n)]
    return [
        f"{weights}/{gradients}/{state}"
        for state in usable
        for weights in usable
        for gradients in usable
        if max(weights, gradients) <= state
        and all(b % a == 0 for a, b in pairwise(sorted({weights, gradients, state, local, world})))
    ]


def grouped(name: str, topology: Topology) -> st.SearchStrategy[dict[str, Any]]:
    """The groups of a strategy that has some."""
    if "groups" not in find(name).uses:
        return st.just({})
    return st.fixed_dictionaries({"groups": st.sampled_from(group_sizes(topology))})


MOST_LAYERS = 12
"""Of a shape: those of a ring over the largest cluster."""


@st.composite
def shapes(draw: st.DrawFn) -> StepSpec:
    """Clusters, layers and settings that go together; every rank has as many micro-batches in every round."""
    topology = Topology.grid(draw(st.integers(1, 4)), draw(st.integers(1, 3)))
    name = draw(st.sampled_from(NAMES))
    ring = name == "weipipe"
    least = topology.world_size if ring else 1
    per_visit = draw(st.integers(1, 2))
    return step_for(
        replace(llama(draw(st.integers(least, max(5, least)))), balances=draw(st.booleans())),
        topology,
        draw(st.integers(1, 3)) * per_visit * topology.world_size,
        strategy=name,
        micro_batches_per_visit=per_visit,
        look_ahead=draw(st.integers(1 if ring else 0, 4)),
        gradient_buffers=draw(st.integers(1, 3)),
        **draw(scopes_and_caches(name)),
        **draw(grouped(name, topology)),
    )


@st.composite
def schedules(draw: st.DrawFn, names: tuple[str, ...] = NAMES, *, training: bool | None = None) -> Schedule:
    """Anything that can be built: clusters, models and settings of all kinds."""
    topology = Topology.grid(draw(st.integers(1, 4)), draw(st.integers(1, 4)))
    name = draw(st.sampled_from(names))
    ring, world = name == "weipipe", topology.world_size
    layers = draw(st.integers(world, world + 7) if ring else st.integers(1, 7))
    shape = draw(st.sampled_from(("plain", "tied", "lora", "frozen")))
    offloaded = 0 if ring else draw(st.integers(0, layers))
    others = layers - offloaded
    model = llama(layers, tied=shape == "tied", lora=shape == "lora", frozen=2 * (shape == "frozen"))
    model = replace(model, balances=draw(st.booleans()))
    homes: list[int] = []
    if (places := find(name).places(topology)) and draw(st.booleans()):
        homes = draw(st.lists(st.integers(0, places - 1), min_size=len(model.units), max_size=len(model.units)))
    chunk = draw(st.sampled_from((0, 0, 4)))
    local = topology.local_size
    ranks = 1 if ring else draw(st.sampled_from([size for size in range(1, local + 1) if local % size == 0]))
    allowed = ("full", "selective") if chunk else tuple(RECOMPUTE) if ranks == 1 else ("full",)
    recompute = draw(st.lists(st.sampled_from(allowed), min_size=others, max_size=others))
    first = [draw(st.sampled_from(allowed))] * offloaded
    if not chunk:
        first = draw(st.lists(st.sampled_from(allowed), min_size=offloaded, max_size=offloaded))
    step = step_for(
        model,
        topology,
        draw(st.integers(1, 20)),
        strategy=name,
        homes=spell_homes(homes),
        micro_batches_per_visit=draw(st.integers(1, 3)),
        look_ahead=draw(st.integers(1 if ring else 0, 4)),
        gradient_buffers=draw(st.integers(1, 3)),
        recompute=spell_recompute(first + recompute),
        offloaded_layers=offloaded,
        sequence_chunk=chunk,
        early_updates=draw(st.booleans()),
        sequence_ranks=ranks,
        host_homes=draw(st.sampled_from(("none", "none", "state", "all"))),
        **draw(compressions(name, topology.local_size)),
        **draw(scopes_and_caches(name)),
        **draw(grouped(name, topology)),
    )
    return build(step, training=draw(st.booleans()) if training is None else training)


def laid_out(kind: str, **how: Any) -> ActivationPipeline:
    """A strategy of the table whose activations travel, laid out as given."""
    strategy = find(kind)
    assert isinstance(strategy, ActivationPipeline)
    return replace(strategy, **how)
