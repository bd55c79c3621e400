"""Plan files: a request and a choice as plain data, so that a plan can be simulated again without its model.

A saved plan has two parts. The first is for the reader and for ``tawpipe train --plan``. The second, under ``clock``,
is the input of the simulation. Consecutive equal layers are written once, with their count."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field, replace
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

import yaml

from tawpipe.dealing.balance import LayerKind, LayerTime
from tawpipe.errors import UserError
from tawpipe.plan.cost.predict import timeline_of
from tawpipe.plan.cost.profile import Profile
from tawpipe.plan.cost.request import BY_TOKENS, PlanRequest
from tawpipe.plan.machine.machine import machine_from, spell_machine
from tawpipe.schedule.settings import KEPT_BY_PLANS, PLANNED, UNPLANNED, ScheduleSettings, settings_from
from tawpipe.schedule.sizes.footprint import BlockMemory, Widths
from tawpipe.schedule.spec import BlockSpec, ModelSpec, UnitSpec
from tawpipe.schedule.step import StepSpec
from tawpipe.simulate import BlockCost, CodingTimes, MicroBatchSize, Seconds, Timeline

FORMAT = 2
MOST_ALIKE = 100_000
"""Largest count of consecutive equal blocks or units in a valid plan. A plan with a larger count is damaged."""
NUMBERS = (
    "global_batch",
    "micro_batch",
    "sequence_length",
    "memory_bytes",
    "flops",
    "peak_flops",
    "system_bytes",
    "communicator_bytes",
)
"""Fields of a request that are plain numbers."""


def load_plan(path: Path, *, setting: str = "PLAN") -> dict[str, Any]:
    """Read a saved plan, check its format, and return its content.

    Args:
        path: the file.
        setting: name of the setting that names the file, for messages.

    Raises:
        UserError: the file does not exist, or is not a plan of this format.
    """
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(setting, str(path), f"a file that `tawpipe plan --save` writes ({error})") from error
    needed = ("nodes", "model", "reason", "global_batch", "micro_batch", "sequence_length", "weight_bytes", "schedule")
    good = isinstance(content, dict) and content.get("format") == FORMAT and all(name in content for name in needed)
    if not good or not isinstance(content["schedule"], dict):
        raise UserError(setting, str(path), f"a plan of format {FORMAT}")
    return content


@dataclass(frozen=True)
class SavedPlan:
    """Plan that a run follows.

    Args:
        text: the plan as text, as the run's checkpoints store it.
        content: the parsed text.
    """

    text: str
    content: Mapping[str, Any] = field(repr=False)

    @classmethod
    def of(cls, text: str) -> SavedPlan | None:
        """Parse the text of a plan; None if the text is empty."""
        return cls(text, yaml.safe_load(text)) if text else None

    @cached_property
    def request(self) -> PlanRequest | None:
        """Request from which the simulation of the plan can be repeated; None if the plan does not contain it."""
        clock = self.content.get("clock")
        return request_from(clock, where="plan.yaml") if isinstance(clock, dict) else None

    def settings(self, base: ScheduleSettings) -> ScheduleSettings:
        """Return ``base`` with the settings that the plan chooses replaced by the plan's values."""
        return planned_settings(self.content["schedule"], base)

    @property
    def step_s(self) -> float:
        """Predicted seconds of a step; 0 if the plan has no prediction."""
        seconds = self.content.get("step_seconds")
        return float(seconds) if isinstance(seconds, int | float) and seconds > 0 else 0.0

    @property
    def work(self) -> LayerTime | None:
        """Time of documents that the plan measured, and that is equal on all ranks and in a resumed run.

        None if the plan has no measurement, or if the measured rows were too short to show the cost of attention."""
        if self.request is None:
            return None
        profile = self.request.profile
        seen = all(block.forward.per_pair and block.forward.per_token for block in profile.blocks[1:-1])
        return profile.work if seen else None

    def check_model(self, spec: ModelSpec) -> None:
        """Raise UserError if the plan is for another model."""
        expected, actual = self.content["model"], spec.identity
        if expected != actual:
            plan_model, here = (
                f"{identity['parameters']} parameters in {identity['blocks']} blocks"
                + (f", {identity['trained']} of them trained" if "trained" in identity else "")
                + (f", which travel as {identity['travels']} elements (--quantize)" if "travels" in identity else "")
                for identity in (expected, actual)
            )
            raise UserError("--plan", f"a model of {plan_model}", f"a plan for this model: {here}")


