"""Answers for other machines and lengths, made before anybody asks: a grid of predictions that a page moves in.

A point of the grid is a choice on every axis: links between nodes and inside them, tokens in a row, nodes, devices of a
node. The planner predicts every strategy there, with the settings that suit it here; in between the page interpolates
and says so. Axes are refined level by level, as long as the next level fits the time that is left.
"""

from __future__ import annotations

import html
import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import resources
from itertools import product

from tawpipe.errors import UserError
from tawpipe.plan.machine import Machine
from tawpipe.plan.plan import Plan
from tawpipe.plan.predict import Prediction, predict
from tawpipe.plan.request import PlanRequest
from tawpipe.plan.search import Candidate, fits
from tawpipe.report.page import Section
from tawpipe.schedule.step import StepSpec
from tawpipe.simulate import LinkModel

TITLE = "On other machines"
AXES = ("between", "length", "nodes", "devices", "inside")
"""Names of the axes, in the order in which a point has them: factors, but for numbers of nodes and devices."""
LEVELS = (
    {"between": (0.1, 1, 10), "length": (0.5, 1, 2)},
    {"nodes": (0.5, 1, 2)},
    {"devices": (0.5, 1, 2)},
    {"inside": (0.25, 1, 4)},
    {"between": (0.1, 0.5, 1, 2, 10), "length": (0.25, 0.5, 1, 2, 4)},
    {"between": (0.1, 0.2, 0.5, 1, 2, 5, 10)},
)
"""Factors of the axes that every level sets; the other axes stay as the levels before have set them."""
FIRST_POINTS = math.prod(map(len, LEVELS[0].values()))
NAMES = {
    "between": "Link of a node to the others",
    "length": "Tokens in a row",
    "nodes": "Nodes",
    "devices": "Devices of a node",
    "inside": "Links inside a node",
}
COMPUTING, LINK, TRANSFERS, WAITING = range(4)
LIMITS = ("computing", "the link between nodes", "transfers that nothing hides", "devices that wait for each other")
MOSTLY = 0.9
"""Share of a step in which what limits it is busy."""
MARGIN = 1.2
"""Multiple of the time that a finer grid is expected to take, which a reader is told to give."""
PATIENCE = 2.0
"""Multiple of the time that was given, beyond which a level that turned out to take longer is given up."""

Point = tuple[float, ...]


@dataclass(frozen=True)
class Outcome:
    """A strategy at a point.

    Args:
        limit: one of ``LIMITS``, as an index.
        fits: the memory suffices.
    """

    seconds: float
    limit: int
    fits: bool


class Forecast:
    """Outcomes of a plan's strategies at points, each predicted once.

    Attributes:
        known: by strategy and point; None where the strategy cannot run there with these settings.
        predictions: that were made.
    """

    def __init__(self, plan: Plan) -> None:
        self.request = plan.request
        self.here: Point = tuple(_base(plan.request, axis) for axis in AXES)
        self.candidates = [one for one in plan.candidates if one.step is not None and one.prediction is not None]
        self.known: dict[tuple[str, Point], Outcome | None] = {}
        self.predictions = 0
        for one in self.candidates:
            assert one.prediction is not None
            self.known[one.strategy, self.here] = _outcome(plan.request, one.prediction)

    def at(self, candidate: Candidate, point: Point) -> Outcome | None:
        """The outcome of a candidate at a point."""
        key = candidate.strategy, point
        if key not in self.known:
            assert candidate.step is not None
            asked = request_at(self.request, point)
            try:
                self.known[key] = _outcome(asked, predict(asked, step_at(asked, candidate.step)))
            except UserError:
                self.known[key] = None
            self.predictions += 1
        return self.known[key]

    def along(self, candidate: Candidate, axis: str, value: float) -> Outcome | None:
        """The same where nothing but one axis is another than the plan's."""
        return self.at(
            candidate, tuple(value if name == axis else own for name, own in zip(AXES, self.here, strict=True))
        )


@dataclass(frozen=True)
class Grid:
    """Points of which every outcome is known.

    Args:
        values: of every axis, ascending.
        seconds: that its making took.
    """

    forecast: Forecast
    values: dict[str, tuple[float, ...]]
    seconds: float

    @property
    def points(self) -> list[Point]:
        """All of them, the last axis counting fastest."""
        return list(product(*(self.values[axis] for axis in AXES)))


