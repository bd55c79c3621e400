"""How a step ends: the norm of all gradients, and the updates.

With clipping or the check for finite numbers every UPDATE waits for NORM, and so for the last gradient of all. Without
them a unit is updated as soon as its own gradient is complete, scaled by the number of tokens, which COUNT has found at
the step's beginning. Either way the next step's first weights travel as soon as they are updated.

Where homes are in the host's memory updates run on a lane of their own, HOME, which brings the state of a unit to the
device and back (landing.py).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import pairwise

from tawpipe.schedule.actions import Action, Lane, Op
from tawpipe.schedule.buffers import COUNT, NORM, Buffer, Pool, home_gradient, home_weight, loss
from tawpipe.schedule.landing import Landing, Raising
from tawpipe.schedule.step import StepSpec


class StepEnd:
    """What closes a step on one rank: NORM, and in training UPDATE of every trainable unit at home here.

    NORM reads the gradients of first copies only: the sum over the world counts every gradient once. In training it
    adds to what ``norm`` holds, so that a number that was not finite is not forgotten.
    """

    def __init__(self, rank: int, step: StepSpec, *, training: bool) -> None:
        model, homes, several = step.model, step.homes, step.topology.world_size > 1
        units = range(len(homes)) if training else ()
        mine = [u for u in units if model.units[u].trainable and homes[u].index(rank) is not None]
        self._units = sorted(mine, key=lambda u: model.units[u].blocks[0])
        self._gradients = tuple(home_gradient(unit) for unit in mine if rank in homes[unit].ranks)
        self._losses = tuple(map(loss, step.losses_of(rank)))
        self._lane = Lane.INTER_G if several else Lane.COMPUTE
        self._training, self._early = training, training and step.settings.early_updates
        # A push still under way must not stop the device, nor a lane of homes on which others' gradients come next, so
        # updates stay behind by as many visits as gradients can be on their way home.
        self._lag = 2 * step.settings.gradient_buffers if several else 0
        self._landing = Landing(step) if training and step.homes_in_host else None
        self._raising = Raising(step) if step.copies_in_host else None
        self._updates = Lane.HOME if self._landing else Lane.COMPUTE

    @property
    def pools(self) -> tuple[Pool, ...]:
        """The buffers that a closed program uses besides its own."""
        return tuple(pool for passing in (self._landing, self._raising) if passing for pool in passing.pools)

    def close(self, program: Sequence[Action]) -> Iterator[Action]:
        """The actions of a step with its end."""
        for passing in filter(None, (self._raising, self._landing)):
            program = tuple(passing.through(program))
        if not self._early:
            yield from program
            yield self._norm(*[NORM] * self._training)
            yield from (self._update(unit, NORM) for unit in self._units)
            return
        updated = {action.unit for action in program if action.op is Op.UPDATE}
        self._units = [unit for unit in self._units if unit not in updated]
        yield Action(Op.COUNT, self._lane, (), (COUNT,), group="world")
        due = self._due(program)
        for index, action in enumerate(program):
            yield action
            yield from (self._update(unit, COUNT) for unit in due.pop(index, ()))
        for units in due.values():
            yield from (self._update(unit, COUNT) for unit in units)
        yield self._norm(NORM, COUNT)

    def _due(self, program: Sequence[Action]) -> dict[int, list[int]]:
        """The units that are updated after the action with an index, or, under the program's length, at its end."""
        computing = [(i, action) for i, action in enumerate(program) if action.lane is Lane.COMPUTE]
        visits = [i for (i, a), (_, b) in pairwise(computing) if (a.op, a.block, a.unit) != (b.op, b.block, b.unit)]
        complete = {buffer: i for i, action in enumerate(program) for buffer in action.writes}
        due: dict[int, list[int]] = {}
        for unit in self._units:
            visit = bisect_left(visits, complete[home_gradient(unit)]) + self._lag
            due.setdefault(visits[visit] if visit < len(visits) else len(program), []).append(unit)
        return due

    def _norm(self, *before: Buffer) -> Action:
        reads = (*self._gradients, *self._losses, *before)
        return Action(Op.NORM, self._lane, reads, (NORM,), self._losses, group="world")

    def _update(self, unit: int, after: Buffer) -> Action:
        home = (home_weight(unit), home_gradient(unit))
        return Action(Op.UPDATE, self._updates, (after, *home), home, unit=unit)
