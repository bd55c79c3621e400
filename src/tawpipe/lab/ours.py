"""This project's rows in the lab: every strategy of the table, and what becomes of TawPipe without one of its ideas.

A row is a strategy and settings, nothing else; ``ours_run`` runs it on both kinds of workload.
``no-grouping`` and ``no-overlap`` are to be read against ``tawpipe-spread`` with ``reuse: false``, or what buffers hold
would count as grouping or overlap.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from tawpipe.errors import UserError
from tawpipe.lab.bounds import workload_model
from tawpipe.lab.real_modules import real_model_spec
from tawpipe.lab.workload import RealWorkload, TimedWorkload, Workload
from tawpipe.schedule.sets import share_in_sets
from tawpipe.schedule.settings import RENAMED, ScheduleSettings
from tawpipe.schedule.step import Schedule, StepSpec
from tawpipe.schedule.strategies import Spread, build, register, step_of, strategies
from tawpipe.schedule.transform import without_overlap
from tawpipe.topology import Topology


class NoGrouping(Spread):
    """TawPipe as if every device were a node."""

    name = "no-grouping"
    summary = "tawpipe-spread as if every process were a node"
    candidate = False

    def view(self, topology: Topology) -> Topology:
        return Topology.grid(topology.world_size, 1)


class NoOverlap(Spread):
    """TawPipe with everything in one lane."""

    name = "no-overlap"
    summary = "tawpipe-spread that computes or transfers, never both"
    candidate = False

    def build(self, step: StepSpec, *, training: bool = True, ranks: Sequence[int] | None = None) -> Schedule:
        schedule = super().build(step, training=training, ranks=ranks)
        return without_overlap(schedule) if training else schedule

    def one_stands_for_all(self, *, inside_is_even: bool) -> bool:
        return False


register(NoGrouping())
register(NoOverlap())
OWN_NAMES = {"hsdp": "hsdp-ours"}
"""Strategy -> its row, where a rival's row has the strategy's name."""
MADE_FOR: dict[str, dict[str, Any]] = {
    "tawpipe-whole": {"reuse": False},
    "no-grouping": {"reuse": False},
    "no-overlap": {"reuse": False, "look_ahead": 0},
}
"""Settings with which a row measures what its paper describes, or only what it leaves out; knobs beat them."""


@dataclass(frozen=True)
class OurSettings:
    """The knobs of a row.

    Args:
        schedule: with more buffers than a user's, so that no strategy waits for want of one.
        parts_per_layer: every layer of the workload is cut into so many; a ring needs a layer per device.
        clip_norm: largest global gradient norm; None for no clipping, and updates as soon as gradients are complete.
        strict: check sequence number and action of every message.
    """

    schedule: ScheduleSettings
    parts_per_layer: int = 1
    clip_norm: float | None = 1.0
    strict: bool = True

    def spelled_out(self) -> dict[str, Any]:
        """All knobs as plain data, which ``settings_of`` reads back."""
        schedule = {name: value for name, value in vars(self.schedule).items() if value is not None}
        return {name: value for name, value in {**schedule, **vars(self)}.items() if name in KNOBS}


OWN_KNOBS = tuple(one.name for one in fields(OurSettings) if one.name != "schedule")
SAID = ("strategy", "early_updates")
"""Settings that a row's name and ``clip_norm`` say."""
KNOBS = (*OWN_KNOBS, *(one.name for one in fields(ScheduleSettings) if one.name not in SAID))


def rows() -> dict[str, str]:
    """Row -> strategy."""
    return {OWN_NAMES.get(name, name): name for name in strategies(runs=True)}


def settings_of(name: str, knobs: Mapping[str, Any]) -> OurSettings:
    """The settings of a row; ``knobs`` beat what its name stands for.

    Raises:
        UserError: no such row or knob.
    """
    if name not in rows():
        raise UserError("strategy", name, f"one of {', '.join(rows())}")
    for knob in knobs:
        if knob not in KNOBS:
            expected = f"its name of today: {RENAMED[knob]}" if knob in RENAMED else f"one of {', '.join(KNOBS)}"
            raise UserError(f"knob of {name}", knob, expected)
    usual = {"micro_batches_per_visit": 1, "look_ahead": 3, "gradient_buffers": 3, **MADE_FOR.get(name, {})}
    wanted = {**usual, **{knob: value for knob, value in knobs.items() if knob not in OWN_KNOBS}}
    early = knobs.get("clip_norm", 1.0) is None
    schedule = ScheduleSettings(strategy=rows()[name], early_updates=early, **wanted)
    return OurSettings(schedule, **{knob: value for knob, value in knobs.items() if knob in OWN_KNOBS})


def schedule_of(name: str, workload: Workload, topology: Topology, knobs: Mapping[str, Any]) -> Schedule:
    """The schedule that a row runs.

    Raises:
        UserError: the strategy cannot run this workload on this topology.
    """
    settings = settings_of(name, knobs)
    work = workload.split(settings.parts_per_layer)
    model = real_model_spec(work) if isinstance(work, RealWorkload) else workload_model(work)
    chosen = settings.schedule
    if isinstance(workload, TimedWorkload) and workload.keys_bytes and "sequence_ranks" not in knobs:
        chosen = replace(chosen, sequence_ranks=topology.local_size)
    elif isinstance(workload, TimedWorkload) and chosen.sequence_ranks not in (None, 1) and not workload.keys_bytes:
        raise UserError("sequence_ranks", chosen.sequence_ranks, "1, or a workload with keys_bytes")
    step = step_of(model, topology, chosen, share_in_sets(workload.micro_batches, topology, chosen))
    selective = any(step.recomputes(block) == "selective" for block in range(len(model.blocks)))
    if selective and isinstance(workload, TimedWorkload):
        expected = "full or none: a timed layer has no attention of its own"
        raise UserError("recompute", settings.schedule.recompute, expected)
    return build(step)