def make_grid(forecast: Forecast, seconds: float) -> tuple[Grid | None, float]:
    """The finest grid that is made in so many seconds, and what the next finer one would take; 0 if there is none.

    A level is begun if what predictions took so far says that it fits. One that takes twice as long as all were given
    is given up.
    """
    values: dict[str, tuple[float, ...]] = {axis: (one,) for axis, one in zip(AXES, forecast.here, strict=True)}
    begun, made, before = time.perf_counter(), None, forecast.predictions
    # What predictions take is not known before the first ones: those of another length are of the first level.
    for done, one in enumerate(forecast.candidates, 1):
        forecast.along(one, "length", 2)
        took = time.perf_counter() - begun
        if took * FIRST_POINTS > seconds:  # without those that are left
            return None, took * FIRST_POINTS * len(forecast.candidates) / done
    for level in LEVELS:
        finer = {axis: _values(forecast.request, axis, factors) for axis, factors in level.items()}
        finer = {axis: own for axis, own in finer.items() if len(own) > len(values[axis])}
        if not finer:
            continue
        values |= finer
        points = list(product(*(values[axis] for axis in AXES)))
        left = [(c, p) for c in forecast.candidates for p in points if (c.strategy, p) not in forecast.known]
        took = time.perf_counter() - begun
        needed = took + took / max(1, forecast.predictions - before) * len(left)
        if needed > seconds:
            return made, needed
        for one, point in left:
            forecast.at(one, point)
            if time.perf_counter() - begun > seconds * PATIENCE:
                return made, needed * PATIENCE
        made = Grid(forecast, dict(values), time.perf_counter() - begun)
    return made, 0.0


def _base(request: PlanRequest, axis: str) -> float:
    """Where the plan itself is on an axis."""
    return {"nodes": len(request.machine.nodes), "devices": request.machine.nodes[0]}.get(axis, 1)


def _values(request: PlanRequest, axis: str, factors: Sequence[float]) -> tuple[float, ...]:
    """The values on an axis, ascending; the plan's alone where no other makes sense on these machines."""
    machine, base = request.machine, _base(request, axis)
    several = {"between": len(machine.nodes) > 1, "inside": max(machine.nodes) > 1}.get(axis, True)
    link = machine.inside if axis in ("inside", "devices") else machine.between
    known = axis == "length" or math.isfinite(link.bytes_per_s)
    even = len(set(machine.nodes)) == 1 and not machine.between_of
    if not several or not known or not (even or axis not in ("nodes", "devices")):
        return (base,)
    if axis in ("nodes", "devices"):
        return tuple(sorted({max(1, round(base * factor)) for factor in factors}))
    return tuple(factors)


def request_at(request: PlanRequest, point: Point) -> PlanRequest:
    """The request at a point: every device has as many sequences as here."""
    between, length, nodes, devices, inside = point
    machine = replace(
        request.machine,
        between=_faster(request.machine.between, between),
        between_of={node: _faster(link, between) for node, link in request.machine.between_of.items()},
        inside=_faster(request.machine.inside, inside),
    )
    if (nodes, devices) != (_base(request, "nodes"), _base(request, "devices")):
        machine = replace(machine, nodes=(int(devices),) * int(nodes))
    batch = max(1, round(request.global_batch * machine.world_size / request.machine.world_size))
    changed = replace(request, machine=machine, global_batch=batch)
    return changed if length == 1 else changed.with_length(max(2, round(request.sequence_length * length)))


def _faster(link: LinkModel, factor: float) -> LinkModel:
    return link if factor == 1 else replace(link, bytes_per_s=link.bytes_per_s * factor)


def step_at(request: PlanRequest, step: StepSpec) -> StepSpec:
    """The step with its settings on the nodes of a request.

    Raises:
        UserError: they do not go together; and stages of a pipeline are made for the devices that it was planned for.
    """
    if request.topology == step.topology:
        return step
    if step.strategy.weights_stay:
        raise UserError("nodes", str(request.machine.topology), "those that the stages were made for")
    return request.step(replace(step.settings, homes=""))


def _outcome(request: PlanRequest, made: Prediction) -> Outcome:
    seconds, limit = made.step_seconds, WAITING
    nodes = len(request.machine.nodes)
    if made.idle_s <= (1 - MOSTLY) * seconds:
        limit = COMPUTING
    elif nodes > 1 and made.link_bytes / min(request.link_rates) >= MOSTLY * seconds:
        limit = LINK
    elif made.exposed_communication_s >= made.idle_s / 2:
        limit = TRANSFERS
    return Outcome(seconds, limit, fits(request, made.needs))


