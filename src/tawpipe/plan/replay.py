"""A saved plan, played again."""

from __future__ import annotations

from pathlib import Path

from tawpipe.errors import UserError
from tawpipe.plan.plan import load_plan
from tawpipe.plan.plan_file import planned_settings, request_from
from tawpipe.plan.predict import timeline_of
from tawpipe.simulate import Timeline


def replay(path: Path) -> tuple[Timeline, str]:
    """The step that a plan predicts, and in words what of it was left out, if anything.

    Raises:
        UserError: no such plan, or one without what the clock was given.
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
