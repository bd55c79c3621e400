"""Links inside a node that sleep for the time of a transfer, as computing does.

They are for cells in which two processors would need longer for the bytes inside a node than the link between the nodes
needs for its bytes.
"""

from __future__ import annotations

import time
from typing import Any

from torch import Tensor

from tawpipe.runtime.transport.early_transfers import Begun, EarlyTransfers
from tawpipe.schedule.actions import Action
from tawpipe_lab.sleeper import HostLink

LITTLE = 16
"""Number of elements per piece that really travel."""


class SleptInside(EarlyTransfers):
    """Transfers between ranks, with collectives inside a node replaced by short messages and sleeping.

    In an all-gather or reduce-scatter inside a node, the ranks wait for each other with messages of ``LITTLE`` elements
    per piece. Each rank then sleeps as long as all bytes take on its link. The rest of the target keeps its values.
    Other transfers are real.

    Args:
        link: link of this rank, shared by its lanes.
    """

    def __init__(self, *of: Any, link: HostLink, **settings: Any) -> None:
        super().__init__(*of, **settings)
        self._link = link

    def _begin_ring(self, action: Action, source: Tensor, target: Tensor) -> Begun:
        return super()._begin_ring(action, *self._little(action, source, target))

    def _end_ring(self, action: Action, begun: Begun, source: Tensor, target: Tensor) -> None:
        super()._end_ring(action, begun, *self._little(action, source, target))
        if action.group == "node":
            passed = abs(target.nbytes - source.nbytes)  # each rank sends and receives all pieces but one
            self._link.carry(time.perf_counter(), up=passed, down=passed)

    def _little(self, action: Action, source: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Return the parts of ``source`` and ``target`` that really travel.

        Inside a node these are short leading parts, else both tensors whole.
        """
        if action.group != "node":
            return source, target
        size = self._neighbours(action)[0]
        piece = min(LITTLE, source.numel(), target.numel())
        whole = piece * size
        return (
            (source[:piece], target[:whole]) if action.collective == "all_gather" else (source[:whole], target[:piece])
        )