def what_if(plan: Plan, forecast: Forecast, seconds: float) -> Section:
    """The section of a page in which a reader moves links, lengths and devices.

    Args:
        seconds: that making the grid may take.
    """
    grid, more = make_grid(forecast, seconds)
    further = f" A finer grid takes about {more:.0f} s: tawpipe plan --grid {math.ceil(more * MARGIN)}." if more else ""
    if grid is None:
        words = f"The answers for other links, lengths and nodes were left out: they take more than {seconds:g} s."
        return Section(TITLE, words + further)
    words = (
        "Move a slider: the page answers by itself. Every strategy keeps the settings of this plan, and every device "
        "its number of sequences; a new plan may find better settings. At the marks the seconds are the planner's own. "
        "Between two marks they are interpolated, and the page says so. "
        f"{len(grid.points)} points, {forecast.predictions} predictions, made in {grid.seconds:.1f} s.{further}"
    )
    script = (resources.files("tawpipe.plan") / "what_if.js").read_text(encoding="utf-8")
    return Section(TITLE, words, markup=_markup(plan, grid), script=script)


def _markup(plan: Plan, grid: Grid) -> str:
    """Sliders, an empty table, and the grid as JSON for the script."""
    request = plan.request
    knobs = "".join(_knob(axis, grid, _base(request, axis)) for axis in AXES if len(grid.values[axis]) > 1)
    content = {
        "axes": [{"name": axis, "values": _shown(request.machine, axis, grid, request)} for axis in AXES],
        "sequences": request.global_batch / request.machine.world_size,
        "devices": request.machine.world_size,
        "uneven": len(set(request.machine.nodes)) > 1,
        "limits": LIMITS,
        "chosen": plan.chosen.strategy if plan.chosen else "",
        "strategies": [
            {"name": one.strategy, "points": [_cell(grid.forecast.at(one, point)) for point in grid.points]}
            for one in grid.forecast.candidates
        ],
    }
    text = json.dumps(content, allow_nan=False).replace("<", "\\u003c")
    left_out = [one.strategy for one in plan.candidates if one.prediction is None]
    note = (
        f'<p class="quiet">Not here: {html.escape(", ".join(left_out))}, see the table above.</p>' if left_out else ""
    )
    head = '<tr><th scope="col">strategy</th><th scope="col">s/step</th><th class="share"></th><th>limit</th></tr>'
    return (
        f'<div class="knobs">{knobs}</div><p class="answer" id="answer" aria-live="polite">This needs JavaScript.</p>'
        f'<div class="wide" role="region" tabindex="0" aria-label="{TITLE}, table"><table class="answers">'
        f'<thead>{head}</thead><tbody id="answers"></tbody></table></div>{note}'
        f'<script type="application/json" id="grid">{text}</script>'
    )


def _knob(axis: str, grid: Grid, base: float) -> str:
    """A slider with a mark at every point of the grid. Numbers of nodes and devices have nothing between."""
    values = grid.values[axis]
    marks = "".join(f'<option value="{number}"></option>' for number in range(len(values)))
    step = 1 if axis in ("nodes", "devices") else 0.25
    return (
        f'<div><label for="knob-{axis}">{NAMES[axis]} <output id="value-{axis}" for="knob-{axis}"></output></label>'
        f'<input type="range" id="knob-{axis}" min="0" max="{len(values) - 1}" step="{step}" '
        f'value="{values.index(base)}" list="marks-{axis}"><datalist id="marks-{axis}">{marks}</datalist></div>'
    )


def _shown(machine: Machine, axis: str, grid: Grid, request: PlanRequest) -> list[float]:
    """Values of an axis as they are shown: Gbit/s, GB/s, tokens, numbers."""
    unit = {
        "between": machine.between.bytes_per_s * 8 / 1e9,
        "inside": machine.inside.bytes_per_s / 1e9,
        "length": request.sequence_length,
    }.get(axis, 1)
    return [value * unit if math.isfinite(unit) else 0.0 for value in grid.values[axis]]


def _cell(outcome: Outcome | None) -> list[float] | None:
    return None if outcome is None else [outcome.seconds, outcome.limit, int(outcome.fits)]