def replay(path: Path) -> tuple[Timeline, str]:
    """Simulate the step of a saved plan again.

    Returns the timeline, and a phrase that says which rounds and ranks were simulated if not all were, else ``""``.

    Raises:
        UserError: the file is no plan, or the plan does not contain the input of the simulation.
    """
    plan = load_plan(path)
    if not isinstance(plan.get("clock"), dict):
        raise UserError("PLAN", str(path), "a plan with the section `clock`, as `tawpipe plan --save` writes it")
    request = request_from(plan["clock"], where=str(path))
    step = request.step(planned_settings(plan["schedule"], request.settings))
    timeline = timeline_of(request, step)
    played, ranks = timeline.schedule.step.rounds, len(timeline.schedule.played)
    if played == step.rounds and ranks == request.topology.world_size:
        return timeline, ""
    return timeline, f"{played} of {step.rounds} rounds, {ranks} of {request.topology.world_size} ranks"


def record_of(request: PlanRequest) -> dict[str, Any]:
    """Return the request as plain data for YAML, from which ``request_from`` restores what the simulation needs.

    The request must be specialised to one step (``PlanRequest.of``)."""
    profile, model = request.profile, request.model
    memory = replace(profile.memory, in_chunks={})
    return {
        "machine": spell_machine(request.machine),
        "blocks": _packed(
            [block.kind, block.backward_reads_weights, block.needs_backward, _cost(cost), cost.window, cost.unpack_s]
            for block, cost in zip(model.blocks, profile.blocks, strict=True)
        ),
        "block_units": [list(block.units) for block in model.blocks],
        "units": _packed([unit.numel, unit.trainable, unit.packed, unit.active] for unit in model.units),
        "profile": {
            "update_s": profile.update_s,
            "update_of": list(profile.update_of),
            "memory": json.loads(json.dumps(asdict(memory))),  # turns tuples into lists, because YAML has no tuples
            "source": profile.source,
            "coding": json.loads(json.dumps(asdict(profile.coding))),
        },
        "size": asdict(request.size),
        "mean": asdict(request.mean) if request.mean else None,
        "widths": asdict(request.widths),
        "settings": {name: getattr(request.settings, name) for name in UNPLANNED},
        "dealt": _packed(sorted(request.dealt, reverse=True)),
        "cuts": request.cuts,
        "work": [list(astuple(kind)) for kind in request.work.kinds] if request.dealt else [],
        **{name: getattr(request, name) for name in NUMBERS},
    }


def request_from(content: Mapping[str, Any], *, where: str) -> PlanRequest:
    """Restore the request of a saved plan from the data that ``record_of`` returned.

    Args:
        content: the data.
        where: name of the file, for messages.

    Raises:
        UserError: the plan is damaged.
    """
    try:
        blocks = list(_unpacked(content["blocks"]))
        of_blocks = content["block_units"]
        units = [
            UnitSpec(numel, trainable, tuple(b for b, of_block in enumerate(of_blocks) if u in of_block), *others)
            for u, (numel, trainable, *others) in enumerate(_unpacked(content["units"]))
        ]
        if {u for of_block in of_blocks for u in of_block} != set(range(len(units))):
            raise ValueError("units that no block has, or the other way round")
        if not all(isinstance(size, int) for unit in units for size in (unit.numel, unit.packed, unit.active)):
            raise ValueError("sizes of units that are no whole numbers")
        specs = tuple(
            BlockSpec(tuple(of_block), kind, reads, needs)
            for of_block, (kind, reads, needs, *_) in zip(of_blocks, blocks, strict=True)
        )
        costs = tuple(_block_cost(*parts) for _, _, _, *parts in blocks)
        work, mean = content.get("work"), content.get("mean")
        return PlanRequest(
            model=ModelSpec(specs, tuple(units)),
            profile=_profile(costs, **content["profile"]),
            machine=machine_from(content["machine"], where=where),
            size=_size(**content["size"]),
            mean=_size(**mean) if mean else None,
            widths=_widths(**content["widths"]),
            settings=ScheduleSettings(**content["settings"]),
            dealt=tuple(_unpacked(content.get("dealt", ()))),
            cuts=content.get("cuts", False),
            work=LayerTime(tuple(LayerKind(*kind) for kind in work)) if work else BY_TOKENS,
            **{name: content[name] for name in NUMBERS},
        )
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise UserError("PLAN", where, f"a plan that `tawpipe plan --save` or a run wrote ({error!r})") from error


