"""How a step ends: the norm of all gradients, and the updates. Imports topology and schedule only.

With clipping or the check for finite numbers every UPDATE waits for NORM, and so for the last gradient of all. Without
them a unit is updated as soon as its own gradient is complete, scaled by the number of tokens, which COUNT has found at
the step's beginning. Either way the next step's first weights travel as soon as they are updated.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import pairwise

from tawpipe.schedule.actions import Action, Lane, Op
from tawpipe.schedule.placement import Home
from tawpipe.schedule.spec import Knobs, ModelSpec
from tawpipe.topology import Topology


class StepEnd:
    """What closes a step on one rank: NORM, and in training UPDATE of every trainable unit at home here.

    NORM reads the gradients of first copies only: the sum over the world counts every gradient once. In training it
    adds to what ``norm`` holds, so that a number that was not finite is not forgotten.
    """

    def __init__(
        self, rank: int, topology: Topology, model: ModelSpec, homes: Sequence[Home], knobs: Knobs, *, training: bool
    ) -> None:
        units = range(len(homes)) if training else ()
        mine = [u for u in units if model.units[u].trainable and homes[u].index(rank) is not None]
        self._units = sorted(mine, key=lambda u: model.units[u].blocks[0])
        self._gradients = tuple(f"home.g.{unit}" for unit in mine if rank in homes[unit].ranks)
        self._losses = tuple(f"loss.{m}" for m in knobs.micro_batches[rank])
        self._lane = Lane.INTER_G if topology.world_size > 1 else Lane.COMPUTE
        self._training, self._early = training, training and knobs.early_updates
        # A push still under way must not stop the device, so updates stay behind by as many visits as gradients can
        # be on their way home.
        self._lag = 2 * knobs.gradient_buffers if topology.world_size > 1 else 0

    def close(self, program: Sequence[Action]) -> Iterator[Action]:
        """The actions of a step with its end."""
        if not self._early:
            yield from program
            yield self._norm("norm" if self._training else "")
            yield from (self._update(unit, "norm") for unit in self._units)
            return
        yield Action(Op.COUNT, self._lane, (), ("count",), group="world")
        due = self._due(program)
        for index, action in enumerate(program):
            yield action
            yield from (self._update(unit, "count") for unit in due.pop(index, ()))
        for units in due.values():
            yield from (self._update(unit, "count") for unit in units)
        yield self._norm("norm", "count")

    def _due(self, program: Sequence[Action]) -> dict[int, list[int]]:
        """The units that are updated after the action with an index, or, under the program's length, at its end."""
        computing = [(i, action) for i, action in enumerate(program) if action.lane is Lane.COMPUTE]
        visits = [i for (i, a), (_, b) in pairwise(computing) if (a.op, a.block, a.unit) != (b.op, b.block, b.unit)]
        complete = {name: i for i, action in enumerate(program) for name in action.writes}
        found: dict[int, list[int]] = {}
        for unit in self._units:
            visit = bisect_left(visits, complete[f"home.g.{unit}"]) + self._lag
            found.setdefault(visits[visit] if visit < len(visits) else len(program), []).append(unit)
        return found

    def _norm(self, *before: str) -> Action:
        reads = (*self._gradients, *self._losses, *filter(None, before))
        return Action(Op.NORM, self._lane, reads, ("norm",), self._losses, group="world")

    @staticmethod
    def _update(unit: int, after: str) -> Action:
        names = (f"home.w.{unit}", f"home.g.{unit}")
        return Action(Op.UPDATE, Lane.COMPUTE, (after, *names), names, unit=unit)
