"""Builders of weight schedules: pure functions from sizes, topology and knobs to a schedule. Imports topology and schedule only.

``build_training`` makes TawPipe (placements ``spread``, ``striped``, ``whole``) and flat sharding (placement ``flat``: one
group of all ranks). ``build_evaluation`` makes the forward-only schedule of the same placement. The order of visits is the
same for all; the routes differ.
"""

from __future__ import annotations

from collections.abc import Iterator

from tawpipe.errors import UserError
from tawpipe.schedule.actions import Action, Lane, Op
from tawpipe.schedule.placement import PLACEMENTS, Home, place
from tawpipe.schedule.routes import Route, make_route
from tawpipe.schedule.spec import Knobs, ModelSpec, Schedule
from tawpipe.schedule.visits import Visit, forward_visits, training_visits
from tawpipe.topology import Topology


def place_units(model: ModelSpec, topology: Topology, placement: str) -> tuple[Home, ...]:
    """The homes of all units. They depend on the placement alone, so that schedules of one placement share one storage."""
    return tuple(place(placement, topology, unit.numel, unit.blocks[0]) for unit in model.units)


def build_training(model: ModelSpec, topology: Topology, knobs: Knobs) -> Schedule:
    """One training step: forward, backward, gradients home, norm, update.

    Raises:
        UserError: a knob has a value that cannot work, or nothing in the model is trainable.
    """
    _check(topology, knobs)
    if not any(unit.trainable for unit in model.units):
        raise UserError("--model", "no trainable parameter", "at least one parameter must require a gradient")
    return _build("flat" if knobs.placement == "flat" else "tawpipe", model, topology, knobs, training=True)


def build_evaluation(model: ModelSpec, topology: Topology, knobs: Knobs) -> Schedule:
    """One forward pass with its loss."""
    _check(topology, knobs)
    return _build("evaluation", model, topology, knobs, training=False)


def _check(topology: Topology, knobs: Knobs) -> None:
    if knobs.placement not in PLACEMENTS:
        raise UserError("schedule.placement", knobs.placement, f"one of {', '.join(PLACEMENTS)}")
    for name, least in (("micro_batches_per_visit", 1), ("look_ahead", 0), ("gradient_buffers", 1)):
        if getattr(knobs, name) < least:
            raise UserError(f"schedule.{name}", getattr(knobs, name), f"at least {least}")
    assert len(knobs.micro_batches) == topology.world_size


def _build(name: str, model: ModelSpec, topology: Topology, knobs: Knobs, *, training: bool) -> Schedule:
    homes = place_units(model, topology, knobs.placement)
    visits = training_visits(model, knobs) if training else forward_visits(model, knobs)
    routes = [make_route(rank, topology, model, knobs, homes, visits) for rank in range(topology.world_size)]
    programs = tuple(tuple(_program(route, visits, training=training)) for route in routes)
    pools = tuple(route.slots.pools() for route in routes)
    return Schedule(name, topology, model, knobs, homes, programs, pools, training)


def _program(route: Route, visits: tuple[Visit, ...], *, training: bool) -> Iterator[Action]:
    model, knobs = route.model, route.knobs
    ahead = 0
    own: tuple[int, ...] = ()
    losses: list[str] = []
    for visit in visits:
        if visit.weights is not None:
            while ahead <= min(visit.weights + knobs.look_ahead, len(route.with_weights) - 1):
                yield from route.pull(route.with_weights[ahead])
                ahead += 1
        own = knobs.in_round(route.rank, visit.round)
        weights = tuple(
            dict.fromkeys(
                route.full[visit.weights, unit] for unit in model.blocks[visit.block].units if visit.weights is not None
            )
        )
        head = model.blocks[visit.block].kind == "head"
        if head:
            losses += [f"loss.{m}" for m in own]
        if visit.backward:
            yield from _backward(route, visit, own, weights)
        else:
            for m in own:
                yield _forward(model, visit, m, weights, keep=training and _first_backward(model) <= visit.block)
        if visit.gradients is not None:
            yield from route.push(visit)
    yield from route.finish()
    yield from _end_of_step(route, losses, training=training)


def _first_backward(model: ModelSpec) -> int:
    return min(i for i, block in enumerate(model.blocks) if block.needs_backward)


def _forward(model: ModelSpec, visit: Visit, m: int, weights: tuple[str, ...], *, keep: bool) -> Action:
    """Boundary activations: ``x.m.b`` is the input of block b for micro-batch m, ``ctx.m`` what every layer is called with besides."""
    b = visit.block
    if b == 0:
        return Action(Op.FORWARD, Lane.COMPUTE, weights, (f"x.{m}.1", f"ctx.{m}"), block=0, micro_batch=m)
    source = f"x.{m}.{b}"
    if model.blocks[b].kind == "head":
        reads, writes, frees = (*weights, source, f"ctx.{m}"), (f"loss.{m}",), (source, f"ctx.{m}")
    else:
        reads, writes = (*weights, source, f"ctx.{m}"), (f"x.{m}.{b + 1}",)
        frees = () if keep else (source,)
    return Action(Op.FORWARD, Lane.COMPUTE, reads, writes, frees, block=b, micro_batch=m)


def _backward(route: Route, visit: Visit, own: tuple[int, ...], weights: tuple[str, ...]) -> Iterator[Action]:
    model, b = route.model, visit.block
    buffers = route.gradient_buffers(visit) if visit.gradients is not None else {}
    head = model.blocks[b].kind == "head"
    first = _first_backward(model)
    for i, m in enumerate(own):
        reads, writes, frees = [*weights], [], []
        if head:
            reads += [f"x.{m}.{b}", f"ctx.{m}"]
            writes += [f"loss.{m}"]
            frees += [f"x.{m}.{b}"]
        else:
            reads += [f"dx.{m}.{b + 1}", f"ctx.{m}"]
            frees += [f"dx.{m}.{b + 1}"]
            if b > 0:
                reads.append(f"x.{m}.{b}")
                frees.append(f"x.{m}.{b}")
        if b > first:
            writes.append(f"dx.{m}.{b}")
        else:
            frees.append(f"ctx.{m}")
        for buffer, accumulate in buffers.values():
            writes.append(buffer)
            if accumulate or i > 0:
                reads.append(buffer)
        yield Action(Op.BACKWARD, Lane.COMPUTE, tuple(reads), tuple(writes), tuple(frees), block=b, micro_batch=m)
    if not own:
        for unit, (buffer, accumulate) in buffers.items():
            if not accumulate:
                yield Action(Op.ZERO, Lane.COMPUTE, (), (buffer,), unit=unit)


def _end_of_step(route: Route, losses: list[str], *, training: bool) -> Iterator[Action]:
    mine = [
        unit for unit, home in enumerate(route.homes) if route.rank in home.ranks and route.model.units[unit].trainable
    ]
    lane = Lane.INTER_G if route.topology.world_size > 1 else Lane.COMPUTE
    gradients = tuple(f"home.g.{unit}" for unit in mine) if training else ()
    yield Action(Op.NORM, lane, (*gradients, *losses), ("norm",), tuple(losses), group="world")
    if not training:
        return
    for unit in sorted(mine, key=lambda u: route.model.units[u].blocks[0]):
        names = (f"home.w.{unit}", f"home.g.{unit}")
        yield Action(Op.UPDATE, Lane.COMPUTE, ("norm", *names), names, unit=unit)
