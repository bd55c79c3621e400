"""Links inside a node that take their time by sleeping, as computing does: for cells in which two processors would take
longer to carry what passes inside a node than its devices would beside the link between nodes.
"""

from __future__ import annotations

import time
from typing import Any

from torch import Tensor

from tawpipe.runtime.transport.ahead import Ahead, Begun
from tawpipe.schedule.actions import Action
from tawpipe_lab.sleeper import HostLink

LITTLE = 16
"""Numbers of a piece that travel."""


class SleptInside(Ahead):
    """All-gathers and reduce-scatters inside a node wait for each other with messages of a few numbers, and then for as
    long as all of them take on this rank's link. The rest of what they write stays as it is.

    Args:
        link: of this rank; its lanes share it.
    """

    def __init__(self, *of: Any, link: HostLink, **settings: Any) -> None:
        super().__init__(*of, **settings)
        self._link = link

    def _begin_ring(self, action: Action, source: Tensor, target: Tensor) -> Begun:
        return super()._begin_ring(action, *self._little(action, source, target))

    def _end_ring(self, action: Action, begun: Begun, source: Tensor, target: Tensor) -> None:
        super()._end_ring(action, begun, *self._little(action, source, target))
        if action.group == "node":
            passed = abs(target.nbytes - source.nbytes)  # each sends and receives all pieces but one
            self._link.carry(time.perf_counter(), up=passed, down=passed)

    def _little(self, action: Action, source: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        if action.group != "node":
            return source, target
        size = self._neighbours(action)[0]
        piece = min(LITTLE, source.numel(), target.numel())
        whole = piece * size
        return (
            (source[:piece], target[:whole]) if action.collective == "all_gather" else (source[:whole], target[:piece])
        )
