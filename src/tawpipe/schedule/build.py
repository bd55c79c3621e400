"""Builders of weight schedules: pure functions from sizes, topology and knobs to a schedule.

Imports topology and schedule only. ``build_training`` makes TawPipe (placements ``spread``, ``striped``, ``whole``),
flat sharding (``flat``: one group of all ranks), HSDP (``hybrid``: one copy of everything per node) and WeiPipe
(``ring``, see weipipe.py). ``build_evaluation`` makes the forward-only schedule of the same placement. The order of
visits is the same for all but the ring; the routes differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tawpipe.errors import UserError
from tawpipe.schedule.actions import Action
from tawpipe.schedule.blocks import backward, forward, left_behind, offload, reload
from tawpipe.schedule.placement import ALL_PLACEMENTS, AT_ONE_PLACE, Home, place, spell_homes
from tawpipe.schedule.residency import plan_residency
from tawpipe.schedule.routes.collective import CollectiveRoute
from tawpipe.schedule.routes.ring import place_on_ring
from tawpipe.schedule.routes.route import Route
from tawpipe.schedule.routes.staggered import ExchangeRoute
from tawpipe.schedule.routes.weipipe import build_weipipe
from tawpipe.schedule.spec import KEPT, WIRES, Knobs, ModelSpec, Pool, Schedule
from tawpipe.schedule.step_end import StepEnd
from tawpipe.schedule.visits import Visit, forward_visits, training_visits
from tawpipe.topology import Topology

NAMES = {"flat": "flat", "hybrid": "hsdp", "ring": "weipipe"}
"""Placement to the name of the strategy, where that is not ``tawpipe``."""
SCOPES = ("visit", "step")
FIXED_SCOPES = {
    ("weights_scope", "flat"): "there is no group that could keep slices between one rank and all of them",
    ("gradients_scope", "flat"): "there is no group in which gradients could add up between one rank and all of them",
    ("weights_scope", "hybrid"): "every node has its own home of every unit and pulls nothing",
    (
        "weights_scope",
        "ring",
    ): "every rank is a group of its own, and weights go on to the next as soon as they were used",
    ("gradients_scope", "ring"): "gradients add up on their way round the ring, for the whole step already",
}

PLAIN_WIRE = {
    "hybrid": "between nodes it sums up in an all-reduce, in the type of the gradients",
    "ring": "numbers pass every process, and would be rounded each time",
}
"""Placement to the reason why nothing travels in 8 bits."""


def place_units(model: ModelSpec, topology: Topology, placement: str, homes: tuple[int, ...] = ()) -> tuple[Home, ...]:
    """The homes of all units. They depend on no other knob: schedules of one placement share one storage.

    Raises:
        UserError: ``ring`` with fewer layers than ranks.
    """
    if placement == "ring":
        return place_on_ring(model, topology)
    at: tuple[int | None, ...] = homes or (None,) * len(model.units)
    return tuple(
        place(placement, topology, unit.numel, unit.blocks[0], where)
        for unit, where in zip(model.units, at, strict=True)
    )


def build_training(
    model: ModelSpec, topology: Topology, knobs: Knobs, *, ranks: Sequence[int] | None = None
) -> Schedule:
    """One training step: forward, backward, gradients home, norm, update.

    Args:
        ranks: those whose programs are made, all by default; see ``simulate.fold``. The others' are empty, so that such
            a schedule can be played by the clock and not be run.

    Raises:
        UserError: a knob has a value that cannot work, or nothing in the model is trainable.
    """
    _check(model, topology, knobs)
    if not any(unit.trainable for unit in model.units):
        raise UserError("--model", "no trainable parameter", "at least one parameter must require a gradient")
    if knobs.placement == "ring" and topology.world_size > 1:
        return build_weipipe(model, topology, knobs, training=True)
    return _build(NAMES.get(knobs.placement, "tawpipe"), model, topology, knobs, training=True, ranks=ranks)


def build_evaluation(model: ModelSpec, topology: Topology, knobs: Knobs) -> Schedule:
    """One forward pass with its loss.

    Raises:
        UserError: a knob has a value that cannot work.
    """
    _check(model, topology, knobs)
    if knobs.placement == "ring" and topology.world_size > 1:
        return build_weipipe(model, topology, knobs, training=False)
    return _build("evaluation", model, topology, knobs, training=False)


def _check(model: ModelSpec, topology: Topology, knobs: Knobs) -> None:
    if knobs.placement not in ALL_PLACEMENTS:
        raise UserError("schedule.placement", knobs.placement, f"one of {', '.join(ALL_PLACEMENTS)}")
    for name, least in (("micro_batches_per_visit", 1), ("look_ahead", 0), ("gradient_buffers", 1)):
        if getattr(knobs, name) < least:
            raise UserError(f"schedule.{name}", getattr(knobs, name), f"at least {least}")
    if knobs.kept_units < 0 or (knobs.kept_units and knobs.placement not in ("spread", "striped")):
        raise UserError("schedule.kept_units", knobs.kept_units, "0, or more under placement spread or striped")
    if knobs.kept_units and knobs.weights_scope == "step":
        raise UserError("schedule.kept_units", knobs.kept_units, "0 at weights_scope step, which keeps all of them")
    _check_homes(model, topology, knobs)
    for name in ("weights_scope", "gradients_scope"):
        scope = getattr(knobs, name)
        if scope not in SCOPES:
            raise UserError(f"schedule.{name}", scope, f"one of {', '.join(SCOPES)}")
        reason = FIXED_SCOPES.get((name, knobs.placement))
        if scope != "visit" and reason:
            raise UserError(f"schedule.{name}", scope, f"visit under placement {knobs.placement}: {reason}")
    for name in ("weights_wire", "gradients_wire"):
        wire = getattr(knobs, name)
        if wire not in WIRES:
            raise UserError(f"schedule.{name}", wire, f"one of {', '.join(WIRES)}")
        if wire != "dtype" and knobs.placement in PLAIN_WIRE:
            raise UserError(f"schedule.{name}", wire, f"dtype under {knobs.placement}: {PLAIN_WIRE[knobs.placement]}")
    if knobs.gradients_wire != "dtype" and knobs.placement == "flat" and topology.local_size > 1:
        reason = "every process would send to every other, which is more than the ring sends in full"
        raise UserError("schedule.gradients_wire", knobs.gradients_wire, f"dtype under flat: {reason}")
    layers = sum(block.kind == "layer" for block in model.blocks)
    if not 0 <= knobs.offloaded_layers <= layers:
        raise UserError("schedule.offloaded_layers", knobs.offloaded_layers, f"0 to {layers}, the layers of the model")
    if knobs.offloaded_layers and knobs.placement == "ring":
        raise UserError("schedule.offloaded_layers", knobs.offloaded_layers, "0 under placement ring")
    if any(knobs.keeps(block) for block in range(1, knobs.offloaded_layers + 1)):
        raise UserError(
            "schedule.offloaded_layers",
            knobs.offloaded_layers,
            "layers that recompute everything: what the others keep instead of their input stays on the device",
        )
    kinds = {block.kind for block, how in zip(model.blocks, knobs.recompute, strict=False) if how != "full"}
    if unknown := set(knobs.recompute) - set(KEPT):
        raise UserError("schedule.recompute", sorted(unknown), f"of {', '.join(KEPT)}")
    assert len(knobs.recompute) in (0, len(model.blocks)) and kinds <= {"layer"}
    assert len(knobs.micro_batches) == topology.world_size and topology.is_even


def _check_homes(model: ModelSpec, topology: Topology, knobs: Knobs) -> None:
    if not knobs.homes:
        return
    said = spell_homes(knobs.homes)
    if knobs.placement not in AT_ONE_PLACE:
        raise UserError(
            "schedule.homes", said, f"nothing under {knobs.placement}: it is for {' and '.join(AT_ONE_PLACE)}"
        )
    places, what = (topology.num_nodes, "nodes") if knobs.placement == "striped" else (topology.world_size, "processes")
    if len(knobs.homes) != len(model.units) or not 0 <= min(knobs.homes) <= max(knobs.homes) < places:
        raise UserError(
            "schedule.homes", said, f"{len(model.units)} {what}, one for every unit, from 0 to {places - 1}"
        )


def _build(
    name: str,
    model: ModelSpec,
    topology: Topology,
    knobs: Knobs,
    *,
    training: bool,
    ranks: Sequence[int] | None = None,
) -> Schedule:
    homes = place_units(model, topology, knobs.placement, knobs.homes)
    visits = training_visits(model, knobs) if training else forward_visits(model, knobs)
    residency = plan_residency(model, topology, homes, knobs, visits)
    kind = _kind_of_route(topology, knobs.placement)
    programs: list[tuple[Action, ...]] = [()] * topology.world_size
    pools: list[tuple[Pool, ...]] = [()] * topology.world_size
    for rank in range(topology.world_size) if ranks is None else ranks:
        route = kind(rank, topology, model, knobs, homes, visits, residency)
        end = StepEnd(rank, topology, model, homes, knobs, training=training)
        programs[rank] = tuple(end.close(tuple(_program(route, visits, training=training))))
        pools[rank] = route.slots.pools()
    return Schedule(name, topology, model, knobs, homes, tuple(programs), tuple(pools), training)


def _kind_of_route(topology: Topology, placement: str) -> type[Route]:
    """How weights reach a device and gradients go home. ``striped`` on one node is one hop of collectives."""
    staggered = placement == "whole" and topology.world_size > 1
    staggered |= placement == "striped" and topology.num_nodes > 1
    return ExchangeRoute if staggered else CollectiveRoute


def _program(route: Route, visits: tuple[Visit, ...], *, training: bool) -> Iterator[Action]:
    model, knobs = route.model, route.knobs
    ahead = 0
    for position, visit in enumerate(visits):
        weights: tuple[str, ...] = ()
        if visit.weights is not None:
            while ahead <= min(visit.weights + knobs.look_ahead, len(route.with_weights) - 1):
                yield from route.pull(route.with_weights[ahead])
                ahead += 1
            weights = tuple(route.full[visit.weights, unit] for unit in model.blocks[visit.block].units)
        own = knobs.in_round(route.rank, visit.round)
        kept = knobs.keeps(visit.block) if training else ""
        for soon in visits[position + 1 : position + 2]:  # a visit ahead, so that it comes back while this one computes
            if soon.backward and knobs.offloads(soon.block):
                coming = knobs.in_round(route.rank, soon.round)
                yield from (reload(soon.block, m, number) for number, m in enumerate(coming))
        if visit.backward:
            gradients = route.gradient_buffers(visit) if visit.gradients is not None else {}
            yield from backward(model, visit.block, own, weights, gradients, kept=kept, knobs=knobs)
        else:
            keep = training and visit.block >= model.first_backward
            for number, m in enumerate(own):
                left = left_behind(model, knobs, visit.block, m) if training else ()
                yield forward(model, visit.block, m, weights, keep=keep, kept=kept, left=left)
                if keep and knobs.offloads(visit.block):
                    yield offload(visit.block, m, number)
        if visit.gradients is not None:
            yield from route.push(visit)
    yield from route.finish()
