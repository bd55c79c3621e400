"""A saved plan, played again. Imports plan."""

from __future__ import annotations

from pathlib import Path

from tawpipe.errors import UserError
from tawpipe.plan.plan import load_plan
from tawpipe.plan.plan_file import knobs_from, question_from
from tawpipe.plan.request import timeline_of
from tawpipe.simulate import Timeline


def replay(path: Path) -> tuple[Timeline, str]:
    """The step that a plan predicts, and in words what of it was left out, if anything.

    Raises:
        UserError: no such plan, or one without what the clock was given.
    """
    plan = load_plan(path)
    if not isinstance(plan.get("clock"), dict):
        raise UserError("PLAN", str(path), "a plan with the section `clock`, as `tawpipe plan --save` writes it")
    question = question_from(plan["clock"], where=str(path))
    knobs = knobs_from(plan["schedule"], question)
    timeline = timeline_of(question, knobs)
    played, ranks = timeline.schedule.knobs.rounds, len(timeline.schedule.played)
    if played == knobs.rounds and ranks == question.topology.world_size:
        return timeline, ""
    return timeline, f"{played} of {knobs.rounds} rounds, {ranks} of {question.topology.world_size} ranks"