def settings_of(step: StepSpec) -> dict[str, Any]:
    """Return name -> value of the settings that a plan chooses, with the values of ``step``."""
    return {name: getattr(step.settings, name) for name in PLANNED}


def planned_settings(schedule: Mapping[str, Any], base: ScheduleSettings) -> ScheduleSettings:
    """Return ``base`` with the settings from the section ``schedule`` of a plan.

    Settings in ``KEPT_BY_PLANS`` that the plan leaves out keep their values.

    Raises:
        UserError: a name is unknown, or a value has the wrong type.
    """
    planned = settings_from(schedule, where="PLAN: schedule")
    # A plan written by hand may leave out the settings in KEPT_BY_PLANS.
    chosen = [name for name in PLANNED if name in schedule or name not in KEPT_BY_PLANS]
    settings = replace(base, **{name: getattr(planned, name) for name in chosen})
    return settings if settings.sequence_chunk else replace(settings, offload_dir="")  # whole rows use no files


def _size(*, within: Iterable[Sequence[float]] = (), **parts: Any) -> MicroBatchSize:
    return MicroBatchSize(**parts, within=tuple((int(window), pairs) for window, pairs in within))


def _widths(*, optimizer_states: float | list[float], **widths: int) -> Widths:
    of_units = tuple(optimizer_states) if isinstance(optimizer_states, list) else optimizer_states
    return Widths(optimizer_states=of_units, **widths)


def _profile(
    blocks: tuple[BlockCost, ...],
    *,
    update_s: float,
    source: str,
    update_of: Iterable[float],
    memory: Mapping[str, Any],
    coding: Mapping[str, Any] | None = None,
) -> Profile:
    """Return the profile whose fields ``record_of`` wrote as plain data."""
    known = BlockMemory(**memory)
    lines = {
        kind: {name: (fixed, per_token) for name, (fixed, per_token) in of_kind.items()}
        for kind, of_kind in known.working.items()
    }
    coding_items = (coding or {}).items()
    each: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in coding_items}
    memory_of = replace(known, working=lines)
    return Profile(blocks, update_s, memory_of, source, update_of=tuple(update_of), coding=CodingTimes(**each))


def _cost(cost: BlockCost) -> list[list[float]]:
    """Return the coefficients of a block's cost as nested lists of numbers."""
    parts = cost.forward, cost.backward, cost.attention
    return [[part.fixed, part.per_token, part.per_pair, *[True] * part.in_turn] for part in parts]


def _block_cost(parts: Sequence[Sequence[float]], window: int | None, unpack_s: float) -> BlockCost:
    """Return the block cost for coefficients that ``_cost`` returned."""
    forward, backward, attention = (Seconds(part[0], part[1], part[2], len(part) > 3) for part in parts)
    return BlockCost(forward, backward, attention, window, unpack_s)


def _packed(rows: Iterable[Any]) -> list[list[Any]]:
    """Run-length encode ``rows``: each run of equal neighbours becomes a pair of count and value.

    >>> _packed("aab")
    [[2, 'a'], [1, 'b']]
    """
    return [[len(list(same)), row] for row, same in groupby(rows)]


def _unpacked(rows: Iterable[list[Any]]) -> Iterable[Any]:
    """Yield the values that ``_packed`` encoded, each as often as its count.

    Raises:
        ValueError: a count is larger than ``MOST_ALIKE``.
    """
    for count, row in rows:
        if count > MOST_ALIKE:
            raise ValueError(f"{count} equal ones")
        for _ in range(count):
            yield row
