"""End of a step: the norm of all gradients, and the optimizer updates.

With clipping or the check for finite numbers, every UPDATE waits for NORM, and so for the last gradient of all. Without
them, a unit is updated as soon as its own gradient is complete. The update is scaled by the number of tokens, which
COUNT computes at the beginning of the step. In both cases the next step's first weights travel as soon as they are
updated.

If homes are in CPU memory, updates run on a lane of their own, HOME, which copies the state of a unit to the device and
back (landing.py).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from tawpipe.schedule.actions import Action, Lane, Op
from tawpipe.schedule.buffers import BALANCE, COUNT, NORM, Buffer, Pool, home_gradient, home_weight, loss
from tawpipe.schedule.landing import Landing, Raising
from tawpipe.schedule.spec import ModelSpec
from tawpipe.schedule.step import StepSpec


class StepEnd:
    """Actions that end a step on one rank: NORM, and in training UPDATE of every trainable unit with a home here.

    NORM reads gradients of the first copy of each home only, so that the sum over all ranks counts every gradient once.
    In training it adds to the present content of ``norm``, so that the flag of non-finite numbers stays set.
    """

    def __init__(self, rank: int, step: StepSpec, *, training: bool) -> None:
        model, homes, several = step.model, step.homes, step.topology.world_size > 1
        units = range(len(homes)) if training else ()
        home_units = [u for u in units if model.units[u].trainable and homes[u].index(rank) is not None]
        self._model = model
        self._units = sorted(home_units, key=lambda u: model.units[u].blocks[0])
        self._gradients = tuple(home_gradient(unit) for unit in home_units if rank in homes[unit].ranks)
        self._losses = tuple(map(loss, step.losses_of(rank)))
        self._lane = Lane.INTER_G if several else Lane.COMPUTE
        self._training, self._early = training, training and step.settings.early_updates
        # An update waits for its gradient to arrive at home. It is issued `_lag` visits later, the time in which
        # gradients can be under way, so that it does not block the device or the lane HOME.
        self._lag = 2 * step.settings.gradient_buffers if several else 0
        self._landing = Landing(step) if training and step.homes_in_host else None
        self._raising = Raising(step) if step.copies_in_host else None
        self._updates = Lane.HOME if self._landing else Lane.COMPUTE

    @property
    def pools(self) -> tuple[Pool, ...]:
        """Pools of the device buffers that ``close`` has added to the program; read it after ``close``."""
        return tuple(pool for passing in (self._landing, self._raising) if passing for pool in passing.pools)

    def close(self, program: Sequence[Action]) -> Iterator[Action]:
        """Yield the actions of ``program`` followed by the end of the step: NORM, and in training the updates.

        With early updates a COUNT comes first, and UPDATE actions are inserted between the program's actions, soon
        after their gradients are complete. With homes in CPU memory, the program is rewritten to pass through buffers
        on the device."""
        for passing in filter(None, (self._raising, self._landing)):
            program = tuple(passing.through(program))
        program, sums = self._summed(program)
        if not self._early:
            yield from program
            yield self._norm(*[NORM] * self._training, *sums)
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
        yield self._norm(NORM, COUNT, *sums)

    def _summed(self, program: Sequence[Action]) -> tuple[Sequence[Action], tuple[Buffer, ...]]:
        """Return the program and what NORM reads of its layers: BALANCE, which their last backward action writes."""
        last = last_to_balance(self._model, program) if self._training else None
        if last is None:
            return program, ()
        ended = replace(program[last], writes=(*program[last].writes, BALANCE))
        return (*program[:last], ended, *program[last + 1 :]), (BALANCE,)

    def _due(self, program: Sequence[Action]) -> dict[int, list[int]]:
        """Return for early updates: index of an action of ``program`` -> units that are updated after it.

        A unit is updated ``_lag`` visits after its gradient is complete. The key is ``len(program)`` for units that are
        updated at the end."""
        computing = [(i, action) for i, action in enumerate(program) if action.lane is Lane.COMPUTE]
        visits = [i for (i, a), (_, b) in pairwise(computing) if (a.op, a.block, a.unit) != (b.op, b.block, b.unit)]
        complete = {buffer: i for i, action in enumerate(program) for buffer in action.writes}
        due: dict[int, list[int]] = {}
        for unit in self._units:
            visit = bisect_left(visits, complete[home_gradient(unit)]) + self._lag
            due.setdefault(visits[visit] if visit < len(visits) else len(program), []).append(unit)
        return due

    def _norm(self, *before: Buffer) -> Action:
        """Return the NORM action; ``before`` are buffers that it reads in addition to gradients and losses."""
        reads = (*self._gradients, *self._losses, *before)
        return Action(Op.NORM, self._lane, reads, (NORM,), self._losses, group="world")

    def _update(self, unit: int, after: Buffer) -> Action:
        """Return the UPDATE action of ``unit``, which waits for the writer of ``after``."""
        home = (home_weight(unit), home_gradient(unit))
        return Action(Op.UPDATE, self._updates, (after, *home), home, unit=unit)


def last_to_balance(model: ModelSpec, program: Sequence[Action]) -> int | None:
    """Return the index of the last action of a program that adds to the loss that balances experts.

    Layers add to it in their backward passes, all on one lane. None for a model or a rank without.
    """
    if not model.balances:
        return None
    backward = (i for i, action in enumerate(program) if action.op in (Op.BACKWARD, Op.BACKWARD_INPUT))
    return max((i for i in backward if model.blocks[program[i].block].kind == "layer"), default=None)
