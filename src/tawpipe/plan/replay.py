"""A saved plan, played again. Imports plan."""

from __future__ import annotations

from pathlib import Path

from tawpipe.errors import UserError
from tawpipe.plan.answer import load_plan
from tawpipe.plan.question import timeline_of
from tawpipe.plan.record import knobs_from, question_from
from tawpipe.simulate import Timeline


def replay(path: Path) -> Timeline:
    """The step that a plan predicts.

    Raises:
        UserError: no such plan, or one without what the clock was given.
    """
    plan = load_plan(path)
    if not isinstance(plan.get("clock"), dict):
        raise UserError("PLAN", str(path), "a plan with the section `clock`, as `tawpipe plan --save` writes it")
    question = question_from(plan["clock"], where=str(path))
    return timeline_of(question, knobs_from(plan["schedule"], question))
